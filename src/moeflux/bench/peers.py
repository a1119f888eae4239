"""moeflux beside llama.cpp on the same shapes, alternating in one run, because a shared machine changes by the minute.

Each measurement is a process of its own, so that memory holds one model at a time. llama.cpp is never a dependency: it
runs in whichever interpreter has llama-cpp-python.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflux.bench.gguf import gguf_bytes, write_gguf
from moeflux.bench.limits import Samples
from moeflux.bench.shapes import published_config
from moeflux.bench.speed import bench_decode, bench_prefill
from moeflux.bench.synthetic import Progress, write_checkpoint
from moeflux.core.config import EngineConfig
from moeflux.core.errors import MoefluxError, OptionError
from moeflux.core.units import format_bytes
from moeflux.runtime.engine import Engine

SHAPES = ("qwen3-30b-a3b", "qwen3.5-35b-a3b")
KINDS = ("decode", "prefill")
CONTEXT = 32  # tokens before the decoded ones
PER_ROUND = 3  # measurements of each kind per process, because a load is dear
BUSY = 0.05  # share of the cores taken by others from which a comparison is not fair

Say = Callable[[str], None]

_VERSION = """
import json, llama_cpp
info = llama_cpp.llama_print_system_info().decode()
print(json.dumps({"version": llama_cpp.__version__, "system": info}))
"""

_OURS = "import sys; from moeflux.bench.peers import measure_ours; measure_ours(sys.argv[1])"

# The same steps as bench_decode and bench_prefill: decode goes on in one sequence, each prompt starts a fresh one. Decode
# warms up twice, because its first measurement after one warm-up was seen 13 % below the later ones; ours was not.
_THEIRS = """
import json, math, random, sys, time
import llama_cpp as l

a = json.loads(sys.argv[1])
l.llama_backend_init()
model = l.llama_model_load_from_file(a["model"].encode(), l.llama_model_default_params())
if not model:
    sys.exit("llama.cpp cannot load the model")
p = l.llama_context_default_params()
p.n_ctx = max(a["tokens"], a["context"] + (a["repeats"] + 2) * a["decode"])
p.n_batch, p.n_ubatch = max(512, a["tokens"]), 512
p.n_threads = p.n_threads_batch = a["threads"]
context = l.llama_init_from_model(model, p)
if not context:
    sys.exit("llama.cpp cannot make a context")
vocab = l.llama_vocab_n_tokens(l.llama_model_get_vocab(model))
rng = random.Random(0)

def run(n):
    ids = (l.llama_token * n)(*(rng.randrange(vocab) for _ in range(n)))
    if code := l.llama_decode(context, l.llama_batch_get_one(ids, n)):
        sys.exit(f"llama_decode gave {code}")
    l.llama_synchronize(context)

def fresh():
    l.llama_memory_clear(l.llama_get_memory(context), True)

def rates(once, tokens, warm_ups, before=lambda: None):
    found = []
    for _ in range(a["repeats"] + warm_ups):
        before()
        start = time.perf_counter()
        once()
        found.append(tokens / (time.perf_counter() - start))
    return found[warm_ups:]

run(a["context"])
decode = rates(lambda: [run(1) for _ in range(a["decode"])], a["decode"], 2)
prefill = rates(lambda: run(a["tokens"]), a["tokens"], 1, fresh)
logits = l.llama_get_logits_ith(context, -1)
if not all(math.isfinite(logits[i]) for i in range(vocab)):
    sys.exit("the logits are not finite")
