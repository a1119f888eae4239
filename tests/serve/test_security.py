"""Who may ask: keys, names, pages, sizes; and what a log may say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serve.server import STORY, serving

CHAT = "/v1/chat/completions"
KEY, OTHER = "a-secret-key-1", "another-key-22"
BODY = {"model": "m", "messages": STORY, "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text(f"# keys\n{KEY}\n\n{OTHER}\n")
    (folder / "serve.toml").write_text(
        'alias = "fox"\nstrict-model = true\nallow_origin = ["http://page.example"]\nmax_tokens = 3\nport = 1\n'
    )
    options = ("--api-key-file", str(folder / "keys"), "--config", str(folder / "serve.toml"))
    with serving(folder, *options) as server:
        yield server


def test_without_a_key_nothing_but_health(guarded):
    assert guarded.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/status", "/openapi.json", "/version", "/tokenizer_info"):
        answer = guarded.get(path)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.post(CHAT, BODY).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {OTHER}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": KEY, "authorization": "Bearer wrong-one"}, 200),
        ({"authorization": "Bearer wrong-one"}, 401),
        ({"authorization": KEY}, 401),
        ({"x-api-key": KEY[:-1]}, 401),
        ({"x-api-key": KEY + "1"}, 401),
        ({"x-api-key": "# keys"}, 401),
    ],
)
def test_keys(guarded, headers, status):
    assert guarded.get("/v1/models", **headers).status_code == status


def test_a_strict_server_knows_its_models_name(guarded):
    key = {"x-api-key": KEY}
    answer = guarded.post(CHAT, BODY, **key)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    answer = guarded.post(CHAT, {**BODY, "model": "fox", "max_tokens": 50}, **key)
    assert answer.json()["model"] == "fox"
    assert answer.json()["usage"]["completion_tokens"] == 3  # what the config file allows


def test_names_of_other_servers_are_refused_where_there_is_no_key(server, guarded):
    for name, status in (("evil.example", 403), ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("", 403)):
        assert server.get("/version", host=name).status_code == status, name
    assert guarded.get("/version", host="evil.example", **{"x-api-key": KEY}).status_code == 200


def test_pages_from_elsewhere_are_refused(server, guarded):
    for origin in ("http://evil.example", "null", "http://localhost:1", "http://127.0.0.1"):
        answer = server.post(CHAT, BODY, origin=origin)
        assert answer.status_code == 403, origin
        assert "access-control-allow-origin" not in answer.headers
    assert server.post(CHAT, BODY, origin=server.url).status_code == 200
    key = {"x-api-key": KEY}
    answer = guarded.get("/v1/models", origin="http://page.example", **key)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://page.example"
    assert guarded.get("/v1/models", origin="http://other.example", **key).status_code == 403


def test_a_browser_may_ask_first_where_its_page_is_allowed(server, guarded):
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with guarded.client() as client:
        answer = client.options(CHAT, headers={"origin": "http://page.example", **asking})
        assert answer.status_code == 204
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    with server.client() as client:
        assert client.options(CHAT, headers={"origin": "http://page.example", **asking}).status_code == 403


def test_a_form_of_a_page_is_not_a_request(server):
    with server.client() as client:
        answer = client.post(CHAT, content=b'{"model":"m"}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400


def test_a_body_that_is_too_large(server):
    with server.client() as client:
        assert client.post(CHAT, content=b"x" * (33 * 2**20)).status_code == 413

        def endless():
            for _ in range(34):
                yield b"x" * 2**20

        assert client.post(CHAT, content=endless()).status_code == 413
    assert server.get("/health").status_code == 200


def test_the_log_says_how_much_and_never_what(server):
    secret = "zyzzyva gobbledygook"
    server.chat([{"role": "user", "content": secret}])
    server.post(CHAT, {"model": "m", "messages": [{"role": secret, "content": secret}]})
    server.post(CHAT, {"model": "m", "messages": [{"role": "user", "content": secret}], "stop": [secret, 5]})
    assert "zyzzyva" not in server.log.read_text()
    lines = [line for line in server.lines() if line.get("path") == CHAT]
    assert {"request", "status", "ms", "client", "method", "time"} <= set(lines[-1])
    assert any(line.get("generated_tokens") == 12 and line.get("reasons") == ["length"] for line in lines)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--host", "0.0.0.0"), "no key"),
        (("--host", "0.0.0.0", "--api-key", "short"), "not a key"),
        (("--port", "99999"), "port"),
        (("--prefix-folder", "/nonexistent"), "folder"),
        (("--config", "/nonexistent.toml"), "No such file"),
        (("--log", "xml"), "log"),
        (("/nonexistent-model", "--port", "0"), "no such file"),
    ],
)
def test_what_a_server_does_not_start_with(options, word):
    ran = subprocess.run([sys.executable, "-m", "moeflux", "serve", *options], capture_output=True, text=True, timeout=60)
    assert ran.returncode in (1, 2)
    assert word in ran.stderr
    assert "listening" not in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("text", "word"),
    [("prot = 5", "no such option"), ("parallel = 0", "too little"), ("port = '5'", "is no int"), ("port = ", "not TOML")],
)
def test_config_files_that_are_none(tmp_path, text, word):
    (tmp_path / "c.toml").write_text(text)
    command = [sys.executable, "-m", "moeflux", "serve", "--config", str(tmp_path / "c.toml")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert word in ran.stderr


def test_a_port_that_is_taken(server):
    port = server.url.rpartition(":")[2]
    ran = subprocess.run(
        [sys.executable, "-m", "moeflux", "serve", "--port", port], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 1
    assert "cannot listen" in ran.stderr
