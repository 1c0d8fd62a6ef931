#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What others reach at the problems of prefill_sm90_bench, index_sm90_bench and module_sm90_bench, for their --baseline.

    python bench/prefill_baselines.py OUT.json [--only REGEX]... [--list]

  triton           our rendition of one program a (token, KV head), as engines run it today: prefill_triton.py; of the
                   index branch, scores to memory and then a top-k, in bf16: index_triton.py; of a module of few
                   queries, the two one after the other
  flashinfer-msa   FlashInfer's sparse attention over given blocks
  cudnn, flash     dense causal attention by PyTorch, with cuDNN's and with FlashAttention's kernels
  fa3, fa4, flashinfer   dense causal attention by these packages

Sparse baselines have the shapes, the selections and the rate (whole picked blocks) of the sparse call. Dense ones are
measured as N queries of N keys; the rows of a call give the time for its own keys and queries, which where there are
fewer queries than keys is the measured one by the share of the visible pairs. Packages that are not installed are
named and left out, as are those that refuse this GPU. Everything is first compared with float64. Medians of
triton.testing.do_bench, which flushes the L2 before each launch. Needs PyTorch with CUDA, and Triton.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

try:
    import torch
    import triton
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import index_triton
    import prefill_triton
except ImportError as error:
    sys.exit(f"prefill_baselines: needs PyTorch and Triton: {error}")

BLOCK, DIM, KV_HEADS = 128, 128, 4
E4M3 = torch.float8_e4m3fn
DEVICE = "cuda"


class Refused(Exception):
    """A baseline does not run here; the text says why."""


def median_ms(launch: Callable[[], object]) -> float:
    return triton.testing.do_bench(launch, warmup=20, rep=60, return_mode="median")


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


# ---- sparse ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    kv_len: int
    q_len: int
    dtype: str  # "bf16", or "bf16-e4m3" = bf16 queries, e4m3 keys and values
    selection: str = "uniform"
    q_heads: int = 64
    top_k: int = 16

    @property
    def name(self) -> str:
        return (f"m3/call/{self.dtype}/{self.kv_len}x{self.q_len}/{self.selection}"
                + ("/hq32" if self.q_heads == 32 else "") + ("/top8" if self.top_k == 8 else ""))


SIZES = ((16384, 16384), (32768, 8192), (131072, 8192))
FEW_QUERIES = ((55040, 171), (74624, 338), (46848, 1404))


def sparse_shapes() -> list[Shape]:
    shapes = []
    for kv_len, q_len in SIZES:
        for dtype in ("bf16", "bf16-e4m3"):
            shapes += [Shape(kv_len, q_len, dtype, selection) for selection in ("uniform", "overlapping", "sink")]
            shapes += [Shape(kv_len, q_len, dtype, q_heads=32), Shape(kv_len, q_len, dtype, top_k=8)]
    for kv_len, q_len in FEW_QUERIES:
        shapes.append(Shape(kv_len, q_len, "bf16-e4m3"))
    return shapes


