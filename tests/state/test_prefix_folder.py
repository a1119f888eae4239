"""The folder of a prefix store: private, of bounded size, and shared by any number of processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from moeflux.core.errors import WriteError
from moeflux.session import disk
from moeflux.session.entry import Limits
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Session
from state.families import HYBRID, fresh_logits, opened, text

TESTS = Path(__file__).parent.parent


def engine():
    return opened(HYBRID, prefixes="20MB")


def store(folder, **limits):
    return PrefixStore(engine(), Limits(**limits), folder)


def sync(prefixes, tokens):
    """Tokens that did not have to be computed."""
    session = Session(engine(), prefixes, None)
    usage = session.sync(tokens, boundaries=[len(tokens)])
    np.testing.assert_array_equal(session.logits, fresh_logits(HYBRID, tokens))
    return usage.read


def files(folder, pattern="*.state"):
    return sorted(folder.rglob(pattern))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_nobody_else_reads_conversations(tmp_path, umask):
    before = os.umask(umask)
    try:
        prefixes = store(tmp_path / "deep" / "new")
        sync(prefixes, text(20))
        prefixes.close()
    finally:
        os.umask(before)
    (file,) = files(tmp_path)
    assert mode(file) == 0o600
    assert mode(file.parent) == mode(file.parent.parent) == 0o700


def test_folders_that_are_too_open_are_closed(tmp_path):
    """Our own; one that the user had before may be anything, and is left alone."""
    tmp_path.chmod(0o755)
    prefixes = store(tmp_path)
    sync(prefixes, text(20))
    prefixes.close()
    own, other = files(tmp_path)[0].parent, tmp_path / "0123456789abcdef"
    other.mkdir()
    mine = tmp_path / "pictures"
    mine.mkdir()
    for folder in (own, other, mine):
        folder.chmod(0o755)
    store(tmp_path).close()
    assert [mode(folder) for folder in (own, other, mine, tmp_path)] == [0o700, 0o700, 0o755, 0o755]


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for name in ("file", "file/below", "a\0b"):
        with pytest.raises(WriteError):
            store(tmp_path / name)


def test_there_is_a_limit_where_none_is_given(tmp_path, monkeypatch):
    System = namedtuple("System", "f_bavail f_frsize")
    monkeypatch.setattr("os.statvfs", lambda _: System(2**20, 4096))
    tier = disk.DiskTier(tmp_path, engine().identity, None)
    assert tier.limit == 2**32 // 10
    tier.close()
    monkeypatch.setattr("os.statvfs", lambda _: System(2**40, 4096))
    tier = disk.DiskTier(tmp_path, engine().identity, None)
    assert tier.limit == 10 * 2**30
    tier.close()


def test_the_limit_is_for_all_models_together(tmp_path):
    """States of weights or arithmetic that nobody uses any more would otherwise stay for ever."""
    prefixes = store(tmp_path)
    sync(prefixes, text(20))
    prefixes.close()
    (file,) = files(tmp_path)
    size, old = file.stat().st_size, tmp_path / "0123456789abcdef"
    old.mkdir()
    for i in range(3):
        (old / f"{i}.state").write_bytes(bytes(size))
        os.utime(old / f"{i}.state", (1000 + i, 1000 + i))
    (tmp_path / "mine.state").write_bytes(bytes(10 * size))
    prefixes = store(tmp_path, disk_bytes=3 * size)
    assert files(old) == [old / "1.state", old / "2.state"]
    sync(prefixes, text(21, 1))
    prefixes.flush()
    assert files(old) in ([], [old / "2.state"])
    assert prefixes.disk_bytes <= 3 * size
    assert file.exists()
    assert (tmp_path / "mine.state").exists()
    prefixes.close()


def test_a_state_larger_than_the_limit_removes_nobody(tmp_path):
    prefixes = store(tmp_path)
    sync(prefixes, text(20))
    prefixes.close()
    (file,) = files(tmp_path)
    prefixes = store(tmp_path, disk_bytes=file.stat().st_size)
    sync(prefixes, text(300, 1))
    with pytest.raises(WriteError, match="does not fit"):
        prefixes.flush()
    assert files(tmp_path) == [file]
    prefixes.close()


def test_files_that_somebody_removes_are_misses(tmp_path, caplog):
    prefixes = store(tmp_path)
    sync(prefixes, text(20, 1))
    prefixes.close()
    prefixes, other = store(tmp_path), store(tmp_path)
    other.drop(text(20, 1))
    assert files(tmp_path) == []
    assert sync(prefixes, [*text(20, 1), 5]) == 0
    assert not caplog.records
    other.close()
    prefixes.close()


def test_what_somebody_removed_is_written_again(tmp_path):
    prefixes = store(tmp_path)
    for _ in range(2):
        sync(prefixes, text(20))
        prefixes.flush()
        (file,) = files(tmp_path)
        file.unlink()
    assert prefixes.lengths == (20,)  # in memory
    prefixes.close()


def test_what_another_process_wrote_is_not_written_again(tmp_path):
    one, two = store(tmp_path), store(tmp_path)
    sync(one, text(20))
    one.flush()
    (file,) = files(tmp_path)
    before = file.stat().st_ino
    sync(two, text(20))
    two.flush()
    assert (file.stat().st_ino, files(tmp_path)) == (before, [file])
    assert one.disk_bytes == two.disk_bytes == file.stat().st_size
    one.close()
    two.close()


def test_what_another_process_used_does_not_expire(tmp_path):
    now = [1000.0]
    prefixes = PrefixStore(engine(), Limits(ttl_seconds=300), tmp_path, clock=lambda: now[0])
    sync(prefixes, text(20))
    prefixes.flush()
    (file,) = files(tmp_path)
    now[0] = 2000.0
    os.utime(file, (1900, 1900))
    assert prefixes.candidates(text(21), 21)
    now[0] = 2300.0
    assert not prefixes.candidates(text(21), 21)
    assert not file.exists()
    prefixes.close()


def test_a_file_that_became_another_is_refused(tmp_path, caplog):
    """One with more tokens than were listed would take more memory than was reserved."""
    prefixes = store(tmp_path)
    sync(prefixes, text(20))
    sync(prefixes, text(600, 1))
    prefixes.close()
    small, large = sorted(files(tmp_path), key=lambda path: path.stat().st_size)
    prefixes = store(tmp_path)
    small.write_bytes(large.read_bytes())
    assert sync(prefixes, [*text(20), 1]) == 0
    assert "no longer the state" in caplog.text
    prefixes.close()


OTHER = """
import sys, pathlib, os
sys.path.insert(0, sys.argv[1])
from state.test_prefix_folder import store, sync
from state.families import text
import moeflux.core.atomic_file as atomic
folder, act = pathlib.Path(sys.argv[2]), sys.argv[3]
if act == "hold":  # a write that stays unfinished until it is told to go on
    sync_file, held = os.fsync, []
    def wait(descriptor):
        if not held:
            held.append(1)
            print("writing", flush=True)
            sys.stdin.readline()
        sync_file(descriptor)
    os.fsync = wait
    prefixes = store(folder)
    sync(prefixes, text(20))
    prefixes.flush()
    print(len(list(folder.rglob("*.state"))), flush=True)
    prefixes.close()
