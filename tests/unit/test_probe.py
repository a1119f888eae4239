"""The drive probe, on drives, on memory file systems, without O_DIRECT, and on files that end too soon."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from moeflux import ReadError
from moeflux.backends.registry import open_backend
from moeflux.bench.synthetic import write_checkpoint
from moeflux.core.config import EngineConfig
from moeflux.formats.checkpoint import Checkpoint
from moeflux.models.registry import read_spec
from moeflux.plan.drive import ExpertReads, Sample
from moeflux.plan.page_cache import cached_share, forget
from moeflux.plan.probe import DEPTHS, choose, probe_drive, probe_memory
from unit.test_synthetic import QUANT, QWEN3

CONFIG = QWEN3 | QUANT
SPEC = read_spec(CONFIG)
LAYERS = [layer for layer, _ in SPEC.moe_layers()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe") / "model"
    write_checkpoint(CONFIG, folder)
    return folder


@pytest.fixture
def checkpoint(folder):
    checkpoint = Checkpoint(folder, SPEC.names)
    yield checkpoint
    checkpoint.close()


def test_probe(checkpoint):
    start = time.perf_counter()
    probe = probe_drive(checkpoint, LAYERS)
    assert time.perf_counter() - start < 3
    whole = sum(checkpoint.experts(layer).nbytes for layer in LAYERS)
    assert {sample.n_readers for sample in probe.samples} == set(DEPTHS)
    assert all(sample.n_bytes == whole for sample in probe.samples)  # so small that each sample reads everything
    assert probe.bytes_s == choose(probe.samples).bytes_s > 0
    assert probe.as_dict()["samples"][0]["bytes_s"] == probe.samples[0].bytes_s


def test_readers_read_the_experts(folder, checkpoint, monkeypatch):
    """Every byte of every expert, nothing else but the pages around it."""
    wanted = np.zeros((folder / "model-00001-of-00001.safetensors").stat().st_size, dtype=bool)
    for layer in LAYERS:
        for expert in range(checkpoint.experts(layer).n_experts):
            for extent in checkpoint.experts(layer).extents(expert):
                wanted[extent.offset : extent.offset + extent.length] = True
    read = np.zeros_like(wanted)
    preadv = os.preadv

    def record(descriptor, buffers, offset):
        n = preadv(descriptor, buffers, offset)
        read[offset : offset + n] = True
        return n

    with ExpertReads(checkpoint, LAYERS) as reads:
        monkeypatch.setattr(os, "preadv", record)
        for direct in (False,) if reads.no_direct else (True, False):
            read[:] = False
            reads.sample(direct, 3, 5.0)
            assert read[wanted].all()
            assert read.sum() <= wanted.sum() + (4096 * 2 * 9 * 16 * len(LAYERS) if direct else 0)


def test_without_direct(checkpoint, monkeypatch):
    plain = os.open

    def refuse(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return plain(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    probe = probe_drive(checkpoint, LAYERS)
    assert not probe.direct
    assert [sample.n_readers for sample in probe.samples] == list(DEPTHS)
    assert "O_DIRECT does not work" in probe.notes[0]


def test_direct_that_fails_when_read(checkpoint, monkeypatch):
    """Some file systems open such a file and then refuse to read it."""
    plain = os.preadv

    def refuse(descriptor, buffers, offset):
        if _is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    probe = probe_drive(checkpoint, LAYERS)
    assert not probe.direct
    assert "O_DIRECT does not work" in probe.notes[0]


def _is_direct(descriptor):
    line = next(x for x in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines() if x.startswith("flags"))
    return bool(int(line.split()[1], 8) & os.O_DIRECT)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no file system in memory here")
def test_files_in_memory_are_never_cold(folder):
    copy = Path("/dev/shm") / f"moeflux-{os.getpid()}"
    shutil.copytree(folder, copy)
    try:
        checkpoint = Checkpoint(copy, SPEC.names)
        probe = probe_drive(checkpoint, LAYERS)
        checkpoint.close()
    finally:
        shutil.rmtree(copy)
    assert not any(sample.cold for sample in probe.samples if not sample.direct)
    assert any("not cold" in note for note in probe.notes)


def test_a_slow_drive_is_given_up_in_time(checkpoint, monkeypatch):
    plain = os.preadv

    def slow(descriptor, buffers, offset):
        time.sleep(0.02)
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    start = time.perf_counter()
    probe = probe_drive(checkpoint, LAYERS, seconds=0.4)
    assert time.perf_counter() - start < 3
    assert 1 <= len(probe.samples) < 8
    assert any("slow" in note for note in probe.notes)


def test_a_file_that_became_shorter(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    checkpoint = Checkpoint(copy, SPEC.names)
    os.truncate(copy / "model-00001-of-00001.safetensors", 100_000)
    with pytest.raises(ReadError, match="bytes at") as caught:
        probe_drive(checkpoint, LAYERS)
    assert "model-00001-of-00001.safetensors" in str(caught.value)
    checkpoint.close()


def test_a_file_that_vanished(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    checkpoint = Checkpoint(copy, SPEC.names)
    shutil.rmtree(copy)
    with pytest.raises(ReadError, match="No such file") as caught:
        probe_drive(checkpoint, LAYERS)
    assert str(copy) in str(caught.value)
    checkpoint.close()


def sample(direct, n, rate, cold=True):
    return Sample(direct, n, rate, 1.0, cold)


@pytest.mark.parametrize(
    ("samples", "direct", "n_readers"),
    [
        ([(True, 1, 50), (True, 4, 100), (True, 16, 60)], True, 16),  # that may be noise
        ([(True, 1, 50), (True, 4, 100), (True, 16, 40)], True, 4),
        ([(True, 1, 100), (True, 4, 40)], True, 1),  # a drive that seeks
        ([(True, 4, 92), (False, 4, 100)], True, 4),  # direct reads are worth a little
        ([(True, 4, 80), (False, 4, 100)], False, 4),
        ([(True, 4, 80), (False, 4, 900, False)], True, 4),  # that was the page cache
        ([(False, 2, 500, False), (False, 4, 900, False)], False, 4),
    ],
)
def test_choice(samples, direct, n_readers):
    best = choose([sample(*values) for values in samples])
    assert (best.direct, best.n_readers) == (direct, n_readers)


def test_without_scales(checkpoint):
    """Where they are kept in memory, only weights are read."""
    whole = sum(table.nbytes for table in map(checkpoint.experts, LAYERS))
    scales = 2 * 2 / 32  # two of two bytes for 64 codes of half a byte
    with ExpertReads(checkpoint, LAYERS, weights_only=True) as reads:
        assert reads.sample(False, 1, 1.0).n_bytes == pytest.approx(whole / (1 + scales))


def test_page_cache(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2**20))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    assert cached_share(descriptor, 5000, 500_000) == 1
    forget(descriptor, 0, 2**20)
    if cached_share(descriptor, 0, 2**20) == 1:
        pytest.skip("this file system keeps its pages")
    assert cached_share(descriptor, 5000, 500_000) == 0
    os.pread(descriptor, 10, 2**19)
    assert 0 < cached_share(descriptor, 0, 2**20) <= 1
    os.close(descriptor)
    assert cached_share(descriptor, 0, 2**20) == 1  # where it cannot be told


def test_memory():
    probe = probe_memory(open_backend(EngineConfig(Path(), "native", 1)), 2**24)
    assert 1e8 < probe.bytes_s < 1e13
    assert probe.macs_s > 1e8
    assert probe.as_dict()["threads"] == 1
