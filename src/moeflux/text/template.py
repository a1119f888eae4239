"""A checkpoint's chat template: messages to text, as HF transformers renders it.

Templates come from strangers, so they run in a sandbox that counts what they do, and see plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.exceptions
from jinja2.utils import Namespace

from moeflux.core.errors import FormatError, InputError, ReadError
from moeflux.core.json_file import read_json
from moeflux.text.messages import REASONING, Arguments
from moeflux.text.meter import Meter, TemplateLimit, metered
from moeflux.text.sandbox import Sandbox
from moeflux.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_BYTES = 2**17  # of a template; the longest that are published have a fifth of it
MOST_TOLD = 1000  # characters of what a template says is wrong
MOST_FORMAT = 256  # characters of a date's format


class ChatTemplate:
    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str], where: str) -> None:
        """`sources`: by name; "tool_use" is used where there are tools, else "default". `variables`: special tokens."""
        self.sources = sources
        self._where = where
        self._variables = variables
        environment = _environment()
        if (n := sum(map(len, sources.values()))) > MAX_BYTES:
            raise FormatError(f"a chat template of {n} characters, the limit is {MAX_BYTES}", where=where)
        try:
            with metered(Meter()):
                self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except (jinja2.TemplateError, TemplateLimit) as error:
            raise FormatError(f"not a chat template: {error}", where=where) from error
        except (SyntaxError, RecursionError, MemoryError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise FormatError(f"not a chat template: {type(error).__name__}: {error}", where=where) from error

    @classmethod
    def open(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """None where the checkpoint has none."""
        sources, where = _find(folder, tokenizer)
        if not sources:
            return None
        names = ((name, tokenizer.name_of(name)) for name in SPECIAL)
        return cls(sources, {name: content for name, content in names if content is not None}, str(where))

    @property
    def source(self) -> str:
        """All that any of the templates says."""
        return "\n".join(self.sources.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """`variables`: what the template itself asks for, like enable_thinking."""
        if not messages:
            raise InputError("there are no messages")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        values = {
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
            **variables,
        }
        try:
            return self._render(name, values)
        except TemplateLimit as error:
            hint = "the template is broken or means harm: take it from the model's own publisher"
            raise FormatError(f"the chat template does more than it may: {error}", where=self._where, hint=hint) from None
        except jinja2.TemplateError as error:
            what = str(error)[:MOST_TOLD]
            raise InputError(f"the chat template does not take these messages: {what}", where=self._where) from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            what = f"{type(error).__name__}: {error}"[:MOST_TOLD]
            raise InputError(f"the chat template failed: {what}", where=self._where) from error

    def _render(self, name: str, values: dict[str, Any]) -> str:
        pieces = []
        with metered(Meter(values)) as meter:
            for piece in self._templates[name].generate(values):
                meter.write(len(piece))
                pieces.append(piece)
        return "".join(pieces)


def _find(folder: Path, tokenizer: Tokenizer) -> tuple[dict[str, str], Path]:
    """The files win over tokenizer_config.json, as they do in transformers."""
    main, more = folder / "chat_template.jinja", sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if main.exists():
        return {"default": _read(main), **{path.stem: _read(path) for path in more}}, main
    config, old = folder / "tokenizer_config.json", folder / "chat_template.json"
    sources = _named(tokenizer.config.get("chat_template"), config)
    if not sources and old.exists():
        return _named(read_json(old).get("chat_template"), old), old
    return sources, config


def _named(value: Any, where: Path) -> dict[str, str]:
    """One template, or a list of them with names."""
    if value is None or isinstance(value, str):
        return {} if value is None else {"default": value}
    try:
        found = {item["name"]: item["template"] for item in value}
    except (TypeError, KeyError):
        found = {}
    if "default" not in found or not all(isinstance(text, str) for text in found.values()):
        raise FormatError("chat_template is neither a text nor a list of named ones with a default", where=str(where))
    return found


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FormatError(f"larger than {MAX_BYTES} bytes", where=str(path))
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReadError(str(error), where=str(path)) from error


def _with_reasoning(message: Message) -> Message:
    """Under the names that templates read, whichever it came under."""
    thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


class _Namespace(Namespace):
    """Without names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name of the template's
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


class _Dict:
    """What `dict` is in a template, without the rest of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment() -> Sandbox:
    environment = Sandbox()
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _now(form: str) -> str:
    if len(form) > MOST_FORMAT:
        raise TemplateLimit(f"a date's format of more than {MOST_FORMAT} characters")
    return datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own would escape what HTML needs escaped. Arguments that came as text come out as they came."""
    if isinstance(value, Arguments) and not (ensure_ascii or indent or separators or sort_keys):
        return str(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