print(json.dumps({"decode": decode, "prefill": prefill}))
"""


@dataclass(frozen=True)
class PeerReport:
    """`others`: per process, ours and theirs in turn, the share of the cores that everything else took meanwhile."""

    rows: tuple[PeerRow, ...]
    others: tuple[float, ...]

    @property
    def warning(self) -> str | None:
        """A neighbour costs one side far more than the other: threads that meet at barriers wait for the slowest."""
        worst = max(self.others)
        return f"NOT A FAIR COMPARISON: other processes took up to {worst:.0%} of the cores" if worst > BUSY else None


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


def peer_version(python: Path) -> dict[str, str]:
    """Of llama-cpp-python in that interpreter, with the instruction sets it was built for."""
    try:
        done = subprocess.run([str(python), "-c", _VERSION], capture_output=True, text=True)
    except OSError as error:
        raise OptionError(f"cannot be run: {error.strerror}", where=f"option 'peer-python', {python}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        hint = f"{python} -m pip install llama-cpp-python, or give another interpreter with --peer-python"
        raise OptionError(f"llama.cpp is not there: {last}", where=f"option 'peer-python', {python}", hint=hint)
    version: dict[str, str] = json.loads(done.stdout)
    return version


@dataclass(frozen=True)
class Models:
    """Both models of one shape in one folder, written if they are not there."""

    config: Mapping[str, Any]
    layers: int
    ours: Path
    theirs: Path

    @staticmethod
    def of(shape: str, layers: int | None, folder: Path) -> Models:
        if shape not in SHAPES:
            raise OptionError(f"{shape!r} cannot be compared", where="shape", hint=f"one of: {', '.join(SHAPES)}")
        config = published_config(shape, layers)
        n = config.get("text_config", config)["num_hidden_layers"]
        name = f"{shape}-{n}"
        return Models(config, n, folder / f"{name}-mlx", folder / f"{name}-q4_0.gguf")

    @property
    def missing(self) -> int:
        """Bytes to write, about: both models have the same size but for small tensors."""
        size = gguf_bytes(self.config)
        return size * (int(not self._has_ours) + int(not self._has_theirs))

    def write(self, progress: Progress | None = None) -> None:
        """Refuses when the drive has no room, before anything is written."""
        folder, missing = self.ours.parent, self.missing
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) < missing:
            what = f"needs {format_bytes(missing)}, and {format_bytes(free)} are free"
            raise OptionError(what, where=str(folder), hint="give another folder with --dir, or fewer --layers")
        if not self._has_ours:
            write_checkpoint(self.config, self.ours, progress=progress)
        if not self._has_theirs:
            write_gguf(self.config, self.theirs, progress=progress)
        os.sync()  # what is still being written slows down whoever is measured first

    @property
    def _has_ours(self) -> bool:
        return (self.ours / "config.json").exists()  # written last

    @property
    def _has_theirs(self) -> bool:
        return self.theirs.exists() and self.theirs.stat().st_size == gguf_bytes(self.config)


def bench_peers(models: Models, python: Path, threads: int, tokens: int, decode: int, rounds: int, say: Say) -> PeerReport:
    """Decode and prefill, ours and theirs in turn. `models` must have been written."""
    common = {"threads": threads, "tokens": tokens, "decode": decode, "context": CONTEXT, "repeats": PER_ROUND}
    sides = {
        "moeflux": (Path(sys.executable), _OURS, common | {"model": str(models.ours)}),
        "llama.cpp": (python, _THEIRS, common | {"model": str(models.theirs)}),
    }
    rates: dict[tuple[str, str], tuple[float, ...]] = {}
    others = []
    for number in range(1, rounds + 1):
        for side, (interpreter, script, arguments) in sides.items():
            result, share = _run(side, interpreter, script, arguments)
            others.append(share)
            for kind in KINDS:
                rates[side, kind] = (*rates.get((side, kind), ()), *result[kind])
            best = ", ".join(f"{kind} {max(result[kind]):.2f}" for kind in KINDS)
            say(f"round {number} of {rounds}, {side}: {best} tok/s; others took {share:.0%} of the cores")
            for note in result.get("notes", ()):
                say(f"{side}: {note}")
    rows = tuple(PeerRow(kind, Samples(rates["moeflux", kind]), Samples(rates["llama.cpp", kind])) for kind in KINDS)
    return PeerReport(rows, tuple(others))


def measure_ours(arguments: str) -> None:
    """What the process on our side does: one JSON line on stdout."""
    a = json.loads(arguments)
    with Engine(EngineConfig(Path(a["model"]), threads=a["threads"])) as engine:
        decode = bench_decode(engine, a["decode"], a["context"], a["repeats"])
        prefill = bench_prefill(engine, a["tokens"], a["repeats"])
        notes = list(engine.notes)
    print(json.dumps({"decode": decode.rate.values, "prefill": prefill.rate.values, "notes": notes}))


def _run(side: str, python: Path, script: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """What the process printed, and the share of all cores that others took while it ran."""
    command = [str(python), "-c", script, json.dumps(arguments)]
    start, busy, own = time.perf_counter(), _busy_seconds(), _child_seconds()
    with tempfile.TemporaryFile("w+") as talk:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=talk, text=True)
        if done.returncode:
            talk.seek(0)
            tail = "".join(talk.readlines()[-15:])
            raise MoefluxError(f"ended with {done.returncode}; the last it said:\n{tail}", where=side)
    elapsed = time.perf_counter() - start
    elsewhere = (_busy_seconds() - busy) - (_child_seconds() - own)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result, max(0.0, elsewhere / elapsed / (os.cpu_count() or 1))


def _busy_seconds() -> float:
    """Of all cores together since boot; time stolen by the host counts, waiting for a drive does not."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
