# SPDX-License-Identifier: Apache-2.0
"""The index branch as serving engines run it today: scores of blocks to memory, then a top-k, each a Triton kernel.

Our own rendition of that form, for keys in pages, bf16, causal. bench/prefill_baselines.py measures it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def scores_kernel(q, k, block_table, scores, kv_len, q_len, num_blocks,
                  HEADS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
                  DIM: tl.constexpr):
    """ROWS rows (token, head) times CHUNK blocks: the largest product of each block."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens, heads = rows // HEADS, rows % HEADS
    positions = kv_len - q_len + tokens
    dims, keys = tl.arange(0, DIM), tl.arange(0, BLOCK)
    q_tile = tl.load(q + rows.to(tl.int64)[:, None] * DIM + dims[None, :], mask=(tokens < q_len)[:, None], other=0.0)
    row_scores = scores + (heads.to(tl.int64) * q_len + tokens) * num_blocks
    first = tl.program_id(1) * CHUNK
    last_position = kv_len - q_len + tl.minimum((tl.program_id(0) + 1) * ROWS // HEADS, q_len) - 1
    end = tl.minimum(first + CHUNK, last_position // BLOCK + 1)
    for block in range(first, end):
        page = tl.load(block_table + block).to(tl.int64)
        k_tile = tl.load(k + (page * BLOCK + keys)[:, None] * DIM + dims[None, :])
        products = tl.dot(q_tile, tl.trans(k_tile))
        products = tl.where((block * BLOCK + keys)[None, :] <= positions[:, None], products, -float("inf"))
        tl.store(row_scores + block, tl.max(products, 1), mask=tokens < q_len)


@triton.jit
def top_k_kernel(scores, block_index, kv_len, q_len, num_rows, num_blocks,
                 ROWS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """The local block and the best of the others, one after the other; -1 where there are no more."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    blocks = tl.arange(0, WIDTH)
    local = (kv_len - q_len + rows % q_len) // BLOCK
    visible = (blocks[None, :] <= local[:, None]) & (rows < num_rows)[:, None]
    best = tl.load(scores + rows.to(tl.int64)[:, None] * num_blocks + blocks[None, :], mask=visible,
                   other=-float("inf"))
    best = tl.where(blocks[None, :] == local[:, None], float("inf"), best)
    out = block_index + rows.to(tl.int64) * TOP_K
    for slot in range(TOP_K):
        score, block = tl.max(best, 1, return_indices=True)
        tl.store(out + slot, tl.where(score == -float("inf"), -1, block), mask=rows < num_rows)
        best = tl.where(blocks[None, :] == block[:, None], -float("inf"), best)


# The best of each counts. Rows, blocks of a program, warps and stages; rows of a program and warps.
SCORES_CONFIGS = ((64, 16, 4, 3), (128, 8, 8, 3), (128, 16, 8, 3), (128, 32, 8, 4))
TOP_K_CONFIGS = ((1, 1), (1, 4), (4, 4))


def launch_scores(q: torch.Tensor, k: torch.Tensor, block_table: torch.Tensor, scores: torch.Tensor, kv_len: int,
                  rows: int, chunk: int, warps: int, stages: int) -> None:
    """q [tokens, heads, dim]; k [pages, block, dim]; scores f32 [heads, tokens, blocks]."""
    tokens, heads, dim = q.shape
    num_blocks = scores.shape[2]
    grid = (triton.cdiv(tokens * heads, rows), triton.cdiv(num_blocks, chunk))
    scores_kernel[grid](q, k, block_table, scores, kv_len, tokens, num_blocks, HEADS=heads, ROWS=rows, CHUNK=chunk,
                        BLOCK=k.shape[1], DIM=dim, num_warps=warps, num_stages=stages)


def launch_top_k(scores: torch.Tensor, block_index: torch.Tensor, kv_len: int, block: int, rows: int,
                 warps: int) -> None:
    """scores f32 [heads, tokens, blocks]; block_index i32 [heads, tokens, top_k]."""
    heads, tokens, num_blocks = scores.shape
    top_k_kernel[(triton.cdiv(heads * tokens, rows),)](
        scores, block_index, kv_len, tokens, heads * tokens, num_blocks, ROWS=rows,
        WIDTH=triton.next_power_of_2(num_blocks), TOP_K=block_index.shape[2], BLOCK=block, num_warps=warps)
