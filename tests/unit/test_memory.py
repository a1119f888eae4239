"""Free memory and limits, from files as the kernel writes them."""

from __future__ import annotations

from moeflux.plan.memory import LEAST_MARGIN, default_budget, free_memory, used_at_most, used_now

GIB = 2**30


def machine(root, available, cgroup, files):
    """A /proc and a /sys/fs/cgroup."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable: {available // 1024} kB\n")
    if cgroup is not None:
        (proc / "self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return proc, cgroups


def test_no_control_groups(tmp_path):
    assert free_memory(*machine(tmp_path, 20 * GIB, None, {})) == 20 * GIB


def test_version_2_limits_of_all_ancestors(tmp_path):
    files = {
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "1000\n",
        "a/memory.max": f"{8 * GIB}\n",
        "a/memory.current": f"{6 * GIB}\n",
        "a/memory.stat": f"anon 5\nfile 7\ninactive_file {GIB}\nactive_file {GIB}\nslab 9\n",
    }
    assert free_memory(*machine(tmp_path, 20 * GIB, "0::/a/b\n", files)) == 4 * GIB


def test_version_1(tmp_path):
    files = {
        "memory/box/memory.limit_in_bytes": f"{4 * GIB}\n",
        "memory/box/memory.usage_in_bytes": f"{3 * GIB}\n",
        "memory/box/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "5\n",
    }
    groups = "5:cpu,cpuacct:/other\n4:memory:/box\n0::/\n"
    assert free_memory(*machine(tmp_path, 20 * GIB, groups, files)) == 3 * GIB // 2


def test_a_container_that_shows_the_path_of_its_host(tmp_path):
    files = {"memory.max": f"{2 * GIB}\n", "memory.current": f"{GIB}\n"}
    assert free_memory(*machine(tmp_path, 20 * GIB, "0::/docker/1234\n", files)) == GIB


def test_a_group_above_its_limit_leaves_nothing(tmp_path):
    files = {"memory.max": "5000\n", "memory.current": "9000\n"}
    assert free_memory(*machine(tmp_path, 20 * GIB, "0::/\n", files)) == 0


def test_default_budget_leaves_a_margin():
    assert default_budget(64 * GIB, 5) == 60 * GIB + 5
    assert default_budget(GIB, 5) == GIB - LEAST_MARGIN + 5
    assert default_budget(0, 5) == 5


def test_of_this_process():
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * (len(block) // 4096)
    assert len(block) < used_now() <= used_at_most()
    assert 0 < free_memory() < 2**50
