"""A slow engine, well behaved: signs of life, a bounded line, turns, clients that leave, and an end that loses nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve.server import STORY, events, serving, wait_until

CHAT = "/v1/chat/completions"
ENDLESS = {"model": "m", "messages": STORY, "max_tokens": 3500, "logit_bias": {"2": -100, "0": -100}, "stream": True}
LONG = "The cat sat on the mat and looked at the moon. " * 250  # about 3,000 tokens


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """One request runs, three may wait."""
    options = ("--context", "4096", "--parallel", "1", "--max-queue", "3", "--heartbeat", "0.05", "--drain", "0.2")
    with serving(tmp_path_factory.mktemp("narrow"), *options) as server:
        yield server


def idle(server):
    status = server.get("/status").json()
    return status["running"] == status["waiting"] == 0


class Stream:
    """A request under way."""

    def __init__(self, server, **more):
        self.client = server.client()
        self._manager = self.client.stream("POST", CHAT, json={**ENDLESS, **more})
        self.answer = self._manager.__enter__()
        self.lines = self.answer.iter_lines()

    def read_until(self, word):
        for line in self.lines:
            if word in line:
                return line
        raise AssertionError(f"no {word} came")

    def leave(self):
        self._manager.__exit__(None, None, None)
        self.client.close()


def test_a_full_line_is_said_with_a_time_to_come_back(narrow):
    streams = [Stream(narrow)]
    streams[0].read_until("content")
    wait_until(lambda: narrow.get("/status").json()["running"] == 1)
    streams += [Stream(narrow) for _ in range(3)]  # their headers have come: they were taken
    assert narrow.get("/status").json()["waiting"] == 3
    refused = narrow.post(CHAT, {**ENDLESS, "stream": False})
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert refused.json()["error"]["type"] == "rate_limit_error"
    for stream in streams:
        stream.leave()
    wait_until(lambda: idle(narrow))
    figures = narrow.get("/metrics").text
    assert "moeflux_rejected_total 1.0" in figures


def test_signs_of_life_while_it_waits_and_while_the_prompt_is_run(narrow):
    first = Stream(narrow)
    first.read_until("content")
    waiting = Stream(narrow)
    assert waiting.answer.status_code == 200
    waiting.read_until('"role"')  # at once, though nothing runs for it
    for _ in range(2):  # an event, which clients see, that adds nothing
        assert '"finish_reason": null' in waiting.read_until('"delta": {}')
    waiting.leave()
    first.leave()
    wait_until(lambda: idle(narrow))
    with narrow.client() as client:
        body = {"model": "m", "messages": [{"role": "user", "content": LONG}], "max_tokens": 1, "stream": True}
        seen = list(events(client, CHAT, body))
    assert sum('"delta": {}' in data and '"finish_reason": null' in data for data in seen) >= 1
    assert seen[-1] == "[DONE]"


def test_a_client_that_leaves_frees_the_engine_and_finds_its_prompt_again(narrow):
    messages = [{"role": "user", "content": LONG + "And what did it see?"}]
    stream = Stream(narrow, messages=messages)
    stream.read_until('"role"')
    wait_until(lambda: any(a["generated"] for r in narrow.get("/status").json()["requests"] for a in r["answers"]))
    stream.leave()
    wait_until(lambda: idle(narrow))
    again = narrow.chat(messages, max_tokens=2)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= again["prompt_tokens"] - 8


def test_a_client_that_leaves_without_a_stream_frees_the_engine_too(narrow):
    with narrow.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json={**ENDLESS, "stream": False}, timeout=0.3)
    wait_until(lambda: idle(narrow))


def test_clients_take_turns(narrow):
    """One client has two requests in the line, then another one comes with one: that one is second."""

    def ask(name, session):
        body = {"model": "m", "messages": STORY, "max_tokens": 20, "logit_bias": {"2": -100, "0": -100}}
        assert narrow.post(CHAT, body, **{"x-session-id": session, "x-request-id": name}).status_code == 200

    blocker = Stream(narrow)
    blocker.read_until("content")
    with ThreadPoolExecutor(3) as pool:
        futures = []
        for n, (name, session) in enumerate((("first", "greedy"), ("third", "greedy"), ("second", "modest")), start=1):
            futures.append(pool.submit(ask, name, session))
            wait_until(lambda n=n: narrow.get("/status").json()["waiting"] == n)
        blocker.leave()
        for future in futures:
            future.result(60)
    names = ("first", "second", "third")
    assert tuple(line["request"] for line in narrow.lines() if line.get("request") in names) == names


def test_three_different_prompts_do_not_touch_each_other(narrow):
    """Nothing of one conversation is in another's answer, whatever was cancelled in between."""
    prompts = [[{"role": "user", "content": f"{word} " * 40}] for word in ("apple", "river", "winter")]
    alone = [narrow.chat(messages, max_tokens=30)["choices"] for messages in prompts]
    for messages in prompts:
        stream = Stream(narrow, messages=[*messages, {"role": "assistant", "content": "So"}])
        stream.read_until("content")
        stream.leave()
    assert [narrow.chat(messages, max_tokens=30)["choices"] for messages in prompts] == alone


def test_a_server_that_is_stopped_lets_running_answers_finish_and_finds_their_states_again(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    options = ("--context", "4096", "--prefix-folder", str(kept), "--parallel", "1", "--drain", "60")
    messages = [{"role": "user", "content": LONG}]
    with serving(tmp_path, *options) as server:
        running = Stream(server, messages=messages, max_tokens=900)
        running.read_until('"content"')
        wait_until(lambda: any(a["generated"] for r in server.get("/status").json()["requests"] for a in r["answers"]))
        waiting = Stream(server)
        server.process.terminate()
        ended = json.loads(waiting.read_until("error").removeprefix("data: "))
        assert ended["error"]["code"] == "unavailable"
        running.read_until('"finish_reason": "length"')
        running.read_until("[DONE]")
        assert server.process.wait(60) == 0
        running.leave()
        waiting.leave()
    assert any(kept.rglob("*"))
    with serving(tmp_path, *options) as server:
        usage = server.chat(messages, max_tokens=2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 8


def test_a_second_signal_does_not_wait(tmp_path):
    with serving(tmp_path, "--drain", "600", "--context", "4096") as server:
        stream = Stream(server)
        stream.read_until("content")
        server.process.terminate()
        wait_until(lambda: not _accepts(server))
        server.process.terminate()
        assert server.process.wait(60) == 0
        stream.leave()


def _accepts(server):
    try:
        httpx.get(server.url + "/health", timeout=5)
    except httpx.TransportError:
        return False
    return True


def test_a_request_whose_time_is_over(tmp_path):
    with serving(tmp_path, "--deadline", "0.5", "--context", "4096") as server:
        late = server.post(CHAT, {**ENDLESS, "stream": False})
        assert late.status_code == 504
        assert late.headers["x-should-retry"] == "false"
        assert late.json()["error"]["type"] == "timeout_error"
        stream = Stream(server)
        assert "timeout_error" in stream.read_until("error")
        stream.leave()
        assert server.chat(max_tokens=2)["choices"]
