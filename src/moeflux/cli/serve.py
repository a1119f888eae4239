"""`moeflux serve [MODEL]`: an HTTP server for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import moeflux
from moeflux.api import Engine, load
from moeflux.cli import options as o
from moeflux.cli.progress import byte_bar
from moeflux.cli.talk import opening
from moeflux.cli.terminal import note, say
from moeflux.core.config import EngineConfig
from moeflux.core.errors import OptionError
from moeflux.core.units import parse_bytes
from moeflux.formats.checkpoint import read_config
from moeflux.models.registry import read_spec
from moeflux.session.demo import demo_model
from moeflux.session.model_text import ModelText

if TYPE_CHECKING:
    from moeflux.serve.settings import Settings

DEMO_ALIAS = "moeflux-demo"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
# What a config file may say, besides lists of texts for allow_host and allow_origin.
CONFIG: dict[str, type] = {
    "model": str, "host": str, "port": int, "api_key": str, "api_key_file": str, "insecure": bool, "alias": str,
    "strict_model": bool, "allow_host": list, "allow_origin": list, "parallel": int, "max_queue": int, "max_tokens": int,
    "heartbeat": float, "deadline": float, "drain": float, "prefixes": str, "prefix_folder": str, "log": str,
    "backend": str, "threads": int, "ram": str, "vram": str, "context": int, "isa": str, "slots": int,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "host": "127.0.0.1", "port": 8080, "insecure": False, "strict_model": False, "parallel": 4, "max_queue": 64,
    "heartbeat": 5.0, "drain": 30.0, "prefixes": "256MiB", "log": "json", "backend": "auto", "isa": "auto",
}  # fmt: skip


def _of(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, show_default=False, **settings)


_WHO, _HOW, _KEPT = "Who may ask", "How requests are taken", "What is kept"


def serve(
    model: Annotated[str | None, typer.Argument(help="Model folder; left out: the demo model.")] = None,
    host: Annotated[str | None, _of(_WHO, help="Address to listen on; default 127.0.0.1.")] = None,
    port: Annotated[int | None, _of(_WHO, help="Default 8080; 0: any free one.")] = None,
    api_key: Annotated[str | None, _of(_WHO, help="Key that clients must send. A file keeps it out of sight.")] = None,
    api_key_file: Annotated[str | None, _of(_WHO, help="File with one key per line.")] = None,
    insecure: Annotated[bool | None, _of(_WHO, "--insecure", help="Listen beyond this machine without a key.")] = None,
    allow_host: Annotated[list[str] | None, _of(_WHO, help="Another name of this server.")] = None,
    allow_origin: Annotated[list[str] | None, _of(_WHO, help="Origin of pages that may use it, like http://a:1.")] = None,
    alias: Annotated[str | None, _of(_HOW, help="Name of the model for clients; default: that of its folder.")] = None,
    strict_model: Annotated[bool | None, _of(_HOW, "--strict-model", help="Refuse other names of models.")] = None,
    parallel: Annotated[int | None, _of(_HOW, min=1, help="Requests that run at once; default 4.")] = None,
    max_queue: Annotated[int | None, _of(_HOW, min=1, help="Requests that may wait; default 64.")] = None,
    max_tokens: Annotated[int | None, _of(_HOW, min=1, help="Of an answer, whatever its request says.")] = None,
    heartbeat: Annotated[float | None, _of(_HOW, min=0, help="Seconds between signs of life; default 5.")] = None,
    deadline: Annotated[float | None, _of(_HOW, min=0, help="Seconds that a request may take; default: any.")] = None,
    drain: Annotated[float | None, _of(_HOW, min=0, help="Seconds for running requests at the end; default 30.")] = None,
    prefixes: Annotated[str | None, _of(_KEPT, help="Memory for states of prompts; default 256MiB.")] = None,
    prefix_folder: Annotated[str | None, _of(_KEPT, help="Folder where they outlive the server.")] = None,
    log: Annotated[str | None, _of("Output", help="json or none; default json, on stderr.")] = None,
    config: Annotated[Path | None, typer.Option(parser=o.path_of, help="TOML file with these options.")] = None,
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    ram: o.Ram = None,
    vram: o.Vram = None,
    context: o.Context = None,
    isa: o.Isa = "auto",
    slots: o.Slots = None,
) -> None:
    """Serve a model over HTTP, in the ways of OpenAI and Anthropic. Options win over the config file."""
    arguments = {name: value for name, value in locals().items() if name != "config"}
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f"{', '.join(missing)} not installed", where="moeflux serve", hint="pip install 'moeflux[serve]'")
    _serve(arguments, config)


def _serve(arguments: dict[str, Any], config: Path | None) -> None:
    from moeflux.serve.logs import write_lines
    from moeflux.serve.run import bind
    from moeflux.serve.run import serve as run
    from moeflux.serve.settings import read_options

    said = o.given(**arguments)
    for name in ("backend", "isa"):  # as if left out, so that a config file can say it
        if said[name] == "auto":
            del said[name]
    wanted = {**DEFAULTS, **(read_options(config, CONFIG) if config else {}), **said}
    folder = Path(wanted["model"]) if wanted.get("model") else demo_model()
    settings = _settings(wanted, folder)
    read_spec(read_config(folder))  # a model that there is, before anybody is told where it is served
    loading = o.engine_options(wanted)
    EngineConfig(folder, **loading, sequences=settings.parallel, prefixes=wanted["prefixes"])
    if wanted["log"] not in ("json", "none"):
        raise OptionError(f"{wanted['log']!r} is no kind of log", where="option '--log'", hint="json or none")
    sock = bind(settings)
    port = sock.getsockname()[1]
    if wanted["log"] == "json":
        write_lines()
    logging.getLogger("uvicorn").setLevel(logging.ERROR)

    def open_model(progress: Any) -> tuple[Engine, ModelText]:
        with byte_bar("loading") as bar:
            engine = load(
                folder, **loading, sequences=settings.parallel, prefixes=wanted["prefixes"],
                progress=_both(progress, bar),
            )  # fmt: skip
        for line in (*engine.notes, opening(settings.alias, engine)):
            say(line)
        return engine, engine.text

    note(where_it_listens(settings.host, port, settings.alias))
    run(settings, open_model, sock, moeflux.__version__, lambda: note("ready"))


def _settings(wanted: dict[str, Any], folder: Path) -> Settings:
    from moeflux.serve.settings import Settings, read_keys

    keys = [wanted["api_key"]] if wanted.get("api_key") else []
    if wanted.get("api_key_file"):
        keys += read_keys(Path(wanted["api_key_file"]))
    kept = Path(wanted["prefix_folder"]) if wanted.get("prefix_folder") else None
    o.check_folder("prefix-folder", kept)
    if kept is not None and parse_bytes(wanted["prefixes"]) == 0:
        raise OptionError("nothing is kept", where="option '--prefix-folder'", hint="give --prefixes as well")
    names = ("host", "port", "insecure", "strict_model", "parallel", "max_queue", "max_tokens", "heartbeat", "deadline",
             "drain")  # fmt: skip
    return Settings(
        **{name: wanted[name] for name in names if name in wanted},
        api_keys=tuple(keys),
        alias=wanted.get("alias") or (DEMO_ALIAS if folder == demo_model() else folder.resolve().name),
        allow_hosts=tuple(wanted.get("allow_host", ())),
        allow_origins=tuple(wanted.get("allow_origin", ())),
        prefix_folder=kept,
    )


def where_it_listens(host: str, port: int, alias: str) -> str:
    """One line for people who have a client already."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http://{name}:{port}"
    return (
        f"listening on {url}: OPENAI_BASE_URL={url}/v1 for OpenAI's clients, ANTHROPIC_BASE_URL={url} for Anthropic's "
        f"and Claude Code, base_url {url}/v1 with wire_api responses for codex; model {alias!r}"
    )


def _both(first: Callable[[int, int], None], second: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        first(done, total)
        second(done, total)

    return tell
