# SPDX-License-Identifier: Apache-2.0
"""Sparse prefill as serving engines run it today: one Triton program for each (token, KV head).

Our own rendition of that form, for paged keys and values in bf16 or e4m3 (widened to bf16 on load), bf16 queries,
causal. bench/prefill_baselines.py measures it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

@triton.jit
def prefill_kernel(q, k, v, block_index, block_table, o, kv_len, q_len, scale_log2,
                   TOP_K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
                   KV_HEADS: tl.constexpr):
    token = tl.program_id(0)
    head = tl.program_id(1)
    position = kv_len - q_len + token
    rows = tl.arange(0, GROUP)
    dims = tl.arange(0, DIM)
    keys = tl.arange(0, BLOCK)
    q_tile = tl.load(q + (token.to(tl.int64) * KV_HEADS + head) * GROUP * DIM + rows[:, None] * DIM + dims[None, :])
    largest = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, DIM], tl.float32)
    for slot in range(TOP_K):
        block = tl.load(block_index + (head * q_len + token) * TOP_K + slot)
        if (block >= 0) & (block * BLOCK <= position):
            page = tl.load(block_table + block).to(tl.int64)
            offsets = (page * BLOCK + keys[:, None]) * (KV_HEADS * DIM) + head * DIM + dims[None, :]
            k_tile = tl.load(k + offsets).to(tl.bfloat16)
            scores = tl.dot(q_tile, tl.trans(k_tile)) * scale_log2
            scores = tl.where((block * BLOCK + keys)[None, :] <= position, scores, -float("inf"))
            new = tl.maximum(largest, tl.max(scores, 1))
            p = tl.exp2(scores - new[:, None])
            keep = tl.exp2(largest - new)
            v_tile = tl.load(v + offsets).to(tl.bfloat16)
            acc = acc * keep[:, None] + tl.dot(p.to(tl.bfloat16), v_tile)
            total = total * keep + tl.sum(p, 1)
            largest = new
    out = acc / total[:, None]
    tl.store(o + (token.to(tl.int64) * KV_HEADS + head) * GROUP * DIM + rows[:, None] * DIM + dims[None, :],
             out.to(tl.bfloat16))


# Warps and stages of a program; the best of them counts.
CONFIGS = ((4, 2), (4, 3), (8, 2))


def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_index: torch.Tensor, block_table: torch.Tensor,
           o: torch.Tensor, kv_len: int, warps: int, stages: int) -> None:
    """q, o [tokens, heads, dim]; k, v [pages, block, KV heads, dim]; block_index [KV heads, tokens, top_k]."""
    tokens, heads, dim = q.shape
    _, block, kv_heads, _ = k.shape
    prefill_kernel[(tokens, kv_heads)](q, k, v, block_index, block_table, o, kv_len, tokens,
                                       dim**-0.5 * 1.4426950408889634, TOP_K=block_index.shape[2],
                                       GROUP=heads // kv_heads, BLOCK=block, DIM=dim, KV_HEADS=kv_heads,
                                       num_warps=warps, num_stages=stages)
