#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much attention a few key blocks keep: a table over the layers and heads of a capture.

For each query the best blocks are those with the most attention mass, which only full attention can tell (an oracle).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from capture_file import CaptureFileError, Float32, read_capture

ROWS = 256


@dataclass(frozen=True)
class Kept:
    """Mean share of the attention mass that a choice of blocks keeps, over the judged queries of one head."""

    oracle: float
    local: float
    first: float


def block_mass(q: Float32, k: Float32, start: int, stop: int, block: int, scale: float) -> Float32:
    """Mass of each key block for queries start..stop-1 of one head: q, k [T, d] -> [stop - start, blocks]."""
    scores = (q[start:stop] * np.float32(scale)) @ k[:stop].T
    scores[np.arange(stop) > np.arange(start, stop)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    mass: Float32 = np.add.reduceat(weights, np.arange(0, stop, block), axis=1)
    mass /= mass.sum(axis=1, keepdims=True)
    return mass


def kept_by_head(q: Float32, k: Float32, block: int, budget: int, scale: float) -> Kept:
    """Compare the best `budget` blocks per query with the first block and the newest budget - 1; q, k [T, d].

    Only queries with at least four times as many blocks to choose from count: for earlier ones any choice is good.
    """
    sums, count = np.zeros(3), 0
    for start in range(4 * budget * block, len(q), ROWS):
        stop = min(start + ROWS, len(q))
        mass = block_mass(q, k, start, stop, block, scale)
        own = np.arange(start, stop) // block
        newest = np.arange(mass.shape[1]) > own[:, None] - (budget - 1)
        newest[:, 0] = True
        best = -np.partition(-mass, budget - 1, axis=1)[:, :budget]
        sums += best.sum(), mass[newest].sum(), mass[:, 0].sum()
        count += stop - start
    return Kept(*(sums / count))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="capture_mass.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capture", type=Path, help="file that capture_smollm2.py wrote")
    parser.add_argument("--block", type=int, default=64, help="keys per block (default: 64)")
    parser.add_argument("--budget", type=int, default=16, help="blocks kept for each query (default: 16)")
    options = parser.parse_args(arguments)
    if options.block < 1 or options.budget < 2:
        parser.error("--block must be at least 1 and --budget at least 2")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        tensors, metadata = read_capture(options.capture)
        scale = float(metadata["softmax_scale"])
        first_group = 0 if metadata["group"] == "all" else int(metadata["group"])
    except (CaptureFileError, OSError, KeyError) as error:
        print(f"error: {options.capture} is not a capture: {error}", file=sys.stderr)
        return 1
    tokens, needed = int(metadata["tokens"]), 4 * options.budget * options.block
    if tokens <= needed:
        print(f"error: {tokens} tokens are too few; this choice needs more than {needed}", file=sys.stderr)
        return 1
    print(f"share of attention kept by {options.budget} blocks of {options.block} keys, "
          f"queries from {needed} on")
    print("layer group head   best  first+newest  first alone")
    for name in tensors:
        if not name.endswith(".q"):
            continue
        q, k = tensors[name], tensors[name.removesuffix("q") + "k"]
        share = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            group = head // share
            kept = kept_by_head(q[:, head], k[:, group], options.block, options.budget, scale)
            print(f"{name.split('.')[1]:>5} {first_group + group:>5} {first_group * share + head:>4} "
                  f"{kept.oracle:>6.3f} {kept.local:>13.3f} {kept.first:>12.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
