"""Every error a user can meet. Each says what is wrong, where, with the numbers, and what to try next."""

from __future__ import annotations

from typing import ClassVar, Literal

Fault = Literal["client", "overload", "ours"]


class MoefluxError(Exception):
    """Base of all errors raised on purpose. `where` names a file, tensor, field or option; `hint` what to try.

    `fault` says whose it is, so that a server can answer with the right class of status: the caller's, who should ask
    differently; overload, so that the same request can succeed later; or ours, the machine's and the files'.
    """

    fault: ClassVar[Fault] = "ours"

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class ConfigError(MoefluxError):
    """A field of config.json is missing, contradictory, or has a value that would change the math unnoticed."""


class UnsupportedModelError(ConfigError):
    """The model type is not one that moeflux knows."""


class FormatError(MoefluxError):
    """A file does not hold what it says, or not what the config says."""


class MissingTensorError(FormatError):
    """A tensor or a shard that the model needs is not in the checkpoint."""


class ReadError(MoefluxError):
    """The operating system could not deliver bytes that the checkpoint promised."""


class NumericError(MoefluxError):
    """A value that must be finite is not."""


class WriteError(MoefluxError):
    """The operating system could not take bytes that were to be kept."""


class SnapshotError(FormatError):
    """A snapshot is damaged, of another model, or of a version that this program does not read."""


class BudgetError(MoefluxError):
    """The memory budget is below what the model needs."""


class InputError(MoefluxError):
    """Tokens or text that cannot be run."""

    fault = "client"


class ContextError(InputError):
    """A prompt of `n_tokens`, where `context` is the most that a sequence can have."""

    def __init__(self, n_tokens: int, context: int) -> None:
        self.n_tokens, self.context = n_tokens, context
        super().__init__(
            f"a prompt of {n_tokens} tokens, but the memory of this engine is planned for {context}",
            where="option 'context'",
            hint=f"load the model with context={n_tokens} or more",
        )


class OptionError(MoefluxError):
    """An option that does not exist, or that would do nothing."""

    fault = "client"


class StateError(MoefluxError):
    """A sequence was used in a way that its state does not allow."""


class CutError(StateError):
    """A state cannot be cut there. `restorable`: the nearest positions below and above where it can be had."""

    def __init__(self, position: int, restorable: tuple[int, ...], length: int) -> None:
        self.position = position
        self.restorable = restorable
        near = " and ".join(map(str, restorable))
        super().__init__(
            f"this model's state of {length} tokens cannot be cut at {position}, only restored; the nearest: {near}",
            hint="make a checkpoint where you want to return to, or use restore_nearest",
        )


class CancelledError(MoefluxError):
    """Work was stopped because its caller asked for it. Nothing is broken."""

    fault = "client"


class OverloadError(MoefluxError):
    """There is no room for another request now."""

    fault = "overload"


class DeadlineError(MoefluxError):
    """A request was not done within the time that it had."""

    fault = "overload"


class InternalError(MoefluxError):
    """Something that must not happen did. It is a mistake of this program."""


class RingFullError(StateError):
    """More expert dispatches were begun than the ring may hold."""


class DeviceError(MoefluxError):
    """A GPU that is not there, cannot be used, has too little memory or failed."""


class ClosedError(MoefluxError):
    """Something was used after `close()`."""
