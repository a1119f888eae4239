"""Two versions of moeflux, in turn: `python benchmarks/alternate.py OLD NEW [-n ROUNDS] -- bench decode MODEL …`.

OLD and NEW are the `moeflux` programs of two environments. Each round runs both, the other one first each time, so that a
drift of the machine meets both. The last line of each run must be JSON with `tok_s`, at the top or in `rows`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median


def rates(program: str, arguments: list[str]) -> dict[str, float]:
    """Median tokens per second, by the size of the batch where there are several."""
    out = subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
    found = json.loads(out.splitlines()[-1])
    rows = found.get("rows") or [found]
    return {str(row.get("size", "")): row["tok_s"][1] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("-n", "--rounds", type=int, default=3)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    chosen, arguments = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    seen: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for i in range(chosen.rounds):
        for name in ("old", "new") if i % 2 == 0 else ("new", "old"):
            seen[name].append(rates(getattr(chosen, name), arguments))
            print(f"{name}: {seen[name][-1]}", flush=True)
    report = {}
    for key in seen["old"][0]:
        old, new = ([run[key] for run in seen[name]] for name in ("old", "new"))
        ratios = [b / a for a, b in zip(old, new, strict=True)]
        report[key] = {"old": old, "new": new, "ratio_best": max(new) / max(old), "ratio_median": median(ratios)}
    print(json.dumps({"bench": "alternate", "arguments": arguments, "report": report}))


if __name__ == "__main__":
    main()
