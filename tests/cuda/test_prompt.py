"""The prompt step against the composed blocks: the same bits in rows and states, however a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cuda.small import Sizes, SmallModel, copied, model_of
from cuda.test_decode import BIG, ON_GPU
from moeflux.backends.cuda.decode import Decoder
from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.phases import DecodeOptions
from moeflux.core.errors import NumericError

pytestmark = pytest.mark.skipif(not ON_GPU, reason="NOT RUN: needs a GPU")
N = 300
CUTS = [[N], [1, 2, 3, 100, 194], [64, 65, 171]]


def prompt_step(model):
    step = Decoder(model.ops, model.layers, model.ends, model.pool, DecodeOptions(512, model.eps, kernels="cuda")).prompt
    assert step is not None
    return step


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(layers="d", width=256, k=2, experts=32), BIG], ids=str)
def test_rows_and_states_have_the_bits_of_the_composed_blocks(sizes):
    model = model_of(sizes)
    tokens = torch.randint(0, sizes.vocab, (N,), generator=torch.manual_seed(3)).tolist()
    states = model.states()
    expected, kept = model.composed(tokens, states, 0), [copied(state) for state in states]
    step = prompt_step(model)
    for cuts in CUTS:
        states, at, found = model.states(), 0, []
        for n in cuts:
            found.append(step.logits(step.run(tokens[at : at + n], states, at)))
            at += n
        step.check()
        assert torch.equal(torch.cat(found), expected), cuts
        for state, arrays in zip(states, kept, strict=True):
            for name, array in copied(state).items():
                np.testing.assert_array_equal(array, arrays[name], err_msg=f"{name} {cuts}")


def test_broken_scores_raise():
    model = SmallModel(CudaOps(open_device(), poison=True), Sizes())
    model.layers[1].mixer_norm[3] = float("nan")
    step = prompt_step(model)
    step.run([1, 2, 3], model.states(), 0)
    with pytest.raises(NumericError, match="not finite"):
        step.check()
    step.check()  # once
