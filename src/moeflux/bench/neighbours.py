"""Who else used the cores while something was measured.

Only the standard library: an interpreter without moeflux runs this text too, on the other side of a comparison.
"""

from __future__ import annotations

import os
import time


class Neighbours:
    """A context; afterwards `shares` says what part of all cores others had meanwhile."""

    def __enter__(self) -> Neighbours:
        self._start = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        busy, stolen, own, elapsed = (now - then for now, then in zip(self._now(), self._start, strict=True))
        cores = elapsed * (os.cpu_count() or 1)
        shares = {"others": (busy - own) / cores, "stolen": stolen / cores}
        self.shares = {name: min(1.0, max(0.0, share)) for name, share in shares.items()}  # ticks are coarse

    def _now(self) -> tuple[float, float, float, float]:
        """Seconds: of all processes and the kernel; that the host kept; of this process; passed. Waiting is none."""
        with open("/proc/stat") as file:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
        tick, times = os.sysconf("SC_CLK_TCK"), os.times()
        return (user + nice + system + irq + softirq) / tick, steal / tick, times.user + times.system, time.perf_counter()
