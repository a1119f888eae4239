"""`/v1/models`: the one model, with the fields that OpenAI's and Anthropic's clients look for."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel

from moeflux.serve.service import Service


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: str
    max_model_len: int
    max_input_tokens: int
    max_tokens: int
    capabilities: dict[str, Any]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: bool
    first_id: str
    last_id: str


def model_card(service: Service) -> ModelCard:
    settings, context = service.settings, service.model.engine.plan.context
    return ModelCard(
        id=settings.alias,
        object="model",
        created=int(service.started),
        owned_by="moeflux",
        type="model",
        display_name=settings.alias,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.started)),
        lifecycle="active",
        max_model_len=context,
        max_input_tokens=context,
        max_tokens=min(context, settings.max_tokens or context),
        capabilities={"text": True, "images": False, "structured_outputs": True},
    )


def model_list(service: Service) -> ModelList:
    card = model_card(service)
    return ModelList(object="list", data=[card], has_more=False, first_id=card.id, last_id=card.id)
