"""`moeflux bench serve [MODEL]`: what HTTP costs against the worker in the same process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Annotated

import typer

from moeflux.api import load
from moeflux.bench.serving import Figures, ServeReport, in_process, measure, over_http, process_cpu_s
from moeflux.cli.options import Context, ModelOrDemo, Ram, Threads, given
from moeflux.cli.tables import print_table
from moeflux.cli.terminal import note
from moeflux.core.errors import InternalError
from moeflux.session.demo import demo_model
from moeflux.session.prefixes import PrefixStore
from moeflux.session.worker import Worker, WorkerOptions

START_S = 600.0
PREFIXES = "64MB"


def serve(
    model: ModelOrDemo = None,
    clients: Annotated[int, typer.Option(min=1, max=64, help="At once.")] = 8,
    tokens: Annotated[int, typer.Option(min=8, help="Of each answer.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Answers one after the other; p50 is shown.")] = 20,
    threads: Threads = None,
    ram: Ram = None,
    context: Context = None,
) -> None:
    """First byte, time per token, and all clients together: over HTTP and in this process."""
    folder = demo_model() if model is None else model
    loading = given(threads=threads, ram=ram, context=context)
    with load(folder, **loading, sequences=clients, prefixes=PREFIXES) as engine:
        ends = sorted(engine.text.ends)
        with Worker(engine, engine.text, PrefixStore(engine), WorkerOptions(clients)) as worker:
            alone = measure(in_process(worker, engine.text), time.process_time, clients, tokens, samples)
    options = [f"--{name}={value}" for name, value in {**loading, "parallel": clients, "prefixes": PREFIXES}.items()]
    with _server([str(folder), *options]) as (pid, host, port):
        served = measure(over_http(host, port, ends), partial(process_cpu_s, pid), clients, tokens, samples)
    report = ServeReport(alone, served, clients, tokens, samples)
    r = report.as_dict()
    note(f"{tokens} tokens per answer; alone: p50 of {samples} answers; together: {clients} clients")
    rows = [(name, *_shown(figures)) for name, figures in (("worker", alone), ("server", served))]
    costs = [f"{r[name]:.2f}" for name in ("first_overhead_ms", "token_overhead_ms", "first_cpu_ms", "token_cpu_ms")]
    rows.append(("HTTP costs", *costs, f"{report.share:.0%} of the worker's"))
    headings = ("", "first token, ms", "next token, ms", "CPU ms of the first", "CPU ms of the next", "together, tok/s")
    print_table(headings, rows)
    print(json.dumps({"bench": "serve", **r}))


def _shown(figures: Figures) -> tuple[str, ...]:
    times = (figures.first_ms, figures.token_ms, figures.cpu_first_ms, figures.cpu_token_ms)
    return (*(f"{value:.2f}" for value in times), f"{figures.together_tok_s:,.0f}")


@contextmanager
def _server(options: list[str]) -> Iterator[tuple[int, str, int]]:
    """A process of its own, on any free port of this machine."""
    with TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "moeflux", "serve", *options, "--port", "0", "--log", "none"]
        process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        try:
            yield process.pid, *_wait(process, log)
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], log: IO[str]) -> tuple[str, int]:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        log.seek(0)
        text = log.read()
        found = re.search(r"listening on http://([\d.]+):(\d+)", text)
        if found and re.search(r"^ready$", text, re.MULTILINE):
            return found[1], int(found[2])
        time.sleep(0.05)
    raise InternalError("the server did not start", hint="try `moeflux serve` by itself")
