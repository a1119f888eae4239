import threading

import pytest

from moeflux.backends.ring import Ring
from moeflux.core.errors import OptionError, RingFullError, StateError


@pytest.fixture(params=[0, 1, 3])
def ring(request):
    ring = Ring(request.param)
    yield ring
    ring.close()


def test_results_come_in_the_order_of_the_beginnings(ring):
    results, begun = [], 0
    while len(results) < 7:
        while begun < 7 and len(ring) < max(1, ring.depth):
            ring.begin(lambda n=begun: n * n)
            begun += 1
        results.append(ring.complete())
    assert results == [0, 1, 4, 9, 16, 25, 36]


def test_a_full_ring_refuses_and_loses_nothing(ring):
    most = max(1, ring.depth)
    for n in range(most):
        ring.begin(lambda n=n: n)
    with pytest.raises(RingFullError, match=f"{most} dispatches are in flight"):
        ring.begin(lambda: 99)
    assert [ring.complete() for _ in range(most)] == list(range(most))


def test_an_error_comes_out_of_complete_and_the_ring_goes_on(ring):
    def fails():
        raise ValueError("no expert")

    ring.begin(fails)
    with pytest.raises(ValueError, match="no expert"):
        ring.complete()
    ring.begin(lambda: 1)
    assert ring.complete() == 1


def test_completing_nothing_is_an_error(ring):
    with pytest.raises(StateError, match="no dispatch"):
        ring.complete()


def test_discard_waits_for_what_is_in_flight():
    ring, go, done = Ring(2), threading.Event(), []

    def slow():
        go.wait(5)
        done.append(1)

    def fails():
        raise ValueError

    ring.begin(slow)
    ring.begin(fails)
    go.set()
    ring.discard()
    assert done == [1]
    assert len(ring) == 0
    ring.close()


def test_a_dispatch_runs_while_the_caller_goes_on():
    ring, seen = Ring(1), threading.Event()
    ring.begin(lambda: seen.wait(5))
    seen.set()  # at depth 0 this line would come too late
    assert ring.complete() is True
    ring.close()


def test_two_rings_never_mix():
    first, second = Ring(1), Ring(1)
    first.begin(lambda: "first")
    second.begin(lambda: "second")
    assert (second.complete(), first.complete()) == ("second", "first")
    first.close()
    second.close()


def test_a_negative_depth_is_refused():
    with pytest.raises(OptionError, match="-1"):
        Ring(-1)
