#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What others reach at the problem 38304x56 of video_sm90_bench, for its --baseline; and tilesieve, where it is installed.

    python bench/video_baselines.py OUT.json

  cudnn      dense attention by PyTorch, with cuDNN's kernels, in bf16
  flex       FlexAttention, compiled, in bf16, over blocks of 128 queries x 64 keys, its own size for this head_dim
  sparge     SpargeAttn over a given mask, in 8 bits; on Hopper its blocks are 64 queries x 128 keys
  sparge-call  SpargeAttn's whole call, with its own choice of as many blocks, by its default settings
  int8, bf16 tilesieve.video_attention, over flex's blocks (-lists), and with its own choice of as many (-call)

56 heads of 128 channels, 38,304 tokens of video; keys have an offset in each channel. A row of blocks keeps ceil(share *
all) of them: those of its own tokens, and others at random, for no time here depends on which they are. Packages that are
not installed are named and left out. Rows of o are first compared with float64. Times as in dense_baselines.py.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable

from dense_baselines import DIM, HEADS, TOKENS, median_ms, torch

SEGMENTS = "video:38x24x42"
SHARES = (0.05, 0.10, 0.15, 0.20, 0.30)
PROBLEM = "38304x56"
Launch = Callable[[], "torch.Tensor"]


class Tensors:
    """q, k and v [1, tokens, heads, dim], and masks of blocks."""

    def __init__(self, tokens: int, heads: int, dim: int, device: str) -> None:
        torch.manual_seed(1)
        self.q, self.k, self.v = (torch.randn(1, tokens, heads, dim, device=device, dtype=torch.bfloat16)
                                  for _ in range(3))
        self.k += 2 * torch.randn(heads, dim, device=device, dtype=torch.bfloat16)

    def heads_first(self) -> list[torch.Tensor]:
        return [x.transpose(1, 2) for x in (self.q, self.k, self.v)]

    def mask(self, share: float, blocks: tuple[int, int]) -> torch.Tensor:
        """Which blocks of keys a block of queries keeps, bool [1, heads, blocks of queries, blocks of keys]."""
        tokens, heads = self.q.shape[1:3]
        q_block, kv_block = blocks
        rows, columns = -(-tokens // q_block), -(-tokens // kv_block)
        scores = torch.rand(1, heads, rows, columns, device=self.q.device)
        begin = torch.arange(rows, device=self.q.device)[:, None] * q_block
        key = torch.arange(columns, device=self.q.device) * kv_block
        scores += (key < begin + q_block) & (begin < key + kv_block)  # a row's own come first
        chosen = scores.topk(math.ceil(round(share * columns, 6)), dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)

    def error(self, o: torch.Tensor, mask: torch.Tensor | None, blocks: tuple[int, int] = (0, 0)) -> float:
        """The worst of some rows of o [1, tokens, heads, dim] against float64, over a mask of such blocks or all keys."""
        _, tokens, heads, dim = self.q.shape
        worst = 0.0
        for token, head in ((0, 0), (tokens // 3, heads // 3), (tokens - 1, heads - 1)):
            keys, values = self.k[0, :, head].double(), self.v[0, :, head].double()
            if mask is not None:
                kept = mask[0, head, token // blocks[0]].repeat_interleave(blocks[1])[:tokens]
                keys, values = keys[kept], values[kept]
            want = torch.softmax(keys @ self.q[0, token, head].double() * dim**-0.5, 0) @ values
            worst = max(worst, ((o[0, token, head].double() - want).norm() / want.norm()).item())
        return worst


def lists_of(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """i32 ids of a mask's blocks, ascending, then the others; and how many of each row are meant."""
    return mask.int().argsort(dim=-1, descending=True, stable=True).int(), mask.sum(-1).int()


def cudnn(tensors: Tensors, mask: torch.Tensor | None) -> Launch:
    attention = importlib.import_module("torch.nn.attention")
    q, k, v = tensors.heads_first()

    def launch() -> torch.Tensor:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return launch


def flex(tensors: Tensors, mask: torch.Tensor) -> Launch:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    ids, counts = lists_of(mask)
    tokens = tensors.q.shape[1]
    # Blocks that are kept whole: no mask is applied inside one.
    blocks = module.BlockMask.from_kv_blocks(torch.zeros_like(counts), torch.zeros_like(ids), counts, ids,
                                             BLOCK_SIZE=(128, 64), seq_lengths=(tokens, tokens))
    attend = torch.compile(module.flex_attention, dynamic=False)
    q, k, v = tensors.heads_first()
    return lambda: attend(q, k, v, block_mask=blocks).transpose(1, 2)


def sparge(tensors: Tensors, mask: torch.Tensor) -> Launch:
    attend = importlib.import_module("spas_sage_attn").block_sparse_sage2_attn_cuda
    q, k, v = (x.contiguous() for x in tensors.heads_first())
    chosen = mask.to(torch.int8)
    return lambda: attend(q, k, v, mask_id=chosen, tensor_layout="HND", output_dtype=torch.bfloat16).transpose(1, 2)


def sparge_call(tensors: Tensors, mask: torch.Tensor) -> Launch:
    attend = importlib.import_module("spas_sage_attn").spas_sage2_attn_meansim_topk_cuda
    q, k, v = (x.contiguous() for x in tensors.heads_first())
    rows, columns = mask.shape[-2:]
    most = int(mask.sum(-1).max())
    # It rounds topk * columns down, in f32; half a block more keeps that from losing one.
    options = {"topk": (most + 0.5) / columns, "tensor_layout": "HND", "output_dtype": torch.bfloat16}
    # Whole rows and columns come on top: those of blocks that its test finds too mixed, and of blocks that are not full.
    kept = 1 - attend(q, k, v, return_sparsity=True, **options)[1]
    if not most / columns - 0.001 < kept < (most + 1) / columns + 1 / rows:
        raise RuntimeError(f"keeps {kept:.4f} of all pairs of blocks where {most / columns:.4f} were asked for")
    print(f"sparge-call keeps {kept:.4f} of all pairs of blocks", flush=True)
    return lambda: attend(q, k, v, **options).transpose(1, 2)


def tilesieve(arithmetic: str, chooses: bool) -> Callable[[Tensors, torch.Tensor], Launch]:
    def make(tensors: Tensors, mask: torch.Tensor) -> Launch:
        package = importlib.import_module("tilesieve")
        tables = package.VideoTables(tensors.q, segments=SEGMENTS, num_kv_heads=tensors.q.shape[2])
        ids, counts = lists_of(mask)
        most = int(counts.max())
        lists = ids[..., :most].contiguous()
        options = {"budget": most / ids.shape[-1], "forced_inside_budget": True} if chooses else {"block_index": lists}
        return lambda: package.video_attention(tensors.q, tensors.k, tensors.v, tables=tables, arithmetic=arithmetic,
                                               **options)

    return make


# What to call, the blocks of its mask, the error that it may have (None: what it attends to is its own choice), and the
# dtypes of the cases that it is a baseline of: what is quantised replaces bf16, too.
SPARSE = {
    "flex": (flex, (128, 64), 0.02, ("int8", "bf16")),
    "sparge": (sparge, (64, 128), 0.2, ("int8",)),
    "sparge-call": (sparge_call, (64, 128), None, ("int8",)),
    "int8-lists": (tilesieve("int8", chooses=False), (128, 64), 0.1, ()),
    "int8-call": (tilesieve("int8", chooses=True), (128, 64), None, ()),
    "bf16-lists": (tilesieve("storage", chooses=False), (128, 64), 0.02, ()),
    "bf16-call": (tilesieve("storage", chooses=True), (128, 64), None, ()),
}


def measured(name: str, make: Callable[..., Launch], tensors: Tensors, share: float, blocks: tuple[int, int],
             limit: float | None) -> float | None:
    """Milliseconds, printed; None where it does not run."""
    try:
        mask = tensors.mask(share, blocks) if share < 1 else None
        launch = make(tensors, mask)
        error = None if limit is None else tensors.error(launch(), mask, blocks)
    except Exception as fault:  # what a package throws where it does not run is its own business
        print(f"{name}: left out: {type(fault).__name__}: {str(fault).splitlines()[:1]}", flush=True)
        return None
    assert limit is None or error < limit, f"{name}: error {error}"
    ms = median_ms(launch)
    print(f"{name}: {ms:.2f} ms" + ("" if error is None else f", error {error:.4f}"), flush=True)
    return ms


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    tensors = Tensors(TOKENS, HEADS, DIM, "cuda")
    versions = {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
    results: dict = {"device": torch.cuda.get_device_name(), "versions": versions, "rows": []}
    print(results["device"], versions, flush=True)

    def keep(what: str, dtype: str, share: float, baseline: str, ms: float) -> None:
        results["rows"].append({"case": f"video/{what}/{dtype}/{PROBLEM}/{share:.2f}", "baseline": baseline,
                                "metric": "ms", "value": ms})
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)

    dense = measured("cudnn", cudnn, tensors, 1, (0, 0), 0.02)
    if dense is not None:
        for dtype in ("int8", "bf16"):
            keep("dense-call", dtype, 1, "cudnn", dense)
            for share in (*SHARES, 1):
                keep("sparse-call", dtype, share, "cudnn", dense)
    for share in SHARES:
        times = {"cudnn": dense}
        for name, (make, blocks, limit, dtypes) in SPARSE.items():
            ms = measured(f"{name} at {share:.2f}", make, tensors, share, blocks, limit)
            times[name] = ms
            for dtype in dtypes if ms is not None else ():
                keep("sparse-call", dtype, share, name, ms)
        for own in ("int8-call", "bf16-call"):
            if times[own] is not None:
                peers = {name: times[name] for name in ("cudnn", "flex", "sparge", "sparge-call")}
                print(f"{own} at {share:.2f}: " + ", ".join(f"x {ms / times[own]:.2f} {name}" for name, ms in peers.items()
                                                           if ms is not None))


if __name__ == "__main__":
    main()
