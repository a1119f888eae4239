"""Ending a forward from another thread, or from the handler of a signal."""

from moeflux.store.cancel import CancelFlag

__all__ = ["CancelFlag"]
