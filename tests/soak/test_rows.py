"""A small soak: rows bit for bit while the drive fails. `make soak` is the long one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from soak.rows import soak

TESTS = Path(__file__).parent.parent


def test_rows_do_not_differ():
    tally = soak(400, seed=1)
    assert tally["wrong"] == tally["failed"] == 0
    assert tally["rows"] >= 400


def test_rows_do_not_differ_while_the_drive_fails(shim):
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "MOEFLUX_SHIM_FILE": "model.safetensors",
        "MOEFLUX_SHIM_MODE": "sometimes",
        "PYTHONPATH": str(TESTS),
    }
    command = [sys.executable, "-m", "soak.rows", "--rows", "1000", "--seed", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 rows differ" in done.stdout
    assert ", 0 sequences failed" not in done.stdout.splitlines()[-1]
