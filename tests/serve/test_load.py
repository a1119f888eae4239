"""Small here; `make soak-serve` is the long one."""

from __future__ import annotations

import json

from serve.load import BAD, TIGHT, faulty, killed, run
from serve.server import STORY, serving

CHAT = "/v1/chat/completions"


def test_many_clients_get_what_each_would_get_alone(server, tmp_path):
    with serving(tmp_path, *TIGHT) as tight:
        tally = run(tight, server, clients=10, seconds=4, seed=1)
    assert {name: tally[name] for name in BAD if tally[name]} == {}, tally
    assert tally["right"] > 0
    assert tally["left"] > 0
    assert tally["failed"] == 0


def test_many_clients_while_the_drive_fails(server, tmp_path, shim):
    when = tmp_path / "failing"
    with serving(tmp_path, *TIGHT, env=faulty(shim, 100, when)) as tight:
        when.touch()
        tally = run(tight, server, clients=6, seconds=4, seed=2)
    assert {name: tally[name] for name in BAD if tally[name] and name != "grown"} == {}, tally
    assert tally["right"] > 0
    assert tally["failed"] > 0


def test_a_server_that_is_killed_under_load_starts_again_with_whole_states(tmp_path):
    killed(tmp_path, times=3, seed=0)


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
