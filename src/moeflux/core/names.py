"""How a model family names its tensors: data that `models` fills in and `formats` reads, so neither imports the other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorNames:
    """Stored names become canonical ones by replacing the first prefix that matches."""

    prefixes: tuple[tuple[str, str], ...]  # (stored, canonical), tried in order
    skipped: tuple[tuple[str, str], ...]  # (regular expression on the stored name, what such a tensor is)
    experts: str  # canonical base of a layer's experts, with "{layer}"

    def canonical(self, stored: str) -> str:
        for prefix, replacement in self.prefixes:
            if stored.startswith(prefix):
                return replacement + stored[len(prefix) :]
        return stored

    def stored(self, canonical: str) -> tuple[str, ...]:
        """Every stored name that would become this canonical one."""
        found = [
            stored + canonical[len(replacement) :]
            for stored, replacement in self.prefixes
            if canonical.startswith(replacement)
        ]
        return (*found, canonical)
