"""Rotary settings as the hub writes them (`rope_theta`, `rope_scaling`) and as transformers 5 does (`rope_parameters`)."""

from __future__ import annotations

from moeflux.core.errors import ConfigError
from moeflux.models.fields import Fields
from moeflux.models.spec import Pairing, Rope, Yarn

MIN_ROTATIONS = 1e-9  # below, the logarithms of the interpolation overflow


def read_rope(fields: Fields, head_dim: int, pairing: Pairing, *, theta: float, partial: float = 1.0) -> Rope:
    """`theta` and `partial` are the family's defaults."""
    new, old = fields.nested("rope_parameters"), fields.nested("rope_scaling")
    theta = _agree([new, old, fields], "rope_theta", theta)
    partial = _agree([new, old, fields], "partial_rotary_factor", partial)
    dim = int(head_dim * partial)
    if not 0 < dim <= head_dim or dim % 2:
        raise ConfigError(
            f"{partial} of {head_dim} channels gives {dim} rotary channels, which must be even and positive",
            where=fields.where("partial_rotary_factor"),
        )
    if theta <= 1:
        raise ConfigError(f"{theta} is not a rotary base", where=fields.where("rope_theta"))
    scalings = [scaling for scaling in (_scaling(new), _scaling(old)) if scaling is not None]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ConfigError("contradicts rope_parameters", where=fields.where("rope_scaling"))
    match scalings[0] if scalings else None:
        case Yarn() as yarn:
            return Rope(dim, theta, pairing, yarn=yarn)
        case float() as factor:
            return Rope(dim, theta, pairing, linear_factor=factor)
    return Rope(dim, theta, pairing)


def _scaling(fields: Fields) -> Yarn | float | None:
    """How positions beyond the trained context are reached: YaRN, a linear factor, or not."""
    kinds = ("default", "yarn", "linear")
    kind = fields.only("rope_type", *kinds)
    other = fields.only("type", *kinds, "mrope")  # mrope: positions of images, plain for text
    if other in ("yarn", "linear"):
        if kind not in ("default", other):
            raise ConfigError(f"{other!r} contradicts rope_type = {kind!r}", where=fields.where("type"))
        kind = other
    if kind == "yarn":
        return _yarn(fields)
    return fields.number("factor", low=1.0) if kind == "linear" else None


def _agree(places: list[Fields], name: str, default: float) -> float:
    values = [(place.where(name), place.number(name)) for place in places if place.has(name)]
    for where, value in values[1:]:
        if value != values[0][1]:
            raise ConfigError(f"{value} contradicts {values[0][0]} = {values[0][1]}", where=where)
    return values[0][1] if values else default


def _yarn(fields: Fields) -> Yarn:
    return Yarn(
        factor=fields.number("factor", low=1.0),
        original_context=fields.whole("original_max_position_embeddings", high=2**31),
        beta_fast=_rotations(fields, "beta_fast", 32.0),
        beta_slow=_rotations(fields, "beta_slow", 1.0),
        truncate=fields.flag("truncate", default=True),
        attention_factor=fields.number("attention_factor") if fields.has("attention_factor") else None,
        mscale=fields.number("mscale", default=0.0),
        mscale_all_dim=fields.number("mscale_all_dim", default=0.0),
    )


def _rotations(fields: Fields, name: str, default: float) -> float:
    """Turns within the original context; 0 stands for the default, as in transformers."""
    value = fields.number(name, default=default) or default
    if value < MIN_ROTATIONS:
        raise ConfigError(f"{value} is not a number of rotations", where=fields.where(name))
    return value
