"""The model that comes with the package, opened in place like any other."""

from __future__ import annotations

from pathlib import Path

from moeflux.core.errors import MissingTensorError

FOLDER = Path(__file__).parent.parent / "demo"


def demo_model() -> Path:
    if not (FOLDER / "config.json").exists():
        raise MissingTensorError(
            "the demo model is not part of this installation", where=str(FOLDER), hint="name a model folder of your own"
        )
    return FOLDER
