"""Before anything else: one thread per process for BLAS and torch, because tests run side by side on few cores; and Triton's
interpreter where there is no GPU, which must be chosen before anybody imports Triton."""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"

import shutil  # noqa: E402 (after the variables above)
import subprocess  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("tests", deadline=None, print_blob=True)
settings.load_profile("tests")

DATA = Path(__file__).parent / "data"


@pytest.fixture
def mlx():
    """The folder of a committed MLX checkpoint, by name."""
    return lambda name: DATA / "mlx" / name


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """A library that stands between a process and its files, and makes reads fail."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("NO C COMPILER: faults of the drive are not tested")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).parent / "store" / "shim.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library
