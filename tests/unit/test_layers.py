"""The import law: a room imports only rooms on lower floors, and each third-party package has its owners."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import moeflux

SOURCE = Path(moeflux.__file__).parent

FLOORS = {
    "core": 0,
    "formats": 1, "models": 1, "text": 1, "sampling": 1,
    "backends": 2, "store": 2, "convert": 2,
    "plan": 3,
    "runtime": 4,
    "session": 5,
    "serve": 6, "bench": 6, "api": 6,
    "cli": 7,
}  # fmt: skip

OWNERS = {
    "numpy": {"formats", "backends", "store", "convert", "plan", "runtime", "session", "sampling", "bench"},
    "tokenizers": {"text"},
    "jinja2": {"text"},
    "typer": {"cli"},
    "rich": {"cli"},
    "torch": {"backends/cuda"},
    "triton": {"backends/cuda"},
    "cuda": {"backends/cuda"},
    "llguidance": {"sampling"},
    "gguf": {"formats"},
    "huggingface_hub": {"convert"},
    "fastapi": {"serve"},
    "starlette": {"serve"},
    "pydantic": {"serve"},
    "uvicorn": {"serve"},
    "prometheus_client": {"serve"},
    "matplotlib": {"bench"},
    "moeflux._native": {"backends/native", "store", "sampling"},
}


def imports(path: Path) -> list[str]:
    """Every module a file imports, lazy imports included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(str(node.module))
            found += [f"{node.module}.{alias.name}" for alias in node.names if node.module == "moeflux"]
    return found


def modules() -> list[Path]:
    return [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.name == "api.py"]


def room(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def test_rooms_import_only_lower_floors():
    broken = []
    for path in modules():
        here = room(path)
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "moeflux" or len(parts) == 1 or parts[1] == "_native" or here == "cli":
                continue
            if parts[1] != here and FLOORS[parts[1]] >= FLOORS[here]:
                broken.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert broken == []


def test_third_parties_have_owners():
    broken = []
    for path in modules():
        inside = str(path.relative_to(SOURCE))
        for name in imports(path):
            top = name if name == "moeflux._native" else name.split(".")[0]
            if top == "moeflux" or top in sys.stdlib_module_names:
                continue
            if not inside.startswith(tuple(OWNERS[top])):
                broken.append(f"{inside} imports {name}")
    assert broken == []


def test_planning_names_no_backend():
    """It asks the one that it is given what things cost."""
    named = ("moeflux.backends.native", "moeflux.backends.numpy", "moeflux.backends.cuda")
    found = [f"{path.name} imports {name}" for path in modules() if room(path) == "plan" for name in imports(path)
             if name.startswith(named)]  # fmt: skip
    assert found == []


def test_every_room_has_a_floor():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert rooms <= set(FLOORS)
