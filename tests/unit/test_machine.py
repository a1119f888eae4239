"""What the machine says about itself, read from files made here."""

from __future__ import annotations

import os
import stat

from moeflux.plan import doctor, machine
from moeflux.plan.doctor import DriveSpeed
from moeflux.plan.machine import Gpu, MemoryFacts, Place, Processor


def test_this_machine():
    processor = machine.read_processor()
    assert 1 <= processor.usable <= processor.cores
    assert processor.isa in ("avx512_vnni", "avx_vnni", "avx2", "generic")
    memory = machine.read_memory()
    assert 0 < memory.free <= memory.total
    assert machine.read_place(machine.PROC).file_system == "proc"


def test_nothing_is_known_where_nothing_is_said(tmp_path):
    assert machine.read_processor(tmp_path).name == "unknown"
    assert machine.read_memory(tmp_path, tmp_path / "none").huge_pages is None
    assert machine.read_place(tmp_path, tmp_path).file_system == "unknown"


def test_huge_pages(tmp_path):
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert machine.read_memory(huge_pages=tmp_path / "enabled").huge_pages == "never"


def test_the_nearest_mount_counts(tmp_path):
    (tmp_path / "mounts").write_text(f"a / ext4 rw 0 0\nb {tmp_path} nfs4 rw 0 0\nc {tmp_path}x xfs rw 0 0\n")
    assert machine.read_place(tmp_path, tmp_path).file_system == "nfs4"


class TestGpus:
    def program(self, tmp_path, monkeypatch, script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def test_from_the_program(self, tmp_path, monkeypatch):
        said = "echo 'Card, the first, 24576, 20480, 570.86.15, 9.0'; echo 'Other, [N/A], [N/A], [N/A], [N/A]'"
        self.program(tmp_path, monkeypatch, said)
        gib = 2**30
        assert machine.find_gpus() == (Gpu("Card, the first", 24 * gib, 20 * gib, "570.86.15", "9.0"), Gpu("Other"))

    def test_a_program_that_fails(self, tmp_path, monkeypatch):
        self.program(tmp_path, monkeypatch, "echo no driver >&2; exit 9")
        assert machine.find_gpus() == ()

    def test_from_the_driver(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        card = tmp_path / "driver/nvidia/gpus/0000:01:00.0"
        card.mkdir(parents=True)
        (card / "information").write_text("Model: \t\t Some Card\nIRQ: 5\n")
        assert [gpu.name for gpu in machine.find_gpus(tmp_path)] == ["Some Card"]
        assert machine.find_gpus(tmp_path / "nowhere") == ()


def test_a_folders_speed_leaves_nothing_behind(tmp_path):
    speed = doctor.folder_speed(tmp_path, 400 * 2**20)
    assert speed.bytes_s > 0
    assert "21 MB" in speed.how  # no more than a twentieth of what is free
    assert list(tmp_path.iterdir()) == []
    assert doctor.folder_speed(tmp_path, 2**20) is None
    assert doctor.folder_speed(tmp_path / "nowhere", 2**30) is None


def test_advice():
    good = (
        Processor("p", 8, 8, "avx512_vnni"), MemoryFacts(100, 90, "madvise"), Place("/m", "ext4", 1),
        DriveSpeed(7e9, True, ""),
    )  # fmt: skip
    assert list(doctor._faster(*good)) == []
    bad = (
        Processor("p", 8, 2, "generic"), MemoryFacts(100 * 10**9, 10**9, "never"), Place("/m", "nfs4", 1),
        DriveSpeed(5e8, True, ""),
    )  # fmt: skip
    advice = " ".join(doctor._faster(*bad))
    for word in ("VNNI", "2 of 8", "transparent_hugepage", "1 GB of 100 GB", "nfs4", "500 MB/s"):
        assert word in advice


def test_why_a_gpu_is_not_used(monkeypatch):
    monkeypatch.setattr(doctor, "missing_packages", lambda: ["torch"])
    assert "torch" in doctor.gpu_unusable(Gpu("Card"))
    monkeypatch.setattr(doctor, "missing_packages", list)
    assert doctor.gpu_unusable(Gpu("Card", capability="9.0")) is None
    assert doctor.gpu_unusable(Gpu("Card")) is None
    assert "7.5" in doctor.gpu_unusable(Gpu("Card", capability="7.5"))
    processor = Processor("p", 8, 8, "avx2")
    assert any("Card where" in line for line in doctor._uses(processor, (Gpu("Card", capability="9.0"),), 10**9))
    assert any("no GPU: Card has" in line for line in doctor._uses(processor, (Gpu("Card", capability="7.5"),), 10**9))
    assert not any("GPU" in line for line in doctor._uses(processor, (), 10**9))
