"""What is refused: with the right status, in the words that clients look for, and never with a path or a trace."""

from __future__ import annotations

import pytest

from serve.server import STORY, events, serving
from session.models import chat_model

CHAT = "/v1/chat/completions"


def refused(server, body, path=CHAT, **headers):
    answer = server.post(path, {"model": "m", "messages": STORY, "max_tokens": 4, **body}, **headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "/" not in error["message"].replace("and/or", "")
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": "hello"}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}],
          "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_mistakes_of_a_client(server, body, param):
    assert refused(server, body)["param"] == param


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        {"not": {"type": "string"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
def test_schemas_that_nothing_fits_or_that_are_too_much(server, schema):
    refused(server, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})


def test_a_schema_that_is_deeper_than_any_parser(server):
    deep = '{"type":"array","items":' * 5000 + "{}" + "}" * 5000
    body = f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],"response_format":{deep}}}'
    with server.client() as client:
        answer = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "m"}', b'{"messages": []}'])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_none(server, path, content):
    with server.client() as client:
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_prompt_beyond_the_context_in_the_words_that_agents_look_for(server):
    long = [{"role": "user", "content": "word " * 6000}]
    error = refused(server, {"messages": long})
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 4096 tokens. However, your messages resulted in "
    )
    refused(server, {"messages": long, "stream": True})  # before any stream begins


def test_more_tokens_than_fit_are_cut_and_not_refused(server):
    long = [{"role": "user", "content": "word " * 3900}]
    answer = server.chat(long, max_tokens=32000, logit_bias={"2": -100, "0": -100})
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert 4096 <= usage["total_tokens"] <= 4097


def test_paths_and_methods_that_are_not_there(server):
    for path, status in (("/v1/embeddings", 404), ("/nothing", 404), ("/v1/models/other", 404)):
        answer = server.get(path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "not_found_error"
    assert server.get(CHAT).status_code == 405
    with server.client() as client:
        assert client.head("/").status_code == 200
        assert client.head("/health").status_code == 200
        assert client.head("/api/hello").status_code == 404


def test_special_tokens_in_a_message_stay_text(server):
    plain = server.chat([{"role": "user", "content": "a b"}])["usage"]["prompt_tokens"]
    spelled = server.chat([{"role": "user", "content": "a<|im_end|>b"}])["usage"]["prompt_tokens"]
    assert spelled > plain + 1  # the spelling, not the token


def test_errors_are_errors_in_a_stream_too(server):
    with server.client() as client:
        answer = client.post(CHAT, json={"model": "m", "messages": [], "stream": True})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_every_answer_has_an_id(server):
    own = server.get("/version", **{"x-request-id": "my-id.1"})
    assert own.headers["x-request-id"] == own.headers["request-id"] == "my-id.1"
    strange = server.get("/version", **{"x-request-id": "a b\tc"})
    assert strange.headers["x-request-id"].startswith("req_")
    with server.client() as client:
        body = {"model": "m", "messages": STORY, "max_tokens": 2, "stream": True}
        with client.stream("POST", CHAT, json=body) as answer:
            assert answer.headers["x-request-id"].startswith("req_")
            answer.read()
        assert list(events(client, CHAT, body))[-1] == "[DONE]"


def test_a_model_without_a_template_continues_texts(tmp_path):
    with serving(tmp_path, "--context", "512", model=chat_model(tmp_path / "model", template=None)) as bare:
        error = refused(bare, {})
        assert "template" in error["message"]
        assert bare.post("/v1/completions", {"model": "m", "prompt": "the", "max_tokens": 2}).status_code == 200
