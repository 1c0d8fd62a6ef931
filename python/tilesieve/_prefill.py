# SPDX-License-Identifier: Apache-2.0
"""`attend` and `route` on a Hopper GPU: the calls, their workspace, and what they refuse of arguments for the CPU."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from . import _core
from ._arrays import library_of, new_array, outputs, whole_sequence


class Choice(NamedTuple):
    """What a call chooses its blocks from, which then has no block index."""

    router: str  # as router_on_cuda names it
    index_q: Any
    index_k: Any
    top_k: Any
    local_blocks: Any
    init_blocks: Any
    dense_up_to: Any


def attend_on_cuda(
    q: Any, k: Any, v: Any, block_index: Any, *, causal: Any, softmax_scale: Any, kv_block_size: Any, cu_seqlens_q: Any,
    cu_seqlens_kv: Any, kv_lens: Any, block_table: Any, q_scale: Any, k_scale: Any, v_scale: Any, out: Any, lse: Any,
    return_lse: bool, loop_order: Any, workspace: Any, workspace_limit: Any, arithmetic: Any, num_threads: Any,
    isa: Any, max_kv_blocks: Any, tile_tokens: Any, stream: Any, progress: Any, choice: Choice | None = None,
) -> Any:
    """`attend` where q lies on a CUDA device, and with a choice `sparse_prefill`."""
    refuse_cpu_arguments(num_threads, isa, progress, arithmetic)
    handle = handle_of(stream)
    lengths = {"kv_lens": kv_lens} if block_table is not None else {"cu_seqlens_kv": cu_seqlens_kv}
    require_with_stream(handle, out=out, workspace=workspace, lse=lse if return_lse else out,
                        cu_seqlens_q=cu_seqlens_q, **lengths)
    cu_seqlens_q, cu_seqlens_kv = _lengths(q, k, cu_seqlens_q, cu_seqlens_kv, block_table)
    out, lse = outputs(q, out, lse, return_lse)
    call = _core.PrefillCall(q, k, v, block_index, cu_seqlens_q, cu_seqlens_kv, kv_lens, block_table, q_scale, k_scale,
                             v_scale, out, lse, kv_block_size, causal, softmax_scale, loop_order, workspace_limit,
                             max_kv_blocks, tile_tokens, handle)
    if choice is not None:
        call.choose_from(*choice)
    if workspace is None:
        workspace = new_array(q, (call.workspace_bytes,), "uint8", "workspace")
    call.run(workspace)
    return (out, lse) if return_lse else out


def workspace_bytes_on_cuda(
    q: Any, k: Any, v: Any, block_index: Any, *, causal: Any, softmax_scale: Any, kv_block_size: Any, cu_seqlens_q: Any,
    cu_seqlens_kv: Any, kv_lens: Any, block_table: Any, q_scale: Any, k_scale: Any, v_scale: Any, loop_order: Any,
    workspace_limit: Any, arithmetic: Any, num_threads: Any, isa: Any, max_kv_blocks: Any, tile_tokens: Any,
    choice: Choice | None,
) -> int:
    """`workspace_bytes` where q lies on a CUDA device."""
    refuse_cpu_arguments(num_threads, isa, False, arithmetic)
    cu_seqlens_q, cu_seqlens_kv = _lengths(q, k, cu_seqlens_q, cu_seqlens_kv, block_table)
    call = _core.PrefillCall(q, k, v, block_index, cu_seqlens_q, cu_seqlens_kv, kv_lens, block_table, q_scale, k_scale,
                             v_scale, None, None, kv_block_size, causal, softmax_scale, loop_order, workspace_limit,
                             max_kv_blocks, tile_tokens, None)
    if choice is not None:
        call.choose_from(*choice)
    return call.workspace_bytes


def explain_on_cuda(
    q: Any, k: Any, block_index: Any, *, causal: Any, softmax_scale: Any, kv_block_size: Any, cu_seqlens_q: Any,
    cu_seqlens_kv: Any, kv_lens: Any, block_table: Any, loop_order: Any, workspace_limit: Any, arithmetic: Any,
    num_threads: Any, isa: Any, max_kv_blocks: Any, tile_tokens: Any,
) -> str:
    """`explain` where q lies on a CUDA device."""
    refuse_cpu_arguments(num_threads, isa, False, arithmetic)
    cu_seqlens_q, cu_seqlens_kv = _lengths(q, k, cu_seqlens_q, cu_seqlens_kv, block_table)
    v = k  # of the same shape and type, and not read
    call = _core.PrefillCall(q, k, v, block_index, cu_seqlens_q, cu_seqlens_kv, kv_lens, block_table, None, None, None,
                             None, None, kv_block_size, causal, softmax_scale, loop_order, workspace_limit,
                             max_kv_blocks, tile_tokens, None)
    refuse_other_libraries("q", q)
    return call.explain(new_array(q, (call.workspace_bytes,), "uint8", "q"))


def route_on_cuda(
    q: Any, k: Any, *, router: Any, top_k: Any, index_q: Any, index_k: Any, local_blocks: Any, init_blocks: Any,
    seed: Any, causal: Any, softmax_scale: Any, kv_block_size: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, kv_lens: Any,
    block_table: Any, num_threads: Any, isa: Any, progress: Any,
) -> Any:
    """`route` where its queries lie on a CUDA device."""
    refuse_cpu_arguments(num_threads, isa, progress)
    router = _core.router_on_cuda(router, index_q, index_k, seed, softmax_scale)
    name, queries, keys = ("index_q", index_q, index_k) if router == "index" else ("q", q, k)
    if queries is not None and keys is not None:
        cu_seqlens_q, cu_seqlens_kv = _lengths(queries, keys, cu_seqlens_q, cu_seqlens_kv, block_table)
    call = _core.RouteCall(router, queries, keys, cu_seqlens_q, cu_seqlens_kv, kv_lens, block_table, top_k,
                           local_blocks, init_blocks, causal, kv_block_size)
    refuse_other_libraries(name, queries)
    workspace = new_array(queries, (call.workspace_bytes,), "uint8", name)
    ids = new_array(queries, call.shape, "int32", name)
    call.run(ids, workspace)
    return ids


def given(value: Any, default: Any) -> Any:
    """None where an argument is as it is without being given."""
    return None if type(value) is type(default) and value == default else value


def refuse_other_libraries(argument: str, array: Any) -> None:
    """Raises an Error where a call that takes no array to write to cannot have one from the library of another."""
    library = library_of(array)
    if library not in ("torch", "cupy"):
        raise _core.Error(f"{argument}: got a CUDA array of {library}, whose arrays cannot be written to; expected one "
                          "of PyTorch or CuPy")


def refuse_cpu_arguments(num_threads: Any, isa: Any, progress: Any, arithmetic: Any = "storage") -> None:
    for name, got in (("num_threads", num_threads is not None), ("isa", isa != "best"), ("progress", progress),
                      ("arithmetic", arithmetic != "storage")):
        if got:
            raise _core.Error(f"{name}: is for calls on the CPU, and q lies on a CUDA device")


def _lengths(q: Any, k: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, block_table: Any) -> tuple[Any, Any]:
    """Where the sequences begin: as given, or of one sequence, as on the CPU."""
    one = cu_seqlens_q is None or tuple(getattr(cu_seqlens_q, "shape", ())) == (2,)
    if cu_seqlens_kv is None and block_table is None and one:
        cu_seqlens_kv = whole_sequence(q, k, "cu_seqlens_kv")
    if cu_seqlens_q is None:
        cu_seqlens_q = whole_sequence(q, q, "cu_seqlens_q")
    return cu_seqlens_q, cu_seqlens_kv


def require_with_stream(handle: int | None, **arrays: Any) -> None:
    """What q's library allocates belongs to its current stream, and may be reused there: no such arrays elsewhere."""
    if handle is None:
        return
    for name, array in arrays.items():
        if array is None:
            raise _core.Error(f"{name}: got None, needed with a stream")


def handle_of(stream: Any) -> int | None:
    """The handle of a stream: of CUDA's own protocol, of PyTorch's and CuPy's objects, or a number."""
    if stream is None:
        return None
    if hasattr(stream, "__cuda_stream__"):  # (version of the protocol, handle), as a method or an attribute
        protocol = stream.__cuda_stream__
        return operator.index((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return operator.index(getattr(stream, name))
    if isinstance(stream, bool) or not hasattr(stream, "__index__"):
        raise TypeError(f"stream: got {type(stream).__name__}, expected a handle as a whole number, or an object with "
                        "__cuda_stream__, .cuda_stream or .ptr")
    return operator.index(stream)
