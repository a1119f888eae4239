"""The `moeflux` command. One small file per subcommand; this one joins them and turns errors into exit codes."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

import moeflux
from moeflux.backends.native.ops import available_isas
from moeflux.cli import bench
from moeflux.cli.chat import chat
from moeflux.cli.doctor import doctor
from moeflux.cli.evaluate import eval_text
from moeflux.cli.generate import generate
from moeflux.cli.inspect import inspect
from moeflux.cli.plan import plan
from moeflux.cli.synth import synth
from moeflux.core.errors import MoefluxError

app = typer.Typer(
    name="moeflux",
    help="Run mixture-of-experts language models larger than memory on one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(inspect)
app.command()(plan)
app.command()(generate)
app.command()(chat)
app.command("eval")(eval_text)
app.command()(doctor)
app.command()(synth)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moeflux {moeflux.__version__} (native: {available_isas()[0]})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more on stderr.")] = False,
) -> None:
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")


def main() -> None:
    """Exit code 0: done; 1: moeflux says why not; 2: the arguments are wrong; 130: interrupted."""
    try:
        app(prog_name="moeflux")
    except MoefluxError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone, and there is nobody to tell
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
