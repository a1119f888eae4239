"""CUDA C++ kernels without a GPU: NVRTC compiles them for every architecture; cache and errors."""

from __future__ import annotations

import logging
import stat
import sys

import pytest

from moeflux.backends.cuda import compiler
from moeflux.backends.cuda.compiler import KernelCache, Program, compile_program
from moeflux.core.errors import DeviceError

try:
    compiler.compiler_version()
    MISSING = None
except DeviceError as error:
    MISSING = str(error)
needs_nvrtc = pytest.mark.skipif(MISSING is not None, reason=f"NOT COMPILED: {MISSING}")

MODEL = {
    "HIDDEN": 2048, "WIDTH": 512, "K": 8, "EXPERTS": 256, "CHANNELS": 8192, "GATES": 4096, "HEADS": 32, "KEY_HEADS": 16,
    "DK": 128, "DV": 128, "ATTENTION": 4096,
}  # fmt: skip
STEP = MODEL | {
    "SIDES": 2, "PROJECT_DELTA_TILES": 6, "PROJECT_FULL_TILES": 5, "HEAD_TILES": 4, "PDL": 0, "EARLY": 16,
    "KV_HEADS": 2, "RATIO": 8, "HEAD_DIM": 256, "HALF": 32, "Q_STRIDE": 512, "ROWS_BLOCK": 256,
}  # fmt: skip
PROMPT = MODEL | {"INPUTS": 12352, "BLOCK_TOKENS": 64}
SMALL = {
    "HIDDEN": 256, "WIDTH": 256, "K": 2, "EXPERTS": 4, "CHANNELS": 0, "GATES": 0, "HEADS": 0, "ATTENTION": 256,
    "KV_HEADS": 2, "RATIO": 2, "HEAD_DIM": 64, "HALF": 16, "Q_STRIDE": 64,
}  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_every_kernel_compiles_for_every_architecture(capability):
    step = STEP | {"PDL": int(capability >= compiler.HOPPER)}
    for file, sizes in (("step.cu", step), ("step.cu", STEP), ("prompt.cu", PROMPT)):
        assert compile_program(Program.of(file, capability, sizes))[:4] == b"\x7fELF"


@needs_nvrtc
def test_sizes_of_other_models_compile():
    for file, more in (("step.cu", STEP), ("prompt.cu", PROMPT)):
        assert compile_program(Program.of(file, (9, 0), more | SMALL))[:4] == b"\x7fELF"


@needs_nvrtc
def test_a_size_that_is_missing_is_an_error_with_the_compilers_words():
    with pytest.raises(DeviceError, match=r"step.cu does not compile for sm_90: .*error"):
        compile_program(Program.of("step.cu", (9, 0), {"HIDDEN": 256}))


@pytest.fixture
def compiled(monkeypatch):
    """Counts compilations instead of doing them."""
    calls = []

    def compile_(program):
        calls.append(program)
        return b"code of " + program.file.encode()

    monkeypatch.setattr(compiler, "compile_program", compile_)
    monkeypatch.setattr(compiler, "compiler_version", lambda: "nvrtc 0.0")
    return calls


PROGRAM = Program.of("step.cu", (9, 0), {"HIDDEN": 256})


def test_a_program_is_compiled_once_and_kept_privately(compiled, tmp_path):
    folder = tmp_path / "a" / "kernels"
    assert KernelCache(folder).load(PROGRAM) == KernelCache(folder).load(PROGRAM) == b"code of step.cu"
    assert len(compiled) == 1
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_other_sizes_architectures_compilers_and_sources_are_other_programs(compiled, tmp_path, monkeypatch):
    cache = KernelCache(tmp_path / "k")
    others = [Program.of("step.cu", (9, 0), {"HIDDEN": 512}), Program.of("step.cu", (8, 0), {"HIDDEN": 256})]
    for program in (PROGRAM, *others):
        cache.load(program)
    monkeypatch.setattr(compiler, "compiler_version", lambda: "nvrtc 0.1")
    cache.load(PROGRAM)
    monkeypatch.setattr(compiler, "_sources", lambda: {"step.cu": "changed"})
    cache.load(PROGRAM)
    assert len(compiled) == 5


def test_a_damaged_file_is_compiled_again(compiled, tmp_path):
    cache = KernelCache(tmp_path / "k")
    cache.load(PROGRAM)
    (file,) = (tmp_path / "k").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert cache.load(PROGRAM) == b"code of step.cu"
    assert len(compiled) == 2
    assert KernelCache(tmp_path / "k").load(PROGRAM)
    assert len(compiled) == 2


def test_a_folder_that_others_may_write_to_is_not_trusted_and_that_is_said_once(compiled, tmp_path, caplog):
    folder = tmp_path / "k"
    KernelCache(folder).load(PROGRAM)
    folder.chmod(0o777)
    cache = KernelCache(folder)
    with caplog.at_level(logging.WARNING, "moeflux"):
        cache.load(PROGRAM)
        cache.load(PROGRAM)
    assert len(compiled) == 3
    assert len(caplog.records) == 1
    assert "others may write" in caplog.text


def test_a_folder_that_cannot_be_made_costs_only_time(compiled, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "moeflux"):
        assert KernelCache(tmp_path / "file" / "k").load(PROGRAM) == b"code of step.cu"
    assert "are not kept in" in caplog.text


def test_a_missing_package_is_an_error_with_a_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match="cuda-bindings") as caught:
        compiler.compiler_version()
    assert "pip install" in str(caught.value)
