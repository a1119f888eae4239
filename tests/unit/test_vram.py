"""Plans for a device's memory, with a backend that only says what things cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeflux.backends.base import Backend, Costs, DeviceRoom, TierCosts
from moeflux.core.errors import DeviceError
from moeflux.plan.needs import CHUNKS, Resources
from moeflux.plan.plan import make_plan
from unit.test_plan import GB, model

SPEC, SIZES = model("qwen3.5-35b-a3b")
SLOT = 1_769_472


class Priced(Backend):
    """Says what things cost, and nothing else."""

    name = "priced"
    ops = None

    def costs(self, spec, sizes, chunk):
        return Costs(TierCosts(10**8, 10**8), TierCosts(3 * GB, 5 * 10**8 + chunk * 10**5, True, SLOT))

    def runner(self, model, tiers):
        raise NotImplementedError


def plan(budget=60 * GB, free=140 * GB, vram=None, **given):
    given = {"context": 8192, "checkpoints": 2} | given
    room = DeviceRoom("a card", 150 * GB, free)
    return make_plan(SPEC, SIZES, Resources(budget=budget, base=10**8, backend=Priced(), device=room, vram=vram, **given))


def test_all_experts_on_the_device():
    p = plan()
    assert p.vram.resident
    assert p.vram.n_slots == SIZES.n_experts
    assert p.vram.chunk_tokens == CHUNKS[0]
    assert p.memory.state == p.memory.checkpoints == p.memory.records == 0  # states live on the device
    assert p.state_limit >= p.vram.states > 0
    assert p.n_slots < 200  # host slots are passed through
    assert p.warnings == ()


@pytest.mark.parametrize("vram", [6 * GB, 12 * GB, 20 * GB])
def test_some_on_the_device_the_others_in_host_memory(vram):
    p = plan(vram=vram)
    assert 0 < p.vram.n_slots < SIZES.n_experts
    assert p.vram.n_slots % 40 == 0  # each layer its share
    assert p.vram.n_slots // 40 >= 8
    assert p.vram.total <= vram
    assert p.memory.records == SIZES.n_experts * SLOT
    assert p.memory.total <= p.budget


def test_some_on_the_device_and_too_little_host_memory_for_the_others():
    p = plan(budget=10 * GB, vram=12 * GB)
    assert p.memory.records == 0
    assert p.n_slots > 1000  # of the store, above the drive
    assert p.memory.total <= p.budget


@given(vram=st.integers(10**9, 200 * GB), free=st.integers(10**9, 150 * GB), named=st.booleans())
def test_a_plan_stays_within_the_device_or_is_refused(vram, free, named):
    try:
        p = plan(free=free, vram=vram if named else None)
    except DeviceError:
        return
    assert p.vram.total <= p.vram.budget <= free
    assert not named or p.vram.budget == vram


def test_what_is_refused_and_how():
    with pytest.raises(DeviceError, match=r"5 GB asked for, a card has 4 GB of 150 GB free"):
        plan(free=4 * GB, vram=5 * GB)
    with pytest.raises(
        DeviceError, match=r"2 GB of a card are too little: trunk 3 GB, states .*, scratch .*, experts"
    ) as error:
        plan(vram=2 * GB)
    assert "from 4" in error.value.hint
    assert "shorter context" in error.value.hint


def test_the_json_form_says_all_of_it():
    found = plan(vram=12 * GB).as_dict()["vram"]
    assert found["title"] == "a card"
    assert found["total"] <= found["budget"] == 12 * GB
    assert replace(plan(vram=12 * GB), vram=None).as_dict()["vram"] is None
