# SPDX-License-Identifier: Apache-2.0
"""Sage attention on a Hopper GPU."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from . import _core
from ._arrays import Array, new_array
from ._dense import dense_outputs

A = TypeVar("A", bound=Array)


@overload
def sage_attention(
    q: A, k: Array, v: Array, *, tensor_layout: Literal["nhd", "hnd"] = ..., causal: bool = ...,
    softmax_scale: float | None = ..., rounding: Literal["exact", "relaxed"] = ...,
    groups: Literal["per_thread", "per_warp"] = ..., smooth_k: bool = ...,
    out: A | None = ..., lse: Array | None = ..., return_lse: Literal[False] = ..., workspace: Array | None = ...,
    stream: Any = ...,
) -> A: ...


@overload
def sage_attention(
    q: A, k: Array, v: Array, *, tensor_layout: Literal["nhd", "hnd"] = ..., causal: bool = ...,
    softmax_scale: float | None = ..., rounding: Literal["exact", "relaxed"] = ...,
    groups: Literal["per_thread", "per_warp"] = ..., smooth_k: bool = ...,
    out: A | None = ..., lse: Array | None = ..., return_lse: Literal[True], workspace: Array | None = ...,
    stream: Any = ...,
) -> tuple[A, Any]: ...


def sage_attention(
    q: Any, k: Any, v: Any, *, tensor_layout: Any = "nhd", causal: Any = False, softmax_scale: Any = None,
    rounding: Any = "exact", groups: Any = "per_thread", smooth_k: Any = True, out: Any = None, lse: Any = None,
    return_lse: bool = False, workspace: Any = None, stream: Any = None,
) -> Any:
    """Dense attention in INT8 and E4M3, in SageAttention 2's arithmetic, on a Hopper GPU.

    q, k, v: bf16 or f16, [tokens, heads, head_dim] with tensor_layout="nhd", [heads, tokens, head_dim] with "hnd", with
    one dimension of sequences in front or without. Quantised on the way; nothing waits, and the call can be captured.
    rounding "exact" rounds as SageAttention 2 does on this chip; "relaxed" is faster and a little less precise.
    groups: whose numbers share an INT8 scale, a thread's or a warp's.
    causal: query i sees keys up to i + kv_len - q_len. lse is the natural log, f32, of q's shape without head_dim.
    out, lse, workspace (uint8): arrays to use instead of new ones; needed with a stream other than the current one.
    """
    handle, out, lse = dense_outputs(q, out, lse, return_lse, stream, workspace=workspace)
    call = _core.SageCall(q, k, v, out, lse, tensor_layout, rounding, groups, causal, smooth_k, softmax_scale, handle)
    if workspace is None:
        workspace = new_array(q, (call.workspace_bytes,), "uint8", "workspace")
    call.run(workspace)
    return (out, lse) if return_lse else out
