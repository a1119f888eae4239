"""A thousand checkpoints and restores in a process of their own: its memory stays where it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conftest import DATA
from state.families import HYBRID, LATENT

RUN = """
import json, sys
import moeflux
from moeflux import Segment
from moeflux.plan.memory import used_now
with moeflux.load(sys.argv[1], threads=1, context=1024) as engine:
    sequence = engine.sequence()
    engine.forward(Segment(sequence, list(range(300)), "none"))
    def rounds(n):
        for _ in range(n):
            start = sequence.length
            sequence.checkpoint()
            engine.forward(Segment(sequence, [1, 2, 3], "none"))
            sequence.checkpoint()
            sequence.restore(start)
    rounds(50)
    before, one = used_now(), sequence.snapshot_bytes
    rounds(1000)
    print(json.dumps({"grown": used_now() - before, "one": one, "kept": len(sequence.checkpoints)}))
"""


@pytest.mark.parametrize("name", [HYBRID, LATENT])
def test_a_thousand_checkpoints_leak_nothing(name):
    result = subprocess.run([sys.executable, "-c", RUN, DATA / "mlx" / name], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["kept"] == 1
    assert seen["grown"] < 10 * seen["one"]  # of the thousand that were made
