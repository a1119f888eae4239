"""Progress bars on stderr, shown only when a person is watching."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from moeflux.core.units import format_bytes
from moeflux.runtime.prefill import OnPrefill, PrefillProgress

SOON = 0.5  # seconds; what takes no longer needs no bar


@contextmanager
def byte_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a callback for (bytes done, bytes in all)."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _bar(*columns) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def token_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a callback for (tokens done, tokens in all)."""
    columns = (TextColumn(title), BarColumn(), TextColumn("{task.completed}/{task.total} tokens"), TimeRemainingColumn())
    with _bar(*columns) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(*columns: TextColumn | BarColumn | DownloadColumn | TransferSpeedColumn | TimeRemainingColumn) -> Progress:
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


class PromptBar:
    """For a prompt that takes a while: tokens done, bytes read, time left. Gone before the answer begins."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    @property
    def callback(self) -> OnPrefill | None:
        return self._update if sys.stderr.isatty() else None

    def _update(self, now: PrefillProgress) -> None:
        soon = (now.eta_s is None or now.eta_s < SOON) and now.total < 4096
        if self._bar is None and (soon or now.done == now.total):
            return
        if self._bar is None:
            columns = (TextColumn("prompt"), BarColumn(), TextColumn("{task.completed}/{task.total} tokens"))
            self._bar = _bar(*columns, TextColumn("{task.fields[read]} read"), TimeRemainingColumn())
            self._bar.start()
            self._bar.add_task("prompt", total=now.total, read="")
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=now.done, read=format_bytes(now.bytes_read))
        if now.done == now.total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
