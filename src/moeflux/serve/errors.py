"""Errors as clients see them: the right status, the wording that clients act upon, and no path or trace of ours.

A typed error's `fault` decides. The text of the client's own mistakes is told; of ours only that there was one, with the id
of the request, under which the log has all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from moeflux.core.errors import (
    ClosedError,
    ContextError,
    DeadlineError,
    MissingTensorError,
    MoefluxError,
    OverloadError,
    ReadError,
)

Kind = Literal[
    "invalid", "context", "key", "forbidden", "unknown", "method", "large", "full", "late", "unavailable", "internal"
]
OVERLOADED = 529  # Anthropic's own status for a full line

_STATUS: dict[Kind, int] = {
    "invalid": 400, "context": 400, "key": 401, "forbidden": 403, "unknown": 404, "method": 405, "large": 413,
    "full": 429, "late": 504, "unavailable": 503, "internal": 500,
}  # fmt: skip
_OPENAI: dict[Kind, tuple[str, str | None]] = {  # type and code
    "invalid": ("invalid_request_error", None),
    "context": ("invalid_request_error", "context_length_exceeded"),
    "key": ("authentication_error", "invalid_api_key"),
    "forbidden": ("permission_error", None),
    "unknown": ("not_found_error", None),
    "method": ("invalid_request_error", None),
    "large": ("invalid_request_error", "request_too_large"),
    "full": ("rate_limit_error", "rate_limit_exceeded"),
    "late": ("timeout_error", None),
    "unavailable": ("server_error", "unavailable"),
    "internal": ("server_error", None),
}
_ANTHROPIC: dict[Kind, str] = {
    "invalid": "invalid_request_error",
    "context": "invalid_request_error",
    "key": "authentication_error",
    "forbidden": "permission_error",
    "unknown": "not_found_error",
    "method": "invalid_request_error",
    "large": "request_too_large",
    "full": "overloaded_error",
    "late": "timeout_error",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}


@dataclass(frozen=True)
class Problem:
    """`param`: the field that is wrong. `retry_after`: seconds. `size`: tokens of the prompt and of the context."""

    kind: Kind
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    size: tuple[int, int] | None = None

    @property
    def status(self) -> int:
        return _STATUS[self.kind]

    def after(self, seconds: int) -> Problem:
        return replace(self, retry_after=seconds)


class Refused(Exception):
    """A request that the server itself does not take."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.message)


def refuse(message: str, param: str | None = None, kind: Kind = "invalid", code: str | None = None) -> Refused:
    """`raise refuse("…", "messages")`"""
    return Refused(Problem(kind, message, param, code))


def problem_of(error: BaseException) -> Problem:
    """What of an error a client is told."""
    match error:
        case Refused():
            return error.problem
        case ContextError():
            return Problem("context", _too_long(error), "messages", size=(error.n_tokens, error.context))
        case OverloadError():
            return Problem("full", error.what)
        case DeadlineError():
            return Problem("late", error.what)
        case ClosedError():
            return Problem("unavailable", error.what if error.fault == "overload" else "the server is going down")
        case MoefluxError(fault="client"):
            return Problem("invalid", _told(error), _param(error))
        case MissingTensorError():  # of a tokenizer or a template that the model does not have
            return Problem("invalid", error.what)
        case ReadError():
            return Problem("internal", "a file of the model could not be read")
    return Problem("internal", "something went wrong in the server")


def is_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def status_of(problem: Problem, path: str) -> int:
    return OVERLOADED if problem.kind == "full" and is_anthropic(path) else problem.status


def body_of(problem: Problem, path: str, request_id: str) -> dict[str, Any]:
    """In the dialect that is spoken at this path."""
    return anthropic_body(problem, request_id) if is_anthropic(path) else openai_body(problem)


def openai_body(problem: Problem) -> dict[str, Any]:
    kind, code = _OPENAI[problem.kind]
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code or code}}


def anthropic_body(problem: Problem, request_id: str) -> dict[str, Any]:
    message = problem.message
    if problem.size is not None:  # agents look for these words
        message = f"prompt is too long: {problem.size[0]} tokens > {problem.size[1]} maximum"
    error = {"type": _ANTHROPIC[problem.kind], "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def headers_of(problem: Problem) -> dict[str, str]:
    headers = {} if problem.retry_after is None else {"retry-after": str(problem.retry_after)}
    if problem.kind in ("late", "internal"):  # the same again would end the same
        headers["x-should-retry"] = "false"
    if problem.kind == "key":
        headers["www-authenticate"] = "Bearer"
    return headers


def _too_long(error: ContextError) -> str:
    """Agents look for these words."""
    return (
        f"This model's maximum context length is {error.context} tokens. However, your messages resulted in "
        f"{error.n_tokens} tokens. Please reduce the length of the messages."
    )


def _told(error: MoefluxError) -> str:
    """Without the names of files."""
    parts = [error.where, error.what] if error.where and "/" not in error.where else [error.what]
    text = ": ".join(part for part in parts if part)
    return f"{text} ({error.hint})" if error.hint and "/" not in error.hint else text


def _param(error: MoefluxError) -> str | None:
    """The field, where the error names one as `option 'name'`."""
    where = error.where or ""
    return where.removeprefix("option '").removesuffix("'") if where.startswith("option '") else None
