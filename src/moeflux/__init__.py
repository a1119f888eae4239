"""moeflux: mixture-of-experts language models larger than memory, on one machine."""

from moeflux.api import Engine, load
from moeflux.core.errors import (
    BudgetError,
    CancelledError,
    ClosedError,
    ConfigError,
    CutError,
    DeadlineError,
    FormatError,
    InputError,
    InternalError,
    MissingTensorError,
    MoefluxError,
    NumericError,
    OptionError,
    OverloadError,
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
from moeflux.session.handle import Handle, RequestOptions
from moeflux.session.prefixes import PrefixStore
from moeflux.session.prompt import Conversation
from moeflux.session.session import Session
from moeflux.session.worker import Worker, WorkerOptions

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CancelFlag",
    "CancelledError",
    "ClosedError",
    "ConfigError",
    "Conversation",
    "CutError",
    "DeadlineError",
    "Engine",
    "Finish",
    "FormatError",
    "Grammar",
    "Handle",
    "InputError",
    "InternalError",
    "Limits",
    "MissingTensorError",
    "MoefluxError",
    "NumericError",
    "OptionError",
    "OverloadError",
    "PrefixStore",
    "ReadError",
    "RequestOptions",
    "Segment",
    "Session",
    "SnapshotError",
    "StateError",
    "Token",
    "Trace",
    "UnsupportedModelError",
    "Usage",
    "Worker",
    "WorkerOptions",
    "WriteError",
    "load",
]
