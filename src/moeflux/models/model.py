"""The parts of a `ModelSpec` that every family reads the same way: sizes, embedding, head, end-of-text ids."""

from __future__ import annotations

from moeflux.core.errors import ConfigError
from moeflux.core.names import TensorNames
from moeflux.models.fields import Fields
from moeflux.models.parts import norm
from moeflux.models.spec import Layer, ModelSpec, Weight


def read_hidden(fields: Fields) -> int:
    fields.only("hidden_act", "silu")
    return fields.whole("hidden_size", high=2**20)


def build_model(
    fields: Fields, root: Fields, model_type: str, layers: tuple[Layer, ...], *, norm_offset: int, names: TensorNames
) -> ModelSpec:
    """`root` is the outermost object of config.json, `fields` the one that describes the text model."""
    hidden, vocab = read_hidden(fields), fields.whole("vocab_size", high=2**26)
    tied = _tied(fields, root)
    eos = (root if root.has("eos_token_id") else fields).ints("eos_token_id", high=vocab)
    spec = ModelSpec(
        model_type=model_type,
        hidden=hidden,
        vocab=vocab,
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        norm_offset=norm_offset,
        context=fields.whole("max_position_embeddings", default=32768, high=2**31),
        layers=layers,
        embedding=Weight("model.embed_tokens.weight", (vocab, hidden), "embedding"),
        final_norm=norm("model.norm", hidden),
        head=None if tied else Weight("lm_head.weight", (vocab, hidden), "matrix"),
        eos=eos,
        names=names,
    )
    if not spec.moe_layers():
        raise ConfigError("no layer has routed experts: this is not a mixture-of-experts model", where="config.json")
    return spec


def _tied(fields: Fields, root: Fields) -> bool:
    """The outer object decides where both speak, as in transformers."""
    source = root if root.has("tie_word_embeddings") else fields
    return source.flag("tie_word_embeddings", default=False)
