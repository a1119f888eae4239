"""Times of the CUDA backend's products on one GPU: vectors and prompts, with cold weights, several tiles. Prints a table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from moeflux.backends.cuda.device import open_device
from moeflux.backends.cuda.memory import AffineMatrix
from moeflux.backends.cuda.ops import CudaOps
from moeflux.backends.cuda.products import Tile

SHAPES = [(12352, 2048), (2048, 4096), (1024, 2048), (2048, 512)]
TILES = [Tile(64, 64, 4, 1), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(128, 64, 4, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2),
         Tile(128, 128, 8, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)]  # fmt: skip


def random_affine(rows: int, cols: int, bits: int = 4, group: int = 64) -> AffineMatrix:
    codes = torch.randint(-(2**31), 2**31 - 1, (rows, cols * bits // 32), dtype=torch.int32, device="cuda")
    scales = ((0.5 + torch.rand(rows, cols // group, device="cuda")) / (cols**0.5 * 2**bits * 0.29)).bfloat16()
    biases = (-(2 ** (bits - 1)) * scales.float()).bfloat16()
    return AffineMatrix(codes, scales, biases, bits, group)


def median_ms(run, times: int = 7) -> float:
    run()
    torch.cuda.synchronize()
    found = []
    for _ in range(times):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        run()
        b.record()
        b.synchronize()
        found.append(a.elapsed_time(b))
    return sorted(found)[times // 2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    ops, rows = CudaOps(open_device()), []
    products = ops._products
    for n, k in SHAPES:
        weight = random_affine(n, k)
        x = torch.randn(2048, k, device="cuda")
        digits = products.digits(x, 64, 4)
        reference = products._one_by_one(products.digits(x[:4], 64, 4), weight)
        quantise = median_ms(lambda x=x: products.digits(x, 64, 4))
        rows.append({"shape": [n, k], "what": "quantise", "us": quantise * 1e3})
        for tile in TILES:
            products.tile = tile
            row = {"shape": [n, k], "what": str(tile)}
            try:
                y = products._together(digits, weight)
                row["same_bits"] = bool(torch.equal(y[:4], reference))
                ms = median_ms(lambda d=digits, w=weight: products._together(d, w))
                row |= {"us": ms * 1e3, "tflops": 2 * 2048 * n * k / ms / 1e9}
            except Exception as error:
                row["error"] = repr(error)[:300]
            rows.append(row)
            print(json.dumps(row), flush=True)
    if out:
        out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
