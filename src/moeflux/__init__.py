"""moeflux: mixture-of-experts language models larger than memory, on one machine."""

from moeflux.api import Engine, load
from moeflux.core.errors import (
    BudgetError,
    CancelledError,
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
from moeflux.sampling.constraint import Grammar
from moeflux.session.events import Finish, Token

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CancelledError",
    "ClosedError",
    "ConfigError",
    "Engine",
    "Finish",
    "FormatError",
    "Grammar",
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
