"""The `moeflux` command. One small file per subcommand; this one joins them and turns errors into exit codes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
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
from moeflux.cli.serve import serve
from moeflux.cli.streams import OutputError, drop_output, prepare_streams
from moeflux.cli.synth import synth
from moeflux.cli.terminal import note, visible
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
app.command()(serve)
app.command("eval")(eval_text)
app.command()(doctor)
app.command()(synth)
app.add_typer(bench.app, name="bench")


class _Shown(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), sys.stderr)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"moeflux {moeflux.__version__} (native: {available_isas()[0]})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more on stderr.")] = False,
) -> None:
    if verbose:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Shown("%(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])


def main() -> None:
    """Exit code 0: done; 1: moeflux says why not; 2: the arguments are wrong; 130: interrupted; 141: nobody reads stdout."""
    code = _told(_command)
    flushed = _told(_flush)  # while a failure can still be told
    sys.exit(code or flushed)


def _told(act: Callable[[], int]) -> int:
    """The exit code, with one line on stderr where there is something to say."""
    try:
        return act()
    except OutputError as error:
        drop_output()
        return 141 if error.nobody_reads else _fail(error)  # what shells show for the signal that others end with
    except MoefluxError as error:
        return _fail(error)
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error)
    except MemoryError as error:
        return _fail(f"out of memory: {error}" if str(error) else "out of memory")
    except KeyboardInterrupt:
        return 130


def _command() -> int:
    prepare_streams()
    try:
        app(prog_name="moeflux")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _flush() -> int:
    if sys.stdout is not None:
        sys.stdout.flush()
    return 0


def _fail(error: object) -> int:
    note(f"error: {error}")
    return 1
