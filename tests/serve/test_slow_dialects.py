"""A slow engine in the other dialects: events as signs of life, a full line, a time that is over, clients that leave."""

from __future__ import annotations

import json

import pytest

from serve.server import STORY, serving, wait_until
from serve.test_slow import LONG, Stream, idle

ASKED = {"model": "m", "messages": STORY, "max_tokens": 2000, "temperature": 0}
ANSWERED = {"model": "m", "input": STORY[0]["content"], "max_output_tokens": 2000, "temperature": 0}
PATHS = {"/v1/messages": ASKED, "/v1/responses": ANSWERED}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """One request runs, one may wait."""
    options = ("--context", "4096", "--parallel", "1", "--max-queue", "1", "--heartbeat", "0.05", "--prefixes", "64MB")
    with serving(tmp_path_factory.mktemp("narrow"), *options) as server:
        yield server


def events(lines):
    """Name and data of each event, as they come."""
    name = None
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", PATHS)
def test_signs_of_life_are_events(narrow, path):
    """Comments would not do: there are clients that count events only."""
    running = Stream(narrow)
    running.read_until("content")
    with narrow.client() as client, client.stream("POST", path, json={**PATHS[path], "stream": True}) as answer:
        seen, numbers = [], []
        for name, data in events(answer.iter_lines()):
            assert name == data["type"]
            seen.append(name)
            numbers.append(data.get("sequence_number"))
            if len(seen) == 6:
                break
    alive = "ping" if path == "/v1/messages" else "response.in_progress"
    assert seen[-4:] == [alive] * 4
    assert path == "/v1/messages" or numbers == list(range(6))
    running.leave()
    wait_until(lambda: idle(narrow))


@pytest.mark.parametrize("path", PATHS)
def test_a_full_line(narrow, path):
    streams = [Stream(narrow)]
    streams[0].read_until("content")
    wait_until(lambda: narrow.get("/status").json()["running"] == 1)
    streams.append(Stream(narrow))
    refused = narrow.post(path, {**PATHS[path], "stream": True})
    assert refused.status_code == (529 if path == "/v1/messages" else 429)
    assert int(refused.headers["retry-after"]) >= 1
    kind = refused.json()["error"]["type"]
    assert kind == ("overloaded_error" if path == "/v1/messages" else "rate_limit_error")
    for stream in streams:
        stream.leave()
    wait_until(lambda: idle(narrow))


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_finds_its_prompt_again(narrow, path):
    words = f"{path} {LONG}"
    body = {"messages": [{"role": "user", "content": words}]} if path == "/v1/messages" else {"input": words}
    body = {**PATHS[path], **body}
    with narrow.client() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
        for name, _ in events(answer.iter_lines()):
            if name in ("content_block_start", "response.output_item.added"):
                break
    wait_until(lambda: idle(narrow))
    short = {"max_tokens": 4} if path == "/v1/messages" else {"max_output_tokens": 4}
    usage = narrow.post(path, {**body, **short}).json()["usage"]
    read = usage["cache_read_input_tokens"] if path == "/v1/messages" else usage["input_tokens_details"]["cached_tokens"]
    assert read > 2000


def test_a_time_that_is_over_is_told_in_the_stream(tmp_path):
    with serving(tmp_path, "--context", "4096", "--deadline", "0.4") as server:
        for path, body in PATHS.items():
            with server.client() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
                assert answer.status_code == 200
                *_, (name, data) = events(answer.iter_lines())
            if path == "/v1/messages":
                assert (name, data["error"]["type"]) == ("error", "timeout_error")
            else:
                assert name == "response.failed"
                assert data["response"]["status"] == "failed"
                assert data["response"]["error"]["code"] == "timeout_error"
