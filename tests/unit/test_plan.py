"""Plans of published shapes under any budget: never over it, honest about where it ends."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux import BudgetError
from moeflux.backends.registry import open_backend
from moeflux.bench.shapes import SHAPES, published_config
from moeflux.core.config import EngineConfig
from moeflux.core.units import parse_bytes
from moeflux.formats.quant_rules import read_quant_rules
from moeflux.models.registry import read_spec
from moeflux.plan.advice import suggest
from moeflux.plan.forecast import Rates
from moeflux.plan.needs import CHUNKS, ROUNDING, RUNNING_BYTES, Resources
from moeflux.plan.plan import make_plan
from moeflux.plan.sizes import predict
from moeflux.plan.text_size import TextNeeds

GB = 10**9
RATES = Rates(drive=3 * GB, memory=20 * GB, macs=300 * GB)
GIVEN = Resources(budget=16 * GB, base=50_000_000, backend=open_backend(EngineConfig(Path(), "native", 8)), rates=RATES)


@cache
def model(shape):
    config = published_config(shape)
    spec = read_spec(config)
    return spec, predict(spec, read_quant_rules(config))


def plan(shape, prompt=2048, **given):
    return make_plan(*model(shape), replace(GIVEN, **given), prompt)


SOME = [*SHAPES]


@given(
    shape=st.sampled_from(SOME),
    budget=st.integers(10**8, 10**12),
    context=st.sampled_from([1, 100, 8192, 40_000]),
    direct=st.booleans(),
    n_readers=st.integers(1, 16),
    text=st.sampled_from([TextNeeds(), TextNeeds(10**8, 2 * 10**8, 10**8), TextNeeds(10**6, 5 * 10**9)]),
    sequences=st.sampled_from([1, 8]),
    checkpoints=st.integers(0, 3),
)
def test_a_plan_never_exceeds_its_budget(shape, budget, context, direct, n_readers, text, sequences, checkpoints):
    given = {"context": context, "direct": direct, "n_readers": n_readers}
    given |= {"text": text, "sequences": sequences, "checkpoints": checkpoints}
    try:
        p = plan(shape, budget=budget, **given)
    except BudgetError as error:
        enough = parse_bytes(re.search(r"works is (\S+);", error.hint)[1])
        assert enough > budget
        p = plan(shape, budget=enough, **given)
        assert p.smallest_budget <= enough
        with pytest.raises(BudgetError):
            plan(shape, budget=p.smallest_budget - 2 * ROUNDING, **given)
    assert p.memory.total <= p.budget
    assert p.smallest_budget <= p.cliff_budget <= p.resident_budget
    k = max(moe.router.k for _, moe in model(shape)[0].moe_layers())
    assert k <= p.n_slots <= p.n_experts
    assert p.resident == (p.n_slots == p.n_experts)
    assert p.chunk_tokens in CHUNKS
    below = plan(shape, budget=p.resident_budget - 3 * ROUNDING, **given)
    assert not below.resident
    assert plan(shape, budget=p.resident_budget, **given).resident
    assert plan(shape, budget=p.cliff_budget, **given).n_slots >= p.working_set


def test_text_states_and_logits_have_lines():
    bare = plan("qwen3.5-35b-a3b", budget=12 * GB)
    text = TextNeeds(kept=10**8, opening=2 * 10**8, constraints=5 * 10**7)
    full = plan("qwen3.5-35b-a3b", budget=12 * GB, text=text, sequences=4, checkpoints=2)
    assert (bare.memory.text, bare.memory.constraints, bare.memory.checkpoints) == (0, 0, 0)
    assert (full.memory.text, full.memory.constraints) == (10**8, 5 * 10**7)
    sizes = model("qwen3.5-35b-a3b")[1]
    assert full.memory.checkpoints >= 9 * sizes.state_per_sequence  # two of each sequence, and one that is being copied
    assert full.memory.states == 4 * bare.memory.state + full.memory.checkpoints
    vocab = model("qwen3.5-35b-a3b")[0].vocab
    assert full.memory.logits > bare.memory.logits > 5 * vocab * bare.logit_rows
    assert full.n_slots < bare.n_slots
    assert 0 <= full.state_limit - full.memory.states == full.budget - full.memory.total


def test_opening_a_tokenizer_must_fit_too():
    smallest = plan("qwen3-30b-a3b").smallest_budget
    text = TextNeeds(kept=10**6, opening=4 * GB)
    with pytest.raises(BudgetError, match="opening the tokenizer takes 4 GB for a moment"):
        plan("qwen3-30b-a3b", budget=smallest + GB, text=text)
    assert plan("qwen3-30b-a3b", budget=16 * GB, text=text).smallest_budget > 4 * GB


@pytest.mark.parametrize("shape", SOME)
def test_little_of_the_budget_is_left_over(shape):
    p = plan(shape, budget=model(shape)[1].experts // 2 + model(shape)[1].trunk + 4 * GB)
    assert 0 <= p.budget - p.memory.total <= p.slot_bytes + 2 * 2**20
    assert p.memory.base == GIVEN.base + RUNNING_BYTES
    assert 0.4 < p.share < 0.8


def test_what_the_numbers_are():
    """Qwen3-30B-A3B: 48 layers of 128 experts of 2.65 MB, 8 per token."""
    p = plan("qwen3-30b-a3b", budget=8 * 2**30, scales="streamed")
    assert (p.n_experts, p.working_set, p.working_set_bytes) == (6144, 384, 384 * 2_654_208)
    assert p.slot_bytes == 2_654_208 + 3 * 4096  # the codes of gate, up and down lie in pages of their own
    assert p.memory.state == 8192 * 48 * 2 * 4 * 128 * 2  # bf16
    assert plan("qwen3-30b-a3b", budget=8 * 2**30, kv="f32", scales="streamed").memory.state == 2 * p.memory.state
    uniform = p.forecast.uniform
    assert uniform.hit_rate == p.n_slots / 6144
    assert uniform.drive_bytes == pytest.approx(p.working_set_bytes * (1 - uniform.hit_rate), abs=1)
    assert uniform.tok_s == pytest.approx(3 * GB / uniform.drive_bytes)
    assert uniform.bound == "drive"
    assert p.forecast.local.tok_s == pytest.approx(20 * GB / p.forecast.memory_bytes)
    assert p.forecast.local.bound == "memory"


def test_scales_are_kept_where_that_is_worth_it():
    """Scales and biases are a ninth of an expert and two thirds of its reads; slots give up as much as they take."""
    for gigabytes, kept in ((4, False), (5, False), (11, True), (13, True), (64, False)):
        p = plan("qwen3-30b-a3b", budget=gigabytes * GB)
        assert p.keep_scales == kept, gigabytes
    streamed, kept = (plan("qwen3-30b-a3b", budget=13 * GB, scales=scales) for scales in ("streamed", "kept"))
    assert (streamed.keep_scales, kept.keep_scales) == (False, True)
    assert kept.slot_bytes == pytest.approx(streamed.slot_bytes * 8 / 9, rel=0.01)
    assert kept.memory.scales == pytest.approx(6144 * 2_654_208 / 9, rel=0.01)
    assert streamed.memory.scales == 0
    assert 0 < streamed.share - kept.share < 0.08
    assert kept.forecast.uniform.drive_bytes == pytest.approx(streamed.forecast.uniform.drive_bytes, rel=0.05)
    assert kept.forecast.first_token.drive_bytes <= streamed.forecast.first_token.drive_bytes
    budgets = ("smallest_budget", "cliff_budget", "resident_budget")
    assert all(getattr(kept, name) == getattr(streamed, name) for name in budgets)


def test_there_may_be_no_scales_to_keep():
    spec = read_spec(published_config("qwen3-30b-a3b"))
    sizes = predict(spec, replace(read_quant_rules(published_config("qwen3-30b-a3b")), affine=None))
    p = make_plan(spec, sizes, replace(GIVEN, budget=40 * GB, scales="kept"))
    assert not p.keep_scales
    assert p.memory.scales == sizes.kept_scales == 0
    assert p.warnings == ("scales are not kept in memory: there are none",)
    assert make_plan(spec, sizes, replace(GIVEN, budget=40 * GB)).warnings == ()


def test_scales_that_do_not_fit_are_not_kept_in_silence():
    small = plan("qwen3-30b-a3b", budget=3 * GB, scales="kept")
    assert not small.keep_scales
    assert "scales are not kept in memory: those of all experts take 1.81 GB" in small.warnings
    assert "scales" not in str(plan("qwen3-30b-a3b", budget=64 * GB, scales="kept").warnings)


def test_everything_resident_reads_nothing():
    p = plan("qwen3-30b-a3b", budget=64 * GB)
    assert p.resident
    assert p.chunk_tokens == 512
    assert p.forecast.uniform == p.forecast.local
    assert (p.forecast.uniform.hit_rate, p.forecast.uniform.drive_bytes, p.forecast.uniform.bound) == (1.0, 0, "memory")
    assert p.forecast.first_token.drive_bytes == 0
    assert p.forecast.first_token.bound == "arithmetic"


def test_the_cliff_is_warned_of():
    above = plan("qwen3-30b-a3b", budget=8 * GB)
    assert above.warnings == ()
    below = plan("qwen3-30b-a3b", budget=above.cliff_budget - 200_000_000)
    assert below.n_slots < below.working_set
    assert "an LRU cache has no hits" in below.warnings[0]
    assert below.forecast.uniform.hit_rate == 0
    typed = parse_bytes(re.search(r"from (\S+) on", below.warnings[0])[1])
    assert plan("qwen3-30b-a3b", budget=typed).n_slots >= below.working_set


def test_chunks_follow_the_room_there_is():
    chunks = [plan("qwen3-30b-a3b", budget=n * GB).chunk_tokens for n in (2, 3, 5, 8)]
    assert chunks == sorted(chunks)
    assert chunks[0] <= 512 < chunks[-1]
    short = plan("qwen3-30b-a3b", budget=14 * GB, context=300)
    assert short.chunk_tokens == 512
    floor = plan("qwen3-30b-a3b", budget=plan("qwen3-30b-a3b").smallest_budget)
    assert floor.chunk_tokens < 512
    assert any("chunks of" in warning for warning in floor.warnings)


def test_a_large_chunk_sweeps_less():
    few, many = (plan("qwen3-235b-a22b", budget=b * GB, prompt=8192) for b in (14, 18))
    assert many.chunk_tokens == 8 * few.chunk_tokens
    assert many.forecast.first_token.drive_bytes < 0.6 * few.forecast.first_token.drive_bytes


def test_rates_that_are_not_known_are_not_made_up():
    p = plan("qwen3-30b-a3b", rates=Rates())
    assert p.forecast.uniform.tok_s is None
    assert p.forecast.first_token.seconds is None
    assert plan("qwen3-30b-a3b", rates=Rates(drive=GB)).forecast.uniform.tok_s is None
    resident = plan("qwen3-30b-a3b", budget=64 * GB, rates=Rates(memory=GB))
    assert resident.forecast.uniform.tok_s is not None


def test_a_context_beyond_the_models_is_noted():
    assert any("40960" in warning for warning in plan("qwen3-30b-a3b", context=50_000, budget=30 * GB).warnings)


def test_the_numpy_backend_decodes_its_trunk():
    decoded = plan("qwen3-30b-a3b", backend=open_backend(EngineConfig(Path(), "numpy")))
    assert decoded.memory.trunk > 5 * plan("qwen3-30b-a3b").memory.trunk


def test_suggestions_are_faster_and_can_be_typed():
    cliff = plan("qwen3-30b-a3b").cliff_budget
    given = replace(GIVEN, budget=cliff - GB // 2)
    p = make_plan(*model("qwen3-30b-a3b"), given)
    choices = suggest(*model("qwen3-30b-a3b"), given, p)
    assert [bool(re.match(r"--ram \S+:|a drive", choice.what)) for choice in choices] == [True] * len(choices)
    assert len(choices) == 4  # the working set, twice the budget, everything, a drive twice as fast
    for choice in choices:
        assert choice.tok_s[0] > p.forecast.uniform.tok_s
        assert choice.tok_s[1] > p.forecast.local.tok_s
    everything = plan("qwen3-30b-a3b", budget=64 * GB)
    (only,) = suggest(*model("qwen3-30b-a3b"), replace(given, budget=64 * GB), everything)
    assert "memory" in only.what
