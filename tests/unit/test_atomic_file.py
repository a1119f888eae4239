"""Files appear whole or not at all, and what is not a regular file is never taken away."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

from moeflux.core.atomic_file import STALE_SECONDS, UNFINISHED, remove_stale, write_atomically
from moeflux.core.errors import WriteError
from moeflux.runtime.trace import Trace
from moeflux.session.chat import Chat
from moeflux.store.trace import TraceRecorder
from state.families import HYBRID, opened


def put(path, data=b"new", **options):
    write_atomically(path, lambda file: file.write(data), **options)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=["fifo", "socket", "folder", "device", "link to a device"])
def node(request, tmp_path):
    """Something that is no regular file; afterwards it must still be the same node."""
    path = tmp_path / "node"
    match request.param:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case "folder":
            path.mkdir()
        case "device":
            if os.geteuid():
                pytest.skip("only root makes devices")
            try:
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            except OSError:
                pytest.skip("devices cannot be made here")
        case _:
            path.symlink_to("/dev/null")
    before = path.lstat()
    yield path
    after = path.lstat()
    assert (after.st_ino, stat.S_IFMT(after.st_mode)) == (before.st_ino, stat.S_IFMT(before.st_mode))
    assert [p.name for p in tmp_path.iterdir()] == ["node"]


def test_what_is_no_regular_file_is_refused(node):
    with pytest.raises(WriteError, match="not a regular file") as caught:
        put(node)
    assert caught.value.hint


def test_states_traces_and_conversations_replace_no_node(node):
    engine = opened(HYBRID)
    chat = Chat.__new__(Chat)
    chat.system, chat.messages = None, []
    routing = TraceRecorder("m", [0], 8, 2)
    writers = [
        lambda: engine.save(engine.sequence(), node),
        lambda: routing.save(node),
        lambda: chat.save(node),
    ]
    for write in writers:
        with pytest.raises(WriteError, match="not a regular file"):
            write()


def test_a_record_of_values_is_written_in_the_same_way(tmp_path):
    trace = Trace()
    trace.record(0, "mixer", 0, np.ones((2, 3), np.float32))
    trace.save(tmp_path / "values")
    assert [p.name for p in tmp_path.iterdir()] == ["values.npz"]
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(WriteError, match="a pipe"):
        trace.save(tmp_path / "pipe.npz")


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to("there/file")
    for data in (b"first", b"second"):  # dangling, then not
        put(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data
    assert not target.is_symlink()
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(WriteError):
        put(loop)
    assert loop.is_symlink()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_new_files_are_private_and_old_ones_keep_their_mode(tmp_path, umask):
    before = os.umask(umask)
    try:
        put(tmp_path / "new")
        (tmp_path / "old").write_bytes(b"old")
        (tmp_path / "old").chmod(0o664)
        put(tmp_path / "old")
        put(tmp_path / "model", mode=0o644)
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("new", "old", "model")] == [0o600, 0o664, 0o644]


def test_what_fails_midway_changes_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "none/file", "file/below"], ids=ascii)
def test_names_that_cannot_be_written(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WriteError):
        put(tmp_path / name)


def test_a_long_name_leaves_room_for_the_unfinished_one(tmp_path):
    put(tmp_path / ("ü" * 127))
    assert len(list(tmp_path.iterdir())) == 1


WRITER = """
import sys, pathlib
from moeflux.core.atomic_file import write_atomically
def write(file):
    file.write(b"half"); file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
    file.write(b" and whole")
write_atomically(pathlib.Path(sys.argv[1]), write)
"""


def writer(path):
    command = [sys.executable, "-c", WRITER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    return process


def test_only_files_without_a_writer_are_removed(tmp_path):
    with writer(tmp_path / "file") as process:
        remove_stale(tmp_path)
        assert len(list(tmp_path.glob(f".*{UNFINISHED}"))) == 1
        process.communicate("go\n")
    assert (tmp_path / "file").read_bytes() == b"half and whole"
    with writer(tmp_path / "other") as process:
        process.kill()
        process.wait()
        assert len(list(tmp_path.glob(f".*{UNFINISHED}"))) == 1
    remove_stale(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_an_unlocked_file_of_a_living_process_goes_only_when_it_is_old(tmp_path):
    """As on a file system without locks, or in the moment before the lock is taken."""
    path = tmp_path / f".x.{os.getpid()}.12345678{UNFINISHED}"
    path.write_bytes(b"")
    remove_stale(tmp_path)
    assert path.exists()
    old = time.time() - STALE_SECONDS - 10
    os.utime(path, (old, old))
    remove_stale(tmp_path)
    assert not path.exists()


def test_a_file_that_is_taken_for_a_leftover_is_begun_again(tmp_path, monkeypatch):
    """Another process may see it in the moment between its making and its lock."""
    import fcntl

    lock, taken = fcntl.flock, []

    def steal(descriptor, operation):
        if not taken:
            taken.append([p.unlink() for p in tmp_path.iterdir()])
        lock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", steal)
    put(tmp_path / "file", json.dumps({}).encode())
    assert taken
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
