"""Coding agents and SDKs in JavaScript, pinned, from `.agents`, which `make agents` sets up: each does its loop with a
scripted model. The engine computes every step; a script replaces the logits (see `serve/scripted`)."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from serve.scripted_model import SCRIPTED, scripted_model
from serve.server import serving

HERE = Path(__file__).parent
AGENTS = Path(os.environ.get("MOEFLUX_AGENTS", HERE.parent.parent / ".agents"))
PACKAGES = AGENTS / "node_modules"
CONTEXT = 65536
ASKED = "make a file"
SAID = "the quick brown fox"

pytestmark = pytest.mark.skipif(
    not (PACKAGES / "node").exists(), reason="NO .agents: pi, codex, opencode, qwen-code, continue and JavaScript SDKs"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    env = {"PYTHONPATH": str(SCRIPTED), "SCRIPTED_COMMAND": "echo made > made.txt"}
    options = ("--context", str(CONTEXT), "--prefixes", "256MB", "--parallel", "2")
    with serving(folder, *options, model=scripted_model(folder / "model"), env=env) as running:
        yield running


class Place:
    """A home and a folder to work in, with nothing of ours in the environment."""

    def __init__(self, folder, server):
        self.home, self.work, self.server = folder / "home", folder / "work", server
        self.home.mkdir()
        self.work.mkdir()
        subprocess.run(["git", "init", "-q", "."], cwd=self.work, check=True)

    def write(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text))

    def run(self, *command, **env):
        path = f"{PACKAGES}/node/bin:{PACKAGES}/.bin:/usr/local/bin:/usr/bin:/bin"
        return subprocess.run(
            [str(PACKAGES / ".bin" / command[0]), *command[1:]], cwd=self.work, stdin=subprocess.DEVNULL,
            env={"HOME": str(self.home), "PATH": path, **env}, capture_output=True, text=True, timeout=180,
        )  # fmt: skip

    def requests(self):
        return [line for line in self.server.lines() if line.get("logger") == "moeflux.requests" and "prompt_tokens" in line]


@pytest.fixture
def place(tmp_path, server):
    return Place(tmp_path, server)


def canary(place, url):
    """What compatcanary finds."""
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    scan = ("scan", "--base-url", f"{url}/v1", "--model", model["id"], "--profile", "modern", "--format", "json")
    return json.loads(place.run("compatcanary", *scan, OPENAI_API_KEY="k").stdout)


def pi(place, url):
    model = {"id": "M", "contextWindow": CONTEXT, "maxTokens": 4096}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "k", "models": [model]}
    place.write(place.home / ".pi/agent/models.json", {"providers": {"moeflux": provider}})
    return place.run("pi", "-p", ASKED, "--provider", "moeflux", "--model", "M", PI_OFFLINE="1")


def codex(place, url):
    place.write(
        place.home / ".codex/config.toml",
        f'model = "M"\nmodel_provider = "moeflux"\napproval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        f'model_context_window = {CONTEXT}\n[model_providers.moeflux]\nname = "moeflux"\nbase_url = "{url}/v1"\n'
        f'wire_api = "responses"\nenv_key = "MOEFLUX_API_KEY"\n',
    )
    return place.run("codex", "exec", "--skip-git-repo-check", ASKED, MOEFLUX_API_KEY="k")


def opencode(place, url):
    models = {"M": {"limit": {"context": CONTEXT, "output": 4096}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "k"}, "models": models}
    config = {"autoupdate": False, "share": "disabled", "permission": "allow", "provider": {"moeflux": provider},
              "model": "moeflux/M", "small_model": "moeflux/M"}  # fmt: skip
    place.write(place.work / "opencode.json", config)
    return place.run("opencode", "run", ASKED)


def qwen(place, url):
    env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "M"}
    return place.run("qwen", "-p", ASKED, "--yolo", "--auth-type", "openai", **env)


def continued(place, url):
    lines = ["name: test", "version: 1.0.0", "schema: v1", "models:", "  - name: M", "    provider: openai", "    model: M",
             f"    apiBase: {url}/v1", "    apiKey: k", "    roles: [chat]", "    capabilities: [tool_use]"]  # fmt: skip
    place.write(place.work / "config.yaml", "\n".join(lines))
    return place.run("cn", "-p", ASKED, "--config", "config.yaml", "--auto")


def claude(place, url):
    """Not one of the packages of `make agents`, because of its licence: who has it there tests it too."""
    if not (PACKAGES / ".bin/claude").exists():
        pytest.skip("NO claude in .agents: npm install --prefix .agents @anthropic-ai/claude-code@2.1.325")
    env = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "k", "ANTHROPIC_MODEL": "M",
           "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT), "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",
           "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}  # fmt: skip
    return place.run("claude", "-p", ASKED, "--allowedTools", "Bash", "--output-format", "json", **env)


@pytest.mark.parametrize("agent", [pi, codex, opencode, qwen, continued, claude])
def test_an_agent_does_its_loop(place, server, agent):
    """It calls its shell, sends the result back, and says what came; its second turn runs little but what is new."""
    before = len(place.requests())
    ran = agent(place, server.url)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (place.work / "made.txt").read_text() == "made\n", ran.stdout + ran.stderr
    assert SAID in ran.stdout + ran.stderr
    time.sleep(0.2)
    asked = place.requests()[before:]
    assert len(asked) >= 2
    last = max(asked, key=lambda line: line["prompt_tokens"])
    assert last["cached_tokens"] >= 0.6 * last["prompt_tokens"], asked


def test_sdks_in_javascript(server):
    script = [str(PACKAGES / "node/bin/node"), str(HERE / "agents/sdks.mjs"), server.url, str(AGENTS)]
    ran = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    words = "It says 1: the quick brown fox.\nThat is all."
    names = ("chat", "chatStream", "response", "responseStream", "message", "messageStream")
    assert [seen[name] for name in names] == [words] * len(names)
    assert seen["chatCall"]["name"] == "read"
    assert json.loads(seen["chatCall"]["arguments"]) == seen["messageCall"] == {"path": "file 1.txt"}
    assert seen["refused"] == [400, True]
    assert 0 <= seen["person"]["age"] <= 120
    assert seen["aborted"]
    assert seen["read"] > 0
    assert seen["missed"] == "previous_message_not_found"


def test_compatcanary(place):
    """Models, chat, streams, a forced call, a strict schema, responses."""
    report = canary(place, place.server.url)
    assert report["summary"]["total"] == 7
    assert {check["id"]: check["status"] for check in report["results"] if check["status"] != "pass"} == {}
