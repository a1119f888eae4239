"""From options to a model that runs: which backend, what it may use, its weights and its runner."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moeflux.backends.base import Backend, Tiers
from moeflux.backends.registry import choose_backend, gpu_unused, open_backend
from moeflux.core.config import EngineConfig
from moeflux.core.errors import DeviceError
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.tensors import TensorView
from moeflux.models.spec import ModelSpec
from moeflux.plan.plan import Plan
from moeflux.plan.planning import plan_engine
from moeflux.plan.sizes import Sizes
from moeflux.runtime.experts import Experts, Progress
from moeflux.runtime.forward import Model, Weights
from moeflux.runtime.trunk import load_trunk
from moeflux.store.policy import bytes_under_way, sweep_slots
from moeflux.store.store import StoreOptions


@dataclass(frozen=True)
class Choice:
    """`config`: as asked, with the backend named. `notes`: what there is to say about the choice."""

    config: EngineConfig
    backend: Backend
    plan: Plan
    notes: tuple[str, ...]


def choose(config: EngineConfig, spec: ModelSpec, sizes: Sizes, checkpoint: Checkpoint) -> Choice:
    """The backend and its plan. Where the choice is left open, a GPU that this model would not gain from is not used."""
    backend, notes = choose_backend(config)
    try:
        if config.backend == "auto" and (reason := backend.refusal(spec, sizes)):
            raise DeviceError(reason, where=f"backend {backend.name!r}")
        plan = plan_engine(config, backend, spec, sizes, checkpoint)
    except DeviceError as error:
        if config.backend != "auto":
            raise
        return without_gpu(config, error, spec, sizes, checkpoint)
    named = replace(config, backend=backend.name, vram=config.vram if backend.room else None)
    return Choice(named, backend, plan, notes)


def without_gpu(config: EngineConfig, error: DeviceError, spec: ModelSpec, sizes: Sizes, checkpoint: Checkpoint) -> Choice:
    """The processor instead, which is said."""
    backend = open_backend(config)
    plan = plan_engine(config, backend, spec, sizes, checkpoint)
    return Choice(replace(config, backend=backend.name, vram=None), backend, plan, (gpu_unused(error),))


def open_model(
    choice: Choice, spec: ModelSpec, checkpoint: Checkpoint, views: dict[str, TensorView], progress: Progress | None
) -> Model:
    """Weights into memory. Closes what it opened where that fails: others may have taken a GPU's memory meanwhile."""
    plan, ops = choice.plan, choice.backend.ops
    trunk = load_trunk(spec, checkpoint, ops, views)
    experts = _open_experts(choice, spec, checkpoint)
    try:
        if plan.resident and choice.backend.streams:
            experts.load_all(progress)
        slots = (plan.vram.n_slots, plan.vram.n_staged) if plan.vram else (0, 0)
        tiers = Tiers(plan.context, *slots, bool(plan.memory.records), progress)
        runner = choice.backend.runner(Weights(spec, trunk, experts), tiers)
    except BaseException:
        experts.close()
        raise
    return Model(spec, ops, trunk, experts, runner)


def _open_experts(choice: Choice, spec: ModelSpec, checkpoint: Checkpoint) -> Experts:
    """With as many slots as the plan allows."""
    plan, config = choice.plan, choice.config
    options = StoreOptions(
        plan.n_slots,
        max(moe.router.k for _, moe in spec.moe_layers()),
        policy=config.policy,
        reader=config.reader,
        direct=plan.direct,
        n_readers=plan.n_readers,
        sweep_slots=sweep_slots(plan.n_slots),
        keep_scales=plan.keep_scales,
        under_way=bytes_under_way(plan.slot_bytes) if plan.keep_scales else 0,
    )
    return Experts(spec, checkpoint, choice.backend.ops, options, config.bits)
