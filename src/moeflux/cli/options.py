"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moeflux.cli.streams import MOST_CHARACTERS, check_length, check_text
from moeflux.core.atomic_file import find_target
from moeflux.core.config import EngineConfig
from moeflux.core.errors import InputError, OptionError, ReadError
from moeflux.formats.checkpoint import read_config
from moeflux.models.registry import read_spec
from moeflux.sampling.constraint import Grammar, Vocabulary
from moeflux.session.model_text import ModelText
from moeflux.text.stops import Stops


def path_of(text: str) -> Path:
    """An empty string is no path, though it would stand for the folder that the shell is in."""
    if not str(text):
        raise typer.BadParameter("is empty")
    return Path(text)


def numbers(given: Sequence[str], where: str, what: str, most: int = 2**31) -> tuple[int, ...]:
    """Ascending, each once, from texts such as "1,4,16"."""
    names = [name.strip() for text in given for name in text.split(",")]
    wrong = [name for name in names if not (name.isascii() and name.isdigit() and 0 < int(name) <= most)]
    if wrong:
        raise OptionError(f"{wrong[0]!r} is no {what}", where=where, hint="such as 1,4,16")
    return tuple(sorted({int(name) for name in names}))


def _in(panel: str, *names: str, **settings: Any) -> Any:
    """An option under a heading of its own in --help."""
    return typer.Option(*names, rich_help_panel=panel, **settings)


_ENGINE, _SAMPLING, _OUTPUT = "Engine", "Sampling", "Output that must fit"
_OWN = "default: the model's own"
MOST = 2**31  # of anything that is counted

Backend = Annotated[str, _in(_ENGINE, help="auto (a GPU that can be used, else native), native, numpy or cuda.")]
Isa = Annotated[str, _in(_ENGINE, help="auto, avx512_vnni, avx_vnni, avx2 or generic.")]
Ram = Annotated[str | None, _in(_ENGINE, help="Ceiling for the memory of the process, like 8GiB; default: what is free.")]
Vram = Annotated[str | None, _in(_ENGINE, help="Memory of the GPU to use, like 20GiB; 0: no GPU; default: what is free.")]
Context = Annotated[int | None, _in(_ENGINE, min=1, help="Longest sequence, in tokens; default: 8192, or the model's own.")]
Slots = Annotated[
    int | None, _in(_ENGINE, min=1, max=MOST, help="Experts in memory at most; default: as many as the budget holds.")
]
Threads = Annotated[int | None, _in(_ENGINE, min=1, max=1024, help="Threads; all cores by default.")]

Model = Annotated[Path, typer.Argument(parser=path_of, help="Model folder.")]
ModelOrDemo = Annotated[Path | None, typer.Argument(parser=path_of, help="Model folder; left out: the demo model.")]
ModelOrConfig = Annotated[Path, typer.Argument(parser=path_of, help="Model folder, or a config.json.")]
Repeats = Annotated[int, typer.Option(min=1, help="Measurements; best and median are shown.")]
Trace = Annotated[
    Path | None, typer.Option(parser=path_of, help="Save which experts every token chose here, for `bench replay`.")
]

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

SchemaFile = Annotated[Path | None, _in(_OUTPUT, "--schema", parser=path_of, help="the JSON schema in this file.")]
Regex = Annotated[str | None, _in(_OUTPUT, help="this regular expression.")]
GrammarFile = Annotated[Path | None, _in(_OUTPUT, "--grammar", parser=path_of, help="the Lark grammar in this file.")]

_LOADING = ("backend", "threads", "ram", "vram", "context", "isa", "slots")
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
            "logprobs")  # fmt: skip


def given(**options: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value is not None}


def engine_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's arguments those that `load` takes."""
    return given(**{name: arguments[name] for name in _LOADING if name in arguments})


def asked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of a command's arguments those that `generate` and `ask` take."""
    stop = [check_text(text, "option '--stop'") for text in arguments["stop"] or ()]
    Stops(stop)
    grammar = read_grammar(arguments["schema"], arguments["regex"], arguments["grammar"])
    sampling = given(**{name: arguments[name] for name in _SAMPLED if name in arguments})
    return {"max_tokens": arguments["max_tokens"], "stop": stop, "grammar": grammar, **sampling}


def check_answer(folder: Path, wanted: Mapping[str, Any], loading: Mapping[str, Any], system: str | None) -> None:
    """What can be known of an answer's options before anything is loaded."""
    EngineConfig(folder, **loading)
    check_text(system or "", "option '--system'")
    sampling = {name: wanted[name] for name in _SAMPLED if name in wanted}
    ModelText(folder, read_spec(read_config(folder))).sampling(**sampling)


def read_grammar(schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    found = given(schema=schema, regex=regex, grammar=grammar)
    if len(found) > 1:
        raise OptionError("output can fit only one of them", where=f"options {' and '.join(f'--{name}' for name in found)}")
    if schema:
        return _checked(Grammar.schema(read_text(schema)))
    if grammar:
        return _checked(Grammar.lark(read_text(grammar)))
    return None if regex is None else _checked(Grammar.regex(check_text(regex, "option '--regex'")))


def _checked(grammar: Grammar) -> Grammar:
    """With a vocabulary of bytes, which is there before the model is. Names of special tokens need the model's own."""
    if not (grammar.kind == "lark" and "<" in grammar.text):
        end = 256
        letters = [bytes([byte]) for byte in range(end)]
        Vocabulary([*letters, b"<end>"], [end], [end], lambda text: list(text.encode())).constrain(grammar)
    return grammar


def read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ReadError(error.strerror or str(error), where=str(path)) from error
    check_length(data, str(path))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError("not a text in UTF-8", where=str(path)) from error


def check_output(name: str, path: Path | None) -> None:
    """Before the work that would be lost: whether a file can be written there."""
    if path is None:
        return
    where = f"option '--{name}', {path}"
    if not path.parent.is_dir() or path.is_dir():
        raise OptionError("is not a file in a folder that exists", where=where)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OptionError("nothing can be written in its folder", where=where)
    find_target(path)  # refuses devices and pipes


def check_folder(name: str, path: Path | None) -> None:
    if path is not None and not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
        raise OptionError("is not a folder that can be written in", where=f"option '--{name}', {path}")


def read_option(name: str, text: str | None, parse: Callable[[str], int]) -> int | None:
    """An option's value, with the option's name in the error."""
    try:
        return None if text is None else parse(text)
    except OptionError as error:
        error.where = f"option '--{name}'"
        raise
