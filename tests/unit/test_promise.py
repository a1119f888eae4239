"""Peak memory of whole processes against their budgets: measured by the benchmark itself, on small models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "memory.py"
LARGE = ("--models", "large", "--ids", "60000", "--experts", "16")  # where a vocabulary is most of what there is


@pytest.mark.parametrize(
    "args",
    [
        (*LARGE, "--cases", "constraints", "eval"),
        (*LARGE, "--cases", "conversations", "too much"),
        ("--models", "demo", "--cases", "chat", "prefix store"),
    ],
    ids=["text", "states", "demo"],
)
def test_the_peak_is_within_the_budget(args):
    result = subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, timeout=900)
    assert result.stdout, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row for row in rows if row["peak"] > row["budget"]] == []
    assert len({(row["case"], row["budget"]) for row in rows}) == len(rows) == 6
    assert result.returncode == 0
