"""The memory of a whole process, measured from outside the plan: what it says is what is used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from moeflux.bench.synthetic import write_checkpoint
from unit.test_synthetic import QUANT, QWEN3

MB = 10**6

RUN = """
import json, sys
import moeflux
from moeflux import Segment
from moeflux.plan.memory import used_at_most, used_now
start = used_now()
folder, ram, context, prompt = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with moeflux.load(folder, ram=ram, context=context, threads=2) as engine:
    loaded, peak = used_now(), used_at_most()
    sequence, step = engine.sequence(), engine.plan.chunk_tokens
    for at in range(0, prompt, step):
        engine.forward(Segment(sequence, [i % 300 for i in range(min(step, prompt - at))], "none"))
    engine.forward(Segment(sequence, [1]))
    print(json.dumps({"start": start, "loaded": loaded, "loading": peak, "peak": used_at_most(),
                      "plan": engine.plan.as_dict(), "state": sequence.nbytes}))
"""


def run(folder, ram, context, prompt):
    command = [sys.executable, "-c", RUN, folder, ram, str(context), str(prompt)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model")


@pytest.mark.parametrize("quantised", [False, True])
def test_the_trunk_is_in_memory_once(folder, quantised):
    """160 MB of unquantised trunk, or the same weights in 4 bits."""
    vocab = 80_000 if not quantised else 300_000
    write_checkpoint(QWEN3 | (QUANT if quantised else {}) | {"hidden_size": 512, "vocab_size": vocab}, folder)
    seen = run(folder, "600MB", 64, 4)
    plan = seen["plan"]["memory"]
    assert plan["trunk"] > 150 * MB
    used = seen["loaded"] - seen["start"] - plan["slots"]
    assert used == pytest.approx(plan["trunk"], rel=0.05)
    assert seen["loading"] - seen["start"] - plan["slots"] <= 1.05 * plan["trunk"]  # not even for a moment
    assert seen["peak"] <= plan["total"] <= 600 * MB


def test_a_long_prompt_stays_within_the_plan(folder):
    """State and scratch are most of it here."""
    heads = {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 128}
    config = QWEN3 | QUANT | heads | {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts_per_tok": 8}
    write_checkpoint(config, folder)
    seen = run(folder, "400MB", 2048, 2000)
    plan = seen["plan"]["memory"]
    assert plan["state"] + plan["scratch"] > 45 * MB
    assert seen["state"] <= plan["state"]
    assert seen["peak"] <= plan["total"] <= 400 * MB
    assert plan["total"] - seen["peak"] < 60 * MB  # and counts no phantoms