def best_ids(scores: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best of the visible blocks, the local one always; -1 where there are fewer."""
    ids = torch.arange(scores.shape[2], device=scores.device)
    scores = torch.where(ids < visible - 1, scores, torch.where(ids == visible - 1, 2.0, -1.0))
    best = scores.topk(count, dim=2)
    return torch.where(best.values >= 0, best.indices, -1)


def picks(shape: Shape) -> torch.Tensor:
    """[KV heads, tokens, top_k] as the bench picks them: ascending, then -1."""
    q_len, blocks = shape.q_len, shape.kv_len // BLOCK
    positions = torch.arange(shape.kv_len - q_len, shape.kv_len, device=DEVICE)
    visible = (positions // BLOCK + 1)[None, :, None]
    if shape.selection == "sink":
        scores = torch.linspace(1, 0, blocks, device=DEVICE).expand(KV_HEADS, q_len, blocks)
    else:
        scores = torch.rand(KV_HEADS, q_len, blocks, device=DEVICE)
    if shape.selection == "overlapping":  # four neighbours share seven of eight
        shared = best_ids(scores[:, ::4].repeat_interleave(4, dim=1)[:, :q_len], visible, shape.top_k * 7 // 8)
        scores = scores.scatter_add(2, shared.clamp(min=0), (shared >= 0).float())
    ids = best_ids(scores, visible, shape.top_k)
    last = torch.iinfo(torch.int32).max
    ids = torch.where(ids < 0, last, ids).sort(dim=2).values
    return torch.where(ids == last, -1, ids).to(torch.int32).contiguous()


class Sparse:
    """The tensors of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, pages = shape, shape.kv_len // BLOCK
        kv_dtype = torch.bfloat16 if shape.dtype == "bf16" else E4M3
        self.q = torch.randn(shape.q_len, shape.q_heads, DIM, device=DEVICE, dtype=torch.bfloat16)
        self.k, self.v = (torch.randn(pages, BLOCK, KV_HEADS, DIM, device=DEVICE).to(kv_dtype) for _ in range(2))
        self.index = picks(shape)
        self.table = torch.randperm(pages, device=DEVICE, dtype=torch.int32)
        self.flop = 4 * shape.q_heads // KV_HEADS * DIM * BLOCK * int((self.index >= 0).sum())

    def error(self, o: torch.Tensor) -> float:
        """The worst relative error of some rows of o against float64."""
        shape, worst = self.shape, 0.0
        for token in (0, shape.q_len // 3, shape.q_len - 1):
            for head in (0, shape.q_heads - 1):
                kv_head, position = head * KV_HEADS // shape.q_heads, shape.kv_len - shape.q_len + token
                ids = self.index[kv_head, token]
                keys = (ids[ids >= 0, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten()
                keys = keys[keys <= position]
                rows = (self.table[keys // BLOCK].long(), keys % BLOCK, kv_head)
                logits = self.k[rows].double() @ self.q[token, head].double() * DIM**-0.5
                worst = max(worst, relative_error(o[token, head], torch.softmax(logits, 0)
                                                  @ self.v[rows].double()))
        return worst


def run_triton(sparse: Sparse) -> float:
    o = torch.full_like(sparse.q, float("nan"))

    def launch(config: tuple[int, int]) -> None:
        prefill_triton.launch(sparse.q, sparse.k, sparse.v, sparse.index, sparse.table, o, sparse.shape.kv_len, *config)

    launch(prefill_triton.CONFIGS[0])
    worst = sparse.error(o)
    assert worst < 0.02, f"triton, {sparse.shape.name}: error {worst}"
    return min(median_ms(lambda config=config: launch(config)) for config in prefill_triton.CONFIGS)


def run_flashinfer_msa(sparse: Sparse) -> float:
    attend = import_from("flashinfer.msa_ops", "msa_sparse_attention")
    shape = sparse.shape
    cu_q = torch.tensor([0, shape.q_len], device=DEVICE, dtype=torch.int32)
    kv_lens = torch.tensor([shape.kv_len], device=DEVICE, dtype=torch.int32)
    k, v = (x.transpose(1, 2).contiguous() for x in (sparse.k, sparse.v))  # pages of heads of tokens

    def launch() -> torch.Tensor:
        return attend(sparse.q, k, v, sparse.index, cu_q, causal=True, page_table=sparse.table[None],
                      seqused_k=kv_lens)

    worst = sparse.error(launch())
    assert worst < 0.05, f"flashinfer-msa, {shape.name}: error {worst}"
    return median_ms(launch)


SPARSE_BASELINES = {"triton": run_triton, "flashinfer-msa": run_flashinfer_msa}


# ---- index branch ----------------------------------------------------------------------------------------------------

INDEX_HEADS, TOP_K = 4, 16


@dataclass(frozen=True)
class IndexShape:
    kv_len: int
    q_len: int

    @property
    def name(self) -> str:
        return f"m3/index/bf16/{self.kv_len}x{self.q_len}/-"


INDEX_SIZES = (*SIZES, (32768, 32768), (131072, 131072), *FEW_QUERIES)


class Index:
    """The tensors of one shape."""

    def __init__(self, shape: IndexShape) -> None:
        self.shape, pages = shape, shape.kv_len // BLOCK
        self.q = torch.randn(shape.q_len, INDEX_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        self.k = torch.randn(pages, BLOCK, DIM, device=DEVICE, dtype=torch.bfloat16)
        self.table = torch.randperm(pages, device=DEVICE, dtype=torch.int32)
        self.scores = torch.empty(INDEX_HEADS, shape.q_len, pages, device=DEVICE)
        self.ids = torch.empty(INDEX_HEADS, shape.q_len, TOP_K, device=DEVICE, dtype=torch.int32)

    def launch(self, scores_config: tuple[int, ...], top_k_config: tuple[int, ...]) -> None:
        index_triton.launch_scores(self.q, self.k, self.table, self.scores, self.shape.kv_len, *scores_config)
        index_triton.launch_top_k(self.scores, self.ids, self.shape.kv_len, BLOCK, *top_k_config)

    def check(self) -> None:
        """That the ids of some rows are the local block and the best others, in float64."""
        shape = self.shape
        for token in (0, shape.q_len // 3, shape.q_len - 1):
            for head in range(INDEX_HEADS):
                position = shape.kv_len - shape.q_len + token
                products = self.k[self.table.long()].double().flatten(0, 1) @ self.q[token, head].double()
                products[position + 1 :] = -torch.inf
                scores = products.view(-1, BLOCK).amax(1)[: position // BLOCK]  # but for the local one
                ids = self.ids[head, token][self.ids[head, token] >= 0].long()
                chosen = torch.zeros(position // BLOCK + 1, dtype=torch.bool, device=DEVICE)
                chosen[ids] = True
                want = min(TOP_K, position // BLOCK + 1)
                right = len(ids) == want == int(chosen.sum()) and bool(chosen[-1])
                if right and want <= position // BLOCK:
                    right = bool(scores[chosen[:-1]].min() >= scores[~chosen[:-1]].max() - 1e-3)
                assert right, f"triton, {shape.name}: token {token} of head {head} has {ids.tolist()}"


def run_index(index: Index) -> list[dict]:
    """Rows of the index branch, and where queries are few of it and then attention."""
    index.launch(index_triton.SCORES_CONFIGS[0], index_triton.TOP_K_CONFIGS[0])
    index.check()
    shape, scores, ids, kv_len = index.shape, index.scores, index.ids, index.shape.kv_len
    best_scores = min(index_triton.SCORES_CONFIGS, key=lambda config: median_ms(
        lambda: index_triton.launch_scores(index.q, index.k, index.table, scores, kv_len, *config)))
    best_top_k = min(index_triton.TOP_K_CONFIGS, key=lambda config: median_ms(
        lambda: index_triton.launch_top_k(scores, ids, kv_len, BLOCK, *config)))
    ms = median_ms(lambda: index.launch(best_scores, best_top_k))
    index.check()
    print(f"{shape.name} triton: scores by {best_scores}, top-k by {best_top_k}", flush=True)
    rows = [{"case": shape.name, "baseline": "triton", "metric": "ms", "value": ms}]
    if (kv_len, shape.q_len) in FEW_QUERIES:
        attention = run_triton(Sparse(Shape(kv_len, shape.q_len, "bf16-e4m3")))
        rows.append({"case": f"m3/module/bf16-e4m3/{kv_len}x{shape.q_len}/-", "baseline": "triton", "metric": "ms",
                     "value": ms + attention})
    return rows


# ---- dense -----------------------------------------------------------------------------------------------------------


class Dense:
    """N queries of N keys, 64 heads on 4: [1, tokens, heads, dim]."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.q, self.k, self.v = (torch.randn(1, length, heads, DIM, device=DEVICE, dtype=torch.bfloat16)
                                  for heads in (64, KV_HEADS, KV_HEADS))

    def error(self, o: torch.Tensor) -> float:
        """The worst relative error of some rows of o [1, tokens, heads, dim] against float64."""
        worst = 0.0
        for token in (0, self.length // 3, self.length - 1):
            for head in (0, 63):
                k, v = (x[0, : token + 1, head // 16].double() for x in (self.k, self.v))
                weights = torch.softmax(k @ self.q[0, token, head].double() * DIM**-0.5, 0)
                worst = max(worst, relative_error(o[0, token, head], weights @ v))
        return worst


def by_pytorch(backend: SDPBackend) -> Callable[[Dense], Callable[[], torch.Tensor]]:
    def make(dense: Dense) -> Callable[[], torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (dense.q, dense.k, dense.v))

        def launch(**options: bool) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, **options).transpose(1, 2)

        try:
            launch(enable_gqa=True)
            return lambda: launch(enable_gqa=True)
        except RuntimeError:  # a kernel that wants as many heads of keys as of queries; the copies are not measured
            k, v = (x.repeat_interleave(16, dim=1) for x in (k, v))
            return launch

    return make


def by_flash_attn(module: str, e4m3: bool = False) -> Callable[[Dense], Callable[[], torch.Tensor]]:
    def make(dense: Dense) -> Callable[[], torch.Tensor]:
        attend = import_from(module, "flash_attn_func")
        tensors = [x.to(E4M3) if e4m3 else x for x in (dense.q, dense.k, dense.v)]

        def launch() -> torch.Tensor:
            o = attend(*tensors, causal=True)
            return o[0] if isinstance(o, tuple) else o

        return launch

    return make


def by_flashinfer(dense: Dense) -> Callable[[], torch.Tensor]:
    attend = import_from("flashinfer", "single_prefill_with_kv_cache")
    return lambda: attend(dense.q[0], dense.k[0], dense.v[0], causal=True)[None]


# The call whose rows they go to, what to call, and the error that it may have.
DENSE_BASELINES = {
    "cudnn": ("bf16", by_pytorch(SDPBackend.CUDNN_ATTENTION), 0.02),
    "flash": ("bf16", by_pytorch(SDPBackend.FLASH_ATTENTION), 0.02),
    "fa3": ("bf16", by_flash_attn("flash_attn_interface"), 0.02),
    "fa3-e4m3": ("e4m3", by_flash_attn("flash_attn_interface", e4m3=True), 0.2),
    "fa4": ("bf16", by_flash_attn("flash_attn.cute"), 0.02),
    "flashinfer": ("bf16", by_flashinfer, 0.02),
}


def pairs(kv_len: int, q_len: int) -> float:
    """(query, key) pairs of one head, causal."""
    return q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2


def run_dense(baseline: str, dense: Dense) -> list[dict]:
    dtype, make, limit = DENSE_BASELINES[baseline]
    launch = make(dense)
    worst = dense.error(launch())
    assert worst < limit, f"{baseline}, {dense.length}: error {worst}"
    length, ms = dense.length, median_ms(launch)
    flop = 4 * 64 * DIM * pairs(length, length)
    rows = [{"case": f"m3/dense/{dtype}/{length}x{length}/{baseline}", "metric": "TFLOP/s", "value": flop / ms * 1e-9}]
    for kv_len, q_len in dict.fromkeys((*SIZES, (length, length))):
        if kv_len != length:
            continue
        compared = [f"m3/call/{dtype}/{kv_len}x{q_len}/uniform"]
        if q_len == kv_len:  # dense bf16 is what an e4m3 call replaces, too
            compared += [f"m3/auto/e4m3/{kv_len}x{q_len}/{selection}" for selection in ("uniform", "overlapping")]
            compared += [f"m3/module/{of}/{kv_len}x{q_len}/-" for of in ("e4m3", "bf16")]
        rows += [{"case": case, "baseline": baseline, "metric": "ms",
                  "value": ms * pairs(kv_len, q_len) / pairs(length, length)} for case in dict.fromkeys(compared)]
    return rows


# ---- all -------------------------------------------------------------------------------------------------------------


def import_from(module: str, name: str) -> Callable:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as fault:
        raise Refused(f"{module}.{name}: {fault}") from None


def versions() -> dict[str, str]:
    """Of what takes part; a package that is not installed has none."""
    found = {"torch": torch.__version__, "triton": triton.__version__, "cudnn": str(torch.backends.cudnn.version())}
    for module in ("flash_attn_interface", "flash_attn", "flashinfer"):
        try:
            found[module] = getattr(importlib.import_module(module), "__version__", "unknown")
        except ImportError as fault:
            print(f"{module}: left out: {fault}")
    return found


def reason(fault: Exception) -> str:
    return f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", metavar="OUT.json")
    parser.add_argument("--only", action="append", metavar="REGEX", help="cases whose 'name baseline' holds a match")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    arguments = parser.parse_args()
    if arguments.list == bool(arguments.path):
        parser.error("give either OUT.json or --list")

    # Each case: its name, the baseline, and what makes its rows.
    cases = [(f"m3/dense/{length}x{length}", baseline, length) for length in (16384, 32768, 131072)
             for baseline in DENSE_BASELINES]
    cases += [(shape.name, baseline, shape) for shape in sparse_shapes() for baseline in SPARSE_BASELINES]
    cases += [(shape.name, "triton", shape) for shape in (IndexShape(*sizes) for sizes in INDEX_SIZES)]
    cases = [case for case in cases
             if any(re.search(only, f"{case[0]} {case[1]}") for only in arguments.only or [""])]
    if arguments.list:
        print(*(f"{name} {baseline}" for name, baseline, _ in cases), sep="\n")
        return

    results = {"device": torch.cuda.get_device_name(), "versions": versions(), "rows": []}
    print(results["device"], results["versions"], flush=True)
    torch.manual_seed(1)
    inputs = None
    for name, baseline, problem in cases:
        try:
            if isinstance(problem, Shape):
                if not isinstance(inputs, Sparse) or inputs.shape != problem:
                    inputs = None  # frees the memory first
                    inputs = Sparse(problem)
                ms = SPARSE_BASELINES[baseline](inputs)
                rows = [{"case": name, "baseline": baseline, "metric": "TFLOP/s", "value": inputs.flop / ms * 1e-9}]
            elif isinstance(problem, IndexShape):
                inputs = None
                rows = run_index(Index(problem))
            else:
                if not isinstance(inputs, Dense) or inputs.length != problem:
                    inputs = None
                    inputs = Dense(problem)
                rows = run_dense(baseline, inputs)
        except AssertionError:
            raise
        except Exception as fault:  # what a package throws where it does not run is its own business
            print(f"{name} {baseline}: left out: {reason(fault)}", flush=True)
            torch.cuda.empty_cache()
            continue
        results["rows"] += rows
        print(*rows, sep="\n", flush=True)
        with open(arguments.path, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    if not results["rows"]:
        sys.exit("prefill_baselines: nothing was measured")


if __name__ == "__main__":
    main()
