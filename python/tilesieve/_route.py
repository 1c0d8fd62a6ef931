# SPDX-License-Identifier: Apache-2.0
"""Routing: which blocks of keys each query attends to; and routing and attending in one call."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt

from . import _core
from ._arrays import A, Array, in_library_of, on_cuda
from ._attend import attend, refuse_cuda_arguments
from ._options import Arithmetic, Isa, Lengths, LoopOrder, Prefilling, Router, Routing, Scale, Scoring
from ._prefill import Choice, attend_on_cuda, route_on_cuda
from ._progress import progress_bar


@overload
def route(q: np.ndarray[Any, Any], k: Array | None = None,
          **options: Unpack[Routing]) -> npt.NDArray[np.int32]: ...
@overload
def route(q: A, k: Array | None = None, **options: Unpack[Routing]) -> A: ...
@overload
def route(q: None = None, k: Array | None = None, **options: Unpack[Routing]) -> Any: ...
def route(
    q: Array | None = None,
    k: Array | None = None,
    *,
    router: Router | None = None,
    top_k: int = 16,
    index_q: Array | None = None,
    index_k: Array | None = None,
    local_blocks: int = 1,
    init_blocks: int = 0,
    seed: int = 0,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int | None = None,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_kv: Lengths | None = None,
    kv_lens: Lengths | None = None,
    block_table: Array | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    num_threads: int | None = None,
    isa: Isa = "best",
    progress: bool = False,
) -> Any:
    """Chooses the top_k blocks of keys for each (token, KV head).

    On the CPU, or on a Hopper GPU where the tensors that the router reads lie there: on the current stream of the
    library of its queries, index_q or q. What a GPU takes is marked CUDA below. It chooses the same blocks up to the
    rounding of the scores, and of means, which are bf16 there.

    Args:
        q: queries, as of `attend`. The router "index" does without q and k. CUDA: bf16 or e4m3, whatever k is.
        k: keys, as of `attend`.
        router: how a block is scored. "index": the largest index_q · index_k of its keys, the model's own index branch,
            as in MiniMax-M3's sparse attention (arXiv 2606.13392); "qk_max": the largest (mean query of the group) ·
            key; "mean_pool": (mean query of the group) · (mean key), the gate of MoBA (arXiv 2502.13189) for a group;
            "oracle": its share of the dense softmax, mean over the group, which costs as much as attending to all;
            "random": a seeded number. None = "index" where there are index_q and index_k, else "qk_max". CUDA: no
            "oracle" and no "random".
        top_k: most blocks that a token attends to (CUDA: 1 to 32).
        index_q: [total_q, num_kv_heads, index_dim] in f32, bf16, f16 or e4m3, for the router "index" and no other.
            CUDA: bf16 or e4m3, 1, 2 or 4 heads, index_dim 128, strides in multiples of 16 bytes; index_k too.
        index_k: [total_kv, index_dim], one key for all heads, or pages [num_pages, kv_block_size, index_dim]. CUDA: of
            the type of index_q.
        local_blocks: the block that holds the token and those right before it are always chosen: this many.
        init_blocks: the first blocks of a sequence are always chosen: this many. They win where both do not fit.
        seed: of the router "random", 0 or more.
        causal: as of `attend`.
        softmax_scale: as of `attend`; the oracle's.
        kv_block_size: as of `attend`.
        cu_seqlens_q: as of `attend`.
        cu_seqlens_kv: as of `attend`.
        kv_lens: as of `attend`.
        block_table: as of `attend`; of k and index_k.
        q_scale: as of `attend`; the oracle's.
        k_scale: as of `attend`; the oracle's.
        num_threads: as of `attend`.
        isa: as of `attend`.
        progress: as of `attend`.

    Returns:
        i32 [num_kv_heads, total_q, top_k]: ascending ids inside the token's own sequence, then -1. Forced blocks first,
        then the highest scores; ties go to the lower id, NaN is chosen last. Of PyTorch where the inputs are, else of
        NumPy; on CUDA of the library of the queries, PyTorch or CuPy, and the call returns before the work is done.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    given = index_q if q is None else q
    if on_cuda(given) or on_cuda(index_q):
        return route_on_cuda(
            q, k, router=router, top_k=top_k, index_q=index_q, index_k=index_k, local_blocks=local_blocks,
            init_blocks=init_blocks, seed=seed, causal=causal, softmax_scale=softmax_scale,
            kv_block_size=kv_block_size, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens,
            block_table=block_table, num_threads=num_threads, isa=isa, progress=progress)
    call = _core.Call(q, k, None, index_q, index_k, block_table, q_scale, k_scale, None, cu_seqlens_q, cu_seqlens_kv,
                      kv_lens, kv_block_size, top_k, causal, softmax_scale)
    with progress_bar(progress, "route") as counters:
        ids = call.route(router, local_blocks, init_blocks, seed, False, num_threads, isa, counters)
    return in_library_of(given, ids)


