"""What drives and people do to files that are being read, done for real: nothing hangs, nothing is silently wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moeflux.core.errors import FormatError, ReadError
from moeflux.formats.quant import Affine
from store.synthetic import CODECS, held, make_experts

HERE = Path(__file__).parent
KINDS = [("native", "buffered"), ("native", "direct"), ("python", "buffered"), ("python", "direct")]


@pytest.fixture
def run(shim, tmp_path):
    def run(reader: str, way: str, mode: str | None = None, times: int | None = None, n_readers: int = 2):
        options = {"FILE": "part-0.bin", "MODE": mode, "TIMES": times}
        chosen = {f"MOEFLUX_SHIM_{name}": str(value) for name, value in options.items() if value is not None}
        environment = {**os.environ, **chosen, "LD_PRELOAD": str(shim), "PYTHONPATH": str(HERE.parent)}
        command = [sys.executable, str(HERE / "faulty.py"), str(tmp_path), reader, way, str(n_readers)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(("reader", "way"), KINDS)
@pytest.mark.parametrize("mode", ["short", "odd_short", "eintr", "einval_direct"])
def test_the_reader_goes_on(run, reader, way, mode):
    outcome = run(reader, way, mode, times=200 if mode == "eintr" else None)
    assert outcome["errors"] == []
    assert (outcome["right"], outcome["wrong"]) == (12, 0)
    assert outcome["retries"] == 0
    refused = [note for note in outcome["notes"] if "direct reads are refused" in note]
    assert len(refused) == (1 if (mode, way) == ("einval_direct", "direct") else 0)


@pytest.mark.parametrize(("reader", "way"), KINDS)
@pytest.mark.parametrize(("mode", "number"), [("eio", errno.EIO), ("eagain", errno.EAGAIN)])
def test_a_failing_drive_is_tried_again(run, reader, way, mode, number):
    outcome = run(reader, way, mode, times=2)
    assert outcome["errors"] == []
    assert (outcome["right"], outcome["wrong"], outcome["retries"]) == (12, 0, 2)
    outcome = run(reader, way, mode)
    assert outcome["wrong"] == 0
    assert outcome["right"] < 12  # whatever is in the other file alone
    assert outcome["failed"] == len(outcome["errors"]) == 12 - outcome["right"]
    assert outcome["retries"] >= 2 * outcome["failed"]
    assert set(outcome["slots"]) <= {"ready", "empty"}
    for _, kind, text, cause in outcome["errors"]:
        assert (kind, cause) == ("ReadError", number)
        assert "part-0.bin: layer" in text
        assert "tried 3 times" in text
        assert "hint:" in text


@pytest.mark.parametrize(("reader", "way"), KINDS)
def test_a_read_that_heals(run, reader, way):
    """The drive fails one expert for good and then recovers: the store asks it again."""
    outcome = run(reader, way, "eio", times=3, n_readers=1)
    assert [error[:2] for error in outcome["errors"]] == [[0, "ReadError"]]
    assert (outcome["right"], outcome["wrong"]) == (11, 0)


def open_store(experts, reader, way, **options):
    return experts.open(reader=reader, direct=way == "direct", **options)


@pytest.mark.parametrize(("reader", "way"), KINDS)
def test_a_file_that_is_cut_while_open(tmp_path, reader, way):
    experts = make_experts(tmp_path, codec=Affine(4, 32, "BF16"), hidden=512, width=640)
    whole = experts.paths[0].read_bytes()
    with open_store(experts, reader, way, n_slots=4) as store:
        for length in (0, 4096, len(whole) // 2 + 1):
            os.truncate(experts.paths[0], length)
            failed = 0
            for (layer, expert), data in experts.contents.items():
                ends = [extent.offset + extent.length for extent in experts.experts(layer).extents(expert)]
                with store.acquire(layer, [expert]) as lease:
                    if max(ends) > length:
                        with pytest.raises(ReadError, match=r"only \d+ of the \d+ bytes at \d+ are left") as error:
                            lease.wait()
                        assert "download it again" in str(error.value)
                        failed += 1
                    else:
                        lease.wait()
                        assert held(lease, expert) == data
            assert failed > 0
            experts.paths[0].write_bytes(whole)
        for (layer, expert), data in experts.contents.items():  # the file is whole again, and the store works
            with store.acquire(layer, [expert]) as lease:
                lease.wait()
                assert held(lease, expert) == data


@pytest.mark.parametrize(("reader", "way"), KINDS)
def test_files_that_are_removed(tmp_path, reader, way):
    experts = make_experts(tmp_path)
    with open_store(experts, reader, way, n_slots=1) as store:
        experts.paths[0].unlink()
        with store.acquire(0, [1]) as lease:
            lease.wait()
            assert held(lease, 1) == experts.contents[0, 1]  # its descriptor is open
    with pytest.raises(ReadError, match="No such file") as error:
        open_store(experts, reader, way, n_slots=1)
    assert str(experts.paths[0]) in str(error.value)


@pytest.mark.parametrize("reader", ["native", "python"])
def test_two_stores_of_one_file(tmp_path, reader):
    experts = make_experts(tmp_path)
    first, second = experts.open(n_slots=1, reader=reader), experts.open(n_slots=2, reader=reader)
    with first.acquire(0, [1]) as a, second.acquire(0, [1]) as b:
        a.wait()
        b.wait()
        assert held(a, 1) == held(b, 1) == experts.contents[0, 1]
        assert a.native.views(1)[0].ctypes.data != b.native.views(1)[0].ctypes.data
    second.close()
    with first.acquire(1, [2]) as lease:
        lease.wait()
        assert held(lease, 2) == experts.contents[1, 2]
    assert (first.stats().misses, second.stats().misses) == (2, 1)
    first.close()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("reader", ["native", "python"])
def test_broken_numbers(tmp_path, codec, fused, reader):
    """Every floating component with a NaN in it is found and named, and the store goes on."""
    broken = {"F32": b"\x00\x00\xc0\x7f", "BF16": b"\x80\xff", "F16": b"\x00\x7c", "F8_E4M3": b"\xff"}
    experts = make_experts(tmp_path, codec=CODECS[codec], fused=fused)
    table = experts.experts(1)
    with experts.open(n_slots=2, reader=reader) as store:
        named = [(p.name, component) for p in table.layout.projections for component in p.components]
        for (projection, component), extent in zip(named, table.extents(4), strict=True):
            if component.dtype == "U32":
                continue
            whole = experts.paths[0].read_bytes()
            at = extent.offset + extent.length - len(broken[component.dtype])
            with experts.paths[0].open("r+b") as file:
                file.seek(at)
                file.write(broken[component.dtype])
            with store.acquire(1, [4]) as lease, pytest.raises(FormatError) as error:
                lease.wait()
            assert error.value.what == f"{component.name} holds NaN or infinity"
            assert error.value.where == f"part-0.bin: layer 1, expert 4.{projection}"
            experts.paths[0].write_bytes(whole)
            with store.acquire(1, [4]) as lease:
                lease.wait()
                assert held(lease, 4) == experts.contents[1, 4]
            with store.acquire(1, [0, 1]) as lease:  # so that the next round reads again
                lease.wait()
