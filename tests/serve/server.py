"""A real server process on loopback, and what tests ask of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PATIENCE_S = 60
STORY = [{"role": "user", "content": "Tell me a story about a little fox."}]


class Server:
    """`moeflux serve` with these options, on any free port. Its stderr goes to a file."""

    def __init__(self, log: Path, *options: str, model: Path | None = None, env: dict[str, str] | None = None) -> None:
        self.log = log
        command = [sys.executable, "-m", "moeflux", "serve", *([str(model)] if model else []), "--port", "0", *options]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stderr=file, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
            )
        try:
            self.url = self._wait_for(r"listening on (http://\S+?):? ")
            self._wait_for(r"^ready$")
        except BaseException:
            self.kill()
            raise

    def _wait_for(self, pattern: str) -> str:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if found := re.search(pattern, self.log.read_text(), re.MULTILINE):
                return found[found.lastindex or 0].rstrip(":")
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"the server did not start ({self.process.poll()}): {self.log.read_text()}")

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, headers=headers, **options)

    def chat(self, messages: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
        body = {"model": "m", "messages": messages or STORY, "max_tokens": 12, "temperature": 0, **more}
        with self.client() as client:
            answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, headers=headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path, headers=headers)

    def stop(self) -> int:
        """As a supervisor does it. The exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def lines(self) -> list[dict[str, Any]]:
        """Of the log: those that are JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@contextmanager
def serving(folder: Path, *options: str, **more: Any) -> Iterator[Server]:
    server = Server(folder / f"server-{time.monotonic_ns()}.log", *options, **more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        assert server.process.returncode in (0, -signal.SIGKILL), server.log.read_text()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[str]:
    """The data of each event, and comments with their colon."""
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
            elif line.startswith(":"):
                yield line


def chunks(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream that ends well."""
    with server.client() as client:
        found = list(events(client, path, {**body, "stream": True}))
    assert found[-1] == "[DONE]"
    return [json.loads(data) for data in found[:-1] if not data.startswith(":")]


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
