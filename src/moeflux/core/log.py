"""The library's logger. The library never prints; the command line decides what of this a person sees."""

from __future__ import annotations

import logging

log = logging.getLogger("moeflux")
log.addHandler(logging.NullHandler())
