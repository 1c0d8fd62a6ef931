#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far 8 bits and sparsity take attention over the latents of a real video from float64, on a Hopper GPU.

    python bench/latents_accuracy.py LATENTS OUT.json [--shape FRAMES,CHANNELS,HEIGHT,WIDTH] [--commit ID]

LATENTS is a .npy file of numbers [frames, channels, height, width], or raw int8 of a given shape. Tokens are patches of
2 x 2, made alike whatever the scale of a file's channels: each channel gets mean 0 and deviation 1 over the whole clip.
v is these numbers. No model's projections are at hand, so q and k are the same tokens seen by eight heads:

  rotation  x R, a fixed random rotation of each head, so that no head's channels are those of the autoencoder
  width     channels from that one on are divided by 10, so that a head looks at a part of what a token is
  RMSNorm   per token and head, without weights, as models such as H3 do it to q and k before they attend
  gain      a factor of q, as a norm's weights would have: logits are at most gain * sqrt(channels)

A gain of 1/4 gives heads that look far and wide, one of 2 heads that look at little beside themselves. Positions are
not encoded: tokens are near each other by what they show alone. All calls and float64 get the same bf16 numbers.

Errors are those of rows spread over the clip: rel-L2 and cosine of all of a head's together. v has mean 0, so the far
and wide heads have small outputs, and of those the same absolute error is a larger share. Sparse calls choose by
mean_pool in raster order, in boxes of 4x4x4, and in the boxes that layout_search gives each head. mass is what their
blocks keep of the dense softmax, floor and ceiling what random blocks and the best would; kept is the share of all
blocks that is attended to. OUT.json has the figures of each head.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tilesieve
import torch

PATCH = 2
HEADS = [(width, gain) for width in (128, 16) for gain in (0.25, 0.5, 1.0, 2.0)]
BUDGETS = (0.05, 0.10, 0.15, 0.20, 0.30)
SHARES = ("mass", "floor", "ceiling", "recall")
NUM_ROWS = 512
EPSILON = 1e-5  # of the norm


@dataclass
class Case:
    """q, k and v [tokens, heads, channels] of a clip, and rows of float64 attention over all keys."""

    grid: tuple[int, int, int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor
    want: torch.Tensor

    @property
    def segments(self) -> str:
        return "video:" + "x".join(map(str, self.grid))

    @property
    def name(self) -> str:
        return f"{self.q.shape[0]}x{self.q.shape[1]}"


def read_latents(path: Path, shape: str | None) -> np.ndarray:
    """f32 [frames, channels, height, width]."""
    if path.suffix == ".npy":
        latents = np.load(path)
    elif shape is None:
        raise SystemExit(f"{path}: raw int8 needs --shape FRAMES,CHANNELS,HEIGHT,WIDTH")
    else:
        latents = np.fromfile(path, np.int8).reshape([int(size) for size in shape.split(",")])
    if latents.ndim != 4 or latents.shape[2] % PATCH or latents.shape[3] % PATCH:
        raise SystemExit(f"{path}: got {latents.shape}, expected (frames, channels, height, width), both even")
    return latents.astype(np.float32)


def tokens_of(latents: np.ndarray, device: str) -> tuple[tuple[int, int, int], torch.Tensor]:
    """The grid of patches, and f32 [tokens, channels * PATCH * PATCH], each channel with mean 0 and deviation 1."""
    x = torch.from_numpy(latents).to(device)
    x = (x - x.mean(dim=(0, 2, 3), keepdim=True)) / x.std(dim=(0, 2, 3), keepdim=True)
    frames, channels, height, width = x.shape
    grid = (frames, height // PATCH, width // PATCH)
    patches = x.reshape(frames, channels, grid[1], PATCH, grid[2], PATCH).permute(0, 2, 4, 1, 3, 5)
    return grid, patches.reshape(-1, channels * PATCH * PATCH)


def make_case(latents: np.ndarray, device: str) -> Case:
    grid, tokens = tokens_of(latents, device)
    count, dim = tokens.shape
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.empty(count, len(HEADS), dim, dtype=torch.bfloat16, device=device) for _ in range(3))
    for head, (width, gain) in enumerate(HEADS):
        rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q.to(device)
        seen = tokens @ rotation
        seen[:, width:] /= 10
        normed = seen / (seen.square().mean(dim=1, keepdim=True) + EPSILON).sqrt()
        q[:, head], k[:, head], v[:, head] = gain * normed, normed, tokens
    rows = torch.linspace(0, count - 1, NUM_ROWS, device=device).long()
    return Case(grid, q, k, v, rows, float64_rows(q, k, v, rows))


def float64_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """f64 [rows, heads, channels]."""
    heads = []
    for head in range(q.shape[1]):
        logits = q[rows, head].double() @ k[:, head].double().T * q.shape[2] ** -0.5
        heads.append(torch.softmax(logits, dim=1) @ v[:, head].double())
    return torch.stack(heads, dim=1)


def errors_of(case: Case, o: torch.Tensor) -> dict[str, Any]:
    """Of each head, and the mean."""
    got, want = (x.transpose(0, 1).flatten(1) for x in (o[case.rows].double(), case.want))
    rel_l2 = (got - want).norm(dim=1) / want.norm(dim=1)
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=1)
    return {"metric": "rel-l2", "value": rel_l2.mean().item(), "rel_l2": rel_l2.tolist(), "cosine": cosine.tolist()}


