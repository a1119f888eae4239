"""`moeflux bench peers SHAPE`: beside llama.cpp, with all the memory there is or with less."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

import moeflux
from moeflux.bench.cap import ReadAhead
from moeflux.bench.llama import peer_version
from moeflux.bench.peer_models import SHAPES, Models
from moeflux.bench.peers import bench_peers
from moeflux.cli.options import Threads, path_of, read_option
from moeflux.cli.progress import byte_bar
from moeflux.cli.tables import pair, print_table
from moeflux.cli.terminal import note
from moeflux.core.config import EngineConfig
from moeflux.core.units import format_bytes, parse_bytes


def peers(
    shape: Annotated[str, typer.Argument(help=f"One of: {', '.join(SHAPES)}.")],
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first N layers.")] = None,
    threads: Threads = None,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt for prefill.")] = 512,
    decode: Annotated[int, typer.Option(min=1, help="Tokens per decode measurement.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each loads both models and measures three times.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", parser=path_of, help="Keep both models here and use them again; else a temporary folder."),
    ] = None,
    peer_python: Annotated[
        Path,
        typer.Option(
            parser=path_of, help="Python that has llama-cpp-python; the running one by default.", show_default=False
        ),
    ] = Path(sys.executable),
    cap: Annotated[
        str | None, typer.Option(help="Decode with so much memory each, page cache included, like 9.5GB (control groups).")
    ] = None,
    read_ahead: Annotated[
        int | None, typer.Option(min=4, help="KiB that the drive reads around a page fault, set for this run (root).")
    ] = None,
) -> None:
    """Compare with llama.cpp on random weights of one shape, alternating in one run."""
    n = EngineConfig(Path(), threads=threads).n_threads
    Models.of(shape, layers, Path())  # refuses before anything is run or written
    limit = read_option("cap", cap, parse_bytes)
    version = peer_version(peer_python)
    temporary = tempfile.TemporaryDirectory(prefix="moeflux-peers-") if folder is None else nullcontext(str(folder))
    with temporary as place:
        models = Models.of(shape, layers, Path(place))
        todo = f"about {format_bytes(models.missing)} to write" if models.missing else "both models are there"
        note(f"{place}: {todo}; 4.5 bits per weight for both")
        with byte_bar("writing") as progress:
            models.write(progress)
        with ReadAhead(models.theirs, read_ahead) as ahead:
            note(*([ahead.warning] if limit and ahead.warning else []))
            report = bench_peers(models, peer_python, n, tokens, decode, repeats, note, limit)
            kib = ahead.kib
    capped = f"{format_bytes(limit)} of memory each, cold, read-ahead {kib} KiB; " if limit else ""
    note(f"{shape}, {models.layers} layers, {n} threads, head in 4 bits for both; {capped}tokens per second, best / median")
    rows = [row.as_dict() for row in report.rows]
    table = [
        (r["kind"], pair(r["ours_tok_s"], ".2f"), pair(r["llama_cpp_tok_s"], ".2f"), pair(r["ratio"], ".2f"))
        for r in rows
    ]  # fmt: skip
    if report.read:
        ours, theirs = map(format_bytes, report.read.values())
        table.append(("read per token", ours, theirs, ""))
    print_table(("", "moeflux", "llama.cpp", "ratio"), table)
    note(*report.warnings)
    about = {"shape": shape, "layers": models.layers, "threads": n, "tokens": tokens, "decode": decode, "rounds": repeats}
    about |= {"cap": limit, "read_ahead_kib": kib, "read_per_token": dict(report.read)} if limit else {}
    versions = {"moeflux": moeflux.__version__, "llama_cpp_python": version["version"], "system": version["system"]}
    company = {"others": report.others, "stolen": report.stolen}
    print(json.dumps({"bench": "peers", **about, "versions": versions, **company, "rows": rows}))
