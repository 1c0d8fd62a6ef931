# SPDX-License-Identifier: Apache-2.0
"""Video attention in float64: blocks, scores, choices, masses and outputs. Shares no code with the library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Block:
    """Tokens [begin, end) of one segment."""

    begin: int
    end: int
    is_video: bool


def blocks_of(segments: str, size: int) -> list[Block]:
    """Blocks of a sequence; none spans two segments."""
    blocks, first = [], 0
    for segment in segments.split(","):
        kind, _, text = segment.partition(":")
        count = math.prod(int(side) for side in text.split("x"))
        for begin in range(first, first + count, size):
            blocks.append(Block(begin, min(begin + size, first + count), kind == "video"))
        first += count
    return blocks


def is_forced(query: Block, key: Block) -> bool:
    """All that is not video, and what holds the queries' own tokens."""
    return not key.is_video or max(query.begin, key.begin) < min(query.end, key.end)


def softmax(q: Array, k: Array, scale: float) -> Array:
    """[num_kv_heads, group, queries, keys] shares of the dense softmax."""
    groups = k.shape[1]
    per_group = q.astype(np.float64).reshape(len(q), groups, -1, q.shape[2])
    logits = np.einsum("igxd,jgd->gxij", per_group, k.astype(np.float64)) * scale
    weights = np.exp(logits - logits.max(axis=3, keepdims=True))
    shares: Array = weights / weights.sum(axis=3, keepdims=True)
    return shares


def masses(q: Array, k: Array, queries: list[Block], keys: list[Block], scale: float) -> Array:
    """[num_kv_heads, blocks of queries, blocks of keys] shares of the dense softmax, mean over queries and the group."""
    shares = softmax(q, k, scale).mean(axis=1)
    of_keys = np.stack([shares[:, :, key.begin : key.end].sum(axis=2) for key in keys], axis=2)
    return np.stack([of_keys[:, query.begin : query.end].mean(axis=1) for query in queries], axis=1)


def mean_scores(q: Array, k: Array, queries: list[Block], keys: list[Block]) -> Array:
    """[num_kv_heads, blocks of queries, blocks of keys] mean query · mean key."""
    mean_q = np.stack([q[query.begin : query.end].astype(np.float64).mean(axis=0) for query in queries])
    mean_k = np.stack([k[key.begin : key.end].astype(np.float64).mean(axis=0) for key in keys])
    mean_q = mean_q.reshape(len(queries), k.shape[1], -1, q.shape[2]).mean(axis=2)
    scores: Array = np.einsum("igd,jgd->gij", mean_q, mean_k)
    return scores


def num_chosen(keys: list[Block], num_forced: int, budget: float, forced_inside_budget: bool) -> int:
    """Blocks beside the forced ones; the product is rounded first, so that 0.15 of 20 is 3."""
    share = round(budget * (len(keys) if forced_inside_budget else sum(key.is_video for key in keys)), 6)
    return max(0, math.ceil(share) - num_forced) if forced_inside_budget else math.ceil(share)


def attention(q: Array, k: Array, v: Array, block_index: Array, queries: list[Block], keys: list[Block],
              scale: float) -> tuple[Array, Array]:
    """o and lse over the kept blocks of each block of queries."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    o, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    for head in range(q.shape[1]):
        of_kv = head // group
        for query, ids in zip(queries, block_index[of_kv], strict=True):
            kept = np.concatenate([np.arange(keys[i].begin, keys[i].end) for i in ids if i >= 0])
            logits = q[query.begin : query.end, head] @ k[kept, of_kv].T * scale
            largest = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - largest)
            rows = slice(query.begin, query.end)
            o[rows, head] = weights @ v[kept, of_kv] / weights.sum(axis=1, keepdims=True)
            lse[rows, head] = np.log(weights.sum(axis=1)) + largest[:, 0]
    return o, lse
