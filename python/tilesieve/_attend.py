# SPDX-License-Identifier: Apache-2.0
"""Attention over given blocks of keys, in one call or planned once and run often."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

from . import _core
from ._arrays import A, Array, on_cuda, outputs
from ._options import Arithmetic, Attending, Isa, Lengths, LoopOrder, Router, Running, Scale
from ._prefill import Choice, attend_on_cuda, explain_on_cuda, workspace_bytes_on_cuda
from ._problem import Problem
from ._progress import progress_bar


def refuse_cuda_arguments(**arguments: Any) -> None:
    """Raises an Error where a call on the CPU is given what is for a CUDA device."""
    for name, got in arguments.items():
        if got is not None:
            raise _core.Error(f"{name}: is for calls on a CUDA device, and q lies on the CPU")


@overload
def attend(q: A, k: Array, v: Array, block_index: Array | None = None, *, return_lse: Literal[False] = False,
           **options: Unpack[Attending]) -> A: ...
@overload
def attend(q: A, k: Array, v: Array, block_index: Array | None = None, *, return_lse: Literal[True],
           **options: Unpack[Attending]) -> tuple[A, A]: ...
@overload
def attend(q: A, k: Array, v: Array, block_index: Array | None = None, *, return_lse: bool,
           **options: Unpack[Attending]) -> A | tuple[A, A]: ...
def attend(
    q: Any,
    k: Array,
    v: Array,
    block_index: Array | None = None,
    *,
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
    stream: Any = None,
    progress: bool = False,
) -> Any:
    """Attention over chosen blocks of keys, or over all of them: softmax(softmax_scale · q kᵀ) v.

    On the CPU, or in bf16 and fp8 on a Hopper GPU where q lies there. What a GPU takes is marked CUDA below; besides,
    there the group num_q_heads // num_kv_heads is 1, 2, 4, 8 or 16, all arrays lie
    on q's device, and strides of q, k, v and out are multiples of 16 bytes.

    Args:
        q: queries [total_q, num_q_heads, head_dim] in f32, bf16, f16 or e4m3 (CUDA: bf16, e4m3). All sequences of a
            batch lie one after the other. head_dim is a multiple of 8 up to 256 (CUDA: 64 or 128).
        k: keys [total_kv, num_kv_heads, head_dim], or pages of one block each [num_pages, kv_block_size, num_kv_heads,
            head_dim] with a block_table. num_kv_heads divides num_q_heads: query head h reads KV head
            h // (num_q_heads // num_kv_heads). CUDA: bf16 or e4m3; bf16 queries of e4m3 keys are quantised in the call,
            with a scale for each token and head.
        v: values, as k, with strides of their own.
        block_index: i32 [num_kv_heads, total_q, capacity], the ids of key blocks that each token's query heads attend
            to, counted inside the token's own sequence. In any order; -1, ids out of range and blocks in the future
            contribute nothing, a duplicate counts once. None = every visible key, in q_outer. CUDA: a capacity of 32 at
            the most. Ids count blocks of kv_block_size keys: an index made for blocks of 64 and read in blocks of
            128 is of a right shape, and silently of the wrong keys.
        causal: query i of a sequence sees the keys up to position kv_len - q_len + i; else all of its sequence.
        softmax_scale: factor of q kᵀ, above 0; None = 1 / sqrt(head_dim).
        kv_block_size: keys of one block, a multiple of 8 up to 1,024 (CUDA: 64 or 128); None = those of a page where
            there is a block_table, else 128.
        cu_seqlens_q: [num_sequences + 1] where the sequences begin among the queries, and the end of the last: i32, i64
            or a sequence of whole numbers (CUDA: i32 in device memory; tokens behind the end are padding, 0 in o and
            -inf in lse). None = one sequence.
        cu_seqlens_kv: likewise among packed keys.
        kv_lens: [num_sequences] keys of each sequence, with a block_table.
        block_table: i32 [num_sequences, blocks of the longest sequence or more], the page of each block. A page that
            does not exist is an error; CUDA: reads as zeros.
        q_scale: what stored numbers of q are to be multiplied by: f32 [1], [num_kv_heads] or of no dimension, or a
            float (CUDA: an array).
        k_scale: likewise of k.
        v_scale: likewise of v.
        out: array to write to, [total_q, num_q_heads, head_dim] in f32, bf16 or f16 (CUDA: bf16, f16); None = a new one
            of q's type (bf16 where q is e4m3) and library (NumPy's where that is neither PyTorch nor CuPy). What is
            written to, lse and workspace too, shares no memory with what is read, nor with one another.
        lse: array to write to, f32 [total_q, num_q_heads]; None = a new one where it is returned.
        return_lse: whether to return lse beside o.
        loop_order: "auto"; "q_outer" owns queries and streams blocks, "kv_outer" owns blocks and streams the queries
            that chose them. On the CPU the choice does not change a bit of the result.
        workspace: memory for partial results, of any type, 64-byte aligned (CUDA: 256), of `workspace_bytes` bytes or
            more; None = allocated for the call (CUDA: by q's library).
        workspace_limit: most bytes of partial results that lie in memory at a time; None = 288 MiB (CUDA: 1,280 MiB).
        arithmetic: on the CPU; "storage" takes the stored numbers exactly, "int8" rounds q, and k less its mean, to 8
            bits first, v and the weights of the softmax to 8 or 16: in q_outer, where `kernels` has one that runs.
        num_threads: on the CPU; None = as many as OpenMP would use.
        isa: instruction set on the CPU; "best" = the best that has a kernel for the call.
        max_kv_blocks: on CUDA, a bound of the key blocks of all sequences together, which saves time and workspace
            where a block_table is wide; None = what the shapes allow. Where lengths go beyond it, tokens that picked a
            block past it get NaN in kv_outer.
        tile_tokens: on CUDA, neighbouring query tokens that q_outer computes together, over the union of their blocks:
            1 up to what 64 rows (token, query head of the group) hold; changes no bit. None = chosen by shapes.
        stream: on CUDA, the stream to work on, with out and workspace given, lse if it is wanted, and the lengths: a
            handle (0 = the legacy default stream), or an object with __cuda_stream__, .cuda_stream (PyTorch) or .ptr
            (CuPy); None = the current stream of q's library.
        progress: whether to show a tqdm bar (on the CPU).

    Returns:
        o [total_q, num_q_heads, head_dim]; with return_lse (o, lse), lse f32 [total_q, num_q_heads] being the natural
        logarithm of the sum over exp(softmax_scale · q kᵀ). A row that sees nothing is 0 in o and -inf in lse. On CUDA
        the call returns before the work is done, like any kernel launch, and can be captured in a graph.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    if type(q) is not np.ndarray and on_cuda(q):  # asked first for the sake of the smallest calls
        return attend_on_cuda(
            q, k, v, block_index, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
            loop_order=loop_order, workspace=workspace, workspace_limit=workspace_limit, arithmetic=arithmetic,
            num_threads=num_threads, isa=isa, max_kv_blocks=max_kv_blocks, tile_tokens=tile_tokens, stream=stream,
            progress=progress)
    if max_kv_blocks is not None or tile_tokens is not None or stream is not None:  # likewise
        refuse_cuda_arguments(max_kv_blocks=max_kv_blocks, tile_tokens=tile_tokens, stream=stream)
    call = _core.Call(q, k, v, None, None, block_table, q_scale, k_scale, v_scale, cu_seqlens_q, cu_seqlens_kv, kv_lens,
                      kv_block_size, 1, causal, softmax_scale)
    out, lse = outputs(q, out, lse, return_lse)
    if not progress:  # without the bar, for the sake of the smallest calls
        call.attend(block_index, out, lse, workspace, loop_order, workspace_limit, arithmetic, num_threads, isa, None)
    else:
        with progress_bar(progress, "attend") as counters:
            call.attend(block_index, out, lse, workspace, loop_order, workspace_limit, arithmetic, num_threads, isa,
                        counters)
    return (out, lse) if return_lse else out


class Plan:
    """A block index made ready for running: the order of the loops and the schedule. Made by `plan`.

    A plan holds no array. It runs any q, k and v of the shapes and types that it was made for.
    """

    def __init__(self, core: _core.Plan, num_threads: int | None, isa: Isa) -> None:
        self._core = core
        self._num_threads = num_threads
        self._isa: Isa = isa

    def __repr__(self) -> str:
        return f"<tilesieve.Plan {self.loop_order}: {self._core.line}>"

    @property
    def problem(self) -> Problem:
        """The sizes that it was made for; top_k is the capacity of the block index."""
        return Problem.parse(self._core.line)

    @property
    def loop_order(self) -> Literal["q_outer", "kv_outer"]:
        """ "q_outer" or "kv_outer"."""
        return "kv_outer" if self._core.loop_order == "kv_outer" else "q_outer"

    @property
    def explanation(self) -> str:
        """Why this order of the loops, with the numbers that it rests on."""
        return self._core.explanation

    @property
    def num_picks(self) -> int:
        """(KV head, token, block) triples that are attended: distinct, in range and visible."""
        return self._core.num_picks

    @property
    def workspace_bytes(self) -> int:
        """Bytes of partial results that lie in memory at a time; 0 for q_outer."""
        return self._core.workspace_bytes

    @overload
    def run(self, q: A, k: Array, v: Array, *, return_lse: Literal[False] = False, **options: Unpack[Running]) -> A: ...
    @overload
    def run(self, q: A, k: Array, v: Array, *, return_lse: Literal[True],
            **options: Unpack[Running]) -> tuple[A, A]: ...
    @overload
    def run(self, q: A, k: Array, v: Array, *, return_lse: bool,
            **options: Unpack[Running]) -> A | tuple[A, A]: ...
    def run(
        self,
        q: Any,
        k: Array,
        v: Array,
        *,
        block_table: Array | None = None,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        workspace: Array | None = None,
        num_threads: int | None = None,
        isa: Isa | None = None,
        progress: bool = False,
    ) -> Any:
        """Attends as planned. Arguments, result and errors as of `attend`; num_threads and isa None = as planned."""
        call = self._core.call(q, k, v, block_table, q_scale, k_scale, v_scale)
        out, lse = outputs(q, out, lse, return_lse)
        threads = self._num_threads if num_threads is None else num_threads
        with progress_bar(progress, "attend") as counters:
            self._core.run(call, out, lse, workspace, threads, self._isa if isa is None else isa, counters)
        return (out, lse) if return_lse else out


def plan(
    q: Array,
    k: Array,
    block_index: Array,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int | None = None,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_kv: Lengths | None = None,
    kv_lens: Lengths | None = None,
    block_table: Array | None = None,
    loop_order: LoopOrder = "auto",
    workspace_limit: int | None = None,
    arithmetic: Arithmetic = "storage",
    num_threads: int | None = None,
    isa: Isa = "best",
) -> Plan:
    """Plans attention over a block index on the CPU: which loop is the outer one, and who does what.

    Of q and k only shapes and types are read. `attend` plans in each call; a plan is worth keeping where several calls
    share a block index. Arguments and errors as of `attend`.
    """
    call = _core.Call(q, k, None, None, None, block_table, None, None, None, cu_seqlens_q, cu_seqlens_kv, kv_lens,
                      kv_block_size, 1, causal, softmax_scale)
    return Plan(call.plan(block_index, loop_order, workspace_limit, arithmetic, num_threads, isa), num_threads, isa)


def explain(
    q: Array,
    k: Array,
    block_index: Array | None,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int | None = None,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_kv: Lengths | None = None,
    kv_lens: Lengths | None = None,
    block_table: Array | None = None,
    loop_order: LoopOrder = "auto",
    workspace_limit: int | None = None,
    arithmetic: Arithmetic = "storage",
    num_threads: int | None = None,
    isa: Isa = "best",
    max_kv_blocks: int | None = None,
    tile_tokens: int | None = None,
) -> str:
    """Says in words how `attend` would walk a block index, and why. On the CPU `plan(...).explanation`.

    Of q and k only shapes and types are read. On CUDA block_index may be None; where it is the device that decides, the
    call makes the same decision on the current stream of q's library and waits for it, so it is for no graph. Arguments
    and errors as of `attend`.
    """
    if on_cuda(q):
        return explain_on_cuda(
            q, k, block_index, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
            loop_order=loop_order, workspace_limit=workspace_limit, arithmetic=arithmetic, num_threads=num_threads,
            isa=isa, max_kv_blocks=max_kv_blocks, tile_tokens=tile_tokens)
    refuse_cuda_arguments(max_kv_blocks=max_kv_blocks, tile_tokens=tile_tokens)
    if block_index is None:
        raise _core.Error("block_index: got None, expected i32 [num_kv_heads, total_q, capacity]")
    return plan(
        q, k, block_index, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
        loop_order=loop_order, workspace_limit=workspace_limit, arithmetic=arithmetic, num_threads=num_threads,
        isa=isa).explanation


def workspace_bytes(
    q: Array,
    k: Array,
    v: Array,
    block_index: Array | None = None,
    *,
    router: Router | None = None,
    top_k: int = 16,
    index_q: Array | None = None,
    index_k: Array | None = None,
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
    loop_order: LoopOrder = "auto",
    workspace_limit: int | None = None,
    arithmetic: Arithmetic = "storage",
    num_threads: int | None = None,
    isa: Isa = "best",
    max_kv_blocks: int | None = None,
    tile_tokens: int | None = None,
    dense_up_to: int | None = None,
) -> int:
    """Bytes of workspace that `attend` needs with these arguments; on CUDA with a router, `sparse_prefill`.

    A router is one by name, or index_q and index_k.

    On the CPU it is that of the plan of a block index, and depends on the ids: 0 where the queries are the outer loop.
    On CUDA only shapes are read, and the answer holds for all data, lengths and ids within them. Arguments and errors
    as of those two.
    """
    if on_cuda(q):
        choice = None
        if router is not None or index_q is not None or index_k is not None:
            name = _core.router_on_cuda(router, index_q, index_k, 0, softmax_scale)
            choice = Choice(name, index_q, index_k, top_k, 1, 0, dense_up_to)
        elif dense_up_to is not None:
            raise _core.Error("dense_up_to: got one without a router, or index_q and index_k, to choose blocks by")
        return workspace_bytes_on_cuda(
            q, k, v, block_index, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, loop_order=loop_order, workspace_limit=workspace_limit,
            arithmetic=arithmetic, num_threads=num_threads, isa=isa, max_kv_blocks=max_kv_blocks,
            tile_tokens=tile_tokens, choice=choice)
    refuse_cuda_arguments(router=router, index_q=index_q, index_k=index_k, max_kv_blocks=max_kv_blocks, tile_tokens=tile_tokens,
                          dense_up_to=dense_up_to)
    if block_index is None:
        raise _core.Error("block_index: got None, expected i32 [num_kv_heads, total_q, capacity]")
    return plan(
        q, k, block_index, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
        loop_order=loop_order, workspace_limit=workspace_limit, arithmetic=arithmetic, num_threads=num_threads,
        isa=isa).workspace_bytes
