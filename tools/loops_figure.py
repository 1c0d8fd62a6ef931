#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/loops.png: the two loops of the Hopper prefill, measured, modelled, and as their bytes alone would allow.

    python tools/loops_figure.py [--results bench/results/h200-loops.json] [--out docs/loops.png]

Needs matplotlib. The bytes: q-outer reads the blocks of a run from the L2 once for both tiles, kv-outer writes its
partials to memory and reads them again; bandwidths as `tilesieve roofline --measure` read them on that GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
MEMORY, L2 = 4.44e6, 7.07e6  # bytes / us
COLOURS = {"kv_outer": "tab:blue", "q_outer": "tab:red"}


def bytes_us(row: dict, loop: str) -> float:
    element = 2 if row["dtype"] == "bf16" else 1
    block = 2 * row["kv_block_size"] * row["head_dim"] * element
    if loop == "q_outer":
        return row["run_blocks"] * block / L2
    group = row["q_heads"] // row["kv_heads"]
    partials = row["picks"] * group * (2 * row["head_dim"] + 8)
    output = row["q_len"] * row["q_heads"] * (2 * row["head_dim"] + 4)
    return (2 * partials + output) / MEMORY


def draw(axis: plt.Axes, rows: list[dict], title: str) -> None:
    def share(row: dict) -> float:
        return row["tile_blocks"] / row["picks"]

    rows = sorted(rows, key=lambda row: (share(row), row["run_blocks"]))
    x = [share(row) for row in rows]
    for loop, colour in COLOURS.items():
        axis.plot(x, [row[f"{loop}_us"] for row in rows], "o", color=colour, label=f"{loop}, measured")
        axis.plot(x, [row[f"{loop}_model_us"] for row in rows], "-", color=colour, label=f"{loop}, model of auto")
        axis.plot(x, [bytes_us(row, loop) for row in rows], ":", color=colour, label=f"{loop}, bytes alone")
    axis.plot(x, [row["q_outer_single_us"] for row in rows], "x", color="tab:orange", label="q_outer of single tokens")
    axis.plot(x, [row["auto_us"] for row in rows], ".", color="black", markersize=4, label="auto, measured")
    axis.set(xlabel="blocks in the unions of four tokens, for each pick", title=title, yscale="log")
    axis.grid(alpha=0.3, which="both")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results/h200-loops.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/loops.png")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), sharey=True)
    for axes_row, dtype in zip(axes, ("e4m3", "bf16")):
        rows = [row for row in results["rows"] if row["dtype"] == dtype]
        for axis, case, title in zip(axes_row, ("reuse", "overlap"), ("picks of ever more blocks", "four neighbours share picks")):
            shown = [row for row in rows if row["case"] == case and row.get("neighbours", 4) == 4]
            draw(axis, shown, f"{dtype}: {title}")
        axes_row[0].set_ylabel("us")
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.suptitle(f"131,072 keys x 8,192 queries, 64 heads on 4, top-16; {results['device']}, {results['date']}")
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=80)


if __name__ == "__main__":
    main()
