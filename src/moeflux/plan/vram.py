"""Where the bytes of a device go, for a backend that has memory of its own: trunk, states, scratch, the rest to experts.

Experts that find no slot there stay below, in host memory or on the drive; any number of slots gives the same result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moeflux.backends.base import DeviceRoom
from moeflux.core.errors import DeviceError
from moeflux.core.units import format_at_least, format_bytes
from moeflux.plan.needs import CHUNKS, Needs

MIB = 2**20
LEAST_MARGIN = 512 * MIB  # of free memory that is left where nobody says how much to use: kernels, graphs, fragments
MARGIN_SHARE = 16
CHUNK_SHARE = 8  # what a larger chunk needs more may be one in so many bytes
STAGED = 64  # slots that a prompt's experts pass through, where not all experts have their own


@dataclass(frozen=True)
class Vram:
    title: str
    budget: int
    trunk: int
    states: int
    scratch: int
    slots: int  # bytes
    n_slots: int  # experts that stay, of so many:
    n_experts: int
    n_staged: int  # slots that experts pass through
    chunk_tokens: int

    @property
    def resident(self) -> bool:
        return self.n_slots == self.n_experts

    @property
    def total(self) -> int:
        return self.trunk + self.states + self.scratch + self.slots

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total, "resident": self.resident}


def plan_vram(needs: Needs, room: DeviceRoom) -> Vram:
    """DeviceError where not even the trunk, the states and one token's experts fit."""
    wanted, spec = needs.resources.vram, needs.spec
    budget = max(0, room.free - max(LEAST_MARGIN, room.free // MARGIN_SHARE)) if wanted is None else wanted
    if budget > room.free:
        there = f"{format_bytes(room.free)} of {format_bytes(room.total)}"
        raise DeviceError(
            f"{format_bytes(budget)} asked for, {room.title} has {there} free",
            where="option 'vram'",
            hint="ask for less, or end what else uses the GPU",
        )
    states = needs.all_states + needs.all_checkpoints
    n_layers, k = len(spec.moe_layers()), max(moe.router.k for _, moe in spec.moe_layers())
    first = needs.costs(CHUNKS[-1]).vram
    assert first is not None
    least = (n_layers * k + k) * first.slot  # a layer keeps one token's experts, and as many pass through
    for chunk in CHUNKS:
        here = needs.costs(chunk).vram
        assert here is not None
        rest = budget - here.trunk - states - here.scratch
        cheap = here.scratch - first.scratch <= budget // CHUNK_SHARE and chunk < 2 * needs.resources.context
        if rest >= least and (cheap or chunk == CHUNKS[-1]):
            n_slots, n_staged = _divide(rest, here.slot, needs.sizes.n_experts, n_layers, k)
            return Vram(
                room.title, budget, here.trunk, states, here.scratch, (n_slots + n_staged) * here.slot, n_slots,
                needs.sizes.n_experts, n_staged, chunk,
            )  # fmt: skip
    parts = (("trunk", first.trunk), ("states", states), ("scratch", first.scratch), ("experts of one token", least))
    numbers = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts if n)
    smallest = first.trunk + states + first.scratch + least
    raise DeviceError(
        f"{format_bytes(budget)} of {room.title} are too little: {numbers}",
        where="option 'vram'" if wanted is not None else "memory of the GPU",
        hint=f"from {format_at_least(smallest)} on it runs; a shorter context= needs less; else use backend='native'",
    )


def _divide(rest: int, slot: int, n_experts: int, n_layers: int, k: int) -> tuple[int, int]:
    """Slots that experts stay in, the same for each layer where not all fit, and slots that they pass through."""
    if not slot:
        return 0, 0
    most = rest // slot
    if most >= n_experts:
        return n_experts, 0
    staged = max(k, min(STAGED, most // 8))
    return (most - staged) // n_layers * n_layers, staged
