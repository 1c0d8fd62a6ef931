# SPDX-License-Identifier: Apache-2.0
"""Attention against float64, over shapes, types, strides, loop orders and plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_reference import attention
from cases import TOLERANCES, Case, cases, make_case
from hypothesis import given, settings

import tilesieve


def expected(case: Case, block_index: Any) -> tuple[Any, Any]:
    return attention(case.q, case.k, case.v, block_index, q_lens=case.q_lens, kv_lens=case.kv_lens, causal=case.causal,
                     scale=case.scale, kv_block_size=case.kv_block_size)


def assert_close(got: tuple[Any, Any], want: tuple[Any, Any], dtype: Any) -> None:
    """Holds o and lse to the tolerance of the stored type; what is -inf must be -inf."""
    o, lse = got[0].astype(np.float64), got[1]
    assert np.isfinite(o).all()
    np.testing.assert_allclose(o, want[0], atol=TOLERANCES[np.dtype(dtype)], rtol=0)
    np.testing.assert_allclose(lse, want[1], atol=1e-4, rtol=1e-5)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_matches_float64(case: Case) -> None:
    for block_index in (case.block_index, None):
        got = tilesieve.attend(case.q, case.k, case.v, block_index, return_lse=True, **case.sizes())
        assert_close(got, expected(case, block_index), case.q.dtype)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_plans_and_loop_orders_agree_bit_for_bit(case: Case) -> None:
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, return_lse=True, **case.sizes())
    for loop_order in ("q_outer", "kv_outer"):
        plan = tilesieve.plan(case.q, case.k, case.block_index, loop_order=loop_order, **case.sizes())
        assert plan.loop_order == loop_order
        memory = np.empty(plan.workspace_bytes + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :][: plan.workspace_bytes]
        for workspace in (None, memory):
            got = plan.run(case.q, case.k, case.v, return_lse=True, workspace=workspace, num_threads=2)
            assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


def test_the_order_of_the_ids_does_not_matter() -> None:
    case = make_case(1)
    shuffled = np.random.default_rng(2).permuted(case.block_index, axis=2)
    got, want = (tilesieve.attend(case.q, case.k, case.v, ids, **case.sizes()) for ids in (shuffled, case.block_index))
    assert got.tobytes() == want.tobytes()


def test_writes_into_given_arrays_of_any_stride() -> None:
    case = make_case(3)
    want, want_lse = tilesieve.attend(case.q, case.k, case.v, case.block_index, return_lse=True, **case.sizes())
    wide = np.full((want.shape[0], want.shape[1] * 2, want.shape[2]), 7, np.float32)
    out, lse = wide[:, ::2], np.zeros(want_lse.shape[::-1], np.float32).T
    assert tilesieve.attend(case.q, case.k, case.v, case.block_index, out=out, lse=lse, **case.sizes()) is out
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)
    assert (wide[:, 1::2] == 7).all()


def test_a_paged_cache_is_the_same_as_packed_keys() -> None:
    case = make_case(4, q_lens=(40, 9), kv_lens=(40, 100))
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, **case.sizes())
    block, rng = case.kv_block_size, np.random.default_rng(5)
    counts = [-(-length // block) for length in case.kv_lens]
    table = np.full((2, max(counts)), -7, np.int32)
    pages = rng.permutation(sum(counts) + 3)
    cache = np.full((len(pages), 2, block, 2, 32), np.nan, np.float32)  # K and V of a page side by side
    begin = 0
    for row, (count, length) in enumerate(zip(counts, case.kv_lens, strict=True)):
        for b in range(count):
            page = table[row, b] = pages[sum(counts[:row]) + b]
            tokens = slice(begin + b * block, begin + min(length, (b + 1) * block))
            cache[page, 0, : tokens.stop - tokens.start] = case.k[tokens]
            cache[page, 1, : tokens.stop - tokens.start] = case.v[tokens]
        begin += length
    sizes = case.sizes() | {"cu_seqlens_kv": None, "kv_lens": case.kv_lens, "block_table": table}
    got = tilesieve.attend(case.q, cache[:, 0], cache[:, 1], case.block_index, **sizes)
    assert got.tobytes() == want.tobytes()


def test_scales_are_factors_of_stored_numbers() -> None:
    case = make_case(6)
    scale = np.array([0.5, 2.0], np.float32)
    got = tilesieve.attend(case.q, case.k, case.v, case.block_index, k_scale=scale, v_scale=scale, **case.sizes())
    k, v = case.k * scale[:, None], case.v * scale[:, None]
    np.testing.assert_array_equal(got, tilesieve.attend(case.q, k, v, case.block_index, **case.sizes()))


def test_sparse_prefill_is_route_and_attend() -> None:
    case = make_case(7, q_lens=(100,), kv_lens=(130,))
    sizes = case.sizes()
    block_index = tilesieve.route(case.q, case.k, router="qk-max", top_k=3, **sizes)
    want = tilesieve.attend(case.q, case.k, case.v, block_index, **sizes)
    for given_index in (None, block_index):
        got = tilesieve.sparse_prefill(case.q, case.k, case.v, given_index, router="qk-max", top_k=3, **sizes)
        assert got.tobytes() == want.tobytes()


def test_combining_parts_of_the_keys_gives_the_whole() -> None:
    case = make_case(8, q_lens=(30,), kv_lens=(90,), causal=False)
    want = tilesieve.attend(case.q, case.k, case.v, causal=False, return_lse=True)
    parts = [tilesieve.attend(case.q, case.k[s], case.v[s], causal=False, return_lse=True)
             for s in (slice(0, 16), slice(16, 17), slice(17, 90), slice(90, 90))]
    for got, whole in zip(tilesieve.combine(parts), want, strict=True):
        np.testing.assert_allclose(got, whole, atol=1e-5)
    nothing = tilesieve.combine(parts[3:])
    assert (nothing[0] == 0).all() and np.isneginf(nothing[1]).all()
    with pytest.raises(ValueError, match="parts: got none"):
        tilesieve.combine([])


def test_explain_says_why() -> None:
    case = make_case(9)
    text = tilesieve.explain(case.q, case.k, case.block_index, loop_order="kv_outer", **case.sizes())
    assert text.startswith("kv_outer")
    plan = tilesieve.plan(case.q, case.k, case.block_index, **case.sizes())
    assert tilesieve.Problem.parse(plan.problem).kv_lens == tuple(case.kv_lens)
