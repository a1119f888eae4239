"""The bytes of states: counted where they are taken, once, and never beyond the limit."""

from __future__ import annotations

import threading

import pytest

from moeflux import BudgetError
from moeflux.backends.account import StateAccount
from moeflux.backends.numpy.storage import HostStorage
from moeflux.backends.state import BLOCK, Rows

ROW = 2 * 4  # bytes


def table(account):
    return Rows(HostStorage("f32"), 2, account=account)


def test_what_is_shared_counts_once():
    account = StateAccount()
    rows = table(account)
    rows.extend(BLOCK + 1)
    assert account.used == rows.nbytes == 2 * BLOCK * ROW
    other = rows.share()
    assert account.used == rows.nbytes
    other.cut(5)
    other.extend(1)  # behind a shared beginning: a block of its own
    assert account.used == 3 * BLOCK * ROW
    del rows
    assert account.used == BLOCK * ROW
    del other
    assert account.used == 0


@pytest.mark.parametrize(("length", "n"), [(0, 1), (0, 0), (5, 1), (BLOCK, 1), (BLOCK - 1, 2), (3, 3 * BLOCK)])
@pytest.mark.parametrize("shared", [False, True])
def test_growth_is_known_beforehand(length, n, shared):
    account = StateAccount()
    rows = table(account)
    rows.extend(length)
    if shared:
        kept = rows.share()
        kept.extend(1)
    before, growth = account.used, rows.growth_bytes(n)
    rows.extend(n)
    assert account.used - before == growth


def test_the_limit_holds_and_the_error_has_the_numbers():
    account = StateAccount(limit=2 * BLOCK * ROW)
    rows = table(account)
    rows.extend(2 * BLOCK)
    assert account.room == 0
    with pytest.raises(BudgetError, match=r"2\.05 kB more for states, but 4\.1 kB of the 4\.1 kB"):
        rows.extend(1)
    assert account.used == account.limit


def test_those_who_can_give_way():
    class Kept:
        def __init__(self, account):
            self.charges = [account.take(10) for _ in range(3)]

        def give_way(self):
            return bool(self.charges) and self.charges.pop() is not None

    account = StateAccount(limit=30)
    kept = Kept(account)
    account.add_giver(kept)
    charge = account.take(15)
    assert len(kept.charges) == 1
    with pytest.raises(BudgetError):
        account.take(31)
    assert len(kept.charges) == 1  # for what can never be had, nobody gives way
    assert account.used == 25
    charge.end()
    charge.end()
    assert account.used == 10


def test_any_thread_takes_and_lets_go():
    account = StateAccount(limit=10**9)

    def work():
        for _ in range(2000):
            charge = account.take(3)
            del charge

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert account.used == 0
