"""What a model is, without loading it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from moeflux.backends.registry import gpu_refusal
from moeflux.core.errors import OptionError
from moeflux.formats.checkpoint import Checkpoint, has_weights, read_config
from moeflux.formats.quant_rules import read_quant_rules
from moeflux.models.registry import read_spec
from moeflux.models.spec import Attention, DeltaNet, Mixer, Mla, ModelSpec
from moeflux.plan.sizes import Sizes, measure, predict
from moeflux.plan.views import skipped_note


@dataclass(frozen=True)
class Report:
    model_type: str
    layout: str | None  # "hf" or "mlx"; None from a bare config
    shapes: dict[str, int]
    mixers: dict[str, int]  # kind of layer -> how many
    sizes: Sizes
    gpu: str | None  # why a GPU would decode it block by block, which is slow; None: in one go
    notes: tuple[str, ...]


def inspect_model(path: Path) -> Report:
    """From a model folder, or from a config.json that has no weights beside it."""
    config = read_config(path)
    spec = read_spec(config)
    if not path.is_dir() and path.suffix != ".json":
        raise OptionError("is neither a model folder nor a config.json", where=str(path))
    if not has_weights(path):
        return _report(spec, None, predict(spec, read_quant_rules(config)), ())
    checkpoint = Checkpoint(path, spec.names)
    try:
        return _report(spec, checkpoint.layout, measure(spec, checkpoint), skipped_note(checkpoint))
    finally:
        checkpoint.close()


def _report(spec: ModelSpec, layout: str | None, sizes: Sizes, notes: tuple[str, ...]) -> Report:
    moe_layers = spec.moe_layers()
    moe = moe_layers[0][1]
    shapes = {
        "layers": len(spec.layers),
        "hidden": spec.hidden,
        "vocab": spec.vocab,
        "moe_layers": len(moe_layers),
        "experts": moe.router.n_experts,
        "k": moe.router.k,
        "expert_width": moe.width,
        "shared_width": moe.shared_width,
        "context": spec.context,
    }
    mixers = dict(Counter(_kind(layer.mixer) for layer in spec.layers))
    return Report(spec.model_type, layout, shapes, mixers, sizes, gpu_refusal(spec, sizes), notes)


def _kind(mixer: Mixer) -> str:
    match mixer:
        case Attention():
            return "gated attention" if mixer.gated else "attention"
        case Mla():
            return "latent attention"
        case DeltaNet():
            return "gated delta net"
