# SPDX-License-Identifier: Apache-2.0
"""What a call on a CUDA device refuses, and with which words: of arrays that say that they lie there, so no GPU is
needed. Every call here is refused before anything would be launched."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilesieve

CUDA, BFLOAT = 2, 4  # DLPack's numbers


class DlpackTensor(ctypes.Structure):
    """The beginning of what lies in a capsule."""

    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("device_index", ctypes.c_int32),
                ("num_dims", ctypes.c_int32), ("type_code", ctypes.c_uint8))


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class OnCuda:
    """A NumPy array that claims to be a CUDA device's."""

    def __init__(self, array: Any, device: int = 0) -> None:
        self.array, self.device = array, device

    @property
    def shape(self) -> Any:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def __dlpack__(self, stream: int | None = None) -> Any:
        is_bf16 = self.array.dtype == ml_dtypes.bfloat16
        capsule = (self.array.view(np.uint16) if is_bf16 else self.array).__dlpack__()
        tensor = DlpackTensor.from_address(_pointer_of(capsule, b"dltensor") or 0)
        tensor.device, tensor.device_index = CUDA, self.device
        if is_bf16:
            tensor.type_code = BFLOAT
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device


def arguments() -> dict[str, Any]:
    """A call whose workspace, which is too small and on the CPU, is its only fault."""
    def zeros(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> OnCuda:
        return OnCuda(np.zeros(shape, dtype))

    return {"q": zeros(10, 4, 64), "k": zeros(300, 2, 64), "v": zeros(300, 2, 64),
            "block_index": zeros(2, 10, 2, dtype=np.int32), "out": zeros(10, 4, 64),
            "lse": zeros(10, 4, dtype=np.float32), "cu_seqlens_q": zeros(2, dtype=np.int32),
            "cu_seqlens_kv": zeros(2, dtype=np.int32), "workspace": np.zeros(8, np.uint8)}


GIVEN = arguments()
Q, K, OUT = (GIVEN[name].array for name in ("q", "k", "out"))


class Handle:
    """A stream by one of the names that libraries have for its handle."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({}, ValueError, "workspace: lies on the CPU, expected cuda:0 as q"),
    ({"k": None}, ValueError, "k: got None"),
    ({"v": None}, ValueError, "v: got None"),
    ({"k": K}, ValueError, "k: lies on the CPU, expected cuda:0 as q"),
    ({"k": OnCuda(K, 1)}, ValueError, "k: lies on cuda:1, expected cuda:0 as q"),
    ({"out": OUT}, ValueError, "out: lies on the CPU"),
    ({"out": None}, ValueError, "out: needed where q is a CUDA array of test_cuda_arguments"),
    ({"out": OnCuda(Q)}, ValueError, "out: overlaps q"),
    ({"out": OnCuda(K.reshape(-1)[: Q.size].reshape(Q.shape))}, ValueError, "out: overlaps k"),
    ({"lse": OnCuda(OUT.view(np.float32).reshape(-1)[:40].reshape(10, 4))}, ValueError, "lse: overlaps out"),
    ({"workspace": OnCuda(OUT)}, ValueError, "workspace: overlaps out"),
    ({"workspace": OnCuda(K)}, ValueError, "workspace: overlaps k"),
    ({"workspace": OnCuda(np.zeros((8, 8), np.uint8)[:, ::2])}, ValueError, "workspace: got .*, expected contiguous"),
    ({"loop_order": "inner"}, ValueError, "loop_order: got 'inner', expected auto, q_outer or kv_outer"),
    ({"num_threads": 2}, ValueError, "num_threads: is for calls on the CPU"),
    ({"isa": "amx"}, ValueError, "isa: is for calls on the CPU"),
    ({"progress": True}, ValueError, "progress: is for calls on the CPU"),
    ({"causal": "yes"}, TypeError, "causal: got str"),
    ({"kv_block_size": "64"}, TypeError, "kv_block_size: got str"),
    ({"softmax_scale": 0}, ValueError, "softmax_scale: got 0"),
    ({"workspace_limit": 0}, ValueError, "workspace_limit: got 0"),
    ({"max_kv_blocks": 0}, ValueError, "max_kv_blocks: got 0, expected 1 or more, or None"),
    ({"k_scale": 0.5}, TypeError, "k_scale: got float, expected an array"),
    ({"cu_seqlens_q": None}, ValueError, "cu_seqlens_q: got None, needed where q is a CUDA array of"),
    ({"cu_seqlens_kv": None}, ValueError, "cu_seqlens_kv: got None, needed where q is a CUDA array of"),
    ({"cu_seqlens_kv": [0, 300]}, TypeError, "cu_seqlens_kv: got list"),
    ({"stream": "side"}, TypeError, "stream: got str, expected a handle as a whole number, or an object with"),
    ({"stream": True}, TypeError, "stream: got bool"),
    *(({"stream": stream, missing: None}, ValueError, f"{missing}: got None, needed with a stream")
      for stream in (0, 7, np.int64(7), Handle(cuda_stream=7), Handle(ptr=7), Handle(__cuda_stream__=lambda: (0, 7)),
                     Handle(__cuda_stream__=(0, 7)))
      for missing in ("out", "cu_seqlens_q", "cu_seqlens_kv")),
    ({"stream": 0, "workspace": None}, ValueError, "workspace: got None, needed with a stream"),
    ({"stream": 0, "lse": None, "return_lse": True}, ValueError, "lse: got None, needed with a stream"),
    ({"stream": 0, "block_table": OnCuda(np.zeros((1, 3), np.int32))}, ValueError, "kv_lens: got None, needed with a"),
])
def test_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    with pytest.raises(exception, match="^" + words):
        tilesieve.attend(**(GIVEN | change))


def test_what_the_cpu_alone_does_is_refused() -> None:
    for call in (lambda: tilesieve.route(GIVEN["q"], GIVEN["k"]),
                 lambda: tilesieve.sparse_prefill(GIVEN["q"], GIVEN["k"], GIVEN["v"]),
                 lambda: tilesieve.route(index_q=GIVEN["q"], index_k=GIVEN["k"])):
        with pytest.raises(ValueError, match="q: lies on a CUDA device; routing is on the CPU so far"):
            call()
    with pytest.raises(ValueError, match="num_threads: is for calls on the CPU"):
        tilesieve.workspace_bytes(GIVEN["q"], GIVEN["k"], GIVEN["v"], GIVEN["block_index"], num_threads=1)
