"""Byte counts and rates as people write and read them."""

from __future__ import annotations

import math
import re

from moeflux.core.errors import OptionError

_HOW = "write it like 24GiB, 800MB or 4096"
_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _FACTORS[f"{_letter}B"] = 1000**_power
    _FACTORS[f"{_letter}IB"] = 1024**_power


def parse_bytes(text: str | int) -> int:
    """ "24GiB", "1.5 GB", "4096" or a plain number, as bytes."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise OptionError(f"{text} is negative", where="byte count", hint=_HOW)
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise OptionError(f"cannot read {text!r}", where="byte count", hint=_HOW)
    return int(float(match[1]) * factor)


def parse_rate(text: str | int) -> int:
    """ "7GB/s", "800 MB/s" or a plain number, as bytes per second."""
    rate = parse_bytes(re.sub(r"\s*/\s*s\s*$", "", text) if isinstance(text, str) else text)
    if rate == 0:
        raise OptionError("a rate of 0 moves nothing", where="byte rate", hint="write it like 7GB/s")
    return rate


def format_at_least(n: float) -> str:
    """Rounded up and readable by `parse_bytes`, for "give at least this": 0.42GB, 18.2GB."""
    unit, step = ("MB", 10**6) if n < 1e8 else ("GB", 10**7)
    steps = math.ceil(n / step)
    return f"{steps}MB" if unit == "MB" else f"{steps / 100:.2f}GB"


def format_bytes(n: float) -> str:
    """Decimal units, three significant digits, as drives and model cards count: 1.77 MB, 18.1 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB" if n < 999.5 else f"{n:,.0f} TB"


def format_count(n: float) -> str:
    """Parameters as model cards write them: 671 B, 2.95 B, 48.0 M."""
    for unit in ("", "k", "M"):
        if abs(n) < 999.5:
            return f"{n:.0f}" if not unit else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.1f} B" if n >= 99.95 else f"{n:.3g} B"
