#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The baseline of the sparse prefill: one Triton program for each (token, KV head), as serving engines run it today.

Our own rendition of that form, for paged keys and values of 128 tokens in bf16 or e4m3 (widened to bf16 on load), bf16
queries, causal. Checks itself against float64 on a few tokens, then prints and writes a row for each shape of
prefill_sm90_bench.cu: prefill_triton.py OUT.json [SUBSTRING]. Needs torch and triton.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

BLOCK, DIM, KV_HEADS = 128, 128, 4


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


def picks(kv_len: int, q_len: int, top_k: int) -> torch.Tensor:
    """Uniform selections: the local block and random earlier ones, -1 where there are fewer."""
    visible = (torch.arange(kv_len - q_len, kv_len, device="cuda") // BLOCK + 1)[None, :, None]
    blocks = kv_len // BLOCK
    scores = torch.rand(KV_HEADS, q_len, blocks, device="cuda")
    ids = torch.arange(blocks, device="cuda")[None, None, :]
    scores = torch.where(ids < visible - 1, scores, torch.where(ids == visible - 1, 2.0, -1.0))
    best = scores.topk(top_k, dim=2)
    return torch.where(best.values >= 0, best.indices, -1).to(torch.int32).contiguous()


def run(name: str, kv_len: int, q_len: int, q_heads: int, top_k: int, kv_dtype: torch.dtype) -> dict:
    group = q_heads // KV_HEADS
    q = torch.randn(q_len, q_heads, DIM, device="cuda", dtype=torch.bfloat16)
    pages = kv_len // BLOCK
    k, v = (torch.randn(pages, BLOCK, KV_HEADS, DIM, device="cuda").to(kv_dtype) for _ in range(2))
    index = picks(kv_len, q_len, top_k)
    table = torch.randperm(pages, device="cuda", dtype=torch.int32)
    o = torch.full_like(q, float("nan"))
    scale = DIM**-0.5

    def launch(warps: int, stages: int) -> None:
        prefill_kernel[(q_len, KV_HEADS)](q, k, v, index, table, o, kv_len, q_len, scale * 1.4426950408889634,
                                          TOP_K=top_k, GROUP=group, BLOCK=BLOCK, DIM=DIM, KV_HEADS=KV_HEADS,
                                          num_warps=warps, num_stages=stages)

    launch(4, 2)
    torch.cuda.synchronize()
    worst = 0.0
    for token in (0, q_len // 3, q_len - 1):
        for head in (0, q_heads - 1):
            kv_head, position = head // group, kv_len - q_len + token
            ids = index[kv_head, token]
            keys = torch.cat([torch.arange(int(b) * BLOCK, min(int(b) * BLOCK + BLOCK, position + 1))
                              for b in ids if b >= 0])
            rows = (table[keys // BLOCK].long(), (keys % BLOCK).cuda())
            logits = (k[rows[0], rows[1], kv_head].double() @ q[token, head].double()) * scale
            want = torch.softmax(logits, 0) @ v[rows[0], rows[1], kv_head].double()
            worst = max(worst, ((o[token, head].double() - want).norm() / want.norm()).item())
    assert worst < 0.02, f"{name}: error {worst}"
    flop = 4 * group * DIM * BLOCK * int((index >= 0).sum())
    best = min((triton.testing.do_bench(lambda: launch(*c), warmup=20, rep=60, return_mode="median"), c)
               for c in ((4, 2), (4, 3), (8, 2)))
    return {"case": name, "metric": "TFLOP/s", "value": flop / best[0] * 1e-9, "config": list(best[1])}


def main() -> None:
    path, only = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    rows = []
    for kv_len, q_len in ((16384, 16384), (32768, 8192), (131072, 8192)):
        for dtype, kv_dtype in (("bf16", torch.bfloat16), ("bf16-e4m3", torch.float8_e4m3fn)):
            name = f"m3/call/{dtype}/{kv_len}x{q_len}/uniform"
            if only in name:
                rows.append(run(name, kv_len, q_len, 64, 16, kv_dtype))
                print(rows[-1], flush=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
