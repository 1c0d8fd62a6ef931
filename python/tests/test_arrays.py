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


def test_numbers_may_be_numpys() -> None:
    case = make_case(6)
    sizes = case.sizes()
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, softmax_scale=0.5, **sizes)
    sizes |= {"kv_block_size": np.int64(16)}
    got = tilesieve.attend(case.q, case.k, case.v, case.block_index, softmax_scale=np.float32(0.5), **sizes)
    assert got.tobytes() == want.tobytes()


def refusals() -> list[Any]:
    """(arguments that differ from a good call, exception, words)."""
    f32 = np.zeros((49, 6, 32), np.float32)
    return [
        ({"q": "text"}, TypeError, "q: got str, expected an array of NumPy"),
        ({"v": None}, ValueError, "v: got"),
        ({"q": f32.astype(np.complex64)}, ValueError, "q: got elements of type complex64"),
        ({"q": f32.astype(">f4")}, ValueError, "q: got elements of type >f4"),
        ({"q": f32.astype(np.float64)}, ValueError, "f64"),
        ({"q": f32.astype(ml_dtypes.float8_e5m2)}, ValueError, "e5m2"),
        ({"q": f32[0]}, ValueError, r"q: got f32\[6, 32\], expected \[total_q, num_q_heads, head_dim\]"),
        ({"q": f32[:, :5]}, ValueError, "num_kv_heads"),
        ({"q": f32[..., ::2]}, ValueError, "q"),
        ({"q": np.zeros((1,) * 9, np.float32)}, ValueError, "q: got 9 dimensions"),
        ({"k": np.zeros((145, 2, 32), np.float16)}, ValueError, "v: got f32"),
        ({"block_index": np.zeros((2, 49, 3), np.int64)}, ValueError, "block_index: got i64"),
        ({"block_index": np.zeros((3, 49, 3), np.int32)}, ValueError, r"block_index: got \[3, 49, 3\]"),
        ({"kv_block_size": 7}, ValueError, "kv_block_size: got 7"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale"),
        ({"cu_seqlens_q": [0, 40, 40]}, ValueError, "cu_seqlens_kv: got 3 sequences, expected as many as of queries"),
        ({"cu_seqlens_q": [1, 49]}, ValueError, "cu_seqlens_q: got 1 at its beginning"),
        ({"cu_seqlens_q": [0, 40, 30, 49]}, ValueError, "cu_seqlens_q: falls from 40 to 30"),
        ({"cu_seqlens_q": ["a"]}, TypeError, "cu_seqlens_q: got an element of type str"),
        ({"cu_seqlens_q": np.zeros(4, np.float32)}, ValueError, r"cu_seqlens_q: got f32\[4\]"),
        ({"cu_seqlens_kv": None}, ValueError, "cu_seqlens_kv: got nothing, needed for the 3 sequences"),
        ({"kv_lens": [1, 2, 3]}, ValueError, "kv_lens: got some without a block_table"),
        ({"block_table": np.zeros((3, 9), np.int32)}, ValueError, "cu_seqlens_kv: got one with a block_table"),
        ({"loop_order": "inner"}, ValueError, "loop order|loop_order"),
        ({"loop_order": "kv_outer", "block_index": None}, ValueError, "loop_order: got 'kv_outer' without"),
        ({"isa": "mmx"}, ValueError, "isa: got 'mmx'"),
        ({"num_threads": -1}, ValueError, "num_threads: got -1"),
        ({"workspace": np.zeros(8, np.uint8), "loop_order": "kv_outer"}, ValueError, "workspace: got 8 bytes, need"),
        ({"workspace_limit": -1, "loop_order": "kv_outer"}, ValueError, "workspace_limit"),
        ({"workspace_limit": 0, "loop_order": "kv_outer"}, ValueError, "workspace_limit"),
        ({"out": np.zeros((49, 6, 32), np.int32)}, ValueError, "i32"),
        ({"lse": np.zeros((49, 5), np.float32)}, ValueError, "lse: got"),
        ({"stream": 3}, ValueError, "stream: is for calls on a CUDA device"),
        ({"max_kv_blocks": 3}, ValueError, "max_kv_blocks: is for calls on a CUDA device"),
        ({"k_scale": np.zeros(1, np.float32)}, ValueError, "k_scale"),
    ]


@pytest.mark.parametrize(("change", "exception", "words"), refusals())
def test_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    case = make_case(4)
    arguments = {"q": case.q, "k": case.k, "v": case.v, "block_index": case.block_index, **case.sizes()}
    tilesieve.attend(**arguments)
    with pytest.raises(exception, match=words) as caught:
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
