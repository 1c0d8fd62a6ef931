# SPDX-License-Identifier: Apache-2.0
"""How much of the index branch's scan could be skipped without changing a single id: an experiment.

    python bench/index_pruning.py CAPTURE [--queries N] [--block B ...] [--top-k K ...]
    python bench/index_pruning.py --random KEYS [--queries N] ...

A bound says how high the best key of a block can score at most; a block whose bound lies below the k-th best score
so far need not be scored. Of a capture (examples/capture_smollm2.py makes them) each layer and KV head is one
problem: its keys are the index keys, the mean query of its group is the index query. --random takes independent
normal numbers, 128 channels. The last N tokens are the queries; the block of a query itself is always chosen, so of
K picks K - 1 are searched for.

Bounds of max_j q.k_j over a block, and how many products with a vector each takes for a query and a block:
  box       sum of max(q_c * lowest_c, q_c * highest_c) over the channels                             2
  ball      q.centre + |q| * radius                                                                   1
  both      the lower of the two                                                                      3
  halves    `both` of each half of the block, the higher of the two                                   6
  clusters  `both` of eight clusters of the block's keys, the highest of them                         24
  leading   not of the block but of every key: the half of the channels in which keys vary most (in   block / 2
            the basis of their principal axes), and |q| * |k_j| of the rest
  perfect   the score itself, for nothing: no bound can do better                                     0

Orders, and the threshold of each:
  oracle    the final k-th best score, known from the start: no order can do better
  falling   highest bound first (of a tile: the highest of its rows), the k-th best so far
  newest    newest block first, the k-th best so far

A tile is that many neighbouring queries that are scored together: a block is skipped when none of them needs it. The
table has the share of blocks that must be scored still, mean over problems, and for tiles of 64 in brackets the
lowest of them. `cost` is the bound's products over those of the full scan: only where share + cost is below 1 is there
anything to win. `over` is the mean distance from a score up to its bound, in standard deviations of the scores of a
query's blocks. The ids are compared with those of the full scan every time; a difference ends the run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from capture_file import CaptureFileError, from_bf16, read_capture, to_bf16

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]

TILES = (1, 16, 64, 256)
SHOWN_LOWEST = 64
CLUSTERS = 8
CLUSTER_ROUNDS = 10
ORDERS = ("oracle", "falling", "newest")
RANDOM_CHANNELS = 128
# Products of bf16 are exact in float64 and their sums nearly so: this covers the last digits, by the size of |q||k|.
SLACK = 1e-12


class PruningError(Exception):
    """Input that cannot be measured, or ids that differ; the message is for the user."""


@dataclass(frozen=True)
class Problem:
    """Index keys of one sequence [T, d] and the index queries of its last tokens [N, d], both exact in bf16."""

    name: str
    q: Array
    k: Array


def as_bf16(values: npt.NDArray[np.float32]) -> Array:
    return from_bf16(to_bf16(values)).astype(np.float64)


def capture_problems(path: Path, queries: int) -> Iterator[Problem]:
    tensors = read_capture(path)[0]
    names = [name.removesuffix("q") for name in tensors if name.endswith(".q")]
    if not names:
        raise PruningError(f"{path} holds no queries")
    for name in names:
        q, k = tensors[name + "q"][-queries:], tensors[name + "k"]
        groups = k.shape[1]
        means = q.reshape(len(q), groups, -1, q.shape[2]).mean(axis=2)
        for group in range(groups):
            yield Problem(f"{name}{group}", as_bf16(means[:, group]), k[:, group].astype(np.float64))


def random_problems(keys: int, queries: int) -> Iterator[Problem]:
    generator = np.random.default_rng(1)
    k = as_bf16(generator.standard_normal((keys, RANDOM_CHANNELS), dtype=np.float32))
    yield Problem("random", as_bf16(generator.standard_normal((queries, RANDOM_CHANNELS), dtype=np.float32)), k)


def block_scores(q: Array, keys: Array) -> Array:
    """Best key of each block: q [N, d], keys [blocks, B, d] -> [N, blocks]."""
    return np.stack([(q @ block.T).max(axis=1) for block in keys], axis=1)


def box_bound(q: Array, keys: Array) -> Array:
    return np.maximum(q, 0) @ keys.max(axis=1).T + np.minimum(q, 0) @ keys.min(axis=1).T


def ball_bound(q: Array, keys: Array) -> Array:
    centre = keys.mean(axis=1)
    radius = np.linalg.norm(keys - centre[:, None], axis=2).max(axis=1)
    return q @ centre.T + np.linalg.norm(q, axis=1)[:, None] * radius


def both_bounds(q: Array, keys: Array) -> Array:
    return np.minimum(box_bound(q, keys), ball_bound(q, keys))


def clusters_bound(q: Array, keys: Array) -> Array:
    centres = keys[:, :: -(-keys.shape[1] // CLUSTERS)].copy()
    for _ in range(CLUSTER_ROUNDS):
        # |key - centre|^2 without |key|^2, which is the same for every centre.
        nearest = ((centres**2).sum(axis=2)[:, None] - 2 * keys @ centres.swapaxes(1, 2)).argmin(axis=2)
        member = nearest[:, None] == np.arange(centres.shape[1])[:, None]  # [blocks, clusters, B]
        count = member.sum(axis=2)[..., None]
        centres = np.where(count > 0, member.astype(np.float64) @ keys / np.maximum(count, 1), centres)
    # In the place of other clusters' keys stands the centre, which is a mean of the cluster's own.
    return np.maximum.reduce([both_bounds(q, np.where(member[:, c, :, None], keys, centres[:, c, None]))
                              for c in range(centres.shape[1])])


def leading_bound(q: Array, keys: Array) -> Array:
    flat = keys.reshape(-1, keys.shape[2])
    mean = flat.mean(axis=0)
    axes = np.linalg.eigh((flat - mean).T @ (flat - mean))[1][:, ::-1]
    lead = keys.shape[2] // 2
    turned_q, turned_k = q @ axes, (keys - mean) @ axes
    rest_q, rest_k = (np.linalg.norm(x[..., lead:], axis=-1, keepdims=True) for x in (turned_q, turned_k))
    bound = block_scores(np.concatenate((turned_q[..., :lead], rest_q), axis=-1),
                         np.concatenate((turned_k[..., :lead], rest_k), axis=-1))
    return bound + (q @ mean)[:, None]


def products(bound: str, block: int) -> int:
    """How many products with a vector a bound takes for one query and one block."""
    return {"box": 2, "ball": 1, "both": 3, "halves": 6, "clusters": 3 * CLUSTERS, "leading": block // 2,
            "perfect": 0}[bound]


def bounds_of(q: Array, keys: Array, scores: Array) -> dict[str, Array]:
    """Every bound of every (query, block), none below its score: [N, blocks] each."""
    half = keys.shape[1] // 2
    slack = SLACK * np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(keys, axis=2).max(axis=1)
    bounds = {
        "box": box_bound(q, keys) + slack,
        "ball": ball_bound(q, keys) + slack,
        "both": both_bounds(q, keys) + slack,
        "halves": np.maximum(both_bounds(q, keys[:, :half]), both_bounds(q, keys[:, half:])) + slack,
        "clusters": clusters_bound(q, keys) + slack,
        "leading": leading_bound(q, keys) + slack,
        "perfect": scores,
    }
    for name, bound in bounds.items():
        if not (bound >= scores).all():
            raise PruningError(f"the bound {name} lies below a score")
    return bounds


def best_ids(scores: Array, picks: int) -> Ids:
    """Ids of the best blocks of each row, ascending; of equal scores the lower id."""
    return np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :picks], axis=1)


def any_of_tile(rows: Mask, tile: int) -> Mask:
    """Whether any row of a tile is set: [N, blocks] -> [tiles, blocks]."""
    return rows.reshape(len(rows) // tile, tile, -1).any(axis=1)


def tile_order(order: str, bound: Array, tile: int) -> Ids:
    """The blocks of each tile in the order in which they are looked at: [tiles, blocks]."""
    tiles, blocks = len(bound) // tile, bound.shape[1]
    if order == "newest":
        return np.tile(np.arange(blocks)[::-1], (tiles, 1))
    return np.argsort(-bound.reshape(tiles, tile, blocks).max(axis=1), axis=1, kind="stable")


def scored_in_order(scores: Array, bound: Array, picks: int, tile: int, order: Ids) -> Mask:
    """Which blocks a tile scores when it looks at them in that order: [tiles, blocks]."""
    rows = np.arange(len(scores))
    of_tile = rows // tile
    best = np.full((len(scores), picks), -np.inf)  # of each row, ascending: the first is its threshold
    scored = np.zeros(order.shape, dtype=bool)
    for step in range(order.shape[1]):
        block = order[:, step]
        row_bound = bound[rows, block[of_tile]]
        wanted = (row_bound >= best[:, 0]) & (row_bound > -np.inf)
        tile_wants = any_of_tile(wanted[:, None], tile)[:, 0]
        scored[np.arange(len(order)), block] = tile_wants
        score = np.where(tile_wants[of_tile], scores[rows, block[of_tile]], -np.inf)
        better = score > best[:, 0]
        best[better, 0] = score[better]
        best[better] = np.sort(best[better], axis=1)
    return scored


def scored_blocks(order: str, scores: Array, bound: Array, picks: int, tile: int) -> Mask:
    if order == "oracle":
        last = np.partition(scores, -picks, axis=1)[:, -picks]
        return any_of_tile((bound >= last[:, None]) & (bound > -np.inf), tile)
    return scored_in_order(scores, bound, picks, tile, tile_order(order, bound, tile))


@dataclass
class Findings:
    """A value for each problem: the share that must be scored, and how far bounds lie above scores."""

    shares: dict[tuple[int, int, str, str, int], list[float]]  # by block, top-k, bound, order, tile
    overs: dict[tuple[int, str], list[float]]  # by block and bound


def measure(problem: Problem, block: int, top_ks: list[int], findings: Findings) -> None:
    """Add a problem's values for every bound, order and tile."""
    own = np.arange(len(problem.k) - len(problem.q), len(problem.k)) // block
    # A block before a query's own is visible whole, so no score needs a mask.
    keys = problem.k[: own[-1] * block].reshape(own[-1], block, -1)
    hidden = np.arange(own[-1]) >= own[:, None]
    scores = block_scores(problem.q, keys)
    bounds = bounds_of(problem.q, keys, scores)
    spread = np.ma.array(scores, mask=hidden).std(axis=1)[:, None]
    for name, bound in bounds.items():
        findings.overs[block, name].append(float(np.ma.array((bound - scores) / spread, mask=hidden).mean()))
        bound[hidden] = -np.inf
    scores[hidden] = -np.inf
    for top_k in top_ks:
        picks = top_k - 1
        if own[0] <= picks:
            raise PruningError(f"{problem.name}: the first query sees {own[0]} blocks of {block} keys before its own, "
                               f"and top-{top_k} takes them all; fewer --queries or a lower --top-k")
        ids = best_ids(scores, picks)
        for name, order, tile in itertools.product(bounds, ORDERS, TILES):
            scored = scored_blocks(order, scores, bounds[name], picks, tile)
            left = np.where(np.repeat(scored, tile, axis=0), scores, -np.inf)
            if not np.array_equal(best_ids(left, picks), ids):
                raise PruningError(f"{problem.name}: pruning by {name}, {order}, tiles of {tile}, changed the ids of "
                                   f"top-{top_k}, blocks of {block}")
            share = float(scored.sum() / any_of_tile(~hidden, tile).sum())
            findings.shares[block, top_k, name, order, tile].append(share)


