"""Byte arithmetic of published shapes, against a table worked out independently of this code."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from moeflux.bench.shapes import SHAPES, published_config
from moeflux.cli.main import app

# total and active parameters (B), one expert (MB), all experts, trunk (GB), streamed and trunk read per token (GB),
# key-value bytes per token in bf16
TABLE = {
    "qwen3.5-35b-a3b": (34.7, 2.95, 1.769, 18.1, 1.39, 0.566, 1.10, 20480),
    "qwen3.5-122b-a10b": (122.1, 9.01, 5.308, 65.2, 3.48, 2.038, 3.05, 24576),
    "qwen3.5-397b-a17b": (396.3, 16.33, 7.078, 217.4, 5.57, 4.247, 5.00, 30720),
    "qwen3-next-80b-a3b": (79.7, 3.56, 1.769, 43.5, 1.36, 0.849, 1.18, 24576),
    "qwen3-30b-a3b": (30.5, 3.04, 2.654, 16.3, 0.87, 1.019, 0.70, 98304),
    "qwen3-235b-a22b": (235.1, 21.57, 10.617, 127.7, 4.52, 7.984, 4.17, 192512),
    "deepseek-v3": (671.0, 36.62, 24.773, 367.8, 9.78, 11.494, 9.26, 70272),
    "cogito-v2-671b": (671.0, 36.62, 24.773, 367.8, 9.78, 11.494, 9.26, 70272),
    "kimi-k2": (1026.4, 31.69, 24.773, 570.8, 6.83, 11.891, 6.17, 70272),
}

DELTA_STATE_MB = {
    "qwen3.5-35b-a3b": 62.91,
    "qwen3.5-122b-a10b": 150.99,
    "qwen3.5-397b-a17b": 188.74,
    "qwen3-next-80b-a3b": 75.50,
}


def inspect(shape, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published_config(shape)))
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("shape", SHAPES)
def test_inspect_reproduces_the_table(shape, tmp_path):
    sizes = inspect(shape, tmp_path)["sizes"]
    total, active, expert, experts, trunk, streamed, read, kv = TABLE[shape]
    assert sizes["total_params"] / 1e9 == pytest.approx(total, abs=0.06)
    assert sizes["active_params"] / 1e9 == pytest.approx(active, abs=0.011)
    assert sizes["expert"] / 1e6 == pytest.approx(expert, abs=0.0006)
    assert sizes["experts"] / 1e9 == pytest.approx(experts, abs=0.06)
    # The table leaves out norms and convolutions, up to 6 MB.
    assert sizes["trunk"] / 1e9 == pytest.approx(trunk, abs=0.005 + 0.006)
    assert sizes["streamed_per_token"] / 1e9 == pytest.approx(streamed, abs=0.0006)
    assert sizes["trunk_read_per_token"] / 1e9 == pytest.approx(read, abs=0.005 + 0.006)
    assert sizes["state_per_token"] == kv


@pytest.mark.parametrize("shape", DELTA_STATE_MB)
def test_recurrent_state(shape, tmp_path):
    report = inspect(shape, tmp_path)
    text = published_config(shape).get("text_config", published_config(shape))
    channels = 2 * 16 * 128 + text["linear_num_value_heads"] * 128
    conv = report["mixers"]["gated delta net"] * 3 * channels * 4
    assert (report["sizes"]["state_per_sequence"] - conv) / 1e6 == pytest.approx(DELTA_STATE_MB[shape], abs=0.006)
