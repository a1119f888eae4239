"""The process on llama.cpp's side of a comparison: scripts for whichever interpreter has llama-cpp-python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from moeflux.bench import neighbours
from moeflux.core.errors import OptionError

_VERSION = """
import json, llama_cpp
info = llama_cpp.llama_print_system_info().decode()
print(json.dumps({"version": llama_cpp.__version__, "system": info}))
"""

# The same steps as bench_decode and bench_prefill: decode goes on in one sequence, each prompt starts a fresh one. Decode
# warms up twice, because its first measurement after one warm-up was seen 13 % below the later ones; ours was not.
_MEASURE = """
import json, math, random, sys, time
import llama_cpp as l

a = json.loads(sys.argv[1])
l.llama_backend_init()
how = l.llama_model_default_params()
if a["cap"]:
    how.use_extra_bufts = False
    if hasattr(how, "load_mode"):
        how.load_mode = l.LLAMA_LOAD_MODE_MMAP
model = l.llama_model_load_from_file(a["model"].encode(), how)
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

def bytes_read():
    return int(next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1])

def rates(once, tokens, before=lambda: None):
    found = []
    for _ in range(a["repeats"]):
        before()
        start = time.perf_counter()
        once()
        found.append(tokens / (time.perf_counter() - start))
    return found

neighbours = Neighbours()
neighbours.__enter__()
run(a["context"])
for _ in range(2 * a["decode"]):
    run(1)
before = bytes_read()
decode = rates(lambda: [run(1) for _ in range(a["decode"])], a["decode"])
read = (bytes_read() - before) / (a["repeats"] * a["decode"])
prefill = []
if not a["cap"]:
    fresh()
    run(a["tokens"])
    prefill = rates(lambda: run(a["tokens"]), a["tokens"], fresh)
neighbours.__exit__()
logits = l.llama_get_logits_ith(context, -1)
if not all(math.isfinite(logits[i]) for i in range(vocab)):
    sys.exit("the logits are not finite")
print(json.dumps({"decode": decode, "prefill": prefill, **neighbours.shares, "bytes_per_token": read}))
"""
MEASURE = Path(neighbours.__file__).read_text() + _MEASURE


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
