"""The CUDA backend on a GPU or, on small shapes, in Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np


@pytest.fixture(autouse=True)
def quiet():
    """The interpreter computes both sides of a choice, and numpy warns of the one that is not taken."""
    with np.errstate(all="ignore"):
        yield
