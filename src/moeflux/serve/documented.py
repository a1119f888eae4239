"""What the schema of the API says beside types: errors of every route, and streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


_WORDS = {
    400: "The request is not one that can be answered.",
    401: "No valid key.",
    403: "From this page or under this name nothing is answered.",
    404: "There is no such thing.",
    405: "Not with this method.",
    413: "The request is too large.",
    429: "Too many requests wait; come back after retry-after seconds.",
    500: "The server failed.",
    503: "The model is being loaded, or the server is going down.",
    504: "The time that the request had is over.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": words} for status, words in _WORDS.items()
}


def answers(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """One object, or a stream of events with smaller ones."""
    data = {"type": "string", "description": f"A {chunk.__name__} as JSON."}
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
    stream = {"schema": event}
    return {200: {"model": whole, "description": "The answer.", "content": {"text/event-stream": stream}}}


def true_schema(api: FastAPI) -> dict[str, Any]:
    """Without the status 422, which the framework always names: here what is not valid is 400."""
    schema = get_openapi(title=api.title, version=api.version, routes=api.routes)
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    return schema
