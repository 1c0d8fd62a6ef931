# SPDX-License-Identifier: Apache-2.0
"""Routing and measuring: what the choices keep of the true softmax, worked out in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_reference import visible_keys
from cases import Case, cases, make_case
from hypothesis import given, settings

import tilesieve

ROUTERS = ("index", "qk_max", "mean_pool", "oracle", "random")


def index_tensors(case: Case) -> dict[str, Any]:
    rng = np.random.default_rng(11)
    return {"index_q": rng.standard_normal((case.q.shape[0], case.k.shape[1], 16), np.float32),
            "index_k": rng.standard_normal((case.k.shape[0], 16), np.float32)}


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_router_picks_what_is_visible_ascending(case: Case) -> None:
    for router in ROUTERS:
        tensors = index_tensors(case) if router == "index" else {}
        ids = tilesieve.route(case.q, case.k, router=router, top_k=3, **tensors, **case.sizes())
        assert ids.shape == (case.k.shape[1], case.q.shape[0], 3) and ids.dtype == np.int32
        token = 0
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
            for i in range(q_len):
                blocks = -(-visible_keys(q_len, kv_len, i, case.causal) // case.kv_block_size)
                for row in ids[:, token]:
                    picked = row[row >= 0]
                    assert len(picked) == min(3, blocks) and (np.diff(picked) > 0).all() and (picked < blocks).all()
                    assert (row[len(picked) :] == -1).all()
                token += 1


def true_masses(case: Case) -> Any:
    """[G, tokens, blocks] of one sequence: shares of the dense softmax, mean over the query heads of a group."""
    (q_len,), (kv_len,) = case.q_lens, case.kv_lens
    groups, size = case.k.shape[1], case.kv_block_size
    q, k = case.q.astype(np.float64), case.k.astype(np.float64)
    result = np.zeros((groups, q_len, -(-kv_len // size)))
    share = q.shape[1] // groups
    for head in range(q.shape[1]):
        for i in range(q_len):
            keys = visible_keys(q_len, kv_len, i, case.causal)
            weights = np.exp(k[:keys, head // share] @ q[i, head] * case.scale)
            np.add.at(result[head // share, i], np.arange(keys) // size, weights / weights.sum() / share)
    return result


def test_scores_of_the_oracle_are_the_true_masses() -> None:
    case = make_case(1, q_lens=(33,), kv_lens=(70,))
    scores = tilesieve.route_scores(case.q, case.k, router="oracle", **case.sizes())
    np.testing.assert_allclose(np.where(np.isneginf(scores), 0, scores), true_masses(case), atol=1e-5)


def test_mass_is_the_share_of_the_true_softmax() -> None:
    case = make_case(2, q_lens=(33,), kv_lens=(70,))
    truth = true_masses(case)
    routes = [tilesieve.route(case.q, case.k, router=router, top_k=2, **case.sizes())
              for router in ("oracle", "random", "qk_max")]
    masses = tilesieve.mass(case.q, case.k, routes, **case.sizes())
    for ids, mass in zip(routes, masses, strict=True):
        kept = np.take_along_axis(truth, np.maximum(ids, 0), 2) * (ids >= 0)
        assert mass.mass == pytest.approx(kept.sum(2).mean(), abs=1e-5)
        np.testing.assert_allclose(mass.mass_per_head, kept.sum(2).mean(1), atol=1e-5)
        assert mass.floor <= mass.ceiling and mass.mass <= mass.ceiling + 1e-6
        assert mass.num_rows == 66
    assert masses[0].recall == pytest.approx(1) and masses[0].mass == pytest.approx(masses[0].ceiling)
    assert tilesieve.mass(case.q, case.k, routes[1], **case.sizes()) == masses[1]


def test_the_index_branch_needs_neither_q_nor_k() -> None:
    case = make_case(3, q_lens=(33,), kv_lens=(70,))
    tensors = index_tensors(case)
    alone = tilesieve.route(top_k=3, **tensors, **case.sizes())
    np.testing.assert_array_equal(alone, tilesieve.route(case.q, case.k, top_k=3, **tensors, **case.sizes()))


def test_the_router_is_the_models_own_where_it_has_one() -> None:
    case = make_case(3, q_lens=(33,), kv_lens=(70,))
    tensors, sizes = index_tensors(case), case.sizes()
    for given, router in ((tensors, "index"), ({}, "qk_max"), ({}, "qk-max")):
        want = tilesieve.route(case.q, case.k, router=router, top_k=3, **given, **sizes)  # type: ignore[arg-type]
        np.testing.assert_array_equal(tilesieve.route(case.q, case.k, top_k=3, **given, **sizes), want)
        o = tilesieve.sparse_prefill(case.q, case.k, case.v, top_k=3, **given, **sizes)
        assert o.tobytes() == tilesieve.attend(case.q, case.k, case.v, want, **sizes).tobytes()


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({"q": None}, ValueError, "q: got None"),
    ({"q": None, "k": None}, ValueError, "q: got None"),
    ({"k": None}, ValueError, "k: got None"),
    ({"router": "best"}, ValueError, "router: got 'best', expected index, qk_max"),
    ({"router": 3}, TypeError, "router: got int, expected str"),
    ({"router": "\udcff"}, TypeError, "router: got str, expected str of whole characters"),
    ({"router": "index"}, ValueError, "index_q: got None"),
    ({"index_q": np.zeros((49, 2, 16), np.float32)}, ValueError, "index_k: got None"),
    ({"index_k": np.zeros((145, 16), np.float32)}, ValueError, "index_q: got None"),
    ({"router": "oracle", "index_k": np.zeros((145, 16), np.float32)}, ValueError,
     "index_k: got an array, which the router 'oracle' does not read"),
    ({"top_k": 0}, ValueError, "top_k: got 0"),
    ({"top_k": 1.5}, TypeError, "top_k: got float"),
    ({"seed": -1}, ValueError, "seed: got -1"),
    ({"local_blocks": "1"}, TypeError, "local_blocks: got str"),
    ({"init_blocks": -1}, ValueError, "init_blocks: got -1"),
])
def test_route_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    case = make_case(4)
    arguments = {"q": case.q, "k": case.k, **case.sizes()}
    tilesieve.route(**arguments)
    with pytest.raises(exception, match="^" + words):
        tilesieve.route(**(arguments | change))


def test_mass_refuses_by_name() -> None:
    case = make_case(4)
    ids, sizes = case.block_index, case.sizes()
    for given, words in ((None, "block_index: got None"), ([ids, None], r"block_index\[1\]: got None")):
        with pytest.raises(ValueError, match=words):
            tilesieve.mass(case.q, case.k, given, **sizes)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="sample_every: got float"):
        tilesieve.mass(case.q, case.k, ids, sample_every=1.5, **sizes)  # type: ignore[call-overload]
    assert tilesieve.mass(case.q, case.k, [], **sizes) == []


def test_the_seed_decides_a_random_route() -> None:
    case = make_case(4, q_lens=(64,), kv_lens=(300,))
    first, same, other = (tilesieve.route(case.q, case.k, router="random", top_k=3, seed=seed, **case.sizes())
                          for seed in (1, 1, 2))
    assert (first == same).all() and (first != other).any()


def test_compare_measures_distance() -> None:
    want = np.array([3.0, 4.0], np.float32)
    assert tilesieve.compare(want * np.float32(1.1), want).rel_l2 == pytest.approx(0.1, rel=1e-5)
    for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        assert tilesieve.compare((want + 1).astype(dtype), want).max_abs == 1
    for got, words in ((want.astype(np.float64), "got: f64"), (want[:1], r"want: got f32\[2\], expected f32\[1\]"),
                       (None, "got: got None")):
        with pytest.raises(ValueError, match="^" + words):
            tilesieve.compare(got, want)  # type: ignore[arg-type]
