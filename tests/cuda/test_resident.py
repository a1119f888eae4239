"""From a checkpoint's files to the decode step: the engine's own logits, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cuda.tiny import write_tiny
from moeflux import Segment, load
from moeflux.backends.cuda.phases import DecodeOptions
from moeflux.backends.cuda.resident import fill_pool, open_decoder
from moeflux.core.errors import DeviceError

ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("model") / "m")
    with load(folder, backend="cuda", context=64) as opened:
        yield opened


def test_the_engine_and_the_step_agree_to_the_bit(engine):
    model = engine.model
    steps = 12 if ON_GPU else 1
    sequence, twin = engine.sequence(), engine.sequence()
    prompt = [3, 60, 17]
    (logits,) = engine.forward(Segment(sequence, prompt))
    engine.forward(Segment(twin, prompt))
    decoder = open_decoder(model.ops, model.trunk, model.experts, DecodeOptions(64, engine.spec.norm_eps, graph=ON_GPU))
    token = int(np.argmax(logits[0]))
    decoder.bind(twin.states, len(prompt), token)
    for _ in range(steps):
        (logits,) = engine.forward(Segment(sequence, [token]))
        (token,) = decoder.tokens(1)
        np.testing.assert_array_equal(decoder.logits.cpu().numpy(), logits[0])
        assert token == int(np.argmax(logits[0]))


def test_too_little_memory_is_refused_with_the_numbers(engine):
    model = engine.model
    small = replace(model.ops.device, name="cpu", total_bytes=1000)
    ops = type(model.ops)(small)
    with pytest.raises(DeviceError, match=r"8 experts need .* of .* free"):
        fill_pool(ops, model.trunk, model.experts)
