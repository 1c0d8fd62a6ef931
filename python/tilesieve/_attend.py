# SPDX-License-Identifier: Apache-2.0
"""Attention over given blocks of keys, in one call or planned once and run often."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import numpy as np

from . import _core
from ._arrays import A, Array, on_cuda, outputs
from ._options import Attending, Isa, Lengths, LoopOrder, Running
from ._prefill import attend_on_cuda
from ._progress import progress_bar


@overload
def attend(q: A, k: Array, v: Array, block_index: Array | None = None, *, return_lse: Literal[False] = False,
           **options: Unpack[Attending]) -> A: ...
@overload
def attend(q: A, k: Array, v: Array, block_index: Array | None = None, *, return_lse: Literal[True],
           **options: Unpack[Attending]) -> tuple[A, A]: ...
def attend(
    q: Any,
    k: Array,
    v: Array,
    block_index: Array | None = None,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int = 128,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_kv: Lengths | None = None,
    kv_lens: Lengths | None = None,
    block_table: Array | None = None,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    loop_order: LoopOrder = "auto",
    workspace: Array | None = None,
    workspace_limit: int | None = None,
    num_threads: int = 0,
    isa: Isa = "best",
    max_kv_blocks: int = 0,
    stream: int | None = None,
    progress: bool = False,
) -> Any:
    """Attention over chosen blocks of keys, or over all of them: softmax(softmax_scale · q kᵀ) v.

    On the CPU, or on a Hopper GPU where q lies there (over chosen blocks, in bf16 and fp8).

    Args:
        q: queries [total_q, num_q_heads, head_dim] in f32, bf16, f16 or e4m3. All sequences of a batch lie one after
            the other. head_dim is a multiple of 8 up to 256 (CUDA: 64 or 128).
        k: keys [total_kv, num_kv_heads, head_dim], or pages of one block each [num_pages, kv_block_size, num_kv_heads,
            head_dim] with a block_table. num_kv_heads divides num_q_heads: query head h reads KV head
            h // (num_q_heads // num_kv_heads).
        v: values, as k, with strides of their own.
        block_index: i32 [num_kv_heads, total_q, capacity], the ids of key blocks that each token's query heads attend
            to, counted inside the token's own sequence. In any order; -1, ids out of range and blocks in the future
            contribute nothing, a duplicate counts once. None = every visible key (on the CPU).
        causal: query i of a sequence sees the keys up to position kv_len - q_len + i; else all of its sequence.
        softmax_scale: factor of q kᵀ; None or 0 = 1 / sqrt(head_dim).
        kv_block_size: keys of one block: a multiple of 8 up to 1,024 (CUDA: 64 or 128).
        cu_seqlens_q: [num_sequences + 1] where the sequences begin among the queries, and the end of the last. On the
            CPU i32, i64 or a list, None = one sequence; on CUDA i32 in device memory, always.
        cu_seqlens_kv: likewise among packed keys.
        kv_lens: [num_sequences] keys of each sequence, with a block_table.
        block_table: i32 [num_sequences, blocks of the longest sequence or more], the page of each block.
        q_scale: f32 [1] or [num_kv_heads], what stored numbers of q are to be multiplied by.
        k_scale: likewise of k.
        v_scale: likewise of v.
        out: array to write to, [total_q, num_q_heads, head_dim] in f32, bf16 or f16 (CUDA: bf16, f16); None = a new one
            of q's type (bf16 where q is e4m3) and library (NumPy's where that is neither PyTorch nor CuPy).
        lse: array to write to, f32 [total_q, num_q_heads]; None = a new one where it is returned.
        return_lse: whether to return lse beside o.
        loop_order: "auto"; "q_outer" owns queries and streams blocks, "kv_outer" owns blocks and streams the queries
            that chose them (CUDA: this alone). The choice does not change a bit of the result.
        workspace: memory for partial results, of any type, 64-byte aligned (CUDA: 256), of at least
            `Plan.workspace_bytes` (CUDA: `sparse_prefill_workspace`) bytes; None = allocated for the call (CUDA: by q's
            library).
        workspace_limit: most bytes of partial results that lie in memory at a time; None = 288 MiB (CUDA: 1,280 MiB).
        num_threads: on the CPU; 0 = as many as OpenMP would use.
        isa: instruction set on the CPU; "best" = the best that has a kernel for the call.
        max_kv_blocks: on CUDA, a bound of the key blocks of all sequences together; 0 = what the shapes allow.
        stream: on CUDA, the handle of the stream to work on, with out and workspace given, and lse if it is wanted;
            None = the current stream of q's library.
        progress: whether to show a tqdm bar (on the CPU).

    Returns:
        o [total_q, num_q_heads, head_dim]; with return_lse (o, lse), lse f32 [total_q, num_q_heads] being the natural
        logarithm of the sum over exp(softmax_scale · q kᵀ). A row that sees nothing is 0 in o and -inf in lse. On CUDA
        the call returns before the work is done, like any kernel launch, and can be captured in a graph.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists.
        TypeError: an argument that is no array.
    """
    if type(q) is not np.ndarray and on_cuda(q):  # asked first for the sake of the smallest calls
        return attend_on_cuda(
            q, k, v, block_index, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
            q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=return_lse,
            loop_order=loop_order, workspace=workspace, workspace_limit=workspace_limit, num_threads=num_threads,
            isa=isa, max_kv_blocks=max_kv_blocks, stream=stream, progress=progress)
    if max_kv_blocks or stream is not None:
        name = "stream" if stream is not None else "max_kv_blocks"
        raise _core.Error(f"{name}: is for calls on a CUDA device, and q lies on the CPU")
    call = _core.Call(q, k, v, None, None, block_table, q_scale, k_scale, v_scale, cu_seqlens_q, cu_seqlens_kv, kv_lens,
                      kv_block_size, 1, causal, softmax_scale or 0.0)
    out, lse = outputs(q, out, lse, return_lse)
    if not progress:  # without the bar, for the sake of the smallest calls
        call.attend(block_index, out, lse, workspace, loop_order, workspace_limit, num_threads, isa, None)
    else:
        with progress_bar(progress, "attend") as counters:
            call.attend(block_index, out, lse, workspace, loop_order, workspace_limit, num_threads, isa, counters)
    return (out, lse) if return_lse else out


class Plan:
    """A block index made ready for running: the order of the loops and the schedule. Made by `plan`.

    A plan holds no array. It runs any q, k and v of the shapes and types that it was made for.
    """

    def __init__(self, core: _core.Plan, sizes: tuple[Any, ...], num_threads: int, isa: Isa) -> None:
        self._core = core
        self._sizes = sizes
        self._num_threads = num_threads
        self._isa: Isa = isa

    @property
    def problem(self) -> str:
        """The sizes that it was made for, as the line that `Problem.parse` reads."""
        return self._core.line

    @property
    def loop_order(self) -> str:
        """ "q_outer" or "kv_outer"."""
        return self._core.loop_order

    @property
    def explain(self) -> str:
        """Why this order of the loops, with the numbers that it rests on."""
        return self._core.explain

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
    def run(
        self,
        q: Any,
        k: Array,
        v: Array,
        *,
        block_table: Array | None = None,
        q_scale: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        workspace: Array | None = None,
        num_threads: int | None = None,
        isa: Isa | None = None,
        progress: bool = False,
    ) -> Any:
        """Attends as planned. Arguments, result and errors as of `attend`; num_threads and isa None = as planned."""
        causal, softmax_scale, kv_block_size, cu_seqlens_q, cu_seqlens_kv, kv_lens = self._sizes
        call = _core.Call(q, k, v, None, None, block_table, q_scale, k_scale, v_scale, cu_seqlens_q, cu_seqlens_kv,
                          kv_lens, kv_block_size, 1, causal, softmax_scale)
        out, lse = outputs(q, out, lse, return_lse)
        threads = self._num_threads if num_threads is None else num_threads
        with progress_bar(progress, "attend") as counters:
            self._core.run(call, out, lse, workspace, threads, isa or self._isa, counters)
        return (out, lse) if return_lse else out


def plan(
    q: Array,
    k: Array,
    block_index: Array,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int = 128,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_kv: Lengths | None = None,
    kv_lens: Lengths | None = None,
    block_table: Array | None = None,
    loop_order: LoopOrder = "auto",
    workspace_limit: int | None = None,
    num_threads: int = 0,
    isa: Isa = "best",
) -> Plan:
    """Plans attention over a block index on the CPU: which loop is the outer one, and who does what.

    Of q and k only shapes and types are read. `attend` plans in each call; a plan is worth keeping where several calls
    share a block index. Arguments and errors as of `attend`.
    """
    scale = softmax_scale or 0.0
    call = _core.Call(q, k, None, None, None, block_table, None, None, None, cu_seqlens_q, cu_seqlens_kv, kv_lens,
                      kv_block_size, 1, causal, scale)
    core = call.plan(block_index, loop_order, workspace_limit, num_threads, isa)
    return Plan(core, (causal, scale, kv_block_size, cu_seqlens_q, cu_seqlens_kv, kv_lens), num_threads, isa)


def explain(
    q: Array,
    k: Array,
    block_index: Array,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int = 128,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_kv: Lengths | None = None,
    kv_lens: Lengths | None = None,
    block_table: Array | None = None,
    loop_order: LoopOrder = "auto",
    workspace_limit: int | None = None,
    num_threads: int = 0,
    isa: Isa = "best",
) -> str:
    """Says in words how `attend` would walk a block index on the CPU, and why: `plan(...).explain`."""
    return plan(
        q, k, block_index, causal=causal, softmax_scale=softmax_scale, kv_block_size=kv_block_size,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, kv_lens=kv_lens, block_table=block_table,
        loop_order=loop_order, workspace_limit=workspace_limit, num_threads=num_threads, isa=isa).explain
