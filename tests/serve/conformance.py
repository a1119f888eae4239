"""What conformance tools say about the server, as the table in docs/server.md: `make conformance`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

from serve.scripted_model import scripted_model, serving_script
from serve.test_clients import ENVIRONMENT, run, schemathesis
from serve.test_comply import FORMATS


def comply(url: str, format: str) -> tuple[str, str]:
    """How many checks passed, and what the others said."""
    ran = run("llm-comply", "--format", format, "-u", f"{url}/v1", "-k", "k", "-m", "m", "--json", *FORMATS[format])
    results = json.loads(ran.stdout[ran.stdout.index("{") :])["results"]
    passed = sum(check["status"] == "passed" for check in results)
    others = [
        f"{check['name']}: {(check.get('errors') or ['skipped'])[0]}" for check in results if check["status"] != "passed"
    ]
    return f"{passed} of {len(results)}", "; ".join(others)


def fuzz(folder: Path) -> tuple[str, str]:
    ran = schemathesis(folder, "-n", "10")
    found = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    if found is None:
        return "none", ran.stdout[-500:].replace("\n", " ")
    return f"{found[2]} of {found[1]}", "" if ran.returncode == 0 else "see its output"


def main() -> int:
    if not ENVIRONMENT.exists():
        print("there is no .venv-clients: make clients", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        with serving_script(folder, scripted_model(folder / "model")) as server:
            rows += [(f"llm-comply, {format}", *comply(server.url, format)) for format in FORMATS]
        rows.append(("schemathesis, all phases, 10 examples", *fuzz(folder)))
    print("| tool | passed | what did not |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
