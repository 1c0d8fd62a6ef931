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
from tilesieve import _core

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


def zeros(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> OnCuda:
    return OnCuda(np.zeros(shape, dtype))


def arguments() -> dict[str, Any]:
    """A call whose workspace, which is too small and on the CPU, is its only fault."""
    return {"q": zeros(10, 4, 64), "k": zeros(300, 2, 64), "v": zeros(300, 2, 64),
            "block_index": zeros(2, 10, 2, dtype=np.int32), "out": zeros(10, 4, 64),
            "lse": zeros(10, 4, dtype=np.float32), "cu_seqlens_q": zeros(2, dtype=np.int32),
            "cu_seqlens_kv": zeros(2, dtype=np.int32), "workspace": np.zeros(8, np.uint8)}


GIVEN = arguments()
INDEX = {"index_q": zeros(10, 2, 128), "index_k": zeros(300, 128)}
LENGTHS = {name: GIVEN[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
Q, K, OUT = (GIVEN[name].array for name in ("q", "k", "out"))


class Handle:
    """A stream by one of the names that libraries have for its handle."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({}, ValueError, "workspace: lies on the CPU, expected cuda:0 as q"),
    ({"k": None}, ValueError, "k: got None"),
    ({"v": None}, ValueError, "v: got None"),
    ({"block_index": None, "loop_order": "kv_outer"}, ValueError, "loop_order: got 'kv_outer' without a block_index"),
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
    ({"arithmetic": "int8"}, ValueError, "arithmetic: is for calls on the CPU, and q lies on a CUDA device"),
    ({"num_threads": 2}, ValueError, "num_threads: is for calls on the CPU"),
    ({"isa": "amx"}, ValueError, "isa: is for calls on the CPU"),
    ({"progress": True}, ValueError, "progress: is for calls on the CPU"),
    ({"causal": "yes"}, TypeError, "causal: got str"),
    ({"kv_block_size": "64"}, TypeError, "kv_block_size: got str"),
    ({"softmax_scale": 0}, ValueError, "softmax_scale: got 0"),
    ({"workspace_limit": 0}, ValueError, "workspace_limit: got 0"),
    ({"max_kv_blocks": 0}, ValueError, "max_kv_blocks: got 0, expected 1 or more, or None"),
    ({"tile_tokens": 0}, ValueError, "tile_tokens: got 0, expected 1 or more, or None"),
    ({"k_scale": 0.5}, TypeError, "k_scale: got float, expected an array"),
    ({"cu_seqlens_q": None}, ValueError, "cu_seqlens_q: got None, needed with CUDA arrays of"),
    ({"cu_seqlens_kv": None}, ValueError, "cu_seqlens_kv: got None, needed with CUDA arrays of"),
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


# Of what chooses blocks: the same in route and sparse_prefill.
CHOOSING: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"router": "qk_max"}, ValueError, "index_q: got an array, which the router 'qk_max' does not read"),
    ({"router": "mean_pool", "index_q": None}, ValueError, "index_k: got an array, which the router 'mean_pool' does"),
    ({"router": "oracle"}, ValueError, "router: got 'oracle', expected index, qk_max or mean_pool, the routers of CUDA"),
    ({"router": "random"}, ValueError, "router: got 'random', expected index, qk_max or mean_pool"),
    ({"router": "best"}, ValueError, "router: got 'best', expected index, qk_max"),
    ({"router": 3}, TypeError, "router: got int"),
    ({"index_k": None}, ValueError, r"index_k: got None, expected \[total_kv, 128\]"),
    ({"index_k": INDEX["index_k"].array}, ValueError, "index_k: lies on the CPU, expected cuda:0"),
    ({"top_k": 0}, ValueError, "top_k: got 0, expected 1 to 32"),
    ({"top_k": 33}, ValueError, "top_k: got 33, expected 1 to 32"),
    ({"top_k": 1.5}, TypeError, "top_k: got float"),
    ({"local_blocks": "1"}, TypeError, "local_blocks: got str"),
    ({"init_blocks": None}, TypeError, "init_blocks: got None"),
    ({"seed": -1}, ValueError, "seed: got -1"),
    ({"softmax_scale": 0}, ValueError, "softmax_scale: got 0"),
    ({"kv_block_size": "64"}, TypeError, "kv_block_size: got str"),
    ({"causal": 1}, TypeError, "causal: got int"),
    ({"num_threads": 2}, ValueError, "num_threads: is for calls on the CPU"),
    ({"isa": "amx"}, ValueError, "isa: is for calls on the CPU"),
    ({"progress": True}, ValueError, "progress: is for calls on the CPU"),
    ({"cu_seqlens_kv": None}, ValueError, "cu_seqlens_kv: got None, needed with CUDA arrays of"),
]


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({}, ValueError, "index_q: got a CUDA array of test_cuda_arguments, whose arrays cannot be written to"),
    ({"index_q": None}, ValueError, "index_q: got None, expected"),
    ({"index_q": INDEX["index_q"].array}, ValueError, "index_q: lies on the CPU, expected a CUDA device"),
    ({"index_q": zeros(10, 128)}, ValueError, "index_q: got bf16"),
    *CHOOSING,
])
def test_route_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    with pytest.raises(exception, match="^" + words):
        tilesieve.route(**({"q": GIVEN["q"], **INDEX, **LENGTHS} | change))


@pytest.mark.parametrize("router", [None, "qk_max", "mean_pool"])
@pytest.mark.parametrize(("change", "words"), [
    ({}, "q: got a CUDA array of test_cuda_arguments, whose arrays cannot be written to"),
    ({"k": None}, r"k: got None, expected \[total_kv, num_kv_heads, head_dim\] or pages"),
    ({"k": K}, "k: lies on the CPU, expected cuda:0 as q"),
    ({"q": zeros(10, 64)}, r"q: got bf16\[10, 64\] on cuda:0, expected \[total_q, num_q_heads, head_dim\]"),
    ({"top_k": 33}, "top_k: got 33, expected 1 to 32"),
    ({"cu_seqlens_kv": None}, "cu_seqlens_kv: got None, needed with CUDA arrays of"),
])
def test_route_by_queries_and_keys_refuses_by_name(router: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="^" + words):
        tilesieve.route(**({"q": GIVEN["q"], "k": GIVEN["k"], "router": router, **LENGTHS} | change))


@pytest.mark.parametrize("router", [None, "qk_max", "mean_pool"])
def test_sparse_prefill_by_queries_and_keys_comes_to_its_workspace(router: Any) -> None:
    given = {name: value for name, value in GIVEN.items() if name != "block_index"}
    with pytest.raises(ValueError, match="^workspace: lies on the CPU, expected cuda:0 as q"):
        tilesieve.sparse_prefill(**given, router=router)


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({}, ValueError, "workspace: lies on the CPU, expected cuda:0 as q"),
    ({"index_q": None}, ValueError, "index_q: got None, expected"),
    ({"index_q": INDEX["index_q"].array}, ValueError, "index_q: lies on the CPU, expected cuda:0 as q"),
    ({"q": Q}, ValueError, "index_q: lies on a CUDA device, expected the CPU as q"),
    ({"out": OnCuda(INDEX["index_q"].array.reshape(10, 4, 64))}, ValueError, "out: overlaps index_q"),
    ({"workspace": INDEX["index_k"]}, ValueError, "workspace: overlaps index_k"),
    ({"dense_up_to": -1}, ValueError, "dense_up_to: got -1, expected 0 or more, or None"),
    ({"dense_up_to": "all"}, TypeError, "dense_up_to: got str"),
    ({"stream": 0, "workspace": None}, ValueError, "workspace: got None, needed with a stream"),
    *CHOOSING,
])
def test_sparse_prefill_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    given = {name: value for name, value in GIVEN.items() if name != "block_index"}
    with pytest.raises(exception, match="^" + words):
        tilesieve.sparse_prefill(**(given | INDEX | change))


def test_workspace_bytes_refuses_by_name() -> None:
    tensors = (GIVEN["q"], GIVEN["k"], GIVEN["v"])
    for ids, change, words in ((GIVEN["block_index"], {"num_threads": 1}, "num_threads: is for calls on the CPU"),
                               (GIVEN["block_index"], {"arithmetic": "int8"}, "arithmetic: is for calls on the CPU"),
                               (GIVEN["block_index"], INDEX, "block_index: got an array beside a router"),
                               (None, {"router": "oracle"}, "router: got 'oracle', expected index"),
                               (None, {"router": "qk_max", **INDEX}, "index_q: got an array, which the router"),
                               (None, {"index_q": INDEX["index_q"]}, "index_k: got None"),
                               (None, {"dense_up_to": 1}, "dense_up_to: got one without a router"),
                               (None, {"loop_order": "kv_outer"}, "loop_order: got 'kv_outer' without a block_index")):
        with pytest.raises(ValueError, match="^" + words):
            tilesieve.workspace_bytes(*tensors, ids, **LENGTHS, **change)


def test_explain_refuses_by_name() -> None:
    for change, words in (({}, "q: got a CUDA array of test_cuda_arguments, whose arrays cannot be written to"),
                          ({"isa": "amx"}, "isa: is for calls on the CPU"),
                          ({"arithmetic": "int8"}, "arithmetic: is for calls on the CPU"),
                          ({"tile_tokens": 0}, "tile_tokens: got 0")):
        with pytest.raises(ValueError, match="^" + words):
            tilesieve.explain(GIVEN["q"], GIVEN["k"], GIVEN["block_index"], **LENGTHS, **change)


def test_what_the_cpu_alone_does_is_refused() -> None:
    for name, call in (("q", lambda: tilesieve.route_scores(GIVEN["q"], GIVEN["k"])),
                       ("index_q", lambda: tilesieve.route_scores(**INDEX))):
        with pytest.raises(ValueError, match=f"^{name}: lies on a CUDA device; the scores are on the CPU so far"):
            call()


@pytest.mark.parametrize("argument", ["tile_tokens", "max_kv_blocks", "dense_up_to"])
def test_what_cuda_alone_has_is_refused_on_the_cpu(argument: str) -> None:
    q, k, v, ids = (GIVEN[name].array for name in ("q", "k", "v", "block_index"))
    calls = {"sparse_prefill": lambda: tilesieve.sparse_prefill(q, k, v, **{argument: 1}),
             "workspace_bytes": lambda: tilesieve.workspace_bytes(q, k, v, ids, **{argument: 1})}
    if argument != "dense_up_to":
        calls |= {"attend": lambda: tilesieve.attend(q, k, v, ids, **{argument: 1}),
                  "explain": lambda: tilesieve.explain(q, k, ids, **{argument: 1})}
    for call in calls.values():
        with pytest.raises(ValueError, match=f"^{argument}: is for calls on a CUDA device, and q lies on the CPU"):
            call()


@pytest.mark.parametrize(("change", "words"), [
    ({"q": Q}, "q: lies on the CPU, expected an array on a CUDA device"),
    ({"tensor_layout": "dhn"}, "tensor_layout: got 'dhn', expected nhd or hnd"),
    ({"rounding": "fast"}, "rounding: got 'fast', expected exact or relaxed"),
    ({"groups": "all"}, "groups: got 'all'"),
    ({"k": zeros(300, 3, 64)}, "k: got 3 KV heads for 4 query heads"),
    ({"v": zeros(299, 2, 64)}, r"v: got bf16\[299, 2, 64\]"),
    ({"tensor_layout": "hnd"}, "k: got 300 KV heads for 10 query heads"),
    ({"softmax_scale": -1.0}, "softmax_scale: got -1"),
    ({"stream": 0, "workspace": None}, "workspace: got None, needed with a stream"),
    ({"out": OUT}, "out: lies on the CPU, expected cuda:0 as q"),
    ({}, "workspace: lies on the CPU, expected cuda:0 as q"),
])
def test_sage_attention_refuses_by_name(change: dict[str, Any], words: str) -> None:
    given = {name: GIVEN[name] for name in ("q", "k", "v", "out", "workspace")} | change
    if "workspace" not in words:
        given["workspace"] = None
    with pytest.raises(ValueError, match="^" + words):
        tilesieve.sage_attention(**given)


@pytest.mark.parametrize(("change", "words"), [
    ({"q": Q}, "q: lies on the CPU, expected an array on a CUDA device"),
    ({"q": zeros(10, 4, 64, dtype=np.float16)}, "q: got f16"),
    ({"q": zeros(10, 4, 60)}, "q: got head_dim 60, expected a multiple of 8 up to 128"),
    ({"q": zeros(10, 64)}, "q: got 2 dimensions"),
    ({"k": None}, "k: got None, expected as q"),
    ({"k": K}, "k: lies on the CPU, expected cuda:0 as q"),
    ({"k": OnCuda(K, 1)}, "k: lies on cuda:1, expected cuda:0 as q"),
    ({"k": zeros(300, 3, 64)}, "k: got 3 KV heads for 4 query heads"),
    ({"v": zeros(299, 2, 64)}, r"v: got bf16\[299, 2, 64\]"),
    ({"tensor_layout": "dhn"}, "tensor_layout: got 'dhn', expected nhd or hnd"),
    ({"tensor_layout": "hnd"}, "k: got 300 KV heads for 10 query heads"),
    ({"softmax_scale": -1.0}, "softmax_scale: got -1"),
    ({"out": OUT}, "out: lies on the CPU, expected cuda:0 as q"),
    ({"out": zeros(10, 4, 64, dtype=np.float32)}, "out: got f32"),
    ({"out": GIVEN["q"]}, "out: overlaps q"),
    ({"out": None}, "out: needed where q is a CUDA array of test_cuda_arguments"),
    ({"lse": zeros(10, 5, dtype=np.float32)}, r"lse: got f32\[10, 5\]"),
    ({"lse": OnCuda(OUT.view(np.float32).reshape(-1)[:40].reshape(10, 4))}, "lse: overlaps out"),
    ({"stream": 0, "out": None}, "out: got None, needed with a stream"),
    ({"stream": 0, "return_lse": True}, "lse: got None, needed with a stream"),
])
def test_dense_attention_refuses_by_name(change: dict[str, Any], words: str) -> None:
    given = {name: GIVEN[name] for name in ("q", "k", "v", "out")} | change
    with pytest.raises(ValueError, match="^" + words):
        tilesieve.dense_attention(**given)


def test_dense_attention_refuses_other_types_by_name() -> None:
    given = {name: GIVEN[name] for name in ("q", "k", "v", "out")}
    for change, words in (({"causal": 1}, "causal: got int"), ({"tensor_layout": 3}, "tensor_layout: got int"),
                          ({"k": 3}, "k: got int"), ({"stream": "side"}, "stream: got str")):
        with pytest.raises(TypeError, match="^" + words):
            tilesieve.dense_attention(**(given | change))


VIDEO: dict[str, Any] = {"q": zeros(206, 4, 64), "k": zeros(206, 2, 64), "v": zeros(206, 2, 64),
                         "segments": "text:6,video:4x5x10"}
VIDEO_ONLY_FAULT: dict[str, Any] = {"out": zeros(206, 4, 64), "workspace": np.zeros(8, np.uint8)}
TABLES = object.__new__(tilesieve.VideoTables)  # of no device: nothing may look inside

# Of what chooses blocks: the same in route_video and video_attention.
VIDEO_CHOOSING: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": None}, ValueError, r"k: got None, expected \[tokens, heads, head_dim\], with a dimension of sequences"),
    ({"k": VIDEO["k"].array}, ValueError, "k: lies on the CPU, expected cuda:0 as q"),
    ({"k": zeros(206, 64)}, ValueError, r"k: got bf16\[206, 64\] on cuda:0, expected \[tokens, heads, head_dim\]"),
    ({"k": zeros(206, 3, 64)}, ValueError, "k: got 3 KV heads for 4 query heads"),
    ({"q": zeros(206, 4, 64, dtype=np.float32)}, ValueError, r"q: got f32\[206, 4, 64\] on cuda:0, expected bf16 or f16"),
    ({"segments": None}, TypeError, "segments: got None, expected str, or tables instead"),
    ({"segments": ""}, ValueError, "segments: got none"),
    ({"segments": 206}, TypeError, "segments: got int"),
    ({"segments": "video:3x4"}, ValueError, "segments: 'video:3x4': expected a grid"),
    ({"segments": "video:4x5x10"}, ValueError, "q: got 206 tokens"),
    ({"tables": "raster"}, TypeError, "tables: got str, expected VideoTables or None"),
    ({"tables": TABLES}, ValueError, "segments: got one beside tables, which were made of theirs"),
    ({"tensor_layout": "dhn"}, ValueError, "tensor_layout: got 'dhn', expected nhd or hnd"),
    ({"tensor_layout": "hnd"}, ValueError, "q: got 4 tokens, expected 206 as the tables have"),
    ({"router": "oracle"}, ValueError, "router: got 'oracle', expected mean_pool, the router of CUDA devices"),
    ({"router": "qk_max"}, ValueError, "router: got 'qk_max', expected mean_pool, oracle or random"),
    ({"router": None}, TypeError, "router: got None"),
    ({"budget": 1.5}, ValueError, "budget: got 1.5, expected 0 to 1"),
    ({"budget": "15%"}, TypeError, "budget: got str"),
    ({"num_routed": -1}, ValueError, "num_routed: got -1, expected 0 or more, or None"),
    ({"forced_inside_budget": 1}, TypeError, "forced_inside_budget: got int"),
    ({"seed": -1}, ValueError, "seed: got -1"),
    ({"softmax_scale": 0}, ValueError, "softmax_scale: got 0"),
    ({"q_block_size": 64}, ValueError, "q_block_size: got 64, expected 128, the size of CUDA devices"),
    ({"kv_block_size": 128}, ValueError, "kv_block_size: got 128, expected 64, the size of CUDA devices"),
    ({"kv_block_size": None}, TypeError, "kv_block_size: got None"),
    ({"num_threads": 2}, ValueError, "num_threads: is for calls on the CPU"),
    ({"isa": "amx"}, ValueError, "isa: is for calls on the CPU"),
    ({"progress": True}, ValueError, "progress: is for calls on the CPU"),
]


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({}, ValueError, "q: got a CUDA array of test_cuda_arguments, whose arrays cannot be written to"),
    *VIDEO_CHOOSING,
])
def test_route_video_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    given = {name: VIDEO[name] for name in ("q", "k", "segments")}
    with pytest.raises(exception, match="^" + words):
        tilesieve.route_video(**(given | change))


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({}, ValueError, "workspace: lies on the CPU, expected cuda:0 as q"),
    *VIDEO_CHOOSING,
    ({"v": None}, ValueError, "v: got None, expected as k"),
    ({"v": zeros(205, 2, 64)}, ValueError, r"v: got bf16\[205, 2, 64\]"),
    ({"v": OnCuda(np.zeros((206, 2, 64), ml_dtypes.bfloat16), 1)}, ValueError, "v: lies on cuda:1, expected cuda:0"),
    ({"layout": "4x4"}, ValueError, "layout: got '4x4'"),
    ({"layout": ["raster"]}, ValueError, "layout: got 1 boxes, expected 2, one for each head"),
    ({"layer": 3}, ValueError, "layer: got one without a LayoutTable"),
    ({"head_begin": 3}, ValueError, "head_begin: got one without a LayoutTable"),
    ({"tables": TABLES, "segments": None, "layout": "4x4x4"}, ValueError, "layout: got one beside tables"),
    ({"tables": TABLES, "segments": None, "layer": 0}, ValueError, "layer: got one beside tables"),
    ({"tables": TABLES, "segments": None, "head_begin": 1}, ValueError, "head_begin: got one beside tables"),
    ({"step": 1}, ValueError, "step: got one without a policy"),
    ({"policy": tilesieve.DensePolicy(), "step": 1}, ValueError, "layer: got None, needed with a policy"),
    ({"policy": tilesieve.DensePolicy(), "step": 1, "layer": 1}, ValueError, "workspace: lies on the CPU"),
    ({"policy": tilesieve.DensePolicy(), "step": 1, "layer": 1, "block_index": zeros(2, 3, 1, dtype=np.int32)},
     ValueError, "block_index: got one beside a policy"),
    ({"block_index": np.zeros((2, 3, 1), np.int32)}, ValueError, "block_index: lies on the CPU, expected cuda:0"),
    ({"block_index": zeros(2, 4, 1, dtype=np.int32)}, ValueError, r"block_index: got i32\[2, 4, 1\] on cuda:0, expected"),
    ({"arithmetic": "fp4"}, ValueError, "arithmetic: got 'fp4', expected storage or int8"),
    ({"groups": "all"}, ValueError, "groups: got 'all'"),
    ({"smooth_k": 1}, TypeError, "smooth_k: got int"),
    ({"out": np.zeros((206, 4, 64), ml_dtypes.bfloat16)}, ValueError, "out: lies on the CPU"),
    ({"out": None}, ValueError, "out: needed where q is a CUDA array of test_cuda_arguments"),
    ({"out": VIDEO["q"]}, ValueError, "out: overlaps q"),
    ({"lse": VIDEO_ONLY_FAULT["out"]}, ValueError, "lse: overlaps out"),
    ({"workspace": None}, ValueError, "workspace: needed where q is a CUDA array of test_cuda_arguments"),
    ({"workspace": VIDEO["k"]}, ValueError, "workspace: overlaps k"),
    ({"workspace": VIDEO_ONLY_FAULT["out"]}, ValueError, "workspace: overlaps out"),
    ({"workspace": zeros(1 << 22, dtype=np.uint8)}, ValueError, "tables: needed where q is a CUDA array of test_cuda"),
    *(({"stream": 0, missing: None}, ValueError, f"{missing}: got None, needed with a stream")
      for missing in ("out", "workspace")),
    ({"stream": 0}, ValueError, "tables: got None, needed with a stream"),
    ({"stream": 0, "tables": TABLES, "segments": None, "return_lse": True}, ValueError, "lse: got None, needed with a"),
])
def test_video_attention_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    with pytest.raises(exception, match="^" + words):
        tilesieve.video_attention(**(VIDEO | VIDEO_ONLY_FAULT | change))


CUDA_TABLE = tilesieve.LayoutTable(grid=(4, 5, 10), menu=["raster", "4x4x4"], box_of_head=[[0, 1], [1, 0]])


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({}, ValueError, "q: got a CUDA array of test_cuda_arguments, whose arrays cannot be written to"),
    *((change, exception, words) for change, exception, words in VIDEO_CHOOSING
      if set(change) <= {"q", "k", "forced_inside_budget", "seed", "softmax_scale", "q_block_size", "kv_block_size",
                         "num_threads", "isa", "progress"}),
    ({"segments": None}, TypeError, "segments: got None, expected str"),
    ({"segments": "video:4x5x10"}, ValueError, "q: got 206 tokens"),
    ({"layouts": "raster"}, TypeError, "layouts: got str, expected a list or a tuple"),
    ({"layouts": ["raster", "4x4"]}, ValueError, r"layouts\[1\]: got '4x4'"),
    ({"layouts": ["raster", 3]}, TypeError, r"layouts\[1\]: got int"),
    ({"layouts": [["raster"]]}, ValueError, r"layouts\[0\]: got 1 boxes, expected 2"),
    ({"layer": 3}, ValueError, "layer: got one without a LayoutTable"),
    ({"head_begin": 1}, ValueError, "head_begin: got one without a LayoutTable"),
    ({"layouts": ["raster", CUDA_TABLE]}, ValueError, "layer: got None, needed with a LayoutTable"),
    ({"layouts": [CUDA_TABLE, "raster"], "layer": 1}, ValueError, "q: got a CUDA array"),
    ({"layouts": [CUDA_TABLE, "raster"], "layer": 1, "head_begin": 1}, ValueError, "head_begin: got 1, with the 2 heads"),
    ({"routers": "mean_pool"}, TypeError, "routers: got str"),
    ({"routers": ["index"]}, ValueError, "routers: got 'index', expected mean_pool, oracle or random"),
    *(({"routers": ["mean_pool", router]}, ValueError, f"routers: got '{router}', expected mean_pool, the router of CUDA")
      for router in ("oracle", "random")),
    ({"budgets": 0.15}, TypeError, "budgets: got float"),
    ({"budgets": [0.15, -1]}, ValueError, "budgets: got -1, expected 0 to 1"),
    ({"budgets": ["15%"]}, TypeError, "budgets: got str"),
    ({"num_sampled": 0}, ValueError, "num_sampled: got 0, expected 1 or more, or None"),
])
def test_video_mass_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    given = {name: VIDEO[name] for name in ("q", "k", "segments")}
    with pytest.raises(exception, match="^" + words):
        tilesieve.video_mass(**(given | change))


def test_layout_search_refuses_by_name() -> None:
    call = (0, VIDEO["q"], VIDEO["k"])
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ([call], {}, r"calls\[0\]: q: got a CUDA array of test_cuda_arguments"),
        ([call], {"kv_block_size": 128}, r"calls\[0\]: kv_block_size: got 128, expected 64, the size of CUDA devices"),
        ([(0, VIDEO["q"], VIDEO["k"].array)], {}, r"calls\[0\]: k: lies on the CPU, expected cuda:0 as q"),
        ([call], {"num_threads": 2}, r"calls\[0\]: num_threads: is for calls on the CPU"),
    ]
    for calls, change, words in refused:
        with pytest.raises(ValueError, match="^" + words):
            tilesieve.layout_search(calls, **({"segments": VIDEO["segments"]} | change))


@pytest.mark.parametrize(("change", "words"), [
    ({}, "like: got a CUDA array of test_cuda_arguments, whose arrays cannot be written to"),
    ({"like": np.zeros(3)}, "like: lies on the CPU, expected an array on a CUDA device"),
    ({"num_kv_heads": None}, "num_kv_heads: got None, needed with one box for all heads"),
])
def test_video_tables_refuse_by_name(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"like": VIDEO["q"], "segments": "video:4x5x10", "num_kv_heads": 2}
    with pytest.raises(ValueError, match="^" + words):
        tilesieve.VideoTables(**(given | change))


# Of a model of 6 heads, of which the call has 2.
VEDA: dict[str, Any] = {"q": zeros(206, 2, 64), "k": zeros(206, 2, 64), "proj_q": zeros(6, 192, 64),
                        "proj_k": zeros(6, 192, 64)}


def on_no_device(made: Any) -> tilesieve.VideoTables:
    """Tables as the module makes them on the host."""
    tables = object.__new__(tilesieve.VideoTables)
    tables._core = made
    return tables


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({}, ValueError, "q: got a CUDA array of test_cuda_arguments, whose arrays cannot be written to"),
    ({"q": VIDEO["q"]}, ValueError, "k: got 2 heads for 4 of q, expected as many"),
    ({"q": zeros(206, 64)}, ValueError, r"q: got bf16\[206, 64\] on cuda:0, expected \[tokens, heads, head_dim\]"),
    ({"q": zeros(206, 2, 64, dtype=np.float32)}, ValueError, r"q: got f32\[206, 2, 64\] on cuda:0, expected bf16 or f16"),
    ({"k": None}, ValueError, "k: got None, expected"),
    ({"k": zeros(205, 2, 64)}, ValueError, r"k: got"),
    ({"tables": None}, ValueError, "tables: got None, needed where q lies on a CUDA device: of VideoTables.veda"),
    ({"tables": None, "segments": VIDEO["segments"], "box": "4x4x8"}, ValueError, "tables: got None"),
    ({"tables": "4x4x8"}, TypeError, "tables: got str, expected VideoTables or None"),
    *(({name: got}, ValueError, f"{name}: got one beside tables, which were made of theirs")
      for name, got in (("segments", "video:4x5x10"), ("box", "4x4x8"), ("keep_ratio", 0.1), ("tiles_per_row", 3))),
    ({"tensor_layout": "dhn"}, ValueError, "tensor_layout: got 'dhn', expected nhd or hnd"),
    ({"q": zeros(206, 1, 64), "k": zeros(206, 1, 64)}, ValueError, "tables: got some of 2 KV heads, expected the 1 of k"),
    ({"q": zeros(200, 2, 64), "k": zeros(200, 2, 64)}, ValueError, "q: got 200 tokens, expected 206 as the tables have"),
    ({"proj_q": None}, ValueError, r"proj_q: got None, expected \[heads, 3 \* head_dim, head_dim\]"),
    ({"proj_k": None}, ValueError, r"proj_k: got None, expected \[heads, 3 \* head_dim, head_dim\]"),
    ({"proj_q": "file"}, TypeError, "proj_q: got str"),
    ({"proj_q": np.zeros((6, 192, 64), np.float32)}, ValueError, "proj_q: lies on the CPU, expected cuda:0 as q"),
    ({"proj_k": zeros(6, 191, 64)}, ValueError, r"proj_k: got bf16\[6, 191, 64\] on cuda:0, expected"),
    ({"proj_k": zeros(6, 192, 64, dtype=np.int32)}, ValueError, r"proj_k: got i32\[6, 192, 64\] on cuda:0, expected"),
    ({"proj_q_scale": np.ones(6, np.float32)}, ValueError, "proj_q_scale: lies on the CPU, expected cuda:0 as q"),
    ({"proj_q_scale": zeros(2, dtype=np.float32)}, ValueError, r"proj_q_scale: got f32\[2\] on cuda:0, expected"),
    ({"proj_k_scale": 0.5}, TypeError, "proj_k_scale: got float"),
    *(({"head_begin": got}, ValueError, f"head_begin: got {got} for 2 heads, expected some of the 6 heads of proj_q")
      for got in (-1, 5)),
    ({"head_begin": 1.5}, TypeError, "head_begin: got float"),
    ({"num_threads": 2}, ValueError, "num_threads: is for calls on the CPU"),
    ({"isa": "amx"}, ValueError, "isa: is for calls on the CPU"),
    ({"progress": True}, ValueError, "progress: is for calls on the CPU"),
])
def test_route_veda_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    tables = on_no_device(_core.VideoTables.of_veda(VIDEO["segments"], ["4x4x8", "8x4x4"], None, None))
    with pytest.raises(exception, match="^" + words):
        tilesieve.route_veda(**(VEDA | {"tables": tables} | change))


def test_route_veda_refuses_tables_of_a_layout() -> None:
    tables = on_no_device(_core.VideoTables(VIDEO["segments"], "raster", None, 0, 2))
    with pytest.raises(ValueError, match=r"^tables: got none of Veda's tiles, expected some of VideoTables\.veda"):
        tilesieve.route_veda(**VEDA, tables=tables)


@pytest.mark.parametrize(("change", "words"), [
    ({"tables": TABLES}, "tables: is for calls on a CUDA device, and q lies on the CPU"),
    ({"tensor_layout": "hnd"}, "tensor_layout: is for calls on a CUDA device, and q lies on the CPU"),
])
def test_route_veda_on_the_cpu_refuses_what_is_of_cuda(change: dict[str, Any], words: str) -> None:
    given = {name: VEDA[name].array for name in ("q", "k", "proj_q", "proj_k")}
    with pytest.raises(ValueError, match="^" + words):
        tilesieve.route_veda(**(given | {"segments": VIDEO["segments"], "box": "4x4x8"} | change))


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({}, ValueError, "like: got a CUDA array of test_cuda_arguments, whose arrays cannot be written to"),
    ({"like": np.zeros(3)}, ValueError, "like: lies on the CPU, expected an array on a CUDA device"),
    ({"segments": None}, TypeError, "segments: got None"),
    ({"segments": ""}, ValueError, "segments: got none"),
    ({"segments": "text:3"}, ValueError, "segments: got no video with tokens, expected one to be tiled"),
    ({"segments": "video:200"}, ValueError, r"segments\[0\]: a video of 200 tokens has no grid"),
    ({"segments": "video:4x5x10,video:4x5x10"}, ValueError, r"segments\[1\]: a second video"),
    ({"boxes": "4x4x8"}, TypeError, "boxes: got str, expected a list or a tuple"),
    ({"boxes": []}, ValueError, "boxes: got none, expected one for each head"),
    ({"boxes": ["4x4x8", "4x8"]}, ValueError, r"boxes\[1\]: got '4x8'"),
    ({"boxes": ["4x4x8", 128]}, TypeError, r"boxes\[1\]: got int"),
    ({"boxes": ["4x4x8", "4x4x4"]}, ValueError, "boxes: got 4x4x4, expected t x h x w of 128 tokens"),
    ({"boxes": ["raster"]}, ValueError, "boxes: got raster"),
    ({"keep_ratio": 0}, ValueError, "keep_ratio: got 0"),
    ({"keep_ratio": "10%"}, TypeError, "keep_ratio: got str"),
    ({"tiles_per_row": -1}, ValueError, "tiles_per_row: got -1"),
    ({"keep_ratio": 0.1, "tiles_per_row": 2}, ValueError, "tiles_per_row: got one beside a keep_ratio"),
])
def test_tables_of_veda_refuse_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    given: dict[str, Any] = {"like": VIDEO["q"], "segments": "video:4x5x10", "boxes": ["4x4x8", "8x4x4"]}
    with pytest.raises(exception, match="^" + words):
        tilesieve.VideoTables.veda(**(given | change))


@pytest.mark.skipif(any(kernel.device == "cuda" for kernel in tilesieve.kernels()), reason="this build has CUDA")
def test_without_cuda_there_is_no_device_to_measure() -> None:
    with pytest.raises(ValueError, match=r"^measure: this build has no CUDA"):
        tilesieve.measure_roofline_device()


@pytest.mark.skipif(any(kernel.device == "cuda" for kernel in tilesieve.kernels()), reason="this build has CUDA")
def test_without_cuda_dense_attention_says_so() -> None:
    with pytest.raises(ValueError, match=r"^dense_attention: this build has no CUDA kernels"):
        tilesieve.dense_attention(*(GIVEN[name] for name in ("q", "k", "v")), out=GIVEN["out"])
