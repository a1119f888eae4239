"""A device in host memory that takes its time: copies land late and in any order, work is done late but in its own order."""

from __future__ import annotations

import random

import numpy as np


class FakeTicket:
    def __init__(self, device):
        self._device, self.done = device, False

    def wait(self):
        while not self.done:
            self._device.tick()


class FakeDevice:
    """Slots of a few bytes. Whatever is read is read when it is done, not when it was asked for."""

    def __init__(self, n_slots, size, seed=0):
        self.n_slots, self.slots = n_slots, np.zeros((n_slots, size), np.uint8)
        self._rng = random.Random(seed)
        self._copies = []  # slot, source, ticket
        self._work = []  # function, ticket, copies that come first
        self._joined = []
        self.fail = False

    def copy_in(self, slot, key, source):
        if self.fail:
            raise OSError("the device is gone")
        assert all(slot != other for other, _, _ in self._copies), "two copies into one slot"
        ticket = FakeTicket(self)
        self._copies.append((slot, source, ticket))
        return ticket

    def join(self, copies):
        self._joined += copies

    def passed(self):
        return self.ask(lambda: None)

    def ask(self, work):
        """Work on what lies in slots, in the order in which it was asked for."""
        ticket = FakeTicket(self)
        self._work.append((work, ticket, list(self._joined)))
        return ticket

    def tick(self):
        """One thing happens: a copy lands, whichever, or the oldest work is done if its copies have landed."""
        ready = [self._land] * len(self._copies)
        if self._work and all(copy.done for copy in self._work[0][2]):
            ready.append(self._do)
        assert ready, "nothing can happen any more"
        self._rng.choice(ready)()

    def drain(self):
        while self._copies or self._work:
            self.tick()

    def _land(self):
        slot, source, ticket = self._copies.pop(self._rng.randrange(len(self._copies)))
        self.slots[slot] = source
        ticket.done = True

    def _do(self):
        work, ticket, _ = self._work.pop(0)
        work()
        ticket.done = True
        self._joined = [copy for copy in self._joined if not copy.done]
