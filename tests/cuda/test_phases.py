"""Each phase of the decode step in CUDA C++ against the same phase in Triton, from the same memory: the same bits."""

from __future__ import annotations

import pytest
import torch

from cuda.small import Sizes, model_of
from cuda.test_decode import BIG, ON_GPU, PROMPT
from moeflux.backends.cuda.decode import Decoder
from moeflux.backends.cuda.phases import PHASES, DecodeOptions

pytestmark = pytest.mark.skipif(not ON_GPU, reason="NOT RUN: needs a GPU")
SHAPES = [Sizes(), Sizes(layers="d", width=256, k=2, experts=32), BIG]


def memory(decoder, states):
    b = decoder.phases.buffers
    names = ("hidden", "squares", "inputs", "mixed", "sizes", "router", "inner", "logits", "position", "tokens")
    found = {name: getattr(b, name) for name in names}
    for i, state in enumerate(states):
        found |= {f"{name} of layer {i}": array for name, array in state.arrays.items()}
    return found


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_phases_agree(sizes, pdl):
    model = model_of(sizes)
    states = model.states()
    first = int(model.composed(PROMPT, states, 0)[-1].argmax())
    decoder = Decoder(
        model.ops, model.layers, model.ends, model.pool, DecodeOptions(512, model.eps, False, pdl, kernels="cuda")
    )
    decoder.bind(states, len(PROMPT), first)
    decoder.reserve(2)
    phases, live = decoder.phases, memory(decoder, states)
    compiled, different = phases._fast, []

    def run(i, layer, bit, fast):
        phases._fast = fast
        if bit == PHASES["head"]:
            phases._finish()
        else:
            phases._mix(i, layer, bit)
            phases._feed(i, layer, bit)
        torch.cuda.synchronize()
        return {name: array.clone() for name, array in live.items()}

    steps = [(i, layer, name) for i, layer in enumerate(phases._layers) for name in PHASES if name != "head"]
    for i, layer, name in [*steps, (0, None, "head")]:
        before = {key: array.clone() for key, array in live.items()}
        ours = run(i, layer, PHASES[name], compiled)
        for key, array in live.items():
            array.copy_(before[key])
        theirs = run(i, layer, PHASES[name], 0)
        for key in live:
            if not torch.equal(ours[key], theirs[key]):
                bad = (ours[key] != theirs[key]).nonzero()
                at = tuple(bad[0].tolist())
                values = f"{float(ours[key][at])!r} {float(theirs[key][at])!r}"
                different.append(f"{name} of layer {i}: {key}: {len(bad)} of {ours[key].numel()}, first at {at}: {values}")
    assert not different, "\n".join(different)
