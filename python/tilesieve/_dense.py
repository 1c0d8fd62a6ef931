# SPDX-License-Identifier: Apache-2.0
"""Dense attention in bf16 on a Hopper GPU."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from . import _core
from ._arrays import A, Array, on_cuda, outputs
from ._options import DenseAttending
from ._prefill import handle_of, require_with_stream


@overload
def dense_attention(q: A, k: Array, v: Array, *, return_lse: Literal[False] = False,
                    **options: Unpack[DenseAttending]) -> A: ...
@overload
def dense_attention(q: A, k: Array, v: Array, *, return_lse: Literal[True],
                    **options: Unpack[DenseAttending]) -> tuple[A, A]: ...
@overload
def dense_attention(q: A, k: Array, v: Array, *, return_lse: bool,
                    **options: Unpack[DenseAttending]) -> A | tuple[A, A]: ...
def dense_attention(
    q: Any, k: Any, v: Any, *, tensor_layout: Any = "nhd", causal: Any = False, softmax_scale: Any = None,
    out: Any = None, lse: Any = None, return_lse: bool = False, stream: Any = None,
) -> Any:
    """Dense attention in bf16 on a Hopper GPU: `sage_attention` for those who do not quantise.

    q, k, v: bf16, [tokens, heads, head_dim] with tensor_layout="nhd", [heads, tokens, head_dim] with "hnd", with one
    dimension of sequences in front or without. head_dim is a multiple of 8 up to 128. Needs no workspace; nothing
    waits, and the call can be captured.
    causal: query i sees keys up to i + kv_len - q_len. A query that sees no key is 0 in o and -inf in lse.
    out: bf16 or f16. lse: the natural log, f32, of q's shape without head_dim. Arrays to use instead of new ones; needed
    with a stream other than the current one.
    """
    handle, out, lse = dense_outputs(q, out, lse, return_lse, stream)
    _core.DenseCall(q, k, v, out, lse, tensor_layout, causal, softmax_scale, handle).run()
    return (out, lse) if return_lse else out


def dense_outputs(q: Any, out: Any, lse: Any, return_lse: bool, stream: Any,
                  **memory: Any) -> tuple[int | None, Any, Any]:
    """The stream's handle, out and lse of a dense call, whose other memory is to be given where they are."""
    if not on_cuda(q):
        raise _core.Error("q: lies on the CPU, expected an array on a CUDA device")
    handle = handle_of(stream)
    require_with_stream(handle, out=out, **memory, lse=lse if return_lse else out)
    return handle, *outputs(q, out, lse, return_lse)
