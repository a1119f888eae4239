"""A budget for a process that measures: shares of the experts become budgets, and measuring pays for itself."""

from __future__ import annotations

import pytest

from moeflux.bench.room import BUFFER_BYTES, MemoryUse, make_room
from moeflux.bench.synthetic import write_checkpoint
from moeflux.core.config import EngineConfig
from moeflux.core.errors import BudgetError, OptionError
from moeflux.runtime.engine import Engine
from unit.test_synthetic import QUANT, QWEN


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """512 experts of about 230 kB: large beside what a process uses more or less of from one moment to the next."""
    folder = tmp_path_factory.mktemp("room") / "model"
    write_checkpoint(QWEN | QUANT | {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 128}, folder)
    return folder


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_share_becomes_the_budget_that_holds_it(model, share):
    room = make_room(EngineConfig(model, threads=1, context=64), share)
    with Engine(room.config) as engine:
        plan = engine.plan
    assert plan.n_slots == share * 512
    assert not plan.resident
    assert plan.budget + room.own == room.budget
    assert plan.memory.total <= plan.budget
    assert plan.budget - plan.memory.total < 64 * 2**20  # and not much more than it needs


def test_measuring_takes_its_part_of_a_given_budget(model):
    room = make_room(EngineConfig(model, threads=1, ram="4GB", slots=100))
    assert room.budget == 4 * 10**9
    assert room.own > BUFFER_BYTES
    assert room.config.ram == room.budget - room.own
    assert room.config.slots == 100


def test_the_default_is_what_is_free(model):
    room = make_room(EngineConfig(model, threads=1))
    assert room.config.ram_bytes == room.budget - room.own
    assert room.config.slots is None


def test_too_little_counts_measuring(model):
    with pytest.raises(BudgetError, match="of which measuring takes") as caught:
        make_room(EngineConfig(model, threads=1, ram="200MB"))
    least = str(caught.value).split("smallest that works is ")[1]
    make_room(EngineConfig(model, threads=1, ram=least))


def test_more_than_there_is_is_refused(model):
    with pytest.raises(BudgetError, match="are free"):
        make_room(EngineConfig(model, ram="900TB"))


@pytest.mark.parametrize(("share", "slots"), [(0.0, None), (1.5, None), (0.5, 7)])
def test_shares_that_are_none(model, share, slots):
    with pytest.raises(OptionError, match="share"):
        make_room(EngineConfig(model, slots=slots), share)


def test_a_peak_above_the_budget_is_told():
    assert MemoryUse(100, 80, 10, 100).within
    assert not MemoryUse(100, 80, 10, 101).as_dict()["within"]
