# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library: what is taken, and new ones in the library of an array at hand."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from . import _core


class Array(Protocol):
    """Any array: NumPy's, and those of libraries with DLPack (PyTorch, CuPy, JAX). Borrowed for a call, never copied.

    bf16 and fp8 exist in NumPy through ml_dtypes: ``array.astype(ml_dtypes.bfloat16)``.
    """

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


A = TypeVar("A", bound=Array)


def on_cuda(array: object) -> bool:
    """Whether an array lies in the memory of a CUDA device."""
    return type(array) is not np.ndarray and _core.cuda_device_of(array) >= 0


def library_of(array: object) -> str:
    """The name of the library that an array comes from: "numpy", "torch", "cupy", "jaxlib"."""
    return type(array).__module__.partition(".")[0]


def bfloat16() -> Any:
    """NumPy's bf16, which is ml_dtypes'."""
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError("bf16 and fp8 arrays of NumPy need the package ml_dtypes: pip install ml_dtypes") from None
    return ml_dtypes.bfloat16


def new_array(q: Any, shape: tuple[int, ...], dtype: str, argument: str) -> Any:
    """An array without values where q lies, of a dtype as NumPy names it: PyTorch's or CuPy's where q is, else NumPy's.

    PyTorch and CuPy take it from their pools, on their current streams. `argument` is what q's library would have to
    be given for, if it has no arrays that can be written to.
    """
    library = library_of(q)
    if library == "torch":
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=q.device)
    if library == "cupy":
        import cupy

        with q.device:
            return cupy.empty(shape, bfloat16() if dtype == "bfloat16" else dtype)
    if on_cuda(q):
        raise _core.Error(f"{argument}: needed where q is a CUDA array of {library}, whose arrays cannot be written to")
    return np.empty(shape, bfloat16() if dtype == "bfloat16" else dtype)


def whole_sequence(q: Any, tokens: Any, argument: str) -> Any:
    """i32 [0, len(tokens)] where q lies, on a CUDA device: written there, so that nothing waits and graphs can have it.

    `argument` is what would have to be given where q's library is not one of those that it is made by.
    """
    shape: Any = getattr(tokens, "shape", ())
    library = library_of(q)
    if len(shape) == 0:
        return None  # no array: whoever borrows it will say more
    count = int(shape[0])
    if library == "torch":
        import torch

        return torch.arange(2, dtype=torch.int32, device=q.device).mul_(count)
    if library == "cupy":
        import cupy

        with q.device:
            return cupy.arange(2, dtype="int32") * count
    raise _core.Error(f"{argument}: got None, needed with CUDA arrays of {library}")


def new_out(q: Any) -> Any:
    """An array for outputs: of q's type, bf16 where q is fp8."""
    if type(q) is np.ndarray and q.dtype.itemsize > 1:  # nothing else, for the sake of the smallest calls
        return np.empty(q.shape, q.dtype)
    name = str(q.dtype).removeprefix("torch.")
    return new_array(q, q.shape, "bfloat16" if name.startswith("float8") else name, "out")


def new_like(x: Any) -> Any:
    """An array for the elements of x in another order: of its shape, type and library."""
    if library_of(x) == "torch":
        return new_array(x, tuple(x.shape), str(x.dtype).removeprefix("torch."), "out")
    return np.empty(x.shape, x.dtype)


def new_lse(q: Any) -> Any:
    """An array for the lse of the outputs."""
    return new_array(q, q.shape[:-1], "float32", "lse")


def outputs(q: Any, out: Any, lse: Any, return_lse: bool) -> tuple[Any, Any]:
    """out and lse to write to: those given, else new ones, of lse only where it is returned."""
    if out is None:
        out = new_out(q)
    if lse is None and return_lse:
        lse = new_lse(q)
    return out, lse


def on_host(array: Any) -> npt.NDArray[Any]:
    """The numbers of an array of PyTorch or CuPy on a CUDA device, which are waited for."""
    values: npt.NDArray[Any] = array.cpu().numpy() if library_of(array) == "torch" else array.get()
    return values


def in_library_of(array: object, result: Any) -> Any:
    """A result of NumPy as an array of the other one's library, on the same memory, if that is PyTorch."""
    if library_of(array) == "torch":
        import torch

        return torch.from_numpy(result)
    return result