@overload
def route_scores(q: np.ndarray[Any, Any], k: Array | None = None,
                 **options: Unpack[Scoring]) -> npt.NDArray[np.float32]: ...
@overload
def route_scores(q: A, k: Array | None = None, **options: Unpack[Scoring]) -> A: ...
@overload
def route_scores(q: None = None, k: Array | None = None, **options: Unpack[Scoring]) -> Any: ...
def route_scores(
    q: Array | None = None,
    k: Array | None = None,
    *,
    router: Router | None = None,
    index_q: Array | None = None,
    index_k: Array | None = None,
    local_blocks: int = 1,
    init_blocks: int = 0,
    seed: int = 0,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int | None = None,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_kv: Lengths | None = None,
    kv_lens: Lengths | None = None,
    block_table: Array | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    num_threads: int | None = None,
    isa: Isa = "best",
    progress: bool = False,
) -> Any:
    """The scores that `route` chooses by, to be looked at: it never stores them itself. On the CPU.

    Returns:
        f32 [num_kv_heads, total_q, blocks of the longest sequence]; -inf where a block is not visible. Of PyTorch where
        the inputs are, else of NumPy. Arguments and errors as of `route`.
    """
    name, given = ("index_q", index_q) if q is None else ("q", q)
    if on_cuda(given):
        raise _core.Error(f"{name}: lies on a CUDA device; the scores are on the CPU so far")
    call = _core.Call(q, k, None, index_q, index_k, block_table, q_scale, k_scale, None, cu_seqlens_q, cu_seqlens_kv,
                      kv_lens, kv_block_size, 1, causal, softmax_scale)
    with progress_bar(progress, "route") as counters:
        scores = call.route(router, local_blocks, init_blocks, seed, True, num_threads, isa, counters)
    return in_library_of(given, scores)


@overload
def sparse_prefill(q: A, k: Array, v: Array, *, return_lse: Literal[False] = False,
                   **options: Unpack[Prefilling]) -> A: ...
@overload
def sparse_prefill(q: A, k: Array, v: Array, *, return_lse: Literal[True],
                   **options: Unpack[Prefilling]) -> tuple[A, A]: ...
@overload
def sparse_prefill(q: A, k: Array, v: Array, *, return_lse: bool,
                   **options: Unpack[Prefilling]) -> A | tuple[A, A]: ...
def sparse_prefill(
    q: Any,
    k: Array,
    v: Array,
    *,
    router: Router | None = None,
    top_k: int = 16,
    index_q: Array | None = None,
    index_k: Array | None = None,
    local_blocks: int = 1,
    init_blocks: int = 0,
    seed: int = 0,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int | None = None,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_kv: Lengths | None = None,
    kv_lens: Lengths | None = None,
    block_table: Array | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    loop_order: LoopOrder = "auto",
    workspace: Array | None = None,
    workspace_limit: int | None = None,
    arithmetic: Arithmetic = "storage",
    num_threads: int | None = None,
    isa: Isa = "best",
    max_kv_blocks: int | None = None,
    tile_tokens: int | None = None,
    dense_up_to: int | None = None,
    stream: Any = None,
    progress: bool = False,
) -> Any:
    """Sparse prefill in one call: chooses the blocks of each token as `route` does, then attends as `attend` does.

    On a Hopper GPU, where q lies there, the ids stay in the workspace, which is larger by them. Arguments, result and
    errors as of `route` and `attend`, and one more:

    Args:
        dense_up_to: on CUDA with loop_order "auto", where the shapes allow no sequence more keys than this, all visible
            keys are attended to, because choosing takes longer than it saves; 0 = never. None = where that is on an
            H200. Pages of a block_table count as full.
    """
    if on_cuda(q):
        name = _core.router_on_cuda(router, index_q, index_k, seed, softmax_scale)
        return attend_on_cuda(
            q, k, v, None, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
            loop_order=loop_order, workspace=workspace, workspace_limit=workspace_limit, arithmetic=arithmetic,
            num_threads=num_threads, isa=isa, max_kv_blocks=max_kv_blocks, tile_tokens=tile_tokens, stream=stream,
            progress=progress,
            choice=Choice(name, index_q, index_k, top_k, local_blocks, init_blocks, dense_up_to))
    refuse_cuda_arguments(max_kv_blocks=max_kv_blocks, tile_tokens=tile_tokens, dense_up_to=dense_up_to, stream=stream)
    if on_cuda(index_q):
        raise _core.Error("index_q: lies on a CUDA device, expected the CPU as q")
    block_index = route(
        q, k, router=router, top_k=top_k, index_q=index_q, index_k=index_k, local_blocks=local_blocks,
        init_blocks=init_blocks, seed=seed, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
        q_scale=q_scale, k_scale=k_scale, num_threads=num_threads, isa=isa, progress=progress)
    return attend(
        q, k, v, block_index, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
        loop_order=loop_order, workspace=workspace, workspace_limit=workspace_limit, arithmetic=arithmetic,
        num_threads=num_threads, isa=isa, progress=progress)
