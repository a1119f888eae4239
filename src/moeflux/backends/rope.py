"""Rotary frequencies and attention scales: small numbers computed once, in float64, the same for every backend."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moeflux.models.spec import Mla, Rope, Yarn

F64 = npt.NDArray[np.float64]


def frequencies(rope: Rope) -> F64:
    """Radians per position for each of the dim/2 channel pairs."""
    extrapolated = rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
    if rope.yarn is None:
        return extrapolated / rope.linear_factor
    keep = 1.0 - _ramp(rope, rope.yarn)
    return extrapolated / rope.yarn.factor * (1.0 - keep) + extrapolated * keep


def rotation_scale(rope: Rope) -> float:
    """What cos and sin are multiplied by."""
    yarn = rope.yarn
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _magnitude(yarn.factor, yarn.mscale) / _magnitude(yarn.factor, yarn.mscale_all_dim)
    return _magnitude(yarn.factor, 1.0)


def mla_scale(spec: Mla) -> float:
    """The softmax scale: with YaRN it carries the square of the magnitude correction."""
    scale = float((spec.nope_dim + spec.rope.dim) ** -0.5)
    yarn = spec.rope.yarn
    if yarn is not None and yarn.mscale_all_dim:
        scale *= _magnitude(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _ramp(rope: Rope, yarn: Yarn) -> F64:
    """0 for fast channels, which are kept, to 1 for slow ones, which are interpolated."""

    def channel(rotations: float) -> float:
        return rope.dim * math.log(yarn.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # as the reference does, to divide by something
    return np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0.0, 1.0)
