"""Clients and conformance tools whose packages clash with ours: in `.venv-clients`, which `make clients` sets up."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import moeflux
from serve.server import serving

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent.parent / ".venv-clients" / "bin"

pytestmark = pytest.mark.skipif(
    not ENVIRONMENT.exists(), reason="NO .venv-clients: litellm, llm-comply, schemathesis, lm-eval"
)

TEXTS = (
    ("Once upon a time there was a little", " fox who lived in the woods."),
    ("The cat sat on the", " mat."),
    ("One day the bear went to the", " river to catch a fish."),
)


def run(*command, timeout=300, cwd=None):
    return subprocess.run(
        [str(ENVIRONMENT / command[0]), *command[1:]], capture_output=True, text=True, timeout=timeout, cwd=cwd
    )


def test_litellm(server):
    ran = run("python", str(HERE / "litellm_client.py"), server.url)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["whole"] == told["said"] == server.chat()["choices"][0]["message"]["content"]
    assert told["usage"]
    assert isinstance(told["structured"]["n"], int)
    assert told["failed"] == "ContextWindowExceededError"


def schemathesis(folder, *options):
    """Answers are short, so that whatever it makes up ends."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    with serving(folder, "--max-tokens", "3", "--context", "1024") as server:
        command = ("schemathesis", "run", f"{server.url}/openapi.json", "--seed", "1", "-c", checks, *options)
        return run(*command, timeout=600, cwd=folder)


def test_schemathesis_finds_no_undocumented_answer(tmp_path):
    ran = schemathesis(tmp_path, "-n", "10", "--phases", "fuzzing")
    assert ran.returncode == 0, ran.stdout[-6000:]


def test_lm_eval_gives_the_scores_of_the_engine(server, tmp_path):
    lines = [json.dumps({"begin": begin, "end": end}) for begin, end in TEXTS]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    (tmp_path / "task.yaml").write_text(
        "task: texts\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'texts.jsonl'}\ntest_split: test\noutput_type: loglikelihood\n"
        'doc_to_text: "{{begin}}"\ndoc_to_target: "{{end}}"\ntarget_delimiter: ""\n'
        "metric_list:\n  - metric: perplexity\n    aggregation: perplexity\n    higher_is_better: false\n"
    )
    ran = run(
        "lm_eval", "--model", "local-completions", "--tasks", "texts", "--include_path", str(tmp_path), "--log_samples",
        "--output_path", str(tmp_path / "out"), "--model_args",
        f"model=moeflux-demo,base_url={server.url}/v1/completions,tokenizer_backend=remote,num_concurrent=1",
        cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    (samples,) = (tmp_path / "out").rglob("samples_texts*.jsonl")
    found = [json.loads(line)["resps"][0][0][0] for line in samples.read_text().splitlines()]
    assert [float(score) for score in found] == pytest.approx([score(begin, end) for begin, end in TEXTS], rel=1e-4)


def score(begin, end):
    """The log-probability of `end` behind `begin`, computed here."""
    with moeflux.load() as engine:
        encode = engine.text.tokenizer.encode
        n, ids = len(encode(begin)), encode(begin + end)
        logits = engine.score(ids).astype(np.float64)
    peak = logits.max(axis=-1, keepdims=True)
    logprobs = logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
    return float(sum(logprobs[at - 1, ids[at]] for at in range(n, len(ids))))
