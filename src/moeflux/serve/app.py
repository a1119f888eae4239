"""All routes as one application, with errors in the dialect of the path, and the guard around it."""

from __future__ import annotations

from functools import cache, partial

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from moeflux.core.errors import MoefluxError
from moeflux.core.log import log
from moeflux.serve.anthropic.routes import anthropic_routes
from moeflux.serve.documented import true_schema
from moeflux.serve.errors import Kind, Problem, Refused, body_of, headers_of, problem_of, status_of
from moeflux.serve.guard import Guard
from moeflux.serve.openai.routes import openai_routes
from moeflux.serve.operations import operation_routes
from moeflux.serve.responses.routes import responses_routes
from moeflux.serve.service import Service
from moeflux.serve.sse import id_of
from moeflux.serve.tokens import token_routes

_KINDS: dict[int, Kind] = {401: "key", 403: "forbidden", 404: "unknown", 405: "method", 413: "large"}


def make_app(service: Service, version: str) -> Guard:
    api = FastAPI(title="moeflux", version=version, docs_url=None, redoc_url=None)
    dialects = (openai_routes, anthropic_routes, responses_routes, token_routes)
    for router in (operation_routes(service, version), *(routes(service) for routes in dialects)):
        api.include_router(router)
    _answer_errors(api, service)
    schema = cache(partial(true_schema, api))
    api.openapi = schema  # type: ignore[method-assign]
    return Guard(api, service.settings, service.metrics.request)


def _answer_errors(api: FastAPI, service: Service) -> None:
    def answer(request: Request, problem: Problem) -> JSONResponse:
        if problem.kind in ("full", "unavailable"):
            problem = problem.after(service.retry_after_s)
        path = request.url.path
        body = body_of(problem, path, id_of(request))
        return JSONResponse(body, status_of(problem, path), headers_of(problem))

    @api.exception_handler(Refused)
    @api.exception_handler(MoefluxError)
    @api.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        problem = problem_of(error)
        if problem.kind == "internal" and isinstance(error, MoefluxError):  # others come to the guard
            log.error("request %s failed", id_of(request), exc_info=error)
        return answer(request, problem)

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(request, _invalid(error))

    @api.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return answer(request, Problem(_KINDS.get(error.status_code, "invalid"), str(error.detail)))


def _invalid(error: RequestValidationError) -> Problem:
    """The first thing that is wrong, and how many more there are; never what was sent."""
    errors = error.errors()
    first = errors[0]
    where = ".".join(str(step) for step in first["loc"] if step != "body") or None
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return Problem("invalid", f"{where or 'body'}: {first['msg']}{more}", where)
