"""What whoever runs the server sees, and what scoring tools ask for."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from serve.server import STORY

DASHBOARD = Path(__file__).parent.parent.parent / "examples" / "grafana.json"


def families(server):
    return {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}


def value(server, name, **labels):
    return sum(
        sample.value
        for family in families(server).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_health_and_version(server):
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/version").json() == {"version": version("moeflux")}


def test_the_model_has_the_fields_of_both_dialects(server):
    listed = server.get("/v1/models?limit=1000").json()
    (model,) = listed["data"]
    assert listed["object"] == "list"
    assert listed["first_id"] == listed["last_id"] == model["id"] == "moeflux-demo"
    assert listed["has_more"] is False
    assert model["object"] == model["type"] == "model"
    assert model["max_model_len"] == 4096
    assert server.get(f"/v1/models/{model['id']}").json() == model


def test_texts_and_tokens(server):
    text = "A fox, a bear — and 狐."
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 4096
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"] == text
    assert server.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"
    chat = server.post("/tokenize", {"messages": STORY}).json()
    assert chat["count"] == server.chat()["usage"]["prompt_tokens"]
    assert server.post("/tokenize", {}).status_code == 400
    assert server.post("/detokenize", {"tokens": [10**6]}).status_code == 400


def test_status_says_what_runs(server):
    status = server.get("/status").json()
    assert status["state"] == "ready"
    assert status["requests"] == []
    assert status["plan"]["context"] == 4096
    body = {"model": "m", "messages": STORY, "max_tokens": 3000, "stream": True, "logit_bias": {"2": -100, "0": -100}}
    named = {"x-request-id": "seen-1"}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body, headers=named) as answer:
        lines = answer.iter_lines()
        next(lines)
        (request,) = server.get("/status").json()["requests"]
    assert request["request"] == "seen-1"
    assert request["answers"][0]["state"] in ("queued", "prompt", "decode")


def test_figures_count_what_happened(server):
    names = ("moeflux_generated_tokens_total", "moeflux_time_to_first_token_seconds_count")
    before = [value(server, name) for name in names]
    read = value(server, "moeflux_prompt_tokens_total", source="read")
    routes = value(server, "moeflux_requests_total", route="/v1/chat/completions", status="200")
    server.chat(max_tokens=7)
    server.chat(max_tokens=7)
    assert [value(server, name) for name in names] == [before[0] + 14, before[1] + 2]
    assert value(server, "moeflux_prompt_tokens_total", source="read") > read
    assert value(server, "moeflux_requests_total", route="/v1/chat/completions", status="200") == routes + 2
    assert value(server, "moeflux_experts_total", found="hits") > 0
    server.get("/some/made-up/name")
    assert value(server, "moeflux_requests_total", route="other") >= 1
    assert value(server, "moeflux_ready") == 1


def test_the_dashboard_shows_figures_that_there_are(server):
    dashboard = json.loads(DASHBOARD.read_text())
    known = {sample.name for family in families(server).values() for sample in family.samples}
    known |= {name.replace("_created", "_bucket") for name in known}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(asked) >= 10
    for expression in asked:
        names = [
            word
            for word in expression.replace("(", " ").replace("{", " ").replace("[", " ").split()
            if word.startswith("moeflux_")
        ]
        assert names, expression
        assert set(names) <= known, expression


def test_the_schema_of_the_api_names_every_route(server):
    schema = server.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/health", "/status"):
        assert path in schema["paths"]
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert chat["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorAnswer")
    assert "422" not in chat["responses"]
