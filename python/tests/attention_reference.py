# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 over the keys that a block index names. Shares no code with the library."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def visible_keys(q_len: int, kv_len: int, i: int, causal: bool) -> int:
    """How many keys query i of a sequence sees."""
    return max(0, kv_len - q_len + i + 1) if causal else kv_len


def attention(
    q: Array, k: Array, v: Array, block_index: Array | None, *, q_lens: list[int], kv_lens: list[int], causal: bool,
    scale: float, kv_block_size: int,
) -> tuple[Array, Array]:
    """o and lse; q [total_q, H, d], k and v [total_kv, G, d], block_index [G, total_q, any] or None for all keys."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    o, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    q_begin = kv_begin = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        for i in range(q_len):
            visible = visible_keys(q_len, kv_len, i, causal)
            for head in range(q.shape[1]):
                kv_head = head // group
                keys = np.arange(visible)
                if block_index is not None:
                    keys = keys[np.isin(keys // kv_block_size, block_index[kv_head, q_begin + i])]
                if len(keys) == 0:
                    continue
                scores = k[kv_begin + keys, kv_head] @ q[q_begin + i, head] * scale
                weights = np.exp(scores - scores.max())
                o[q_begin + i, head] = weights @ v[kv_begin + keys, kv_head] / weights.sum()
                lse[q_begin + i, head] = np.log(weights.sum()) + scores.max()
        q_begin, kv_begin = q_begin + q_len, kv_begin + kv_len
    return o, lse
