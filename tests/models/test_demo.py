"""The model that comes with the package: its numbers against HF transformers, and its text at every budget."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

import moeflux
from models.hf import run
from moeflux.session.demo import demo_model

FOLDER = demo_model()
N_EXPERTS = 8 * 32
TEXT = """The old lighthouse keeper climbed the stairs every evening, one hundred and twelve of them, with a lamp in his
left hand and the keys in his right. "If I should fall," he used to say, "then the ships will have to look out for
themselves." He never fell. But one night in November, when the wind had blown for three days without a pause, he heard
someone knocking at the door below, and there was no road to the lighthouse, and no boat could have come near the rocks."""


def dequantised():
    """By the definition, code by code: what transformers' model of the same shape calls its parameters."""
    stored = {name.removeprefix("language_model."): value for name, value in load_file(FOLDER / "model.safetensors").items()}
    found = {name: value.float() for name, value in stored.items() if f"{name.removesuffix('.weight')}.scales" not in stored}
    for name in [name for name in stored if name.endswith(".scales")]:
        module = name.removesuffix(".scales")
        scales, biases = stored[name].float(), stored[f"{module}.biases"].float()
        words = torch.from_numpy(stored[f"{module}.weight"].numpy().astype(np.int64))
        bits = 32 * words.shape[-1] // (64 * scales.shape[-1])
        codes = torch.stack([words >> shift & (1 << bits) - 1 for shift in range(0, 32, bits)], -1)
        groups = codes.reshape(*scales.shape, 64) * scales[..., None] + biases[..., None]
        found[f"{module}.weight"] = groups.flatten(-2)
    return {name: value for name, value in as_transformers(found) if not name.endswith((".scales", ".biases"))}


def as_transformers(stored):
    for name, value in stored.items():
        if ".switch_mlp." not in name:
            if name.endswith("conv1d.weight"):
                value = value.transpose(1, 2)
            elif "norm" in name and "linear_attn" not in name:
                value = value - 1  # there it is added to one
            yield name, value
        elif "gate_proj" in name:
            up = stored[name.replace("gate_proj", "up_proj")]
            yield name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj"), torch.cat([value, up], 1)
        elif "down_proj" in name:
            yield name.replace("switch_mlp.down_proj.weight", "experts.down_proj"), value


def test_logits_are_those_of_transformers():
    config = json.loads((FOLDER / "config.json").read_text())["text_config"]
    model = Qwen3_5MoeForCausalLM._from_config(
        Qwen3_5MoeTextConfig(**config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    missing = model.load_state_dict(dequantised(), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    ids = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(TEXT).ids
    with moeflux.load(backend="numpy", kv="f32") as engine:
        logits = engine.score(ids)
    expected = run(model, np.array(ids))
    np.testing.assert_allclose(logits, expected, atol=5e-4, rtol=0)
    losses = torch.nn.functional.cross_entropy(torch.tensor(logits[:-1]), torch.tensor(ids[1:]))
    assert losses < 5  # it has learnt English: a guess among all tokens loses 9


@pytest.fixture(scope="module")
def story():
    with moeflux.load() as engine:
        assert engine.plan.resident
        return written(engine)


def written(engine):
    tokens = list(engine.generate("Once upon a time", max_tokens=60, temperature=0))
    return [token.id for token in tokens], "".join(token.text for token in tokens)


@pytest.mark.parametrize("slots", [N_EXPERTS // 10, N_EXPERTS // 4, 4 * N_EXPERTS // 10, 3 * N_EXPERTS // 4])
@pytest.mark.parametrize("policy", ["lru", "lfru"])
def test_text_is_the_same_with_few_experts_in_memory(story, slots, policy):
    with moeflux.load(slots=slots, policy=policy) as engine:
        assert not engine.plan.resident
        assert written(engine) == story
        assert engine.stats().bytes_read > 0


def test_text_is_the_same_with_the_smallest_budget(story):
    with pytest.raises(moeflux.BudgetError, match="smallest") as caught:
        moeflux.load(ram="1MB")
    least = str(caught.value).split("smallest that works is ")[-1].split(";")[0].split(")")[0].strip(" .")
    with moeflux.load(ram=least) as engine:
        assert written(engine) == story
