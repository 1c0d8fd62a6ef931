# SPDX-License-Identifier: Apache-2.0
"""Attention against float64, over shapes, types, strides, loop orders and plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_reference import attention
from cases import INT8_REL_L2, TOLERANCES, Case, cases, has_int8, make_case
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
    for block_size in (block, None):  # pages say what a block is
        got = tilesieve.attend(case.q, cache[:, 0], cache[:, 1], case.block_index,
                               **(sizes | {"kv_block_size": block_size}))
        assert got.tobytes() == want.tobytes()
    routed = tilesieve.route(case.q, cache[:, 0], top_k=2, **(sizes | {"kv_block_size": None}))
    np.testing.assert_array_equal(routed, tilesieve.route(case.q, case.k, top_k=2, **case.sizes()))
    with pytest.raises(ValueError, match="k: got"):
        tilesieve.attend(case.q, cache[:, 0], cache[:, 1], case.block_index, **(sizes | {"kv_block_size": 8}))


def test_scales_are_factors_of_stored_numbers() -> None:
    case = make_case(6)
    scale = np.array([0.5, 2.0], np.float32)
    got = tilesieve.attend(case.q, case.k, case.v, case.block_index, k_scale=scale, v_scale=scale, **case.sizes())
    k, v = case.k * scale[:, None], case.v * scale[:, None]
    np.testing.assert_array_equal(got, tilesieve.attend(case.q, k, v, case.block_index, **case.sizes()))


def test_sparse_prefill_is_route_and_attend() -> None:
    case = make_case(7, q_lens=(100,), kv_lens=(130,))
    sizes = case.sizes()
    block_index = tilesieve.route(case.q, case.k, router="qk_max", top_k=3, **sizes)
    want = tilesieve.attend(case.q, case.k, case.v, block_index, **sizes)
    got = tilesieve.sparse_prefill(case.q, case.k, case.v, router="qk_max", top_k=3, **sizes)
    assert got.tobytes() == want.tobytes()
    with pytest.raises(TypeError):
        tilesieve.sparse_prefill(case.q, case.k, case.v, block_index, **sizes)  # type: ignore[call-overload]


def test_combining_parts_of_the_keys_gives_the_whole() -> None:
    case = make_case(8, q_lens=(30,), kv_lens=(90,), causal=False)
    want = tilesieve.attend(case.q, case.k, case.v, causal=False, return_lse=True)
    parts = [tilesieve.attend(case.q, case.k[s], case.v[s], causal=False, return_lse=True)
             for s in (slice(0, 16), slice(16, 17), slice(17, 90), slice(90, 90))]
    for got, whole in zip(tilesieve.combine(parts), want, strict=True):
        np.testing.assert_allclose(got, whole, atol=1e-5)
    nothing = tilesieve.combine(parts[3:])
    assert (nothing[0] == 0).all() and np.isneginf(nothing[1]).all()
    np.testing.assert_array_equal(tilesieve.combine(part for part in parts)[0], tilesieve.combine(parts)[0])


@pytest.mark.parametrize(("parts", "exception", "words"), [
    ([], ValueError, "parts: got none"),
    (3, TypeError, "parts: got int"),
    ([np.zeros((2, 1, 8)), np.zeros((2, 1, 8))], TypeError, r"parts\[0\]: got ndarray, expected a pair"),
    ([(np.zeros((2, 1, 8)),)], TypeError, r"parts\[0\]: got tuple, expected a pair"),
    ([(np.zeros((2, 1, 8)), None)], TypeError, r"parts\[0\]: got NoneType, expected arrays"),
    ([(np.zeros((2, 1, 8)), np.zeros((2, 2)))], ValueError, r"parts\[0\]: got o \[2, 1, 8\] and lse \[2, 2\]"),
    ([(np.zeros((2, 1, 8)), np.zeros((2, 1))), (np.zeros((3, 1, 8)), np.zeros((3, 1)))], ValueError, r"parts\[1\]"),
])
def test_combine_refuses_by_name(parts: Any, exception: type[Exception], words: str) -> None:
    with pytest.raises(exception, match=words):
        tilesieve.combine(parts)


def test_explain_says_why() -> None:
    case = make_case(9)
    text = tilesieve.explain(case.q, case.k, case.block_index, loop_order="kv_outer", **case.sizes())
    assert text.startswith("kv_outer")
    plan = tilesieve.plan(case.q, case.k, case.block_index, loop_order="kv-outer", **case.sizes())
    assert plan.explanation == text and plan.loop_order == "kv_outer"
    assert plan.problem == tilesieve.Problem(case.q_lens, case.kv_lens, num_q_heads=6, num_kv_heads=2, head_dim=32,
                                             kv_block_size=16, top_k=4)
    assert repr(plan) == f"<tilesieve.Plan kv_outer: {plan.problem}>"


def test_workspace_bytes_are_the_plans() -> None:
    case = make_case(10)
    arguments = (case.q, case.k, case.v, case.block_index)
    plan = tilesieve.plan(case.q, case.k, case.block_index, loop_order="kv_outer", **case.sizes())
    assert tilesieve.workspace_bytes(*arguments, loop_order="kv_outer", **case.sizes()) == plan.workspace_bytes > 0
    assert tilesieve.workspace_bytes(*arguments, loop_order="q_outer", **case.sizes()) == 0
    with pytest.raises(ValueError, match="max_kv_blocks: is for calls on a CUDA device"):
        tilesieve.workspace_bytes(*arguments, max_kv_blocks=4, **case.sizes())


def test_a_plan_keeps_no_array_of_lengths() -> None:
    case = make_case(11)
    sizes = case.sizes()
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, **sizes)
    plan = tilesieve.plan(case.q, case.k, case.block_index, **sizes)
    sizes["cu_seqlens_q"][:] = 0
    sizes["cu_seqlens_kv"][:] = 0
    assert plan.run(case.q, case.k, case.v).tobytes() == want.tobytes()
    with pytest.raises(ValueError, match=r"q: got f32\[48, 6, 32\]"):
        plan.run(case.q[1:], case.k, case.v)
    with pytest.raises(ValueError, match="v: got None"):
        plan.run(case.q, case.k, None)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="q: got None"):
        plan.run(None, case.k, case.v)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="block_index: got None"):
        tilesieve.plan(case.q, case.k, None)  # type: ignore[arg-type]


@pytest.mark.skipif(not has_int8(), reason="this machine has no kernel in int8")
@pytest.mark.parametrize("block_index", ["given", None])
def test_int8_is_near_what_is_stored(block_index: str | None) -> None:
    case = make_case(12, q_lens=(100, 20), kv_lens=(130, 40), head_dim=64)
    arguments: Any = (case.q, case.k, case.v, case.block_index if block_index else None)
    got, want = (tilesieve.attend(*arguments, arithmetic=arithmetic, return_lse=True, **case.sizes())
                 for arithmetic in ("int8", "storage"))
    assert 0 < tilesieve.compare(got[0], want[0]).rel_l2 < INT8_REL_L2
    np.testing.assert_allclose(got[1], want[1], atol=0.05)
    if block_index:
        plan = tilesieve.plan(case.q, case.k, case.block_index, arithmetic="int8", **case.sizes())
        assert plan.problem.arithmetic == "int8" and plan.workspace_bytes == 0
        assert plan.run(case.q, case.k, case.v).tobytes() == got[0].tobytes()
        assert tilesieve.explain(*arguments[:2], case.block_index, arithmetic="int8", **case.sizes()) == plan.explanation
        with pytest.raises(ValueError, match="^loop_order: got kv_outer, expected q_outer or auto for the arithmetic int8"):
            tilesieve.attend(*arguments, arithmetic="int8", loop_order="kv_outer", **case.sizes())
    routed = tilesieve.sparse_prefill(*arguments[:3], router="qk_max", top_k=99, arithmetic="int8", **case.sizes())
    whole = tilesieve.attend(*arguments[:3], **case.sizes())
    assert 0 < tilesieve.compare(routed, whole).rel_l2 < INT8_REL_L2


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({"arithmetic": "fp4"}, ValueError, "arithmetic: got 'fp4', expected storage or int8"),
    ({"arithmetic": None}, TypeError, "arithmetic: got None, expected str"),
])
def test_arithmetic_is_refused_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    case = make_case(13)
    arguments: Any = (case.q, case.k, case.v, case.block_index)
    calls = [tilesieve.attend, tilesieve.sparse_prefill, tilesieve.workspace_bytes,
             lambda q, k, v, ids, **options: tilesieve.plan(q, k, ids, **options)]
    for call in calls:
        given = arguments[:3] if call is tilesieve.sparse_prefill else arguments
        with pytest.raises(exception, match="^" + words):
            call(*given, **case.sizes(), **change)
