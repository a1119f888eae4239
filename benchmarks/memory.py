"""Peak memory against `--ram`: `python benchmarks/memory.py [--out FILE]`; `--text`: what text itself costs.

Every case runs in a process of its own, at the smallest budget that it accepts and at two larger ones. The peak is VmHWM of
that process, which it copies from /proc when it ends. A table for people, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from vocabulary import write_vocabulary

from moeflux.bench.shapes import published_config
from moeflux.bench.synthetic import write_checkpoint
from moeflux.core.units import format_bytes, parse_bytes
from moeflux.plan.inspect import inspect_model
from moeflux.session.demo import demo_model

HERE = Path(__file__).parent
SHARES = (0.0, 0.3, 0.8)  # of the experts' bytes, on top of the smallest budget
LARGE_VOCAB = 248_320
CONTEXT = ("--context", "1024", "--threads", "2")
WORDS = "the quick brown fox jumps over the lazy dog and runs on\n"

# Ends with the process's own account of its memory, whatever happens in it.
RUN = """
import atexit, runpy, sys
from pathlib import Path
status, script = sys.argv[1:3]
atexit.register(lambda: Path(status).write_text(Path("/proc/self/status").read_text()))
sys.argv = sys.argv[2:]
sys.path.insert(0, str(Path(script).parent))
runpy.run_path(script, run_name="__main__") if script.endswith(".py") else runpy.run_module(script, run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=LARGE_VOCAB, help="of the second model's vocabulary")
    parser.add_argument("--experts", type=int, default=128, help="in each of its four layers")
    parser.add_argument("--models", nargs="*", default=["demo", "large"])
    parser.add_argument("--text", action="store_true", help="what tokenizers and constraints of several sizes take")
    parser.add_argument("--cases", nargs="*", help="only these")
    parser.add_argument("--out", type=Path, help="keep the JSON line here too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report = measure_text(Path(scratch)) if asked.text else measure_cases(Path(scratch), asked)
    line = json.dumps(report)
    if asked.out:
        asked.out.write_text(line + "\n")
    print(line)
    sys.exit(0 if all(row.get("within", True) for row in report["rows"]) else 1)


def measure_cases(scratch: Path, asked: argparse.Namespace) -> dict:
    models = {"demo": demo_model()} if "demo" in asked.models else {}
    if "large" in asked.models:
        models[f"{asked.ids:,} ids"] = large_model(scratch / "large", asked.ids, asked.experts)
    rows = []
    print(f"{'model':12} {'case':14} {'budget':>9} {'peak':>9} {'share':>6}")
    for name, folder in models.items():
        for case, command in cases(folder, scratch).items():
            if not asked.cases or case in asked.cases:
                for budget, peak in measure(command, folder, scratch):
                    share = peak / budget
                    rows.append({"model": name, "case": case, "budget": budget, "peak": peak, "within": share <= 1})
                    print(f"{name:12} {case:14} {format_bytes(budget):>9} {format_bytes(peak):>9} {share:6.0%}", flush=True)
    return {"bench": "memory", "rows": rows}


def large_model(folder: Path, n_ids: int, n_experts: int) -> Path:
    """Few and small layers of the hybrid family, under a vocabulary of the usual size."""
    config = published_config("qwen3.5-35b-a3b")
    text = config["text_config"]
    text |= {"num_hidden_layers": 4, "hidden_size": 512, "num_experts": n_experts, "vocab_size": n_ids}
    text["eos_token_id"] = config["eos_token_id"] = n_ids - 5  # <|im_end|>
    text["layer_types"] = text["layer_types"][:4] if "layer_types" in text else None
    text = {key: value for key, value in text.items() if value is not None}
    write_checkpoint({**config, "text_config": text}, folder)
    write_vocabulary(folder, n_ids)
    return folder


def cases(model: Path, scratch: Path) -> dict[str, tuple[list[str], str]]:
    """By name: a command without its budget, and what it is told on stdin."""
    text, schema = scratch / "text.txt", scratch / "schema.json"
    text.write_text(WORDS * 20_000)
    schema.write_text(json.dumps({"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}))
    prompt = WORDS * 8
    own = str(HERE / "memory_cases.py")
    return {
        "generate": (["moeflux", "generate", str(model), prompt, "-n", "24", *CONTEXT, "--ram"], ""),
        "sampled": (["moeflux", "generate", str(model), prompt, "-n", "8", "--temperature", "0.8", "--top-p", "0.9",
                     "--presence-penalty", "0.5", "--repetition-penalty", "1.1", *CONTEXT, "--ram"], ""),
        "constraints": (["moeflux", "generate", str(model), prompt, "-n", "24", "--schema", str(schema),
                         *CONTEXT, "--ram"], ""),
        "chat": (["moeflux", "chat", str(model), "-n", "12", *CONTEXT, "--ram"], "Hello there\nAnd what then\nWhy\n"),
        "eval": (["moeflux", "eval", str(model), "--text", str(text), "--tokens", "1500", *CONTEXT, "--ram"], ""),
        "conversations": ([own, "conversations", str(model)], ""),
        "prefix store": ([own, "prefixes", str(model)], ""),
        "too much": ([own, "too much", str(model)], ""),
    }  # fmt: skip


def measure(case: tuple[list[str], str], model: Path, scratch: Path) -> list[tuple[int, int]]:
    """Budgets and peaks. What is asked of a budget of nothing tells the smallest one that works."""
    refused, _ = run(case, "1MB", scratch)
    found = re.search(r"the smallest that works is (\S+);", refused.stderr)
    assert found, refused.stderr
    experts = inspect_model(model).sizes.experts
    rows = []
    for share in SHARES:
        budget = parse_bytes(found[1]) + round(share * experts)
        result, peak = run(case, str(budget), scratch)
        assert result.returncode == 0, (case[0][:2], result.stderr[-2000:])
        rows.append((budget, peak))
    return rows


def run(case: tuple[list[str], str], ram: str, scratch: Path) -> tuple[subprocess.CompletedProcess[str], int]:
    command, said = case
    status = scratch / "status"
    whole = [sys.executable, "-c", RUN, str(status), *command, ram]
    result = subprocess.run(whole, input=said, capture_output=True, text=True, timeout=600)
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text())
    assert found
    return result, int(found[1]) * 1024


def measure_text(scratch: Path) -> dict:
    """Beside what the plan counts for it."""
    rows = []
    print(f"{'ids':>8} {'file':>9} {'opening':>19} {'open':>19} {'constraints':>19}   (measured, planned)")
    for n_ids in (8_000, 32_000, 128_000, LARGE_VOCAB):
        folder = scratch / str(n_ids)
        folder.mkdir()
        write_vocabulary(folder, n_ids)
        command = [sys.executable, str(HERE / "memory_text.py"), str(folder), str(n_ids)]
        row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append(row)
        pairs = [
            f"{format_bytes(row[k]):>9} {format_bytes(row['planned_' + k]):>9}" for k in ("opening", "kept", "constraints")
        ]
        print(f"{n_ids:8,} {format_bytes(row['file']):>9} {' '.join(pairs)}", flush=True)
    return {"bench": "memory of text", "rows": rows}


if __name__ == "__main__":
    main()
