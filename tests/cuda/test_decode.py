"""The decode step against the composed blocks: the same bits, with a graph and without, whatever slots experts are in."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from backends.test_linear import random_matrix
from cuda.small import Sizes, SmallModel, model_of
from moeflux.backends.account import StateAccount
from moeflux.backends.cuda import compiler
from moeflux.backends.cuda.decode import Decoder
from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.phases import PHASES, DecodeOptions
from moeflux.backends.cuda.pool import ExpertPool, ExpertShape
from moeflux.core.errors import DeviceError, StateError
from moeflux.formats.quant import Affine

ON_GPU = open_device().name != "cpu"
PROMPT = torch.randint(0, 64, (290 if ON_GPU else 3,), generator=torch.manual_seed(1)).tolist()  # past a block of rows
WAYS = (
    [(g, p, k) for k in ("cuda", "triton") for g in (True, False) for p in (True, False)]
    if ON_GPU
    else [(False, False, "triton")]
)
BIG = Sizes(
    hidden=2048, vocab=4096, experts=32, k=8, width=512, key_heads=16, value_heads=32, head=128, heads=16, head_dim=256,
    rotary=64, layers="dda",
)  # fmt: skip


def decoded(model, options, n):
    """Prompt through the composed blocks, then n tokens through the step in one go."""
    states = model.states()
    first = int(model.composed(PROMPT, states, 0)[-1].argmax())
    decoder = Decoder(model.ops, model.layers, model.ends, model.pool, options)
    decoder.bind(states, len(PROMPT), first)
    return [first, *decoder.tokens(n)]


@pytest.mark.parametrize("sizes", [Sizes(), BIG] if ON_GPU else [Sizes(vocab=64, experts=4, k=2, width=256)], ids=str)
def test_the_step_has_the_bits_of_the_composed_blocks(sizes):
    model = model_of(sizes)
    n = 6 if ON_GPU else 1
    states = model.states()
    expected = [model.composed(PROMPT, states, 0)[-1]]
    tokens = [int(expected[0].argmax())]
    for i in range(n):
        expected.append(model.composed(tokens[-1:], states, len(PROMPT) + i)[0])
        tokens.append(int(expected[-1].argmax()))
    for graph, pdl, kernels in WAYS:
        options = DecodeOptions(512 if ON_GPU else 32, model.eps, graph, pdl, kernels=kernels)
        # one step at a time: the next step is under way when a token is given out
        states = model.states()
        model.composed(PROMPT, states, 0)
        decoder = Decoder(model.ops, model.layers, model.ends, model.pool, options)
        decoder.bind(states, len(PROMPT), tokens[0])
        for i in range(n):
            assert list(decoder.tokens(1)) == [tokens[i + 1]], (graph, pdl, kernels, i)
            assert torch.equal(decoder.logits, expected[i + 1]), (graph, pdl, kernels, i)
        if ON_GPU:
            assert decoded(model, options, n) == tokens


@pytest.mark.skipif(not ON_GPU, reason="NOT RUN: needs a GPU")
def test_each_phase_may_be_either_kernel():
    model = model_of(BIG)
    expected = decoded(model, DecodeOptions(512, model.eps, kernels="triton"), 6)
    for phase in PHASES:
        alone, without = DecodeOptions(512, model.eps, kernels="cuda", triton=frozenset({phase})), PHASES.keys() - {phase}
        assert decoded(model, alone, 6) == expected, phase
        assert decoded(model, replace(alone, triton=frozenset(without)), 6) == expected, phase


@pytest.mark.skipif(not ON_GPU, reason="NOT RUN: needs a GPU")
def test_without_a_compiler_the_step_falls_back_to_triton_and_says_so(monkeypatch, caplog):
    def fail(program):
        raise DeviceError("no compiler here", hint="none")

    monkeypatch.setattr(compiler, "compile_program", fail)
    monkeypatch.setattr(compiler.KernelCache, "_ready", lambda self: False)
    model = SmallModel(CudaOps(open_device(), poison=True), Sizes())
    with caplog.at_level(logging.WARNING, "moeflux"):
        decoder = Decoder(model.ops, model.layers, model.ends, model.pool, DecodeOptions(64, model.eps))
    assert decoder.phases.compiled is None
    assert decoder.prompt is None
    assert caplog.text.count("no compiler here") == 1
    with pytest.raises(DeviceError, match="no compiler here"):
        Decoder(model.ops, model.layers, model.ends, model.pool, DecodeOptions(64, model.eps, kernels="cuda"))


@pytest.mark.skipif(ON_GPU, reason="NOT RUN: there is a GPU")
def test_without_a_gpu_cuda_kernels_are_refused_and_not_taken_by_themselves():
    model = SmallModel(CudaOps(open_device()), Sizes(vocab=64, experts=4, k=2, width=256, layers="a"))
    parts = (model.ops, model.layers, model.ends, model.pool)
    assert Decoder(*parts, DecodeOptions(16, model.eps, False)).phases.compiled is None
    with pytest.raises(DeviceError, match="need a GPU"):
        Decoder(*parts, DecodeOptions(16, model.eps, False, kernels="cuda"))


def test_experts_in_slots_give_the_bits_of_experts_one_by_one():
    ops = CudaOps(open_device(), poison=True)
    model = SmallModel(ops, Sizes(vocab=64, experts=4, k=2, width=256, layers="d"))
    x = ops._tensor(torch.randn(11, 256, generator=torch.manual_seed(2)).numpy())
    layer = model.layers[0]
    _, ids, weights = ops.router(x, layer.ffn["router"], None, layer.spec.ffn.router)
    expected = ops.experts(x, ids, weights, [(dict(enumerate(model.experts[0])), range(4))])
    assert torch.equal(ops.pooled_experts(x, ids, weights, model.pool, 0), expected)


def test_what_has_no_step_is_refused():
    ops = CudaOps(open_device(), poison=True)
    model = SmallModel(ops, Sizes(vocab=64, experts=4, k=2, width=256, layers="a"))
    options = DecodeOptions(16, model.eps, False, False)
    decoder = Decoder(ops, model.layers, model.ends, model.pool, options)
    with pytest.raises(StateError, match="bf16"):
        decoder.bind([ops.new_state(layer.spec.mixer, "f32", StateAccount()) for layer in model.layers], 0, 1)
    decoder.bind(model.states(), 0, 1)
    with pytest.raises(StateError, match="17 tokens"):
        decoder.reserve(17)
    broken = replace(model.layers[0], ffn={**model.layers[0].ffn, "router": model.layers[0].ffn["shared_gate_proj"]})
    with pytest.raises(DeviceError, match="router is not of 8 bits"):
        Decoder(ops, [broken], model.ends, model.pool, options)


def test_an_expert_of_another_codec_has_no_slot():
    ops = CudaOps(open_device(), poison=True)
    pool = ExpertPool(ops.device, ExpertShape(256, 256), 1, 1, 1)
    wrong = dict.fromkeys(("gate", "up", "down"), random_matrix(Affine(8, 64, "BF16"), 256, 256))
    with pytest.raises(DeviceError, match="4 bits"):
        pool.put(0, 0, 0, wrong)
