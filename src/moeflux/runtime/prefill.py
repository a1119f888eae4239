"""How far a prompt is that runs in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillProgress:
    done: int  # tokens,
    total: int  # of so many
    bytes_read: int  # of experts, so far
    seconds: float

    @property
    def eta_s(self) -> float | None:
        """Seconds that are left at the speed so far."""
        return self.seconds / self.done * (self.total - self.done) if self.done else None


OnPrefill = Callable[[PrefillProgress], None]
