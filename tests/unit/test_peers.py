"""The comparison with llama.cpp, as far as it goes without llama.cpp: its arithmetic, its files, its refusals."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from moeflux.bench.gguf import BLOCK_BYTES, Q4_0, gguf_bytes, metadata, tensors, write_gguf
from moeflux.bench.limits import Samples
from moeflux.bench.llama import peer_version
from moeflux.bench.peer_models import SHAPES, Models
from moeflux.bench.peers import PER_ROUND, PeerReport, PeerRow, bench_peers
from moeflux.bench.shapes import published_config
from moeflux.core.errors import MoefluxError, OptionError
from unit.test_synthetic import QUANT

SMALL = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "vocab_size": 1000, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
}  # fmt: skip


def test_a_missing_peer_is_refused_with_the_way_to_get_it():
    if importlib.util.find_spec("llama_cpp"):
        pytest.skip("llama_cpp IS INSTALLED in the project's own interpreter: its absence cannot be tested")
    with pytest.raises(OptionError, match="No module named 'llama_cpp'") as caught:
        peer_version(Path(sys.executable))
    assert "pip install llama-cpp-python" in str(caught.value)


def test_a_missing_interpreter_is_refused():
    with pytest.raises(OptionError, match="No such file"):
        peer_version(Path("/nowhere/python"))


def test_other_shapes_are_refused():
    with pytest.raises(OptionError, match="deepseek-v3"):
        Models.of("deepseek-v3", None, Path())


def test_ratios_compare_like_with_like():
    row = PeerRow("decode", Samples((8.0, 12.0, 9.0)), Samples((3.0, 2.0, 4.0, 3.0)))
    assert row.ratio == (3.0, 3.0)
    assert row.as_dict() == {
        "kind": "decode", "ours": [8.0, 12.0, 9.0], "llama_cpp": [3.0, 2.0, 4.0, 3.0],
        "ours_tok_s": [12.0, 9.0], "llama_cpp_tok_s": [4.0, 3.0], "ratio": [3.0, 3.0],
    }  # fmt: skip


def test_a_busy_machine_is_told():
    assert PeerReport((), (0.01, 0.02), (0.2, 0.2)).warnings == ()
    assert "97%" in PeerReport((), (0.01, 0.97), (0.0, 0.0)).warnings[0]
    assert "the host took 20%" in PeerReport((), (0.01, 0.02), (0.2, 0.1, 0.2, 0.0)).warnings[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_gguf_holds_as_many_weights_as_ours(shape):
    """The head is there, each expert is, and nothing twice: known totals, 4.5 bits for all but the small tensors."""
    config = published_config(shape)
    found = tensors(config)
    assert len({tensor.name for tensor in found}) == len(found)
    weights = sum(np.prod(tensor.dims, dtype=np.int64) for tensor in found)
    assert weights / 1e9 == pytest.approx({"qwen3-30b-a3b": 30.53, "qwen3.5-35b-a3b": 34.66}[shape], abs=0.01)
    assert gguf_bytes(config) * 8 / weights == pytest.approx(4.5, abs=0.05)
    assert all(tensor.dims[0] % 32 == 0 for tensor in found if tensor.type == Q4_0)


def test_gguf_bytes_are_where_the_header_says(tmp_path):
    path = tmp_path / "small.gguf"
    assert write_gguf(SMALL, path) == path.stat().st_size == gguf_bytes(SMALL)
    data = path.read_bytes()
    assert data[:4] == b"GGUF"
    assert struct.unpack_from("<IQQ", data, 4) == (3, len(tensors(SMALL)), len(metadata(SMALL)))
    name = b"token_embd.weight"
    at = data.index(name) + len(name)
    assert struct.unpack_from("<IQQIQ", data, at) == (2, 64, 1000, Q4_0, 0)
    body = len(data) - sum(tensor.nbytes + -tensor.nbytes % 32 for tensor in tensors(SMALL))
    blocks = np.frombuffer(data, np.uint8, 2000 * BLOCK_BYTES, body).reshape(2000, BLOCK_BYTES)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
    codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float32) - 8
    values = codes * scales
    assert values.std() == pytest.approx(1.0, abs=0.02)  # embeddings of unit variance
    assert abs(values.mean()) < 0.02


FAKE_LLAMA = """
LLAMA_LOAD_MODE_MMAP = 1
class _Parameters:
    load_mode, use_extra_bufts = -1, True
llama_model_default_params = llama_context_default_params = _Parameters
llama_token = __import__("ctypes").c_int
def llama_model_load_from_file(path, how):
    assert (how.load_mode, how.use_extra_bufts) == ((1, False) if CAPPED else (-1, True))
    return path
def llama_decode(context, batch):
    return 0
llama_batch_get_one = lambda ids, n: ids
llama_model_get_vocab = llama_get_memory = lambda of: of
llama_vocab_n_tokens = lambda vocab: 10
llama_get_logits_ith = lambda context, i: [0.0] * 10
llama_init_from_model = lambda model, how: model
llama_backend_init = llama_synchronize = llama_memory_clear = lambda *_: None
"""


class NoCap:
    """Making control groups needs rights that tests may not have."""

    def __init__(self, limit):
        assert limit == 900_000_000

    def command(self, command):
        return command

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


@pytest.mark.parametrize("cap", [None, 900_000_000], ids=["free", "capped"])
def test_both_sides_are_measured(tmp_path, monkeypatch, cap):
    """With a llama.cpp that does nothing: what each process is told and what comes back."""
    (tmp_path / "llama_cpp.py").write_text(f"CAPPED = {cap is not None}\n{FAKE_LLAMA}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("moeflux.bench.peers.MemoryCap", NoCap)
    config = SMALL | QUANT | {"moe_intermediate_size": 64, "head_dim": 64, "norm_topk_prob": True, "intermediate_size": 64}
    models = Models(config, 1, tmp_path / "ours", tmp_path / "theirs.gguf")
    models.write()
    said = []
    report = bench_peers(models, Path(sys.executable), 1, 8, 2, 2, said.append, cap)
    assert [row.kind for row in report.rows] == (["decode", "prefill"] if cap is None else ["decode"])
    for row in report.rows:
        assert len(row.ours.values) == len(row.theirs.values) == 2 * PER_ROUND
        assert row.theirs.median > row.ours.median > 0  # doing nothing is fast
    assert len(report.others) == len(report.stolen) == 4
    assert all(0 <= share <= 1 for share in (*report.others, *report.stolen))
    assert set(report.read) == (set() if cap is None else {"moeflux", "llama.cpp"})
    assert any("round 2 of 2, llama.cpp" in line for line in said)


def test_a_process_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr("moeflux.bench.peers.MemoryCap", NoCap)
    models = Models(SMALL, 1, tmp_path / "ours", tmp_path / "theirs.gguf")
    (tmp_path / "ours").mkdir()
    models.theirs.touch()
    with pytest.raises(MoefluxError, match=r"config\.json") as caught:
        bench_peers(models, Path(sys.executable), 1, 8, 2, 1, print, 900_000_000)
    assert "Traceback" not in str(caught.value)
