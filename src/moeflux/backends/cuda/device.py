"""One GPU, opened: what it is, and typed errors where there is none or it cannot be used.

`cpu` stands for Triton's interpreter, which runs the same kernels without a GPU: for tests of small shapes.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeflux.core.errors import DeviceError
from moeflux.core.units import format_bytes

OLDEST = (8, 0)  # Ampere: bf16, asynchronous copies, integer tensor cores as the kernels use them
WHERE = "backend 'cuda'"
VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Device:
    """`name`: as torch names it. `dp4a`: the integer dot instruction, which the interpreter lacks."""

    name: str
    title: str
    capability: tuple[int, int]
    total_bytes: int
    driver: str = ""

    @property
    def dp4a(self) -> bool:
        return self.name != "cpu"

    @property
    def free_bytes(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self.name)[0]) if self.name != "cpu" else self.total_bytes


def open_device(index: int = 0) -> Device:
    """The GPU of this number, checked."""
    _need("torch", "pip install 'moeflux[cuda]'")
    _need("triton", "pip install 'moeflux[cuda]'")
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        return Device("cpu", "Triton's interpreter", OLDEST, 2**62)
    if torch.version.cuda is None:
        raise DeviceError(
            f"torch {torch.__version__} was built without CUDA", where=WHERE, hint="install a CUDA build of torch"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch warns of becomes the error below
        usable = torch.cuda.is_available() and index < torch.cuda.device_count()
    driver = driver_version()
    if not usable and driver:
        raise DeviceError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU number {index} under driver {driver}",
            where=WHERE,
            hint="is the GPU visible (nvidia-smi, CUDA_VISIBLE_DEVICES)? An old driver needs an older CUDA build of torch, "
            "or an update; else use backend='native'",
        )
    if not usable:
        raise DeviceError(
            f"no GPU number {index}: there is no NVIDIA driver here",
            where=WHERE,
            hint="install the driver (nvidia-smi shows it), or use backend='native'",
        )
    found: Any = torch.cuda.get_device_properties(index)
    capability = (int(found.major), int(found.minor))
    if capability < OLDEST:
        raise DeviceError(
            f"{found.name} has compute capability {capability[0]}.{capability[1]}, the kernels need {OLDEST[0]}.{OLDEST[1]}",
            where=WHERE,
            hint="use backend='native'",
        )
    return Device(f"cuda:{index}", str(found.name), capability, int(found.total_memory), driver or "")


def driver_version(path: Path = VERSION) -> str | None:
    """None where no driver is loaded."""
    try:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", path.read_text())
    except OSError:
        return None
    return found[1] if found else "of unknown version"


@contextmanager
def device_errors(device: Device, what: str, n_bytes: int = 0) -> Iterator[None]:
    """What torch raises becomes an error that says what was being done."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        need = f"{format_bytes(n_bytes)} for " if n_bytes else ""
        raise DeviceError(
            f"too little memory on {device.title}: {need}{what}, {format_bytes(device.free_bytes)} of "
            f"{format_bytes(device.total_bytes)} free",
            where=WHERE,
            hint="end what else uses the GPU, shorten the context, or use backend='native'",
        ) from error
    except torch.AcceleratorError as error:
        raise DeviceError(
            f"{device.title} failed at {what}: {str(error).splitlines()[0]}",
            where=WHERE,
            hint="load the model again; results of this step are lost",
        ) from error


def _need(package: str, hint: str) -> None:
    if find_spec(package) is None:
        raise DeviceError(f"the package {package!r} is not installed", where=WHERE, hint=hint)
