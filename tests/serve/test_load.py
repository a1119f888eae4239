"""Small here; `make soak-serve` is the long one."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time

import httpx
import pytest

from serve.load import BAD, TIGHT, faulty, run
from serve.server import STORY, serving

CHAT = "/v1/chat/completions"


def test_many_clients_get_what_each_would_get_alone(server, tmp_path):
    with serving(tmp_path, *TIGHT) as tight:
        tally = run(tight, server, clients=10, seconds=4, seed=1)
    assert {name: tally[name] for name in BAD if tally[name]} == {}, tally
    assert tally["right"] > 10
    assert tally["left"] > 5
    assert tally["failed"] == 0


def test_many_clients_while_the_drive_fails(server, tmp_path, shim):
    when = tmp_path / "failing"
    with serving(tmp_path, *TIGHT, env=faulty(shim, 100, when)) as tight:
        when.touch()
        tally = run(tight, server, clients=6, seconds=4, seed=2)
    assert {name: tally[name] for name in BAD if tally[name] and name != "grown"} == {}, tally
    assert tally["right"] > 0
    assert tally["failed"] > 0


@pytest.mark.parametrize("times", [3])
def test_a_server_that_is_killed_under_load_starts_again_with_whole_states(tmp_path, times):
    kept = tmp_path / "kept"
    kept.mkdir()
    options = ("--context", "2048", "--prefix-folder", str(kept), "--parallel", "2")
    first = [{"role": "user", "content": "A fox and a bear went to the river. " * 60}]
    wanted, rng = None, random.Random(0)
    for i in range(times + 1):
        with serving(tmp_path, *options) as server:
            answer = server.chat(first, max_tokens=10)
            wanted = wanted or answer["choices"]
            assert answer["choices"] == wanted
            if i > 0:
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > answer["usage"]["prompt_tokens"] - 40
            if i < times:
                wait_for_states(kept)
                kill_under_load(server, rng)
    assert not list(kept.rglob("*.tmp*"))


def wait_for_states(kept):
    end = time.monotonic() + 20
    while not any(path.is_file() for path in kept.rglob("*")):
        assert time.monotonic() < end
        time.sleep(0.02)


def kill_under_load(server, rng):
    """While requests run, and states are being written."""

    def ask(i):
        messages = [{"role": "user", "content": f"{i} " + "one two three " * 200}]
        body = {"model": "m", "messages": messages, "max_tokens": 200, "stream": i % 2 == 0}
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(server.url + CHAT, json=body, timeout=60)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2 + rng.random())
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(60)
    for thread in threads:
        thread.join()


def test_a_failing_drive_is_an_error_of_its_dialect(server, tmp_path, shim):
    """Streams that have begun end with an error and no [DONE]; others with status 500; the server goes on."""
    when = tmp_path / "failing"
    with serving(tmp_path, "--slots", "12", "--context", "2048", env=faulty(shim, 1024, when)) as broken:
        whole = broken.chat()
        when.touch()
        answer = broken.post(CHAT, {"model": "m", "messages": STORY, "max_tokens": 200})
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["type"] == "server_error"
        assert "/" not in error["message"]
        streamed = broken.post(CHAT, {"model": "m", "messages": STORY, "max_tokens": 200, "stream": True}).text
        last = [line for line in streamed.splitlines() if line.startswith("data: ")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert broken.get("/health").status_code == 200
        when.unlink()
        assert broken.chat()["choices"] == whole["choices"]