def sdpa(case: Case) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (case.q, case.k, case.v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


def video_calls(case: Case, **options: Any) -> dict[str, Callable[[], Any]]:
    def call(arithmetic: Any) -> Callable[[], Any]:
        return lambda: tilesieve.video_attention(case.q, case.k, case.v, segments=case.segments, arithmetic=arithmetic,
                                                 **options)

    return {"video-int8": call("int8"), "video-bf16": call("storage")}


def dense_rows(case: Case) -> list[dict[str, Any]]:
    calls: dict[str, Callable[[], Any]] = {
        "torch-bf16": lambda: sdpa(case),
        "sage-exact": lambda: tilesieve.sage_attention(case.q, case.k, case.v, rounding="exact"),
        "sage-relaxed": lambda: tilesieve.sage_attention(case.q, case.k, case.v, rounding="relaxed"),
        **video_calls(case, budget=1)}
    return [{"case": f"latents/dense/{name}/{case.name}", "call": name, "layout": "-", "budget": 1.0,
             **errors_of(case, call())} for name, call in calls.items()]


def sparse_rows(case: Case) -> list[dict[str, Any]]:
    table, _ = tilesieve.layout_search([(0, case.q, case.k)], segments=case.segments)
    print("boxes found for the heads: " + ", ".join(table.boxes(0)))
    rows = []
    for layout_name, layout in (("raster", "raster"), ("4x4x4", "4x4x4"), ("found", list(table.boxes(0)))):
        masses = tilesieve.video_mass(case.q, case.k, segments=case.segments, layouts=[layout], budgets=BUDGETS)
        for budget, mass in zip(BUDGETS, masses, strict=True):
            kept: dict[str, Any] = {field: getattr(mass, field).tolist() for field in SHARES}
            kept["kept_share"] = mass.kept_share
            for name, call in video_calls(case, layout=layout, budget=budget).items():
                rows.append({"case": f"latents/sparse/{name}/{case.name}/{layout_name}/{budget:.2f}", "call": name,
                             "layout": layout_name, "budget": budget, **errors_of(case, call()), **kept})
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Errors by gain, the two widths of each taken together; cosine and shares as means over heads."""
    gains = sorted({gain for _, gain in HEADS})
    columns = [*(f"rel-L2 at gain {gain:g}" for gain in gains), "cosine", *SHARES, "kept"]
    print("| call | layout | budget | " + " | ".join(columns) + " |")
    print("|---|---|" + "---:|" * (len(columns) + 1))
    for row in rows:
        numbers = [np.mean([error for error, (_, of) in zip(row["rel_l2"], HEADS, strict=True) if of == gain])
                   for gain in gains]
        numbers += [np.mean(row[field]) for field in ("cosine", *SHARES, "kept_share") if field in row]
        cells = [f"{number:.4f}" for number in numbers] + ["-"] * (len(columns) - len(numbers))
        print(f"| {row['call']} | {row['layout']} | {row['budget']:.2f} | " + " | ".join(cells) + " |")


def facts_of_run(commit: str) -> dict[str, Any]:
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
                            capture_output=True, text=True, check=True).stdout.strip()
    return {"device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(), "driver": driver,
            "commit": commit, "versions": {"torch": torch.__version__}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("latents", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", help="of raw int8: FRAMES,CHANNELS,HEIGHT,WIDTH")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    case = make_case(read_latents(options.latents, options.shape), "cuda")
    results = facts_of_run(options.commit)
    print(f"{results['device']}, {results['date']}: {case.segments}, {case.q.shape[0]} tokens of {case.q.shape[2]} "
          f"channels, {len(HEADS)} heads of (width, gain) {HEADS}")
    results["rows"] = dense_rows(case) + sparse_rows(case)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_table(results["rows"])


if __name__ == "__main__":
    main()
