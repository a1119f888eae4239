"""Figures for Prometheus. What the engine counts itself is read when somebody asks; requests are counted as they go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from moeflux.core.errors import Fault
from moeflux.session.events import Finish, Reason

if TYPE_CHECKING:
    from moeflux.serve.service import Service

Family = CounterMetricFamily | GaugeMetricFamily

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ROUTES = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/models", "/tokenize", "/detokenize", "/tokenizer_info", "/health", "/version", "/status", "/metrics",
    )
)  # fmt: skip


class Metrics:
    def __init__(self, service: Service) -> None:
        self._registry = r = CollectorRegistry()
        self._requests = Counter("moeflux_requests", "Requests by route and status.", ["route", "status"], registry=r)
        self._answers = Counter("moeflux_answers", "Answers by how they ended.", ["reason"], registry=r)
        self._failed = Counter("moeflux_failed", "Answers that failed, by fault.", ["fault"], registry=r)
        self._rejected = Counter("moeflux_rejected", "Requests refused because too many waited.", registry=r)
        self._prompt = Counter("moeflux_prompt_tokens", "Of prompts, read or computed.", ["source"], registry=r)
        self._kept = Counter("moeflux_prefix_created_tokens", "Of prompts, whose state was kept anew.", registry=r)
        self._said = Counter("moeflux_generated_tokens", "Of answers.", registry=r)
        self._thought = Counter("moeflux_reasoning_tokens", "Of answers, those that are thoughts.", registry=r)
        self._waited = _seconds("moeflux_queue_seconds", "That requests waited for their turn.", r)
        self._first = _seconds("moeflux_time_to_first_token_seconds", "From the request on.", r)
        self._between = _seconds("moeflux_time_between_tokens_seconds", "Of one answer.", r, _BETWEEN)
        self._whole = _seconds("moeflux_answer_seconds", "From the request to the end of an answer.", r)
        for fault in get_args(Fault):  # what has not happened is 0, not unknown
            self._failed.labels(fault)
        for reason in get_args(Reason):
            self._answers.labels(reason)
        r.register(_EngineFigures(service))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def request(self, path: str, status: int | None) -> None:
        """An unknown path is one of all others: clients do not make up names here."""
        self._requests.labels(path if path in _ROUTES else "other", str(status or 499)).inc()
        if status in (429, 529):
            self._rejected.inc()

    # What `serve/track` tells.

    def started(self, waited_s: float) -> None:
        self._waited.observe(waited_s)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._between.observe(seconds)

    def finished(self, finish: Finish, seconds: float) -> None:
        usage = finish.usage
        self._answers.labels(finish.reason).inc()
        self._whole.observe(seconds)
        self._prompt.labels("read").inc(usage.cached)
        self._prompt.labels("computed").inc(usage.prompt - usage.cached)
        self._kept.inc(getattr(usage, "kept", 0))
        self._said.inc(usage.completion)
        self._thought.inc(usage.reasoning)

    def failed(self, kind: str) -> None:
        self._failed.labels(kind).inc()


def _seconds(name: str, words: str, registry: CollectorRegistry, bounds: tuple[float, ...] = _SECONDS) -> Histogram:
    return Histogram(name, words, buckets=bounds, registry=registry)


class _EngineFigures(Collector):
    """Read from the engine when somebody asks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Family]:
        model = self._service.loaded
        yield _gauge("moeflux_ready", "1 where requests are taken.", float(self._service.state == "ready"))
        if model is None:
            return
        worker, store, plan = model.worker.status, model.engine.stats(), model.engine.plan
        yield _gauge("moeflux_requests_running", "Requests that run.", worker.running)
        yield _gauge("moeflux_requests_waiting", "Requests that wait.", worker.waiting)
        yield _gauge("moeflux_conversations_resting", "Whose state is kept for the next turn.", worker.resting)
        experts = CounterMetricFamily("moeflux_experts", "Asked for, by where they were.", labels=["found"])
        for found in ("hits", "late", "joined", "misses"):
            experts.add_metric([found], getattr(store, found))
        yield experts
        yield _counter("moeflux_drive_read_bytes", "Of experts.", store.bytes_read)
        yield _counter("moeflux_drive_busy_seconds", "With at least one read under way.", store.read_busy_ns / 1e9)
        yield _counter("moeflux_drive_read_errors", "Experts that could not be read.", store.errors)
        yield _counter("moeflux_stall_seconds", "That the engine waited for experts.", store.stall_ns / 1e9)
        yield _gauge("moeflux_expert_slots", "Experts that memory has room for.", store.slots)
        yield _gauge("moeflux_expert_slots_used", "Experts in memory.", store.slots_used)
        yield _gauge("moeflux_context_tokens", "The longest sequence.", plan.context)
        if model.prefixes is not None:
            yield _gauge("moeflux_prefix_states", "That are kept, in memory or on disk.", model.prefixes.n_states)
            yield _gauge("moeflux_prefix_memory_bytes", "Of kept states in memory.", model.prefixes.ram_bytes)
            yield _gauge("moeflux_prefix_disk_bytes", "Of kept states on disk.", model.prefixes.disk_bytes)


def _gauge(name: str, words: str, value: float) -> Family:
    return GaugeMetricFamily(name, words, value=value)


def _counter(name: str, words: str, value: float) -> Family:
    return CounterMetricFamily(name, words, value=value)
