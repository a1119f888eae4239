"""moeflux: mixture-of-experts language models larger than memory, on one machine."""

from moeflux.api import Engine, load
from moeflux.core.errors import (
    BudgetError,
    ClosedError,
    ConfigError,
    FormatError,
    InputError,
    MissingTensorError,
    MoefluxError,
    NumericError,
    OptionError,
    ReadError,
    StateError,
    UnsupportedModelError,
)
from moeflux.runtime.batch import Segment
from moeflux.runtime.trace import Trace
from moeflux.session.generate import Token

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ClosedError",
    "ConfigError",
    "Engine",
    "FormatError",
    "InputError",
    "MissingTensorError",
    "MoefluxError",
    "NumericError",
    "OptionError",
    "ReadError",
    "Segment",
    "StateError",
    "Token",
    "Trace",
    "UnsupportedModelError",
    "load",
]
