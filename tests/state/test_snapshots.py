"""Files of states: exact, whole or not there, and refused in words when they are anything else than what they should be."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import struct
import subprocess

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moeflux
from conftest import DATA
from moeflux import Segment
from moeflux.core.errors import InputError, MoefluxError, ReadError, SnapshotError, WriteError
from moeflux.formats import snapshot as container
from moeflux.formats.snapshot import Section, SnapshotFile, write_snapshot
from state.families import FAMILIES, HYBRID, LATENT, PLAIN, fresh_logits, opened, text
from state.test_sequence import advance, check


@pytest.fixture
def saved(tmp_path):
    engine = opened(HYBRID)
    sequence = engine.sequence()
    advance(HYBRID, sequence, text(270))
    path = tmp_path / "state"
    engine.save(sequence, path, sampler={"seed": 7})
    return sequence, path


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_and_loaded_is_the_same(name, tmp_path):
    engine = opened(name)
    sequence = engine.sequence()
    advance(name, sequence, text(270))
    path = tmp_path / "state"
    n = engine.save(sequence, path, sampler={"rng": [1, 2], "text": "ü"})
    assert n == path.stat().st_size
    assert sequence.snapshot_bytes < n < sequence.snapshot_bytes + 4096
    again, sampler = engine.load(path)
    assert sampler == {"rng": [1, 2], "text": "ü"}
    assert again.tokens == sequence.tokens
    check(name, again)
    check(name, sequence)


def test_another_engine_over_the_same_weights_loads_it(saved, tmp_path):
    sequence, path = saved
    copy = shutil.copytree(DATA / "mlx" / HYBRID, tmp_path / "elsewhere")
    with moeflux.load(copy, threads=2) as engine:
        again, _ = engine.load(path)
        (logits,) = engine.forward(Segment(again, [5]))
        np.testing.assert_array_equal(logits[0], fresh_logits(HYBRID, [*sequence.tokens, 5]))


def test_an_empty_sequence_can_be_saved(tmp_path):
    engine = opened(HYBRID)
    engine.save(engine.sequence(), tmp_path / "state")
    sequence, sampler = engine.load(tmp_path / "state")
    assert (sequence.length, sampler) == (0, None)
    check(HYBRID, sequence)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found(saved, place, bit):
    _, path = saved
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1 << bit
    broken = path.with_name("broken")
    broken.write_bytes(data)
    with pytest.raises(SnapshotError):
        opened(HYBRID).load(broken)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_every_cut_is_found(saved, share):
    _, path = saved
    data = path.read_bytes()
    for content in (data[: int(share * (len(data) - 1))], data + b"\0"):
        broken = path.with_name("broken")
        broken.write_bytes(content)
        with pytest.raises(SnapshotError):
            opened(HYBRID).load(broken)


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_any_header_gives_a_typed_error(tmp_path_factory, header):
    path = tmp_path_factory.getbasetemp() / "any"
    prefix = container._PREFIX.pack(container.MAGIC, 1, len(header), container._header_checksum(1, header))
    path.write_bytes(prefix + header)
    with pytest.raises(MoefluxError):
        SnapshotFile(path)


@pytest.mark.parametrize(
    "header",
    [b"{}", b'{"about": 1, "sections": []}', b'{"about": {}, "sections": [1]}', b'{"about": {}, "sections": {"a": 1}}',
     b'{"about": {}, "sections": [{"name": "a", "dtype": "F32", "shape": [-1], "crc32": 0}]}',
     b'{"about": {}, "sections": [{"name": "a", "dtype": "F99", "shape": [1], "crc32": 0}]}',
     b'{"about": {}, "sections": [{"name": "a", "dtype": "F32", "shape": [1e30], "crc32": 0}]}',
     b'{"about": {}, "sections": [{"name": "a", "dtype": "F32", "shape": [99999999999], "crc32": 0}]}'],
)  # fmt: skip
def test_headers_that_make_no_sense(tmp_path, header):
    path = tmp_path / "state"
    prefix = container._PREFIX.pack(container.MAGIC, 1, len(header), container._header_checksum(1, header))
    path.write_bytes(prefix + header)
    with pytest.raises(SnapshotError, match="damaged"):
        SnapshotFile(path)


@pytest.mark.parametrize(("version", "words"), [(0, "an older"), (2, "a newer"), (2**31, "a newer")])
def test_other_versions_are_refused_in_words(saved, version, words):
    _, path = saved
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, version)
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=f"{words} moeflux: version {version}, this one reads 1") as caught:
        opened(HYBRID).load(path)
    assert caught.value.hint


def test_no_file_and_no_snapshot(tmp_path):
    with pytest.raises(ReadError):
        opened(HYBRID).load(tmp_path / "none")
    (tmp_path / "text").write_text("hello, this is no snapshot at all")
    with pytest.raises(SnapshotError, match="not a snapshot"):
        opened(HYBRID).load(tmp_path / "text")


def test_another_model_is_refused(saved):
    _, path = saved
    with pytest.raises(SnapshotError, match="model of type"):
        opened(LATENT).load(path)


def test_other_weights_of_the_same_shape_are_refused(saved, tmp_path):
    """One tensor is made of other numbers; every size, name and header is the same."""
    _, path = saved
    folder = shutil.copytree(DATA / "mlx" / HYBRID, tmp_path / "tuned")
    engine = opened(HYBRID)
    extent = engine._checkpoint.extent("model.layers.0.mlp.gate.weight")
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(extent.offset)
        data = file.read(extent.length)
        file.seek(extent.offset)
        file.write(bytes(byte ^ 1 for byte in data))
    with moeflux.load(folder) as other, pytest.raises(SnapshotError, match="weights"):
        other.load(path)


@pytest.mark.parametrize(("options", "words"), [({"kv": "f32"}, "keys and values"), ({"backend": "numpy"}, "backend")])
def test_states_that_are_kept_otherwise_are_refused(saved, options, words):
    """They would be close, but not what this engine computes."""
    _, path = saved
    with moeflux.load(DATA / "mlx" / HYBRID, **options) as other, pytest.raises(SnapshotError, match=words):
        other.load(path)


def test_a_section_of_the_wrong_type_is_refused(saved, tmp_path):
    _, path = saved
    with SnapshotFile(path) as file:
        about, arrays = file.about, {name: (entry, file.read(name)) for name, entry in file.sections.items()}
    name = next(name for name, (entry, _) in arrays.items() if entry.dtype == "BF16")
    for dtype, shape, extra in (("F16", None, 0), ("BF16", (1,), 0), ("BF16", None, 1)):
        sections = []
        for key, (entry, array) in arrays.items():
            here = key == name
            data = array.reshape(-1)[:1] if here and shape else array
            sections.append(Section(key, dtype if here else entry.dtype, shape if here and shape else entry.shape, [data]))
        sections += [Section("more", "F32", (1,), [np.zeros(1, np.float32)])] * extra
        write_snapshot(tmp_path / "other", about, sections)
        with pytest.raises(SnapshotError, match="section"):
            opened(HYBRID).load(tmp_path / "other")


def test_tokens_outside_the_vocabulary_are_refused(saved, tmp_path):
    _, path = saved
    with SnapshotFile(path) as file:
        sections = [Section(name, e.dtype, e.shape, [file.read(name)]) for name, e in file.sections.items()]
        about = file.about
    sections[0].parts[0][3] = 512
    write_snapshot(tmp_path / "other", about, sections)
    with pytest.raises(SnapshotError, match="vocabulary"):
        opened(HYBRID).load(tmp_path / "other")


def test_longer_than_the_context_is_refused(saved):
    _, path = saved
    with moeflux.load(DATA / "mlx" / HYBRID, context=100) as engine, pytest.raises(InputError, match="270 tokens"):
        engine.load(path)


def test_a_crash_before_the_rename_leaves_the_old_file(saved, monkeypatch):
    sequence, path = saved
    before = path.read_bytes()
    advance(HYBRID, sequence, [1])

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        opened(HYBRID).save(sequence, path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_disk_that_fills_up(saved):
    """The file may only grow to 64 KiB: what was there stays, nothing is left over, the sequence goes on."""
    sequence, path = saved
    before = path.read_bytes()
    assert len(before) > 65536
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limit[1]))
    try:
        with pytest.raises(WriteError, match="no room for") as caught:
            opened(HYBRID).save(sequence, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.hint
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    check(HYBRID, sequence)


def test_a_small_file_system(saved, tmp_path):
    sequence, _ = saved
    place = tmp_path / "small"
    place.mkdir()
    mounted = os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True
    ).returncode  # fmt: skip
    if not mounted:
        pytest.skip("a file system cannot be mounted here")
    try:
        with pytest.raises(WriteError, match="no room for"):
            opened(HYBRID).save(sequence, place / "state")
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_folder_that_cannot_be_written(saved, tmp_path):
    sequence, _ = saved
    with pytest.raises(WriteError):
        opened(HYBRID).save(sequence, tmp_path / "none" / "state")


def test_the_fingerprint_is_cheap_and_stable():
    one, two = opened(PLAIN).identity, moeflux.load(DATA / "mlx" / PLAIN).identity
    assert one == two
    assert one.fingerprint != opened(HYBRID).identity.fingerprint
