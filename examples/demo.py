"""What `make demo` runs: a tiny hybrid model with random weights is written, looked at and asked for text.

The weights are random, so the text means nothing. What it shows is the whole way from files to text: the folder is
opened in place, only the routed experts are read, and every token is computed exactly.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from moeflux.bench.synthetic import write_checkpoint

CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "vocab_size": 115,
    "quantization": {"group_size": 64, "bits": 4},
}


WORDS = """? a above again all and before behind below bird boat bread bridge by came child cloud cold dark day deep door
down dream east every far field fire fish flew forest found from garden gate glass gold grew hand heard high hill home horse
house ice in island king lamp land last light little long lost moon morning mountain night no north of old on once one over
path queen rain ran red river road sea ship silver sky sleep slow small snow song star stone story sun tall the then thread
through time to tower tree under upon voice wall was water way went white who wide wind winter with woke wood young"""


def word_tokenizer() -> Tokenizer:
    """One token per word; the first stands for every unknown one."""
    words = WORDS.split()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def run(*args: str) -> None:
    print(f"\n$ moeflux {' '.join(args)}", flush=True)
    subprocess.run([sys.executable, "-m", "moeflux", *args], check=True)


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary) / "tiny"
    write_checkpoint(CONFIG, folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    print("a tiny Qwen3.5-MoE with random weights: what it writes means nothing, how it is computed is real")
    run("inspect", str(folder))
    run("generate", str(folder), "once upon a time", "--max-tokens", "40")