else:
    prefixes = store(folder, disk_bytes=int(sys.argv[4]))
    print("ready", flush=True)
    sys.stdin.readline()
    found = 0
    for turn in range(25):
        found += sync(prefixes, text(20 + turn % 5, turn % 3)) > 0
        if turn % 7 == 0:
            prefixes.flush()
            prefixes.close()
            prefixes = store(folder, disk_bytes=int(sys.argv[4]))
    prefixes.flush()
    print(found, flush=True)
    prefixes.close()
"""


def other_process(folder, *args):
    command = [sys.executable, "-c", OTHER, str(TESTS), str(folder), *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_that_starts_leaves_what_another_is_writing(tmp_path):
    with other_process(tmp_path, "hold") as process:
        assert process.stdout.readline() == "writing\n"
        assert len(files(tmp_path, ".*.part")) == 1
        prefixes = store(tmp_path)
        assert len(files(tmp_path, ".*.part")) == 1
        assert prefixes.disk_bytes > 0  # it counts
        out, err = process.communicate("go\n", timeout=60)
        assert (out, process.returncode) == ("1\n", 0), err
    assert sync(prefixes, text(20)) == 0  # listed before it was there
    prefixes.close()
    again = store(tmp_path)
    assert sync(again, [*text(20), 1]) == 20
    again.close()


def test_two_processes_in_one_folder(tmp_path):
    """Both write the same states and remove each other's: right answers, no error, no leftovers, the limit kept."""
    prefixes = store(tmp_path)
    sync(prefixes, text(24))
    prefixes.flush()
    size = files(tmp_path)[0].stat().st_size
    prefixes.close()
    processes = [other_process(tmp_path, "churn", 3 * size) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert int(out) > 0
        assert "Traceback" not in err
    assert files(tmp_path, ".*.part") == []
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 4 * size  # each may write one at the same moment
