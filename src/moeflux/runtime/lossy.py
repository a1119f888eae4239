"""Ways to run a model with less than it was trained with: never by default, and the engine's notes say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moeflux.core.config import EngineConfig
from moeflux.core.errors import OptionError
from moeflux.formats.checkpoint import Checkpoint
from moeflux.formats.quant import AFFINE_BITS, Affine, BlockFp8, Matrix, decode, quantize
from moeflux.models.spec import ModelSpec

GROUP = 64  # of weights that were not quantised before
SCALES = "BF16"


def fewer_experts(spec: ModelSpec, k: int | None) -> ModelSpec:
    if k is None:
        return spec
    own = min(moe.router.k for _, moe in spec.moe_layers())
    if k >= own:
        raise OptionError(f"{k} experts per token, the model's own is {own}", where="option 'k'", hint=f"1 to {own - 1}")
    return spec.with_k(k)


def check_bits(bits: int | None, spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """That requantising would take something away."""
    if bits is None:
        return
    layer, _ = spec.moe_layers()[0]
    codecs = [projection.codec for projection in checkpoint.experts(layer).layout.projections]
    most = min(codec.bits if isinstance(codec, Affine) else 8 if isinstance(codec, BlockFp8) else 16 for codec in codecs)
    if bits not in AFFINE_BITS or bits >= most:
        choices = ", ".join(str(n) for n in AFFINE_BITS if n < most)
        raise OptionError(f"experts of {most} bits cannot become {bits}", where="option 'bits'", hint=f"one of: {choices}")


def requantised(matrices: Mapping[str, Matrix], bits: int) -> dict[str, Matrix]:
    return {name: _requantised(matrix, bits) for name, matrix in matrices.items()}


def _requantised(matrix: Matrix, bits: int) -> Matrix:
    old = matrix.codec
    new = Affine(bits, old.group, old.scales) if isinstance(old, Affine) else Affine(bits, GROUP, SCALES)
    return Matrix(new, matrix.shape, quantize(decode(matrix), bits, new.group, new.scales), matrix.source)


def lossy_notes(config: EngineConfig, own_k: int) -> Iterator[str]:
    if config.k is not None:
        yield f"lossy: {config.k} of the model's {own_k} experts per token"
    if config.bits is not None:
        yield f"lossy: experts requantised to {config.bits} bits"


def lossy_mark(config: EngineConfig) -> str:
    """Tells the states of such a model from those of the whole one."""
    marks = (("k", config.k), ("bits", config.bits))
    return "".join(f"-{name}{value}" for name, value in marks if value is not None)
