"""What HTTP costs: the same requests to a worker in this process and to a server on loopback."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from moeflux.session.handle import RequestOptions
from moeflux.session.model_text import ModelText
from moeflux.session.prompt import Conversation
from moeflux.session.worker import Worker

MESSAGES = [{"role": "user", "content": "Tell me a story about a little fox and a big bear."}]
SHORT = 5  # answers of one token for each long one
ROUNDS = 3  # of all clients together
NEVER = -100.0  # a bias that keeps an answer from ending before its limit

Times = list[float]  # of one answer: when it was asked for, and when each piece of it came
Ask = Callable[[int], Times]


@dataclass(frozen=True)
class Figures:
    """Of one way to ask: milliseconds at p50 of answers, and tokens per second of all clients together.

    `cpu_…`: what an answer of one token, and each further one, takes of the processors; it says more on a busy machine.
    """

    first_ms: float
    token_ms: float
    together_tok_s: float
    cpu_first_ms: float
    cpu_token_ms: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


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
            "first_cpu_ms": self.server.cpu_first_ms - self.worker.cpu_first_ms,
            "token_cpu_ms": self.server.cpu_token_ms - self.worker.cpu_token_ms,
            "share_of_worker": self.share,
        }


def measure(ask: Ask, cpu_s: Callable[[], float], clients: int, tokens: int, samples: int) -> Figures:
    """`ask(n)` asks for so many tokens, waits for all of them and says when they came. `cpu_s`: of whoever answers."""
    for _ in range(3):
        ask(tokens)  # experts, prefixes and connections are warm from now on
    begun = cpu_s()
    alone = [ask(tokens) for _ in range(samples)]
    whole_s = (cpu_s() - begun) / samples
    first = median(times[1] - times[0] for times in alone)
    between = median((times[-1] - times[1]) / (len(times) - 2) for times in alone)  # pieces can arrive together
    begun = cpu_s()
    for _ in range(SHORT * samples):
        ask(1)
    one_s = (cpu_s() - begun) / (SHORT * samples)
    rate = _together(ask, clients, tokens)
    return Figures(1000 * first, 1000 * between, rate, 1000 * one_s, 1000 * (whole_s - one_s) / (tokens - 1))


def _together(ask: Ask, clients: int, tokens: int) -> float:
    """Tokens per second."""
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, [tokens] * clients))
        start = time.perf_counter()
        list(pool.map(ask, [tokens] * clients * ROUNDS))
        return ROUNDS * clients * tokens / (time.perf_counter() - start)


def process_cpu_s(pid: int) -> float:
    """Seconds that a process has taken of the processors so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
