"""Less memory for a child: groups are made, joined and removed; what is missing is said. On fake control groups."""

from __future__ import annotations

import os
import subprocess

import pytest

from moeflux.bench.cap import MemoryCap, ReadAhead, forget_files
from moeflux.core.errors import OptionError

V1 = "9:name=systemd:/\n4:memory:/some/group\n0::/\n"
V2 = "0::/some/group\n"


def groups(tmp_path, text, folder):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(text)
    parent = tmp_path / "cgroup" / folder
    parent.mkdir(parents=True)
    return parent


class Emptied(MemoryCap):
    """The kernel's groups can be removed with their files in them."""

    def __exit__(self, *error):
        for file in self._group.iterdir():
            file.unlink()
        super().__exit__(*error)


@pytest.mark.parametrize(
    ("text", "folder", "limit"),
    [(V1, "memory/some/group", "memory.limit_in_bytes"), (V2, "some/group", "memory.max")],
    ids=["v1", "v2"],
)
def test_the_command_runs_inside_the_group(tmp_path, text, folder, limit):
    parent = groups(tmp_path, text, folder)
    with Emptied(12345, tmp_path / "proc", tmp_path / "cgroup") as cap:
        (group,) = parent.iterdir()
        assert (group / limit).read_text() == "12345"
        done = subprocess.run(cap.command(["/bin/sh", "-c", "echo $$"]), capture_output=True, text=True, check=True)
        assert (group / "cgroup.procs").read_text() == done.stdout  # it joined, and then became the command
    assert list(parent.iterdir()) == []


def test_a_group_that_cannot_be_made_is_refused(tmp_path):
    groups(tmp_path, V1, "elsewhere")
    with (
        pytest.raises(OptionError, match="memory cannot be capped: No such file") as caught,
        MemoryCap(1, tmp_path / "proc", tmp_path / "cgroup"),
    ):
        pass
    assert "root, or a delegated group" in str(caught.value)


def test_no_control_groups(tmp_path):
    with pytest.raises(OptionError, match="no control groups"):
        MemoryCap(1, tmp_path, tmp_path)


@pytest.fixture
def drive(tmp_path):
    """A fake /sys in which the drive of `file` has a read-ahead of 8192 KiB."""
    file = tmp_path / "file"
    file.write_bytes(b"x")
    device = file.stat().st_dev
    queue = tmp_path / "sys/devices/disk/queue"
    queue.mkdir(parents=True)
    (queue / "read_ahead_kb").write_text("8192\n")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").symlink_to(queue.parent)
    return file, tmp_path / "sys", queue / "read_ahead_kb"


def test_read_ahead_is_put_back(drive):
    file, sys, setting = drive
    with ReadAhead(file, 128, sys) as ahead:
        assert ahead.kib == 128
        assert ahead.warning is None
    assert int(setting.read_text()) == 8192


def test_read_ahead_is_left_alone_unless_asked(drive):
    file, sys, setting = drive
    with ReadAhead(file, None, sys) as ahead:
        assert "8192" in ahead.warning
    assert setting.read_text() == "8192\n"


def test_a_drive_without_the_setting(tmp_path):
    (tmp_path / "file").touch()
    with ReadAhead(tmp_path / "file", None, tmp_path) as ahead:
        assert ahead.kib is None
        assert ahead.warning is None
    with pytest.raises(OptionError, match="no such setting"), ReadAhead(tmp_path / "file", 128, tmp_path):
        pass


def test_files_that_stay_in_memory_are_told(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 8192)
    monkeypatch.setattr("moeflux.bench.cap.cached_share", lambda *_: 0.0)
    assert forget_files([file]) is None
    monkeypatch.setattr("moeflux.bench.cap.cached_share", lambda *_: 0.5)
    assert "NOT COLD: 50%" in forget_files([file])
