"""Servers whose model follows a script: tiny weights, a template of our own, real steps, replaced logits."""

from __future__ import annotations

from pathlib import Path

from serve.server import serving
from session.models import chat_model

SCRIPTED = Path(__file__).parent / "scripted"
ENV = {"PYTHONPATH": str(SCRIPTED)}
READ = {
    "name": "read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}


def scripted_model(folder: Path, template: str = "xml") -> Path:
    return chat_model(folder, template)


def serving_script(folder: Path, model: Path, *options: str):
    return serving(folder, "--context", "16384", "--prefixes", "256MB", *options, model=model, env=ENV)
