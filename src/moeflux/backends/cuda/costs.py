"""What a model takes on a GPU, and which models have a decode step, from shapes alone. Neither a GPU nor torch is needed."""

from __future__ import annotations

from moeflux.backends.base import Costs, TierCosts, WeightSizes
from moeflux.formats.quant import Affine, describe
from moeflux.models.spec import Attention, DeltaNet, Layer, Mixer, Mla, ModelSpec, Moe

F32 = 4
SLOT_CODEC = Affine(4, 64, "BF16")  # as pool.py lays slots out
WIDTHS = (256, 512)  # of experts, as kernels/step.py sums them
MIB = 2**20
HOST_BYTES = 512 * MIB  # what the driver, kernels and pinned buffers take of the process
DEVICE_BYTES = 256 * MIB  # kernels, graphs, tables of angles, and what allocating in pieces wastes
LOGIT_ROWS = 128  # at most at a time


def model_costs(spec: ModelSpec, sizes: WeightSizes, chunk: int) -> Costs:
    """Steps keep projections with the same input joined by rows, and some again as tiles: all but the embedding is counted
    three times, which is more than that."""
    largest = max(sizes.trunk_matrices, default=0)
    slot = 0 if shape_refusal(spec, sizes) else slot_bytes(spec)
    return Costs(
        ram=TierCosts(trunk=2 * largest, scratch=HOST_BYTES),
        vram=TierCosts(
            trunk=sizes.trunk + 2 * sizes.trunk_read_per_token + sizes.trunk_vectors,
            scratch=DEVICE_BYTES + _rows_bytes(spec, chunk),
            keeps_states=True,
            slot=slot,
        ),
    )


def slot_bytes(spec: ModelSpec) -> int:
    """Of one expert on the device: gate, up and down."""
    moe = spec.moe_layers()[0][1]
    return sum(part.nbytes for part in SLOT_CODEC.components((3 * moe.width, spec.hidden)))


def shape_refusal(spec: ModelSpec, sizes: WeightSizes) -> str | None:
    """Why this model has no decode step and no slots, or None. Its weights may still be refused."""
    if sizes.expert_codec != describe(SLOT_CODEC):
        return f"slots hold experts of {describe(SLOT_CODEC)}, these are of {sizes.expert_codec}"
    reasons = (layer_refusal(i, layer) for i, layer in enumerate(spec.layers))
    return next((reason for reason in reasons if reason), None)


def layer_refusal(index: int, layer: Layer) -> str | None:
    """What the step's kernels do not do, by shape."""
    moe, mixer = layer.ffn, layer.mixer
    if not isinstance(moe, Moe) or moe.router.kind != "softmax" or not moe.router.normalize or not moe.shared_gated:
        return f"layer {index}: the step wants softmax routing with normalised weights and a gated shared expert"
    if moe.width not in WIDTHS or moe.shared_width != moe.width:
        return f"layer {index}: experts of width {moe.width} beside a shared one of {moe.shared_width}"
    sizes = [moe.router.k, moe.router.n_experts]
    match mixer:
        case Attention():
            sizes.append(mixer.head_dim)
        case DeltaNet(fused=False):
            sizes += [mixer.key_dim, mixer.value_dim, mixer.n_value_heads]
        case _:
            return f"layer {index}: the step has no {type(mixer).__name__} of this kind"
    odd = [n for n in sizes if n & (n - 1)]
    return f"layer {index}: sizes of {odd}, the step wants powers of two" if odd else None


def _rows_bytes(spec: ModelSpec, tokens: int) -> int:
    """Of one layer's intermediate results, and of logits."""
    moe = spec.moe_layers()[0][1]
    mixer = max(_mixer_width(layer.mixer) for layer in spec.layers)
    each = 8 * spec.hidden + 3 * mixer + moe.router.k * (3 * spec.hidden + 4 * moe.width) + 4 * (moe.shared_width or 0)
    return F32 * (tokens * each + LOGIT_ROWS * spec.vocab)


def _mixer_width(mixer: Mixer) -> int:
    match mixer:
        case Attention():
            return (2 * mixer.n_heads + 2 * mixer.n_kv_heads) * mixer.head_dim
        case Mla():
            return 2 * mixer.n_heads * (mixer.latent_dim + mixer.nope_dim)
        case DeltaNet():
            return mixer.channels + 2 * mixer.n_value_heads * mixer.value_dim
