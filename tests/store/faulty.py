"""Run by test_faults with the shim in place: reads every expert and tells, as JSON, what came of it."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from moeflux.core.errors import MoefluxError
from store.synthetic import CODECS, held, make_experts


def main(folder: str, reader: str, way: str, n_readers: str) -> None:
    notes: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())
    logging.getLogger("moeflux").addHandler(handler)
    experts = make_experts(Path(folder), codec=CODECS["affine"], hidden=512, width=640, n_experts=3, n_layers=2, n_files=2)
    outcome: dict[str, object] = {"wrong": 0, "right": 0, "errors": []}
    with experts.open(n_slots=3, reader=reader, direct=way == "direct", n_readers=int(n_readers)) as store:
        for round_ in range(2):
            for layer, expert in experts.contents:
                try:
                    with store.acquire(layer, [expert]) as lease:
                        lease.wait()
                        outcome["right" if held(lease, expert) == experts.contents[layer, expert] else "wrong"] += 1
                except MoefluxError as error:
                    cause = error.__cause__
                    number = cause.errno if isinstance(cause, OSError) else 0
                    outcome["errors"].append([round_, type(error).__name__, str(error), number])
        stats = store.stats()
        outcome |= {"retries": stats.retries, "failed": stats.errors, "slots": [s[3] for s in store.native.slots()]}
    print(json.dumps(outcome | {"notes": notes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
