"""Routes for whoever runs the server: is it well, what does it do, what did it do."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from moeflux.serve.documented import ERRORS
from moeflux.serve.service import Service


class Health(BaseModel):
    status: str
    progress: float | None = None


class Version(BaseModel):
    version: str


def operation_routes(service: Service, version: str) -> APIRouter:
    router = APIRouter(responses=ERRORS)

    @router.api_route("/health", methods=["GET", "HEAD"], response_model=Health)
    async def health() -> Response:
        """200 where requests are taken; 503 while the model is loaded, and when the server is going down."""
        body: dict[str, Any] = {"status": "ok" if service.state == "ready" else service.state}
        if service.state == "loading":
            body["progress"] = round(service.progress, 3)
        return JSONResponse(body, 200 if service.state == "ready" else 503)

    @router.get("/version")
    async def show_version() -> Version:
        return Version(version=version)

    return router
