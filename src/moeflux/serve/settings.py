"""What a server was asked for, from options and a config file, checked before anything is opened."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from moeflux.core.errors import InputError, OptionError, ReadError

MOST_BODY = 32 * 2**20  # bytes of a request
LEAST_KEY = 8  # characters


@dataclass(frozen=True)
class Settings:
    """`max_tokens`: of an answer, whatever its request says. `drain`, `heartbeat`, `deadline`: seconds."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    alias: str = "moeflux"
    strict_model: bool = False
    insecure: bool = False  # listen beyond this machine without a key
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    parallel: int = 4
    max_queue: int = 64
    max_tokens: int | None = None
    max_body: int = MOST_BODY
    heartbeat: float = 5.0
    deadline: float | None = None
    drain: float = 30.0
    prefix_folder: Path | None = None

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                hint = f"at least {LEAST_KEY} printable ASCII characters without spaces"
                raise OptionError("this is not a key", where="option 'api_key'", hint=hint)
        if not (self.is_local or self.api_keys or self.insecure):
            raise OptionError(
                f"{self.host} can be reached from other machines, and there is no key",
                where="option 'host'",
                hint="give --api-key-file, or listen on 127.0.0.1; --insecure insists",
            )
        if not 0 <= self.port < 65536:
            raise OptionError(f"{self.port} is not a port", where="option 'port'", hint="0 to 65535; 0: any free one")
        for name, least in (
            ("heartbeat", 0),
            ("drain", 0),
            ("deadline", 0),
            ("parallel", 1),
            ("max_queue", 1),
            ("max_tokens", 1),
        ):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise OptionError(f"{value!r} is too little", where=f"option {name!r}", hint=f"{least} or more")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_options(path: Path, known: Mapping[str, type]) -> dict[str, Any]:
    """A TOML file with the names of the command's options, `_` or `-` in them. What is not known is refused."""
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ReadError(error.strerror or str(error), where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not TOML: {error}", where=str(path)) from error
    options = {name.replace("-", "_"): value for name, value in found.items()}
    for name, value in options.items():
        if name not in known:
            raise OptionError("there is no such option", where=f"{path}: {name!r}", hint=", ".join(sorted(known)))
        wanted = known[name]
        good = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        if not good or (isinstance(value, bool) and wanted is not bool):
            raise OptionError(f"{value!r} is no {wanted.__name__}", where=f"{path}: {name!r}")
    return options


def read_keys(path: Path) -> tuple[str, ...]:
    """One key per line; empty lines and lines with # are left out."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ReadError(error.strerror or str(error), where=str(path)) from error
    except UnicodeDecodeError as error:
        raise InputError("not a text in UTF-8", where=str(path)) from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise InputError("there is no key in it", where=str(path))
    return keys
