"""The process: a socket that is bound first, a model that is loaded beside it, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from types import FrameType

import uvicorn

from moeflux.core.errors import MoefluxError, OptionError
from moeflux.serve.app import make_app
from moeflux.serve.service import OpenModel, Service
from moeflux.serve.settings import Settings

BACKLOG = 128
GRACE_S = 10.0  # for answers that are ended to reach their clients
MOST_CONNECTIONS = 1024
IDLE_S = 75  # that a connection without a request stays open


def bind(settings: Settings) -> socket.socket:
    """Before anything is loaded: a port that is taken is said at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        where = f"{settings.host}, port {settings.port}"
        hint = "another program may have it: give another --port, or 0 for any free one"
        raise OptionError(f"cannot listen there: {error.strerror}", where=where, hint=hint) from error
    return sock


def serve(settings: Settings, open_model: OpenModel, sock: socket.socket, version: str, ready: Callable[[], None]) -> None:
    """Until it is told to stop. Raises what kept the model from being loaded."""
    service = Service(settings, open_model)
    config = uvicorn.Config(
        make_app(service, version),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        timeout_keep_alive=IDLE_S,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=int(settings.drain + GRACE_S),
    )
    server = _Server(config, service)

    def load() -> None:
        try:
            service.load()
        except MoefluxError:  # which the service has noted
            server.should_exit = True
        else:
            ready()

    loader = Thread(target=load, name="moeflux-load", daemon=True)
    loader.start()
    try:
        server.run(sockets=[sock])
    finally:
        service.drain()
        loader.join()
        service.close()
    if service.error is not None:
        raise service.error


class _Server(uvicorn.Server):
    """Told to stop, it takes no more requests, and waits until the service has ended those that run."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None  # once it shuts down

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The second signal does not wait. After the end no signal is raised again: the exit code says that all is well."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._service.hurry)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._service.drain()
        closing = self._loop.run_in_executor(None, self._service.close)
        await super().shutdown(sockets)
        await closing