def print_table(findings: Findings) -> None:
    print(f"{'block':>5} {'top-k':>5}  {'bound':<9}{'over':>5}{'cost':>7}  {'order':<8}"
          + "".join(f"{f'tile {tile}':>9}" + " " * 8 * (tile == SHOWN_LOWEST) for tile in TILES))
    for block, top_k, bound, order in dict.fromkeys(key[:4] for key in findings.shares):
        line = (f"{block:>5} {top_k:>5}  {bound:<9}{np.mean(findings.overs[block, bound]):>5.1f}"
                f"{products(bound, block) / block:>7.3f}  {order:<8}")
        for tile in TILES:
            values = findings.shares[block, top_k, bound, order, tile]
            line += f"{np.mean(values):>9.3f}" + (f" ({min(values):.3f})" if tile == SHOWN_LOWEST else "")
        print(line)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="index_pruning.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("capture", type=Path, nargs="?", help="file that capture_smollm2.py wrote")
    source.add_argument("--random", type=int, metavar="KEYS", help="normal random numbers, that many keys")
    parser.add_argument("--queries", type=int, default=1024, metavar="N", help="last tokens judged (default: 1024)")
    parser.add_argument("--block", type=int, nargs="+", default=[128, 64], help="keys a block (default: 128 64)")
    parser.add_argument("--top-k", type=int, nargs="+", default=[16, 8, 2],
                        help="picks, the query's own block among them (default: 16 8 2)")
    options = parser.parse_args(arguments)
    if options.queries < 1 or options.queries % TILES[-1]:
        parser.error(f"--queries must be a multiple of {TILES[-1]}, got {options.queries}")
    if min(options.block) < 2 or any(block % 2 for block in options.block):
        parser.error(f"--block must be even, got {options.block}")
    if min(options.top_k) < 2:
        parser.error(f"--top-k must be at least 2, got {options.top_k}")
    return options


def run(options: argparse.Namespace) -> None:
    problems = (capture_problems(options.capture, options.queries) if options.capture
                else random_problems(options.random, options.queries))
    findings = Findings(defaultdict(list), defaultdict(list))
    count = 0
    for problem in problems:
        if len(problem.q) < options.queries or len(problem.k) < options.queries:
            raise PruningError(f"{problem.name} has {len(problem.k)} keys, fewer than --queries {options.queries}")
        for block in options.block:
            measure(problem, block, options.top_k, findings)
        count += 1
        print(f"\r{problem.name} done", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{count} problems, {len(problem.k)} keys, the last {options.queries} queries; "
          "ids equal to the full scan's everywhere")
    print_table(findings)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        run(options)
    except (PruningError, CaptureFileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
