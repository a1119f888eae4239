"""moeflux beside llama.cpp on the same shapes, alternating in one run, because a shared machine changes by the minute.

Each measurement is a process of its own, so that memory holds one model at a time. llama.cpp is never a dependency: it
runs in whichever interpreter has llama-cpp-python.

With a cap, each process is alone in a control group of that size, starts with neither model in the page cache, and decodes:
llama.cpp from its mapping, with weights left as they are in the file, because repacked ones would not fit.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from moeflux.bench.cap import MemoryCap, forget_files
from moeflux.bench.limits import Samples
from moeflux.bench.llama import MEASURE
from moeflux.bench.neighbours import Neighbours
from moeflux.bench.peer_models import Models
from moeflux.bench.room import make_room
from moeflux.bench.speed import SpeedRow, bench_decode, bench_prefill
from moeflux.core.config import EngineConfig
from moeflux.core.errors import MoefluxError
from moeflux.core.units import format_bytes
from moeflux.runtime.engine import Engine

KINDS = ("decode", "prefill")
CONTEXT = 32  # tokens before the decoded ones
PER_ROUND = 3  # measurements of each kind per process, because a load is dear
CAP_MARGIN = 32  # one in so many bytes of a cap is left to the kernel and the page cache, not given to our budget
BUSY = 0.05  # share of the cores from which a comparison is not fair: taken by others, or by the host from one side alone

Say = Callable[[str], None]

_OURS = """
import sys
from moeflux.bench.peers import measure_ours
from moeflux.core.errors import MoefluxError
try:
    measure_ours(sys.argv[1])
except MoefluxError as error:
    sys.exit(f"error: {error}")
"""


@dataclass(frozen=True)
class PeerReport:
    """`others`, `stolen`: by process, ours and theirs in turn, shares of the cores that processes and the host took."""

    rows: tuple[PeerRow, ...]
    others: tuple[float, ...]
    stolen: tuple[float, ...]
    read: Mapping[str, float] = field(default_factory=dict)  # with a cap, by side: bytes from the drive per decoded token
    not_cold: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """A neighbour costs one side far more than the other: threads that meet at barriers wait for the slowest."""
        ours, theirs = mean(self.stolen[::2]), mean(self.stolen[1::2])
        unfair = "NOT A FAIR COMPARISON: "
        busy = f"{unfair}other processes took up to {max(self.others):.0%} of the cores"
        uneven = f"{unfair}the host took {ours:.0%} of the cores from moeflux and {theirs:.0%} from llama.cpp"
        said = ((busy, max(self.others) > BUSY), (uneven, abs(ours - theirs) > BUSY))
        return (*self.not_cold, *(words for words, true in said if true))


@dataclass(frozen=True)
class PeerRow:
    """Tokens per second of both."""

    kind: str  # one of KINDS
    ours: Samples
    theirs: Samples

    @property
    def ratio(self) -> tuple[float, float]:
        """Ours over theirs: best against best, median against median."""
        return self.ours.best / self.theirs.best, self.ours.median / self.theirs.median

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "ours": list(self.ours.values),
            "llama_cpp": list(self.theirs.values),
            "ours_tok_s": [self.ours.best, self.ours.median],
            "llama_cpp_tok_s": [self.theirs.best, self.theirs.median],
            "ratio": list(self.ratio),
        }


def bench_peers(
    models: Models, python: Path, threads: int, tokens: int, decode: int, rounds: int, say: Say, cap: int | None = None
) -> PeerReport:
    """Decode and prefill, ours and theirs in turn; decode alone with a `cap` in bytes. `models` must have been written."""
    kinds = KINDS if cap is None else ("decode",)
    common = {"threads": threads, "tokens": tokens, "decode": decode, "context": CONTEXT, "repeats": PER_ROUND, "cap": cap}
    sides = {
        "moeflux": (Path(sys.executable), _OURS, common | {"model": str(models.ours)}),
        "llama.cpp": (python, MEASURE, common | {"model": str(models.theirs)}),
    }
    rates: dict[tuple[str, str], tuple[float, ...]] = {}
    read: dict[str, list[float]] = {side: [] for side in sides}
    others, stolen, warnings = [], [], []
    for number in range(1, rounds + 1):
        for side, (interpreter, script, arguments) in sides.items():
            if cap is not None and (warning := forget_files(models.files)):
                warnings.append(warning)
            result = _run(side, [str(interpreter), "-c", script, json.dumps(arguments)], cap)
            others.append(result["others"])
            stolen.append(result["stolen"])
            read[side].append(result["bytes_per_token"])
            for kind in kinds:
                rates[side, kind] = (*rates.get((side, kind), ()), *result[kind])
            best = ", ".join(f"{kind} {max(result[kind]):.2f}" for kind in kinds)
            say(f"round {number} of {rounds}, {side}: {best} tok/s; {_company(result)}")
            for note in result.get("notes", ()):
                say(f"{side}: {note}")
    rows = tuple(PeerRow(kind, Samples(rates["moeflux", kind]), Samples(rates["llama.cpp", kind])) for kind in kinds)
    median_read = {side: median(values) for side, values in read.items()} if cap is not None else {}
    return PeerReport(rows, tuple(others), tuple(stolen), median_read, tuple(warnings))


def measure_ours(arguments: str) -> None:
    """What the process on our side does: one JSON line on stdout."""
    a = json.loads(arguments)
    ram = a["cap"] and a["cap"] - a["cap"] // CAP_MARGIN
    context = max(a["tokens"], a["context"] + (a["repeats"] + 1) * a["decode"])
    room = make_room(EngineConfig(Path(a["model"]), "native", a["threads"], ram, context=context))
    with Engine(room.config) as engine, Neighbours() as neighbours:
        decode = bench_decode(engine, a["decode"], a["context"], a["repeats"], room=room)
        prefill = () if a["cap"] else bench_prefill(engine, a["tokens"], a["repeats"]).rate.values
        notes = [*engine.notes, *_about(decode)]
    streaming = decode.streaming
    read = streaming.per_token(lambda lap: lap.stats.bytes_read) if streaming else 0.0
    rates = {"decode": decode.rate.values, "prefill": prefill}
    print(json.dumps({**rates, **neighbours.shares, "notes": notes, "bytes_per_token": read}))


def _about(row: SpeedRow) -> list[str]:
    """One line about what streaming did."""
    if row.streaming is None or row.memory is None:
        return []
    s, memory = row.streaming.as_dict(), row.memory
    share = f"{s['n_slots'] / s['n_experts']:.0%} of the experts in memory, {s['hit_rate']:.0%} hits"
    limit = f"{s['share_of_limit'][1]:.0%} of the I/O-only limit"
    return [f"{share}, {limit}, peak {format_bytes(memory.peak)} of {format_bytes(memory.budget)}"]


def _company(result: Mapping[str, Any]) -> str:
    return f"others took {result['others']:.0%} of the cores, the host {result['stolen']:.0%}"


def _run(side: str, command: list[str], cap: int | None) -> dict[str, Any]:
    """What the process printed."""
    with ExitStack() as stack:
        talk = stack.enter_context(tempfile.TemporaryFile("w+"))
        group = stack.enter_context(MemoryCap(cap)) if cap is not None else None
        done = subprocess.run(group.command(command) if group else command, stdout=subprocess.PIPE, stderr=talk, text=True)
        if done.returncode:
            talk.seek(0)
            tail = "".join(talk.readlines()[-15:])
            killed = " (killed: the cap is too small for it)" if group and done.returncode == -signal.SIGKILL else ""
            raise MoefluxError(f"ended with {done.returncode}{killed}; the last it said:\n{tail}", where=side)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
