"""moeflux: mixture-of-experts language models larger than memory, on one machine."""

from moeflux.api import Engine, load
from moeflux.core.errors import (
    BudgetError,
    CancelledError,
    ClosedError,
    ConfigError,
    CutError,
    FormatError,
    InputError,
    MissingTensorError,
    MoefluxError,
    NumericError,
    OptionError,
    ReadError,
    SnapshotError,
    StateError,
    UnsupportedModelError,
    WriteError,
)
from moeflux.runtime.batch import Segment
from moeflux.runtime.cancel import CancelFlag
from moeflux.runtime.trace import Trace
from moeflux.sampling.constraint import Grammar
from moeflux.session.entry import Limits
from moeflux.session.events import Finish, Token, Usage
from moeflux.session.prefixes import PrefixStore
from moeflux.session.session import Session

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CancelFlag",
    "CancelledError",
    "ClosedError",
    "ConfigError",
    "CutError",
    "Engine",
    "Finish",
    "FormatError",
    "Grammar",
    "InputError",
    "Limits",
    "MissingTensorError",
    "MoefluxError",
    "NumericError",
    "OptionError",
    "PrefixStore",
    "ReadError",
    "Segment",
    "Session",
    "SnapshotError",
    "StateError",
    "Token",
    "Trace",
    "UnsupportedModelError",
    "Usage",
    "WriteError",
    "load",
]
