"""CUDA C++ kernels from the package's sources: compiled by NVRTC for one architecture, kept in a cache folder.

A cache entry is found by what went into it (sources, sizes, architecture, compiler), holds its own digest, and appears whole
or not at all. A folder that others may write to is not trusted. Nothing here needs a GPU.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflux.core.atomic_file import remove_stale, write_atomically
from moeflux.core.errors import DeviceError, WriteError
from moeflux.core.log import log

WHERE = "backend 'cuda'"
SOURCES = Path(__file__).parent / "source"
FLAGS = ("--std=c++17", "--fmad=false", "--ptxas-options=-O3")
HOPPER = (9, 0)  # the first with programmatic dependent launch
DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Program:
    """One source file of the package with its sizes, for GPUs of one compute capability."""

    file: str
    capability: tuple[int, int]
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, file: str, capability: tuple[int, int], sizes: Mapping[str, int]) -> Program:
        return cls(file, capability, tuple(sorted(sizes.items())))

    @property
    def options(self) -> list[str]:
        major, minor = self.capability
        return [f"--gpu-architecture=sm_{major}{minor}", *FLAGS, *(f"-D{name}={value}" for name, value in self.sizes)]

    def key(self, compiler: str) -> str:
        found = hashlib.sha256("\n".join([compiler, self.file, *self.options]).encode())
        for name, text in _sources().items():
            found.update(f"\n{name}\n{text}".encode())
        return found.hexdigest()


class KernelCache:
    """Compiled programs in a folder of this user's own. Without a usable folder every program is compiled anew."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._usable: bool | None = None

    def load(self, program: Program) -> bytes:
        """The machine code. Raises a DeviceError where it cannot be had."""
        path = self._folder / f"{program.key(compiler_version())}.cubin"
        if self._ready() and (found := _read(path)) is not None:
            return found
        code = compile_program(program)
        if self._ready():
            try:
                write_atomically(path, lambda file: file.write(hashlib.sha256(code).digest() + code), n_bytes=len(code))
                remove_stale(self._folder)
            except WriteError as error:
                self._give_up(str(error))
        return code

    def _ready(self) -> bool:
        if self._usable is None:
            self._usable = True
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                found = self._folder.stat()
                if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                    self._give_up("others may write to it")
            except OSError as error:
                self._give_up(error.strerror or str(error))
        return self._usable

    def _give_up(self, reason: str) -> None:
        self._usable = False
        log.warning("GPU kernels are not kept in %s (%s): they are compiled again in every process", self._folder, reason)


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "moeflux" / "kernels"


def compiler_version() -> str:
    nvrtc = _nvrtc()
    result, major, minor = nvrtc.nvrtcVersion()
    _expect(nvrtc, result, "asking NVRTC for its version")
    return f"nvrtc {major}.{minor}"


def compile_program(program: Program) -> bytes:
    nvrtc, texts = _nvrtc(), _sources()
    headers = [name for name in texts if name != program.file]
    result, handle = nvrtc.nvrtcCreateProgram(
        texts[program.file].encode(), program.file.encode(), len(headers), [texts[n].encode() for n in headers],
        [n.encode() for n in headers],
    )  # fmt: skip
    _expect(nvrtc, result, f"opening {program.file}")
    try:
        options = [option.encode() for option in program.options]
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        if int(result):
            raise DeviceError(
                f"{program.file} does not compile for {program.options[0].split('=')[1]}: {_first_error(nvrtc, handle)}",
                where=WHERE,
                hint="update cuda-bindings and nvidia-cuda-nvrtc, or use the Triton kernels (kernels='triton')",
            )
        result, size = nvrtc.nvrtcGetCUBINSize(handle)
        _expect(nvrtc, result, "asking for the machine code")
        code: bytes = b" " * size
        (result,) = nvrtc.nvrtcGetCUBIN(handle, code)
        _expect(nvrtc, result, "asking for the machine code")
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _first_error(nvrtc: Any, handle: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(handle)
    text = b" " * size
    nvrtc.nvrtcGetProgramLog(handle, text)
    lines = text.decode(errors="replace").strip("\0 \n").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def _nvrtc() -> Any:
    hint = "pip install 'moeflux[cuda]'"
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except ImportError as error:
        raise DeviceError("the package 'cuda-bindings' is not installed", where=WHERE, hint=hint) from error
    except Exception as error:  # the loader has its own kinds of errors, which differ by version
        raise DeviceError(f"NVRTC cannot be loaded: {str(error).splitlines()[0]}", where=WHERE, hint=hint) from error
    return nvrtc


def _expect(nvrtc: Any, result: Any, doing: str) -> None:
    if int(result):
        _, name = nvrtc.nvrtcGetErrorString(result)
        raise DeviceError(f"{doing} failed: {name.decode()}", where=WHERE)


def _sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cu", ".cuh")}


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[DIGEST:] if hashlib.sha256(data[DIGEST:]).digest() == data[:DIGEST] else None
