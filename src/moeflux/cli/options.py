"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from moeflux.core.errors import InputError, OptionError, ReadError
from moeflux.sampling.constraint import Grammar


def _in(panel: str, *names: str, **settings: Any) -> Any:
    """An option under a heading of its own in --help."""
    return typer.Option(*names, rich_help_panel=panel, **settings)


_ENGINE, _SAMPLING, _OUTPUT = "Engine", "Sampling", "Output that must fit"
_OWN = "default: the model's own"

Backend = Annotated[str, _in(_ENGINE, help="auto, native, numpy or cuda.")]
Isa = Annotated[str, _in(_ENGINE, help="auto, avx512_vnni, avx2 or generic.")]
Ram = Annotated[str | None, _in(_ENGINE, help="Ceiling for the memory of the process, like 8GiB; default: what is free.")]
Context = Annotated[int | None, _in(_ENGINE, min=1, help="Longest sequence, in tokens; default: 8192, or the model's own.")]
Slots = Annotated[int | None, _in(_ENGINE, min=1, help="Experts in memory at most; default: as many as the budget holds.")]
Threads = Annotated[int | None, _in(_ENGINE, min=1, help="Threads; all cores by default.")]

Model = Annotated[Path, typer.Argument(help="Model folder.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measurements; best and median are shown.")]
Trace = Annotated[Path | None, typer.Option(help="Save which experts every token chose here, for `bench replay`.")]

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of text.")]
System = Annotated[str | None, typer.Option(help="System prompt, through the chat template.")]
Thinking = Annotated[bool | None, typer.Option(help="Whether to think first, where the chat template can choose.")]

Temperature = Annotated[float | None, _in(_SAMPLING, help=f"0 takes the most likely token; {_OWN}.")]
TopK = Annotated[int | None, _in(_SAMPLING, help=f"Only among so many of the most likely tokens; {_OWN}.")]
TopP = Annotated[float | None, _in(_SAMPLING, help=f"Only among those that together have this probability; {_OWN}.")]
MinP = Annotated[float | None, _in(_SAMPLING, help="Only those with this share of the most likely one's probability.")]
Repetition = Annotated[float | None, _in(_SAMPLING, help=f"Above 1: less of what was there before; {_OWN}.")]
Presence = Annotated[float | None, _in(_SAMPLING, help="Above 0: less of what the answer has already.")]
Frequency = Annotated[float | None, _in(_SAMPLING, help="Above 0: less of it, the more often it came.")]
Seed = Annotated[int | None, _in(_SAMPLING, help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, _in(_SAMPLING, help="End before this text; may be given several times.")]

SchemaFile = Annotated[Path | None, _in(_OUTPUT, "--schema", help="the JSON schema in this file.")]
Regex = Annotated[str | None, _in(_OUTPUT, help="this regular expression.")]
GrammarFile = Annotated[Path | None, _in(_OUTPUT, "--grammar", help="the Lark grammar in this file.")]


def given(**options: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value is not None}


def read_grammar(schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    found = given(schema=schema, regex=regex, grammar=grammar)
    if len(found) > 1:
        raise OptionError("output can fit only one of them", where=f"options {' and '.join(f'--{name}' for name in found)}")
    if schema:
        return Grammar.schema(read_text(schema))
    if grammar:
        return Grammar.lark(read_text(grammar))
    return None if regex is None else Grammar.regex(regex)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ReadError(error.strerror or str(error), where=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError("not a text in UTF-8", where=str(path)) from error


def read_option(name: str, text: str | None, parse: Callable[[str], int]) -> int | None:
    """An option's value, with the option's name in the error."""
    try:
        return None if text is None else parse(text)
    except OptionError as error:
        error.where = f"option '--{name}'"
        raise
