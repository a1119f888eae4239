"""llm-comply in the formats of Messages and Responses. It is one of the clients that `make clients` sets up."""

from __future__ import annotations

import json

import pytest

from serve.scripted_model import scripted_model, serving_script
from serve.test_clients import ENVIRONMENT, run

pytestmark = pytest.mark.skipif(not ENVIRONMENT.exists(), reason="NO .venv-clients: llm-comply")
THOUGHT = "unknown SSE event type: response.reasoning_text"
FORMATS = {
    "anthropic": ("--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"),
    "open-responses": (),
    "openai-chat": (),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comply")
    with serving_script(folder, scripted_model(folder / "model")) as running:
        yield running


@pytest.mark.parametrize("format", FORMATS)
def test_llm_comply_finds_nothing_wrong(script, format):
    """Its checks of images want acceptance: a text model answers 400, and they are left out. It does not know the events
    that OpenAI's own SDK has for thoughts."""
    ran = run("llm-comply", "--format", format, "-u", f"{script.url}/v1", "-k", "k", "-m", "m", "--json", *FORMATS[format])
    report = json.loads(ran.stdout[ran.stdout.index("{") :])
    results = report.get("results") or report.get("tests") or report.get("checks")
    failed = {check.get("id") or check.get("name"): check for check in results if check.get("status") == "failed"}
    errors = {name: [e for e in check["errors"] if THOUGHT not in e] for name, check in failed.items()}
    assert {name: found for name, found in errors.items() if found and "image" not in name} == {}
    assert sum(check.get("status") == "passed" for check in results) >= 6
