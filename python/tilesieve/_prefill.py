# SPDX-License-Identifier: Apache-2.0
"""The prefill on a Hopper GPU: the call, its workspace, and what it refuses of the arguments for the CPU."""

from __future__ import annotations

from typing import Any

from . import _core
from ._arrays import Array, new_array, on_cuda, outputs
from ._options import Isa, LoopOrder


def attend_on_cuda(
    q: Any,
    k: Array,
    v: Array,
    block_index: Array | None,
    *,
    causal: bool,
    softmax_scale: float | None,
    kv_block_size: int,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    kv_lens: Any,
    block_table: Array | None,
    q_scale: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    out: Any,
    lse: Any,
    return_lse: bool,
    loop_order: LoopOrder,
    workspace: Array | None,
    workspace_limit: int | None,
    num_threads: int,
    isa: Isa,
    max_kv_blocks: int,
    stream: int | None,
    progress: bool,
) -> Any:
    """`attend` where q lies on a CUDA device."""
    if block_index is None:
        raise _core.Error("block_index: got None, needed where q lies on a CUDA device; dense attention is on the CPU")
    if loop_order not in ("auto", "kv_outer"):
        raise _core.Error(f"loop_order: got '{loop_order}', expected 'auto' or 'kv_outer' on a CUDA device")
    for name, got in (("num_threads", num_threads), ("isa", isa != "best"), ("progress", progress)):
        if got:
            raise _core.Error(f"{name}: is for calls on the CPU, and q lies on a CUDA device")
    if not isinstance(stream, int | None):
        raise TypeError(f"stream: got {type(stream).__name__}, expected a handle as a whole number, such as "
                        "torch.cuda.Stream.cuda_stream")
    if stream is not None:  # what q's library allocates belongs to its current stream, and may be reused there
        for name, array in (("out", out), ("workspace", workspace), ("lse", lse if return_lse else out)):
            if array is None:
                raise _core.Error(f"{name}: got None, needed with a stream")
    out, lse = outputs(q, out, lse, return_lse)
    call = _core.PrefillCall(q, k, v, block_index, cu_seqlens_q, cu_seqlens_kv, kv_lens, block_table, q_scale, k_scale,
                             v_scale, out, lse, kv_block_size, causal, softmax_scale or 0.0, workspace_limit,
                             max_kv_blocks, stream)
    if workspace is None:
        workspace = new_array(q, (call.workspace_bytes,), "uint8", "workspace")
    call.run(workspace)
    return (out, lse) if return_lse else out


def sparse_prefill_workspace(
    q: Array,
    k: Array,
    v: Array,
    block_index: Array,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int = 128,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    kv_lens: Array | None = None,
    block_table: Array | None = None,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    workspace_limit: int | None = None,
    max_kv_blocks: int = 0,
) -> int:
    """Bytes of workspace that `attend` and `sparse_prefill` need on a CUDA device for arrays of these shapes.

    Reads shapes alone: the answer holds for all data, lengths and ids within them. On the CPU
    `plan(...).workspace_bytes` says it, and depends on the ids. Arguments and errors as of `attend`.
    """
    if not on_cuda(q):
        raise _core.Error("q: lies on the CPU, expected a CUDA device; plan(...).workspace_bytes is for the CPU")
    call = _core.PrefillCall(q, k, v, block_index, cu_seqlens_q, cu_seqlens_kv, kv_lens, block_table, q_scale, k_scale,
                             v_scale, None, None, kv_block_size, causal, softmax_scale or 0.0, workspace_limit,
                             max_kv_blocks, None)
    return call.workspace_bytes
