"""What HTTP costs: the same requests to a worker in this process and to a server on loopback."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from moeflux.session.handle import RequestOptions
from moeflux.session.model_text import ModelText
from moeflux.session.prompt import Conversation
from moeflux.session.worker import Worker

MESSAGES = [{"role": "user", "content": "Tell me a story about a little fox and a big bear."}]
NEVER = -100.0  # a bias that keeps an answer from ending before its limit

Times = list[float]  # of one answer: when it was asked for, and when each piece of it came
Ask = Callable[[int], Times]


@dataclass(frozen=True)
class Figures:
    """Of one way to ask: milliseconds at p50 of answers, and tokens per second of all clients together."""

    first_ms: float
    token_ms: float
    together_tok_s: float

    def as_dict(self) -> dict[str, float]:
        return {"first_ms": self.first_ms, "token_ms": self.token_ms, "together_tok_s": self.together_tok_s}


@dataclass(frozen=True)
class ServeReport:
    worker: Figures
    server: Figures
    clients: int
    tokens: int
    samples: int

    @property
    def share(self) -> float:
        """Of the worker's rate that all clients together get through HTTP."""
        return self.server.together_tok_s / self.worker.together_tok_s

    def as_dict(self) -> dict[str, Any]:
        return {
            "clients": self.clients,
            "tokens": self.tokens,
            "samples": self.samples,
            "worker": self.worker.as_dict(),
            "server": self.server.as_dict(),
            "first_overhead_ms": self.server.first_ms - self.worker.first_ms,
            "token_overhead_ms": self.server.token_ms - self.worker.token_ms,
            "share_of_worker": self.share,
        }


def measure(ask: Ask, clients: int, tokens: int, samples: int) -> Figures:
    """`ask(n)` asks for so many tokens, waits for all of them and says when they came."""
    for _ in range(3):
        ask(tokens)  # experts, prefixes and connections are warm from now on
    alone = [ask(tokens) for _ in range(samples)]
    first = median(times[1] - times[0] for times in alone)
    between = median((times[-1] - times[1]) / (len(times) - 2) for times in alone)  # pieces can arrive together
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, [tokens] * clients))
        start = time.perf_counter()
        list(pool.map(ask, [tokens] * clients * 3))
        seconds = time.perf_counter() - start
    return Figures(1000 * first, 1000 * between, 3 * clients * tokens / seconds)


def in_process(worker: Worker, text: ModelText) -> Ask:
    bias = dict.fromkeys(text.ends, NEVER)

    def ask(tokens: int) -> Times:
        times = [time.perf_counter()]
        options = RequestOptions(tokens, sampling={"temperature": 0, "logit_bias": bias})
        for _ in worker.submit(Conversation(MESSAGES), options).tokens():
            times.append(time.perf_counter())
        return times

    return ask


def over_http(host: str, port: int, ends: list[int]) -> Ask:
    """A connection for each request, as many clients do. Pieces of an answer are counted, which are tokens but for a few."""
    bias = {str(id): NEVER for id in ends}

    def ask(tokens: int) -> Times:
        body = {
            "model": "m",
            "messages": MESSAGES,
            "max_tokens": tokens,
            "temperature": 0,
            "logit_bias": bias,
            "stream": True,
        }
        connection = http.client.HTTPConnection(host, port, timeout=600)
        times = [time.perf_counter()]
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            for line in answer:
                if b'"content": "' in line and b'"role"' not in line:
                    times.append(time.perf_counter())
            if answer.status != 200:
                raise ConnectionError(f"the server answered with status {answer.status}")
        finally:
            connection.close()
        return times

    return ask
