"""The scripts in examples/ do what they say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moeflux.cli.serve import CONFIG
from serve.scripted_model import scripted_model, serving_script

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    with serving_script(folder, scripted_model(folder / "model")) as running:
        yield running


def run(name, url):
    command = [sys.executable, str(EXAMPLES / name), url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name != "structured_output.py"))
def test_scripts(script, name):
    ran = run(name, script.url)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


def test_structured_output(server):
    ran = run("structured_output.py", server.url)
    assert ran.returncode == 0, ran.stderr
    assert "legs=" in ran.stdout


def test_the_config_file_has_options_that_there_are():
    options = tomllib.loads((EXAMPLES / "serve.toml").read_text())
    assert {name.replace("-", "_") for name in options} <= set(CONFIG)
