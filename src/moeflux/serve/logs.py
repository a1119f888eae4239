"""One line of JSON for each request. It says how long and how much, never what was written."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

requests = logging.getLogger("moeflux.requests")


class JsonLines(logging.Formatter):
    """Every record as one object."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record, "fields", None)
        line |= fields if isinstance(fields, Mapping) else {"message": record.getMessage()}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_request(id: str, scope: Mapping[str, Any], status: int | None, seconds: float, more: Mapping[str, Any]) -> None:
    fields = {
        "request": id,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(1000 * seconds, 1),
        "client": scope["state"]["client"],
        **more,
    }
    requests.info("request", extra={"fields": fields})


def write_lines(level: int = logging.INFO) -> None:
    """All of moeflux's records to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger("moeflux")
    root.addHandler(handler)
    root.setLevel(level)
