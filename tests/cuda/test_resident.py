"""From a checkpoint's files to the decode step: the engine's own logits, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from moeflux import Segment, load
from moeflux.backends.cuda.phases import DecodeOptions
from moeflux.backends.cuda.resident import fill_pool, open_decoder
from moeflux.bench.shapes import published_config
from moeflux.bench.synthetic import write_checkpoint
from moeflux.core.errors import DeviceError

ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    config = published_config("qwen3.5-35b-a3b")
    config["eos_token_id"] = [2]
    config["text_config"] = config["text_config"] | {
        "hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
        "full_attention_interval": 2,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("model") / "m"
    write_checkpoint(config, folder)
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
