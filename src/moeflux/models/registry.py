"""model_type to family. The file name of a family is its model_type; aliases stand in its MODEL_TYPES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from reprlib import repr as shown
from typing import Any

from moeflux.core.errors import UnsupportedModelError
from moeflux.models import deepseek_v3, qwen3_5_moe, qwen3_moe, qwen3_next
from moeflux.models.fields import Fields
from moeflux.models.spec import ModelSpec

Reader = Callable[[Fields, Fields, str], ModelSpec]

FAMILIES: Mapping[str, Reader] = {
    model_type: family.read_spec
    for family in (qwen3_moe, qwen3_next, qwen3_5_moe, deepseek_v3)
    for model_type in family.MODEL_TYPES
}


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config.json. Multi-modal wrappers are read through their `text_config`."""
    root = Fields(config)
    fields = root.nested("text_config") if root.has("text_config") else root
    model_type = config.get("model_type")
    reader = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        raise UnsupportedModelError(
            f"model type {shown(model_type)} is not supported",
            where="config.json: model_type",
            hint=f"supported: {', '.join(sorted(FAMILIES))}",
        )
    return reader(fields, root, str(model_type))
