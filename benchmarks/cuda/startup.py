"""From a model in device memory to its first token: with no compiled kernels at hand, and with all of them kept.

python benchmarks/cuda/startup.py --out benchmarks/results/h200/startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def first_token() -> None:
    import torch
    from model import EPS, RandomModel, Shape

    from moeflux.backends.cuda.decode import Decoder
    from moeflux.backends.cuda.device import open_device
    from moeflux.backends.cuda.ops import CudaOps
    from moeflux.backends.cuda.phases import DecodeOptions

    model = RandomModel(CudaOps(open_device()), Shape(vocab=8192, experts=32))
    states = model.states(0)
    torch.cuda.synchronize()
    began = time.perf_counter()
    decoder = Decoder(model.ops, model.layers, model.ends, model.pool, DecodeOptions(2048, EPS, kernels="cuda"))
    made = time.perf_counter()
    prompt = decoder.prompt
    assert prompt is not None
    token = int(prompt.logits(prompt.run(list(range(512)), states, 0)[-1:]).argmax())
    prompted = time.perf_counter()
    decoder.bind(states, 512, token)
    list(decoder.tokens(1))
    print(json.dumps({"step_s": made - began, "prompt_s": prompted - made, "first_token_s": time.perf_counter() - began}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        first_token()
        return
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        places = {"XDG_CACHE_HOME": f"{folder}/kernels", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for name in ("cold", "warm"):
            command = [sys.executable, *sys.orig_argv[1:], "--child"]
            run = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=False)
            found = run.stdout.strip().splitlines()
            result[name] = json.loads(found[-1]) if run.returncode == 0 and found else run.stderr[-2000:]
            print(name, result[name], flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
