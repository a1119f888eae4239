"""What stands before every route: who may ask, how much, under which id; and one line in the log for each request."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from moeflux.core.log import log
from moeflux.serve.errors import Problem, Refused, body_of, headers_of, problem_of, refuse, status_of
from moeflux.serve.logs import log_request
from moeflux.serve.settings import Settings

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]

PUBLIC = ("/health", "/")
BODY_S = 60.0  # that a client may take to send its request
SESSIONS = ("x-session-id", "session_id", "session-id", "x-claude-code-session-id")  # headers that name a conversation
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """Around the whole application, so that nothing is answered without it."""

    def __init__(self, app: App, settings: Settings, count: Callable[[str, int | None], None]) -> None:
        """`count` is told the path and status of each request."""
        self._app, self._settings, self._count = app, settings, count
        self._keys = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            await self._request(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        asked = headers.get("x-request-id", "")
        id = asked if _ID.fullmatch(asked) else f"req_{secrets.token_hex(12)}"
        reply = _Reply(send, id, scope)
        state = scope["state"] = {**scope.get("state", {}), "id": id, "client": "", "note": {}}
        start = time.perf_counter()
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if headers.get("origin") in self._settings.allow_origins:
                reply.allow(headers["origin"])
                if scope["method"] == "OPTIONS":
                    await reply.say_what_is_allowed()
                    return
            state["client"] = self._check_key(scope, headers)
            await self._app(scope, await self._with_body(headers, receive), reply.send)
        except Refused as error:
            await reply.refuse(error.problem)
        except Exception as error:
            log.error("request %s failed", id, exc_info=error)
            await reply.refuse(problem_of(error))
        finally:
            self._count(scope["path"], reply.status)
            log_request(id, scope, reply.status, time.perf_counter() - start, state["note"])

    def _check_key(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """Who asks, as a name for taking turns. Raises Refused."""
        who = next((key for key in _given_keys(headers) if self._is_known(key)), "")
        if self._keys and not who and scope["path"] not in PUBLIC:
            raise refuse("no valid key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'", kind="key")
        name = next((headers[name] for name in SESSIONS if headers.get(name)), "")
        address = (scope.get("client") or ("",))[0]
        return hashlib.sha256(f"{who}|{name}|{'' if who or name else address}".encode()).hexdigest()[:12]

    def _is_known(self, key: str) -> bool:
        """All keys are compared, whole, so that the time says nothing about any."""
        given = hashlib.sha256(key.encode()).digest()
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """A page that made its own name point here has that name in Host. With a key it could do nothing anyway."""
        host = _host(headers.get("host", ""))
        if self._keys or host in ("localhost", self._settings.host, *self._settings.allow_hosts) or _is_address(host):
            return
        raise refuse("this name is not one of the server's; --allow-host adds it", "host", kind="forbidden")

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Browsers say which page asks. Only pages of this server, and those that were allowed, may."""
        origin = headers.get("origin")
        if origin is None or origin in self._settings.allow_origins:
            return
        if urlsplit(origin).netloc != headers.get("host"):
            raise refuse("pages from elsewhere may not use this server; --allow-origin lets one", "origin", kind="forbidden")

    async def _with_body(self, headers: Mapping[str, str], receive: Receive) -> Receive:
        """The body was read, within its limits; what comes next is the end of the connection."""
        most = self._settings.max_body
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise refuse("content-length is not a number", "content-length")
        if int(length) > most:
            raise _too_large(most)
        if "content-length" not in headers and "transfer-encoding" not in headers:
            return receive
        pieces, n_bytes = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    pieces.append(message.get("body", b""))
                    n_bytes += len(pieces[-1])
                    if n_bytes > most:
                        raise _too_large(most)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise refuse(f"the request was not sent within {BODY_S:g} s", kind="late") from None
        return _replay(b"".join(pieces), receive)


class _Reply:
    """Adds what every answer has, and knows whether one was begun."""

    def __init__(self, send: Send, id: str, scope: Scope) -> None:
        self._send, self._id, self._scope = send, id, scope
        self.status: int | None = None
        self._allowed: list[tuple[bytes, bytes]] = []

    def allow(self, origin: str) -> None:
        """A page from there may read the answer."""
        self._allowed = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]

    async def say_what_is_allowed(self) -> None:
        """To a browser that asks first."""
        headers = [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-max-age", b"600"),
                   (b"access-control-allow-headers", b"authorization, content-type, x-api-key, anthropic-version, "
                    b"anthropic-beta, x-request-id, x-session-id")]  # fmt: skip
        await self.send({"type": "http.response.start", "status": 204, "headers": headers})
        await self.send({"type": "http.response.body", "body": b""})

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            id = self._id.encode()
            more = [(b"x-request-id", id), (b"request-id", id), (b"cache-control", b"no-store"),
                    (b"x-content-type-options", b"nosniff")]  # fmt: skip
            message = {**message, "headers": [*message.get("headers", ()), *more, *self._allowed]}
        await self._send(message)

    async def refuse(self, problem: Problem) -> None:
        if self.status is not None:
            return
        path = self._scope["path"]
        body = json.dumps(body_of(problem, path, self._id)).encode()
        headers = {**headers_of(problem), "content-type": "application/json", "content-length": str(len(body))}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status_of(problem, path), "headers": raw})
        await self.send({"type": "http.response.body", "body": body if self._scope["method"] != "HEAD" else b""})


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _too_large(most: int) -> Refused:
    return refuse(f"the request is larger than {most} bytes", kind="large")


def _given_keys(headers: Mapping[str, str]) -> list[str]:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return [value.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()]


def _host(value: str) -> str:
    """Without the port."""
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].lower()


def _is_address(host: str) -> bool:
    """A number is nobody's name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
