# SPDX-License-Identifier: Apache-2.0
"""What is taken as an array, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import make_case

import tilesieve


class OnlyDlpack:
    """An array that is nothing but DLPack, of the newest kind or the oldest."""

    def __init__(self, array: Any, knows_versions: bool) -> None:
        self._array = array
        self._knows_versions = knows_versions

    @property
    def shape(self) -> Any:
        return self._array.shape

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    def __dlpack__(self, **arguments: Any) -> Any:
        if not self._knows_versions and "max_version" in arguments:
            raise TypeError("unexpected keyword max_version")
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("knows_versions", [True, False])
def test_takes_objects_that_are_dlpack_alone(knows_versions: bool) -> None:
    case = make_case(1)
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, **case.sizes())
    wrapped = [OnlyDlpack(x, knows_versions) for x in (case.q, case.k, case.v, case.block_index)]
    got = tilesieve.attend(*wrapped, **case.sizes())  # type: ignore[call-overload]
    assert type(got) is np.ndarray and got.tobytes() == want.tobytes()


def test_takes_read_only_arrays_and_refuses_to_write_to_them() -> None:
    case = make_case(2)
    for array in (case.q, case.k, case.v, case.block_index):
        array.flags.writeable = False
    out = tilesieve.attend(case.q, case.k, case.v, case.block_index, **case.sizes())
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out: is read-only"):
        tilesieve.attend(case.q, case.k, case.v, case.block_index, out=out, **case.sizes())
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":  # before it NumPy refuses to export them at all
        with pytest.raises(ValueError, match="out: is read-only"):
            tilesieve.attend(case.q, case.k, case.v, case.block_index, out=OnlyDlpack(out, True), **case.sizes())


def test_lengths_may_be_lists_and_whole_numbers_of_either_size() -> None:
    case = make_case(3)
    sizes = case.sizes()
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, **sizes)
    for cast in (list, tuple, lambda x: x.astype(np.int64), lambda x: np.repeat(x, 2)[::2]):
        lengths = {name: cast(sizes[name]) for name in ("cu_seqlens_q", "cu_seqlens_kv")}
        got = tilesieve.attend(case.q, case.k, case.v, case.block_index, **(sizes | lengths))
        assert got.tobytes() == want.tobytes()


def test_lengths_may_be_a_range() -> None:
    case = make_case(3, q_lens=(7, 7, 7), kv_lens=(7, 7, 7))
    sizes = case.sizes()
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, **sizes)
    lengths = {"cu_seqlens_q": range(0, 22, 7), "cu_seqlens_kv": range(0, 22, 7)}
    assert tilesieve.attend(case.q, case.k, case.v, case.block_index, **(sizes | lengths)).tobytes() == want.tobytes()


def test_what_is_written_may_not_overlap_what_is_read() -> None:
    case = make_case(7)
    q, k, v = (np.ascontiguousarray(x) for x in (case.q, case.k, case.v))
    ids, sizes = case.block_index, case.sizes()
    want = tilesieve.attend(q, k, v, ids, **sizes)
    memory = np.empty(1 << 20, np.uint8)
    plan = tilesieve.plan(q, k, ids, loop_order="kv_outer", **sizes)
    aligned = memory[-memory.ctypes.data % 64 :]
    shared: dict[str, Any] = {"out": aligned[: want.nbytes].view(np.float32).reshape(want.shape), "workspace": aligned}
    for options, words in (({"out": q}, "out: overlaps q"),
                           ({"out": k.reshape(-1)[: want.size].reshape(-1)}, "out: "),
                           ({"out": np.lib.stride_tricks.as_strided(v, want.shape, want.strides)}, "out: overlaps v"),
                           ({"out": want, "lse": want.reshape(-1)[:294].reshape(49, 6)}, "lse: overlaps out"),
                           ({"lse": ids.view(np.float32).reshape(-1)[:294].reshape(49, 6)}, "lse: overlaps block_index"),
                           ({**shared, "loop_order": "kv_outer"}, "workspace: overlaps out")):
        with pytest.raises(tilesieve.Error, match=words):
            tilesieve.attend(q, k, v, ids, **(sizes | options))
    with pytest.raises(tilesieve.Error, match="out: overlaps q"):
        plan.run(q, k, v, out=q)
    fused = np.empty((49, 12, 32), np.float32)  # the queries beside the outputs: no byte is shared
    fused[:, ::2] = q
    assert tilesieve.attend(fused[:, ::2], k, v, ids, out=fused[:, 1::2], **sizes).tobytes() == want.tobytes()


def test_scales_may_be_numbers() -> None:
    case = make_case(8)
    sizes = case.sizes()
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, k_scale=np.array([0.5], np.float32),
                            v_scale=np.array([2], np.float32), **sizes)
    for half, two in ((0.5, 2), (np.float32(0.5), np.float64(2)), (np.array(0.5, np.float32), np.array(2, np.float32))):
        got = tilesieve.attend(case.q, case.k, case.v, case.block_index, k_scale=half, v_scale=two, **sizes)
        assert got.tobytes() == want.tobytes()


def test_numbers_may_be_numpys() -> None:
    case = make_case(6)
    sizes = case.sizes()
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, softmax_scale=0.5, **sizes)
    sizes |= {"kv_block_size": np.int64(16), "causal": np.bool_(True), "num_threads": np.int32(1)}
    got = tilesieve.attend(case.q, case.k, case.v, case.block_index, softmax_scale=np.float32(0.5), **sizes)
    assert got.tobytes() == want.tobytes()


def refusals() -> list[Any]:
    """(arguments that differ from a good call, exception, words)."""
    f32 = np.zeros((49, 6, 32), np.float32)
    return [
        ({"q": "text"}, TypeError, "q: got str, expected an array of NumPy"),
        ({"q": None}, ValueError, r"q: got None, expected \[total_q, num_q_heads, head_dim\]"),
        ({"k": None}, ValueError, "k: got None"),
        ({"v": None}, ValueError, "v: got None"),
        ({"q": np.ma.masked_array(f32, f32 > 0)}, TypeError, "q: got MaskedArray"),
        ({"q": f32.astype(np.complex64)}, ValueError, "q: got elements of type complex64"),
        ({"q": f32.astype(">f4")}, ValueError, "q: got elements of type >f4"),
        ({"q": f32.astype(np.float64)}, ValueError, "q: got f64"),
        ({"q": f32.astype(ml_dtypes.float8_e5m2)}, ValueError, "q: got e5m2"),
        ({"q": f32[0]}, ValueError, r"q: got f32\[6, 32\], expected \[total_q, num_q_heads, head_dim\]"),
        ({"q": f32[:, :5]}, ValueError, "k: got num_kv_heads 2, expected a divisor of num_q_heads = 5"),
        ({"q": f32[..., :12]}, ValueError, "q: got head_dim 12"),
        ({"q": f32[..., ::2]}, ValueError, "q: the stride"),
        ({"q": np.zeros((1,) * 9, np.float32)}, ValueError, "q: got 9 dimensions"),
        ({"k": np.zeros((145, 2, 32), np.float16)}, ValueError, "v: got f32"),
        ({"block_index": np.zeros((2, 49, 3), np.int64)}, ValueError, "block_index: got i64"),
        ({"block_index": np.zeros((3, 49, 3), np.int32)}, ValueError, r"block_index: got \[3, 49, 3\]"),
        ({"block_index": [1, 2]}, TypeError, "block_index: got list"),
        ({"causal": "yes"}, TypeError, "causal: got str, expected bool"),
        ({"causal": 1}, TypeError, "causal: got int, expected bool"),
        ({"kv_block_size": 7}, ValueError, "kv_block_size: got 7"),
        ({"kv_block_size": 16.0}, TypeError, "kv_block_size: got float, expected a whole number"),
        ({"kv_block_size": True}, TypeError, "kv_block_size: got bool, expected a whole number"),
        ({"kv_block_size": 10**30}, ValueError, "kv_block_size: got 1000.*, expected a whole number below"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan"),
        ({"softmax_scale": 0}, ValueError, "softmax_scale: got 0, expected a positive number, or None"),
        ({"softmax_scale": -0.5}, ValueError, "softmax_scale: got -0.5"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale: got str, expected a number"),
        ({"cu_seqlens_q": [0, 40, 40]}, ValueError, "cu_seqlens_kv: got 3 sequences, expected as many as of queries"),
        ({"cu_seqlens_q": [1, 49]}, ValueError, "cu_seqlens_q: got 1 at its beginning"),
        ({"cu_seqlens_q": [0, 40, 30, 49]}, ValueError, "cu_seqlens_q: falls from 40 to 30"),
        ({"cu_seqlens_q": [0, "a"]}, TypeError, r"cu_seqlens_q\[1\]: got str, expected a whole number"),
        ({"cu_seqlens_q": "ab"}, TypeError, "cu_seqlens_q: got str"),
        ({"cu_seqlens_q": 3}, TypeError, "cu_seqlens_q: got int"),
        ({"cu_seqlens_q": np.zeros(4, np.float32)}, ValueError, r"cu_seqlens_q: got f32\[4\]"),
        ({"cu_seqlens_kv": None}, ValueError, "cu_seqlens_kv: got None, needed for the 3 sequences"),
        ({"kv_lens": [1, 2, 3]}, ValueError, "kv_lens: got some without a block_table"),
        ({"block_table": np.zeros((3, 9), np.int32)}, ValueError, "cu_seqlens_kv: got one with a block_table"),
        ({"loop_order": "inner"}, ValueError, "loop_order: got 'inner'"),
        ({"loop_order": None}, TypeError, "loop_order: got None, expected str"),
        ({"loop_order": "kv_outer", "block_index": None}, ValueError, "loop_order: got 'kv_outer' without"),
        ({"isa": "mmx"}, ValueError, "isa: got 'mmx'"),
        ({"isa": None}, TypeError, "isa: got None, expected str"),
        ({"num_threads": -1}, ValueError, "num_threads: got -1"),
        ({"num_threads": 0}, ValueError, "num_threads: got 0, expected 1 or more, or None"),
        ({"num_threads": 1 << 40}, ValueError, "num_threads: got"),
        ({"num_threads": "2"}, TypeError, "num_threads: got str"),
        ({"workspace": np.zeros(8, np.uint8), "loop_order": "kv_outer"}, ValueError, "workspace: got 8 bytes, need"),
        ({"workspace_limit": -1, "loop_order": "kv_outer"}, ValueError, "workspace_limit: got -1"),
        ({"workspace_limit": 0, "loop_order": "kv_outer"}, ValueError, "workspace_limit: got 0"),
        ({"workspace_limit": 1, "loop_order": "kv_outer"}, ValueError, "workspace_limit"),
        ({"out": np.zeros((49, 6, 32), np.int32)}, ValueError, "out: i32"),
        ({"out": np.zeros((49, 6, 33), np.float32)}, ValueError, "out: got"),
        ({"lse": np.zeros((49, 5), np.float32)}, ValueError, "lse: got"),
        ({"stream": 3}, ValueError, "stream: is for calls on a CUDA device"),
        ({"max_kv_blocks": 3}, ValueError, "max_kv_blocks: is for calls on a CUDA device"),
        ({"k_scale": np.zeros(1, np.float32)}, ValueError, "k_scale: head 0 is 0"),
        ({"k_scale": 0.0}, ValueError, "k_scale: head 0 is 0"),
        ({"k_scale": "half"}, TypeError, "k_scale: got str"),
    ]


@pytest.mark.parametrize(("change", "exception", "words"), refusals())
def test_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    case = make_case(4)
    arguments = {"q": case.q, "k": case.k, "v": case.v, "block_index": case.block_index, **case.sizes()}
    tilesieve.attend(**arguments)
    with pytest.raises(exception, match="^" + words) as caught:
        tilesieve.attend(**(arguments | change))
    assert exception is not ValueError or isinstance(caught.value, tilesieve.Error)


def test_jax_arrays_are_taken() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    case = make_case(5, dtype=ml_dtypes.bfloat16, q_lens=(40,), kv_lens=(40,))
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        arrays = [jax.numpy.asarray(np.ascontiguousarray(x)) for x in (case.q, case.k, case.v, case.block_index)]
    got = tilesieve.attend(*arrays, kv_block_size=16)
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, kv_block_size=16)
    assert got.tobytes() == want.tobytes()
