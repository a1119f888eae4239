"""Routes for whoever runs the server: is it well, what does it do, what did it do."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from moeflux.serve.documented import ERRORS
from moeflux.serve.service import Service
from moeflux.session.prefixes import PrefixStore

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Health(BaseModel):
    status: str
    progress: float | None = None


class Version(BaseModel):
    version: str


class Status(BaseModel):
    """`requests`: those that are being answered, with how far they are."""

    state: str
    model: str
    uptime_s: float
    running: int
    waiting: int
    resting: int
    retry_after_s: int
    requests: list[dict[str, Any]]
    plan: dict[str, Any]
    experts: dict[str, Any]
    prefixes: dict[str, Any] | None


def operation_routes(service: Service, version: str) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root() -> Response:
        return JSONResponse({"name": "moeflux", "version": version, "schema": "/openapi.json"})

    @router.get("/health", responses={503: {"model": Health, "description": "Not now."}}, response_model=Health)
    async def health() -> Response:
        """200 where requests are taken; 503 while the model is loaded, and when the server is going down."""
        body: dict[str, Any] = {"status": "ok" if service.state == "ready" else service.state}
        if service.state == "loading":
            body["progress"] = round(service.progress, 3)
        return JSONResponse(body, 200 if service.state == "ready" else 503)

    @router.head("/health", include_in_schema=False)
    async def health_head() -> Response:
        return Response(status_code=200 if service.state == "ready" else 503)

    @router.get("/version")
    async def show_version() -> Version:
        return Version(version=version)

    @router.get("/status")
    async def status() -> Status:
        """What the server does now."""
        return read_status(service)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type=PROMETHEUS)

    return router


def read_status(service: Service) -> Status:
    model = service.model
    worker, plan, store = model.worker.status, model.engine.plan, model.engine.stats()
    prefixes = model.prefixes
    return Status(
        state=service.state,
        model=service.settings.alias,
        uptime_s=round(time.time() - service.started, 1),
        running=worker.running,
        waiting=worker.waiting,
        resting=worker.resting,
        retry_after_s=service.retry_after_s,
        requests=[track.as_dict() for track in service.active],
        plan={"context": plan.context, "experts": plan.n_experts, "slots": plan.n_slots, "share": plan.share,
              "budget_bytes": plan.budget},
        experts={"hit_rate": store.hit_rate, "bytes_read": store.bytes_read, "slots_used": store.slots_used},
        prefixes=None if prefixes is None else _kept(prefixes),
    )  # fmt: skip


def _kept(prefixes: PrefixStore) -> dict[str, Any]:
    return {"states": prefixes.n_states, "ram_bytes": prefixes.ram_bytes, "disk_bytes": prefixes.disk_bytes}
