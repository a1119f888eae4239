"""Compiled kernels on the device: loaded once, launched through the driver on torch's current stream."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from moeflux.backends.cuda.memory import AffineMatrix, Tensor
from moeflux.core.errors import DeviceError

WHERE = "backend 'cuda'"


class MatrixArgument(ctypes.Structure):
    """`Matrix` of source/tile.cuh."""

    _fields_ = (("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("biases", ctypes.c_void_p))


class NormedArgument(ctypes.Structure):
    """`Normed` of source/mixers.cuh."""

    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
    )


class ConvolutionArgument(ctypes.Structure):
    """`Convolution` of source/mixers.cuh."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("base", "place", "taps", "log", "bias"))


class KeptArgument(ctypes.Structure):
    """`Kept` of source/attention.cuh."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("base", "keys", "values"))


def matrix(m: AffineMatrix) -> MatrixArgument:
    return MatrixArgument(m.codes.data_ptr(), m.scales.data_ptr(), m.biases.data_ptr())


def normed(hidden: Tensor, squares: Tensor, norm: Tensor, eps: float) -> NormedArgument:
    return NormedArgument(hidden.data_ptr(), squares.data_ptr(), norm.data_ptr(), eps)


class Kernel:
    """One function. `threads` of a block and its dynamic shared memory are fixed."""

    def __init__(self, driver: Any, function: Any, name: str, threads: int, shared_bytes: int) -> None:
        self._driver, self._function, self._name = driver, function, name
        self._config = driver.CUlaunchConfig()
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = threads, 1, 1
        self._config.gridDimY = self._config.gridDimZ = 1
        self._config.sharedMemBytes = shared_bytes
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        self._config.attrs = [overlap]
        if shared_bytes:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            expect(driver, driver.cuFuncSetAttribute(function, limit, shared_bytes), f"making room for kernel {name}")

    def __call__(self, blocks: int, *arguments: Any, pdl: bool = False) -> None:
        """Tensors go as their address, integers and floats in 32 bits, structures as they are."""
        values = [_argument(a) for a in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        config = self._config
        config.gridDimX, config.numAttrs = blocks, int(pdl)
        config.hStream = torch.cuda.current_stream().cuda_stream
        result = self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(places), 0)
        expect(self._driver, result, f"launching kernel {self._name}")


class Module:
    """Machine code, loaded into torch's context."""

    def __init__(self, code: bytes) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        torch.cuda.current_stream()  # makes torch's context this thread's
        (self._module,) = expect(driver, driver.cuModuleLoadData(code), "loading compiled kernels")

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Kernel:
        found = self._driver.cuModuleGetFunction(self._module, name.encode())
        (function,) = expect(self._driver, found, f"looking for kernel {name}")
        return Kernel(self._driver, function, name, threads, shared_bytes)


def expect(driver: Any, result: tuple[Any, ...], doing: str) -> tuple[Any, ...]:
    """What a driver call gave, without its status."""
    status, *values = result
    if int(status):
        _, text = driver.cuGetErrorString(status)
        raise DeviceError(
            f"{doing} failed: {text.decode() if text else status}",
            where=WHERE,
            hint="update the driver, or use the Triton kernels (kernels='triton')",
        )
    return tuple(values)


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int(value) if isinstance(value, int) else value
