# SPDX-License-Identifier: Apache-2.0
"""Routing, attention and mass of video models against plain renderings in float64."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import INT8_REL_L2, TOLERANCES, has_int8, strided
from hypothesis import given, settings
from hypothesis import strategies as st
from test_arrays import OnlyDlpack
from test_cuda_arguments import OnCuda
from video_reference import Array, attention, blocks_of, is_forced, masses, mean_scores, num_chosen

import tilesieve

SEGMENTS = "text:21,video:3x6x7,audio:9,video:2x5x5"  # 206 tokens


@dataclass
class Case:
    """Arrays of one call of a video model and what is said of them."""

    q: Array
    k: Array
    v: Array
    segments: str
    q_block_size: int
    kv_block_size: int

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[2])

    def sizes(self) -> dict[str, Any]:
        """The keyword arguments of a call."""
        return {"segments": self.segments, "q_block_size": self.q_block_size, "kv_block_size": self.kv_block_size}


def make_case(seed: int, *, segments: str = SEGMENTS, dtype: Any = np.float32, num_kv_heads: int = 2, group: int = 2,
              head_dim: int = 16, q_block_size: int = 32, kv_block_size: int = 16) -> Case:
    rng = np.random.default_rng(seed)
    num_tokens = sum(block.end - block.begin for block in blocks_of(segments, 1024))
    q, k, v = (strided(rng, (num_tokens, heads, head_dim), dtype)
               for heads in (num_kv_heads * group, num_kv_heads, num_kv_heads))
    return Case(q, k, v, segments, q_block_size, kv_block_size)


@st.composite
def cases(draw: st.DrawFn, dtypes: Any = tuple(TOLERANCES)) -> Case:
    """Ragged segments in any order, several of the video, empty ones among them."""
    side = st.integers(1, 6)
    video = st.tuples(side, side, side).map(lambda grid: "video:" + "x".join(map(str, grid)))
    other = st.tuples(st.sampled_from(["text", "conditioning", "reference", "audio"]),
                      st.integers(0, 40)).map(lambda one: f"{one[0]}:{one[1]}")
    segments = draw(st.lists(st.one_of(video, other), min_size=1, max_size=4))
    return make_case(draw(st.integers(0, 2**32 - 1)), segments=",".join(segments), dtype=draw(st.sampled_from(dtypes)),
                     num_kv_heads=draw(st.integers(1, 3)), group=draw(st.integers(1, 3)),
                     head_dim=8 * draw(st.integers(1, 4)), q_block_size=draw(st.sampled_from([1, 8, 12, 32])),
                     kv_block_size=draw(st.sampled_from([8, 16, 24])))


budgets = st.sampled_from([0.0, 0.05, 0.15, 0.5, 1.0])


@settings(max_examples=80, deadline=None)
@given(cases(), budgets, st.booleans(), st.sampled_from(["mean_pool", "oracle", "random"]))
def test_routes_are_the_forced_blocks_and_the_best_of_the_others(case: Case, budget: float, inside: bool,
                                                                 router: Any) -> None:
    ids = tilesieve.route_video(case.q, case.k, router=router, budget=budget, forced_inside_budget=inside,
                                **case.sizes())
    queries, keys = blocks_of(case.segments, case.q_block_size), blocks_of(case.segments, case.kv_block_size)
    assert ids.dtype == np.int32 and ids.shape[:2] == (case.k.shape[1], len(queries))
    scores = None
    if router != "random" and len(case.q) > 0:
        scores = (mean_scores(case.q, case.k, queries, keys) if router == "mean_pool"
                  else masses(case.q, case.k, queries, keys, case.scale))
    for head, row in np.ndindex(ids.shape[:2]):
        kept = ids[head, row][ids[head, row] >= 0]
        assert (np.diff(kept) > 0).all() and (ids[head, row, len(kept) :] == -1).all() and (kept < len(keys)).all()
        if not queries[row].is_video:
            assert len(kept) == len(keys)
            continue
        forced = {i for i, key in enumerate(keys) if is_forced(queries[row], key)}
        others = sorted(set(range(len(keys))) - forced)
        count = min(len(others), num_chosen(keys, len(forced), budget, inside))
        chosen = sorted(set(kept.tolist()) - forced)
        assert forced <= set(kept.tolist()) and len(chosen) == count
        if scores is not None and count > 0:  # as good as the best, but for the rounding of f32
            best = np.sort(scores[head, row, others])[-count:]
            np.testing.assert_allclose(np.sort(scores[head, row, chosen]), best, atol=1e-5, rtol=1e-5)


def test_a_budget_is_counted_as_published() -> None:
    """b.2 of the published numbers: 5,760 slots for video alone at 15 %, of 599 blocks or of the video's 583."""
    whole = tilesieve.video_budget(segments="video:38x24x42", forced_inside_budget=True)
    assert whole == tilesieve.VideoBudget(num_forced=2, num_routed=88, num_blocks=599, num_slots=5760)
    h3 = tilesieve.video_budget(segments=tilesieve.h3_segments())
    assert h3 == tilesieve.VideoBudget(num_forced=10 + 7 + 2, num_routed=88, num_blocks=600, num_slots=107 * 64)
    for budget, count in ((0.05, 30), (0.1, 59), (0.2, 117), (0.3, 175), (float(np.float32(0.15)), 88)):
        assert tilesieve.video_budget(segments="video:37x24x42", budget=budget).num_routed == count
    assert tilesieve.video_budget(segments="video:37x24x42", num_routed=7).num_slots == 9 * 64
    assert tilesieve.video_budget(segments="video:1280", budget=1 - 0.85).num_routed == 3  # of 20, not 4


@settings(max_examples=60, deadline=None)
@given(cases(), budgets, st.data())
def test_attention_is_route_and_attention_in_the_layouts_order(case: Case, budget: float, data: st.DataObject) -> None:
    boxes = data.draw(st.lists(st.sampled_from(["raster", "2x2x2", "1x4x4", "8x1x3"]), min_size=case.k.shape[1],
                               max_size=case.k.shape[1]))
    got, lse = tilesieve.video_attention(case.q, case.k, case.v, layout=boxes, budget=budget, return_lse=True,
                                         **case.sizes())
    queries, keys = blocks_of(case.segments, case.q_block_size), blocks_of(case.segments, case.kv_block_size)
    group = case.q.shape[1] // case.k.shape[1]
    for head, box in enumerate(boxes):
        of_head = slice(head * group, (head + 1) * group)
        layout: Any = {"segments": case.segments, "layout": box}
        q, k, v = (tilesieve.gather_tokens(x, **layout) for x in (case.q[:, of_head], case.k[:, [head]],
                                                                  case.v[:, [head]]))
        ids = tilesieve.route_video(q, k, budget=budget, **case.sizes())
        want = [tilesieve.scatter_tokens(x, **layout) for x in attention(q, k, v, ids, queries, keys, case.scale)]
        np.testing.assert_allclose(got[:, of_head].astype(np.float64), want[0], rtol=0,
                                   atol=TOLERANCES[case.q.dtype])
        np.testing.assert_allclose(lse[:, of_head], want[1], atol=1e-4, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(cases(dtypes=(np.float32, np.float16)))
def test_at_full_budget_it_is_dense(case: Case) -> None:
    dense = tilesieve.attend(case.q, case.k, case.v, causal=False, return_lse=True)
    for layout in ("raster", "2x2x2"):
        got = tilesieve.video_attention(case.q, case.k, case.v, layout=layout, budget=1, return_lse=True,
                                        **case.sizes())
        np.testing.assert_allclose(got[0].astype(float), dense[0].astype(float), atol=TOLERANCES[case.q.dtype], rtol=0)
        np.testing.assert_allclose(got[1], dense[1], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not has_int8(), reason="this machine has no kernel in int8")
@pytest.mark.parametrize("layout", ["raster", "2x2x2"])
def test_int8_is_near_what_is_stored(layout: str) -> None:
    case = make_case(4, segments="text:9,video:4x8x8")
    options: Any = {"layout": layout, "return_lse": True, **case.sizes()}
    got, want = (tilesieve.video_attention(case.q, case.k, case.v, arithmetic=arithmetic, **options)
                 for arithmetic in ("int8", "storage"))
    assert 0 < tilesieve.compare(got[0], want[0]).rel_l2 < INT8_REL_L2
    np.testing.assert_allclose(got[1], want[1], atol=0.05)


@settings(max_examples=40, deadline=None)
@given(cases(dtypes=(np.float32,)), budgets, st.booleans())
def test_mass_is_the_share_of_the_true_softmax(case: Case, budget: float, inside: bool) -> None:
    routers: tuple[tilesieve.VideoRouter, ...] = ("mean_pool", "oracle", "random")
    options = {**case.sizes(), "forced_inside_budget": inside, "seed": 3}
    measured = tilesieve.video_mass(case.q, case.k, layouts=["raster", "2x2x2"], routers=routers, budgets=[budget],
                                    num_sampled=None, **options)
    queries, keys = blocks_of(case.segments, case.q_block_size), blocks_of(case.segments, case.kv_block_size)
    videos = [i for i, query in enumerate(queries) if query.is_video]
    assert [(one.layout, one.router, one.budget) for one in measured] == [
        (layout, router, budget) for layout in ("raster", "2x2x2") for router in routers]
    for one in measured:
        assert one.num_measured == len(videos) and one.mass.shape == (case.k.shape[1],)
        if not videos:
            continue
        layout: Any = {"segments": case.segments, "layout": one.layout}
        q, k = (tilesieve.gather_tokens(x, **layout) for x in (case.q, case.k))
        ids = tilesieve.route_video(q, k, router=one.router, budget=budget, **options)
        truth = masses(q, k, queries, keys, case.scale)
        want = np.zeros((4, case.k.shape[1], len(videos)))
        for head, place in np.ndindex(case.k.shape[1], len(videos)):
            row = videos[place]
            kept = set(ids[head, row][ids[head, row] >= 0].tolist())
            forced = {i for i, key in enumerate(keys) if is_forced(queries[row], key)}
            others = sorted(set(range(len(keys))) - forced, key=lambda i: -truth[head, row, i])
            r, f = len(kept) - len(forced), truth[head, row, sorted(forced)].sum()
            want[0, head, place] = truth[head, row, sorted(kept)].sum()
            want[1, head, place] = f + (r / len(others) * (1 - f) if others else 0)
            want[2, head, place] = f + truth[head, row, others[:r]].sum()
            want[3, head, place] = len(kept & (forced | set(others[:r]))) / len(kept)
        got = np.stack([one.mass, one.floor, one.ceiling, one.recall])
        np.testing.assert_allclose(got, want.mean(axis=2), atol=1e-5)
        kept_share = (ids[:, videos] >= 0).sum() / (ids.shape[0] * len(videos) * len(keys))
        assert one.kept_share == pytest.approx(kept_share)


def test_samples_lie_evenly() -> None:
    case = make_case(1, segments="video:4x8x32", q_block_size=32)  # 32 blocks
    got = tilesieve.video_mass(case.q, case.k, num_sampled=5, **case.sizes())[0]
    assert got.num_measured == 5
    assert tilesieve.video_mass(case.q, case.k, **case.sizes())[0].num_measured == 32
    queries, keys = blocks_of(case.segments, 32), blocks_of(case.segments, 16)
    kept = tilesieve.route_video(case.q, case.k, **case.sizes())[:, [3, 9, 16, 22, 28]]
    truth = masses(case.q, case.k, queries, keys, case.scale)[:, [3, 9, 16, 22, 28]]
    want = np.where(kept >= 0, np.take_along_axis(truth, np.maximum(kept, 0), 2), 0).sum(axis=2).mean(axis=1)
    np.testing.assert_allclose(got.mass, want, atol=1e-5)


def planted(seed: int, group_of: Any) -> tuple[Array, Array]:
    """q and k [8 * 8 * 8 + 44, 2, 16] of "text:30,audio:14,video:8x8x8": tokens of a group of each head are alike."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((556, 2, 16), np.float32) for _ in range(2))
    for head in range(2):
        groups = group_of(head, *np.unravel_index(np.arange(512), (8, 8, 8)))
        signs = np.sign(np.random.default_rng(7).standard_normal((512, 16)))[groups].astype(np.float32)
        q[44:, head] += 2 * signs
        k[44:, head] += 2 * signs
    return q, k


def boxes_and_frames(head: int, f: Array, y: Array, x: Array) -> Array:
    """Head 0's groups are boxes of 4x4x4, head 1's frames, which are blocks of 64 in raster order."""
    return (f // 4 * 2 + y // 4) * 2 + x // 4 if head == 0 else f


def test_a_search_finds_the_boxes_that_were_planted() -> None:
    segments, menu = "text:30,audio:14,video:8x8x8", ("raster", "4x4x4", "8x8x1")
    captured = [(layer, *planted(10 * layer + step, boxes_and_frames)) for layer in (3, 1) for step in (1, 2)]
    table, report = tilesieve.layout_search((one for one in captured), segments=segments, menu=menu, budget=0.05,
                                            num_sampled=None)
    assert table.grid == (8, 8, 8) and table.menu == menu and len(table.box_of_head) == 4
    assert [table.boxes(layer) for layer in (1, 3)] == [("4x4x4", "raster")] * 2
    assert [row["layer"] for row in report["layers"]] == [1, 3] and report["layers"][0]["boxes"] == ["4x4x4", "raster"]
    masses = {box: [tilesieve.video_mass(q, k, segments=segments, layouts=[box], budgets=[0.05], num_sampled=None)[0]
                    .mass for _, q, k in captured] for box in menu}
    for row in report["menu"]:
        assert row["mass"] == pytest.approx(np.mean(masses[row["layout"]]), abs=1e-12)
    assert [row["num_chosen"] for row in report["menu"]] == [2, 2, 0]
    best = menu.index(max(menu, key=lambda box: np.mean(masses[box])))
    assert table.box_of_head[0] == table.box_of_head[2] == (best, best)  # layers without a call
    of_table = [tilesieve.video_mass(q, k, segments=segments, layouts=[table], layer=layer, budgets=[0.05],
                                     num_sampled=None)[0].mass for layer, q, k in captured]
    assert report["chosen_mass"] == pytest.approx(np.mean(of_table), abs=1e-12)
    assert report["chosen_mass"] > max(row["mass"] for row in report["menu"])


def test_a_search_takes_the_boxes_that_fit_and_of_ties_the_earlier() -> None:
    case = make_case(2, segments="video:4x8x8", kv_block_size=64)
    table, report = tilesieve.layout_search([(0, case.q, case.k)], budget=1.0, **case.sizes())
    assert table.menu == ("raster", *tilesieve.box_menu((4, 8, 8), 64)) and len(table.menu) > 3
    assert report["chosen_mass"] == pytest.approx(1)
    same, _ = tilesieve.layout_search([(0, case.q, case.k)], menu=["2x4x8", "raster", "2x4x8"], budget=0.0,
                                      **case.sizes())
    assert 2 not in same.box_of_head[0]


def test_a_table_is_the_boxes_of_its_layer() -> None:
    case = make_case(3, segments="text:5,video:4x8x8", num_kv_heads=2)
    table = tilesieve.LayoutTable(grid=(4, 8, 8), menu=["raster", "2x2x4", "4x4x1"], box_of_head=[[0, 1, 2], [2, 2, 1]])
    got = tilesieve.video_attention(case.q, case.k, case.v, layout=table, layer=1, head_begin=1, **case.sizes())
    want = tilesieve.video_attention(case.q, case.k, case.v, layout=["4x4x1", "2x2x4"], **case.sizes())
    raster = tilesieve.video_attention(case.q, case.k, case.v, **case.sizes())
    assert got.tobytes() == want.tobytes() != raster.tobytes()


def test_writes_into_given_arrays_of_any_stride() -> None:
    case = make_case(4)
    want, want_lse = tilesieve.video_attention(case.q, case.k, case.v, layout="2x2x2", return_lse=True, **case.sizes())
    wide = np.full((want.shape[0], want.shape[1] * 2, want.shape[2]), 7, np.float32)
    out, lse = wide[:, ::2], np.zeros(want_lse.shape[::-1], np.float32).T
    assert tilesieve.video_attention(case.q, case.k, case.v, layout="2x2x2", out=out, lse=lse, **case.sizes()) is out
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)
    assert (wide[:, 1::2] == 7).all()


def test_fp8_comes_out_in_bf16_and_dlpack_alone_is_taken() -> None:
    case = make_case(5, dtype=ml_dtypes.float8_e4m3fn)
    assert tilesieve.video_attention(case.q, case.k, case.v, **case.sizes()).dtype == ml_dtypes.bfloat16
    case = make_case(5)
    wrapped: list[Any] = [OnlyDlpack(x, True) for x in (case.q, case.k, case.v)]
    got = tilesieve.video_attention(*wrapped, **case.sizes())
    assert got.tobytes() == tilesieve.video_attention(case.q, case.k, case.v, **case.sizes()).tobytes()


def test_tensors_of_pytorch_give_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    case = make_case(6)
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)) for x in (case.q, case.k, case.v))
    ids = tilesieve.route_video(q, k, **case.sizes())
    o, lse = tilesieve.video_attention(q, k, v, layout="2x2x2", return_lse=True, **case.sizes())
    assert isinstance(ids, torch.Tensor) and ids.dtype == torch.int32 and isinstance(lse, torch.Tensor)
    want = tilesieve.video_attention(case.q, case.k, case.v, layout="2x2x2", **case.sizes())
    assert o.numpy().tobytes() == want.tobytes()
    assert (ids.numpy() == tilesieve.route_video(case.q, case.k, **case.sizes())).all()
    half = [x.to(torch.bfloat16) for x in (q, k, v)]
    assert tilesieve.video_attention(*half, **case.sizes()).dtype == torch.bfloat16


POLICY = tilesieve.DensePolicy()
ROUTING: list[Any] = [
    ({"q": None}, ValueError, r"q: got None, expected \[num_tokens, num_q_heads, head_dim\]"),
    ({"k": None}, ValueError, "k: got None"),
    ({"k": np.zeros((206, 32), np.float32)}, ValueError, r"k: got f32\[206, 32\]"),
    ({"k": np.zeros((206, 3, 16), np.float32)}, ValueError, "k: got num_kv_heads 3, expected a divisor"),
    ({"k": np.zeros((205, 2, 16), np.float32)}, ValueError, "segments: 206 tokens, but sequence 0 has 206 queries and"),
    ({"k": np.zeros((206, 2, 24), np.float32)}, ValueError, r"k: got f32\[206, 2, 24\]"),
    ({"q": np.zeros((206, 4, 12), np.float32)}, ValueError, "q: got head_dim 12"),
    ({"q": np.zeros((206, 4, 16), np.float64)}, ValueError, "q: got f64"),
    ({"k": OnCuda(np.zeros((206, 2, 16), np.float32))}, ValueError, "k: lies on a CUDA device, expected the CPU"),
    ({"segments": ""}, ValueError, "segments: got none"),
    ({"segments": "text:3"}, ValueError, "segments: 3 tokens, but sequence 0 has 206"),
    ({"segments": ["text:3"]}, TypeError, "segments: got list"),
    ({"segments": None}, TypeError, "segments: got None"),
    ({"tensor_layout": "hnd"}, ValueError, "tensor_layout: is for calls on a CUDA device, and q lies on the CPU"),
    ({"tables": 3}, ValueError, "tables: is for calls on a CUDA device"),
    ({"segments": "video:3x4"}, ValueError, "segments: 'video:3x4': expected a grid"),
    ({"router": "qk_max"}, ValueError, "router: got 'qk_max', expected mean_pool, oracle or random"),
    ({"router": None}, TypeError, "router: got None, expected str"),
    ({"budget": 1.5}, ValueError, "budget: got 1.5, expected 0 to 1"),
    ({"budget": math.nan}, ValueError, "budget: got nan"),
    ({"budget": "15%"}, TypeError, "budget: got str"),
    ({"num_routed": -1}, ValueError, "num_routed: got -1, expected 0 or more, or None"),
    ({"num_routed": 1.5}, TypeError, "num_routed: got float"),
    ({"forced_inside_budget": 1}, TypeError, "forced_inside_budget: got int, expected bool"),
    ({"seed": -1}, ValueError, "seed: got -1"),
    ({"softmax_scale": 0}, ValueError, "softmax_scale: got 0"),
    ({"q_block_size": 0}, ValueError, "q_block_size: got 0, expected 1 to 1024"),
    ({"kv_block_size": 12}, ValueError, "kv_block_size: got 12"),
    ({"kv_block_size": None}, TypeError, "kv_block_size: got None"),
    ({"num_threads": 0}, ValueError, "num_threads: got 0"),
    ({"isa": "mmx"}, ValueError, "isa: got 'mmx'"),
]


@pytest.mark.parametrize(("change", "exception", "words"), ROUTING)
def test_route_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    case = make_case(7)
    arguments = {"q": case.q, "k": case.k, **case.sizes()}
    tilesieve.route_video(**arguments)
    with pytest.raises(exception, match="^" + words) as caught:
        tilesieve.route_video(**(arguments | change))
    assert exception is not ValueError or isinstance(caught.value, tilesieve.Error)


@pytest.mark.parametrize(("change", "exception", "words"), [
    *ROUTING,
    ({"arithmetic": "fp4"}, ValueError, "arithmetic: got 'fp4', expected storage or int8"),
    ({"arithmetic": 8}, TypeError, "arithmetic: got int"),
    ({"v": None}, ValueError, "v: got None, expected as k"),
    ({"v": np.zeros((206, 2, 16), np.float16)}, ValueError, "v: got f16"),
    ({"v": OnCuda(np.zeros((206, 2, 16), np.float32))}, ValueError, "v: lies on a CUDA device"),
    ({"layout": "4x4"}, ValueError, "layout: got '4x4'"),
    ({"layout": ["raster"]}, ValueError, "layout: got 1 boxes, expected 2, one for each head"),
    ({"layer": 3}, ValueError, "layer: got one without a LayoutTable"),
    ({"step": 3}, ValueError, "step: got one without a policy"),
    ({"policy": "dense"}, TypeError, "policy: got str, expected DensePolicy or None"),
    ({"policy": POLICY, "layer": 1}, ValueError, "step: got None, needed with a policy"),
    ({"policy": POLICY, "step": 1}, ValueError, "layer: got None, needed with a policy"),
    ({"policy": POLICY, "step": 1, "layer": "1"}, TypeError, "layer: got str"),
    ({"block_index": np.zeros((2, 7, 3), np.int32)}, ValueError, "block_index: is for calls on a CUDA device"),
    ({"workspace": np.zeros(3, np.uint8)}, ValueError, "workspace: is for calls on a CUDA device"),
    ({"groups": "per_warp"}, ValueError, "groups: is for calls on a CUDA device"),
    ({"smooth_k": False}, ValueError, "smooth_k: is for calls on a CUDA device"),
    ({"stream": 0}, ValueError, "stream: is for calls on a CUDA device"),
    ({"segments": "text:6,video:200", "layout": "2x2x2"}, ValueError, "segments: a video segment of 200 tokens has no"),
    ({"out": np.zeros((206, 4, 17), np.float32)}, ValueError, "out: got"),
    ({"lse": np.zeros((206, 3), np.float32)}, ValueError, "lse: got"),
])
def test_attention_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    case = make_case(7)
    arguments = {"q": case.q, "k": case.k, "v": case.v, **case.sizes()}
    with pytest.raises(exception, match="^" + words):
        tilesieve.video_attention(**(arguments | change))
    with pytest.raises(tilesieve.Error, match="^out: overlaps q"):
        tilesieve.video_attention(**(arguments | {"out": case.q}))


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({"layouts": "raster"}, TypeError, "layouts: got str, expected a list or a tuple"),
    ({"layouts": ["raster", "4x4"]}, ValueError, r"layouts\[1\]: got '4x4'"),
    ({"layouts": [["raster"]]}, ValueError, r"layouts\[0\]: got 1 boxes, expected 2"),
    ({"layer": 3}, ValueError, "layer: got one without"),
    ({"routers": "mean_pool"}, TypeError, "routers: got str"),
    ({"routers": ["index"]}, ValueError, "routers: got 'index', expected mean_pool, oracle or random"),
    ({"budgets": 0.15}, TypeError, "budgets: got float"),
    ({"budgets": [0.15, -1]}, ValueError, "budgets: got -1"),
    ({"q": OnCuda(np.zeros((206, 4, 16), np.float32))}, ValueError, "k: lies on the CPU, expected cuda:0 as q"),
    ({"k": OnCuda(np.zeros((206, 2, 16), np.float32))}, ValueError, "k: lies on a CUDA device, expected the CPU"),
    ({"num_sampled": 0}, ValueError, "num_sampled: got 0, expected 1 or more, or None"),
    ({"segments": "video:206x1"}, ValueError, "segments: "),
])
def test_mass_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    case = make_case(7)
    arguments: dict[str, Any] = {"q": case.q, "k": case.k, **case.sizes()}
    with pytest.raises(exception, match="^" + words):
        tilesieve.video_mass(**(arguments | change))
    assert tilesieve.video_mass(**(arguments | {"budgets": []})) == []


def test_a_search_refuses_by_name() -> None:
    case = make_case(7, segments="text:6,video:4x5x10")
    call = (0, case.q, case.k)
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([], {}, ValueError, "calls: got none"),
        (3, {}, TypeError, r"calls: got int, expected \(layer, q, k\)"),
        ([call[:2]], {}, TypeError, r"calls\[0\]: got tuple, expected \(layer, q, k\)"),
        ([call, 3], {}, TypeError, r"calls\[1\]: got int"),
        ([("0", *call[1:])], {}, TypeError, r"calls\[0\].layer: got str"),
        ([call, call, (-1, *call[1:])], {}, ValueError, r"calls\[2\].layer: got -1, expected 0 to 1023"),
        ([call, (1 << 40, *call[1:])], {}, ValueError, r"calls\[1\].layer: got 1099511627776"),
        ([call, (1, case.q[:, :2], case.k[:, :1])], {}, ValueError, r"calls\[1\]: got 1 heads, expected 2"),
        ([call, (1, case.q[1:], case.k)], {}, ValueError, r"calls\[1\]: segments: 206 tokens, but sequence 0 has 205"),
        ([call, (1, "q", case.k)], {}, TypeError, r"calls\[1\]: q: got str"),
        ([call], {"menu": []}, ValueError, "menu: got no box"),
        ([call], {"menu": "raster"}, TypeError, "menu: got str"),
        ([call], {"menu": ["raster", "x"]}, ValueError, r"menu\[1\]: got 'x'"),
        ([call], {"budget": 2}, ValueError, "budget: got 2"),
        ([call], {"segments": "text:206"}, ValueError, "segments: no video segment"),
        ([call], {"segments": "video:206"}, ValueError, "segments: a video segment without a grid"),
        ([call], {"kv_block_size": 24}, ValueError, "kv_block_size: got 24, expected a power of two"),
    ]
    for calls, change, exception, words in refused:
        with pytest.raises(exception, match="^" + words):
            tilesieve.layout_search(calls, **(case.sizes() | change))


def test_a_policy_says_which_calls_are_dense() -> None:
    policy = tilesieve.DensePolicy(layers=np.array([7, 9]))  # type: ignore[arg-type]
    assert policy == tilesieve.DensePolicy(layers=(7, 9)) and hash(policy) == hash(tilesieve.DensePolicy(layers=(7, 9)))
    routed = [(step, layer) for step in range(4) for layer in range(50)
              if not tilesieve.DensePolicy().is_dense(step, layer)]
    assert len(routed) == 147  # of the published 4 steps of 50 blocks
    assert policy.is_dense(0, 20) and policy.is_dense(2, 0) and policy.is_dense(2, 9) and not policy.is_dense(2, 8)
    for fields, exception, words in (({"first_steps": -1}, ValueError, "first_steps: got -1, expected 0 or more"),
                                     ({"first_layers": "1"}, TypeError, "first_layers: got str"),
                                     ({"layers": [1.5]}, TypeError, r"layers\[0\]: got float"),
                                     ({"layers": 3}, TypeError, "layers: got int")):
        with pytest.raises(exception, match="^" + words):
            tilesieve.DensePolicy(**fields)
    with pytest.raises(TypeError, match="step: got str"):
        policy.is_dense("1", 2)  # type: ignore[arg-type]


def test_a_policy_makes_calls_dense() -> None:
    case = make_case(12, segments="text:5,video:4x8x8")
    table = tilesieve.LayoutTable(grid=(4, 8, 8), menu=["raster", "2x2x4"], box_of_head=[[0, 1], [1, 1], [1, 0]])

    def call(**options: Any) -> bytes:
        return tilesieve.video_attention(case.q, case.k, case.v, **case.sizes(), **options).tobytes()  # type: ignore[no-any-return]

    assert call(policy=POLICY, step=0, layer=2, num_routed=1) == call(budget=1) != call()
    assert call(policy=POLICY, step=1, layer=2) == call()
    in_table: Any = {"layout": table, "layer": 2}
    assert call(policy=POLICY, step=1, **in_table) == call(**in_table) != call()
    assert call(policy=tilesieve.DensePolicy(layers=[2]), step=1, **in_table) == call(budget=1, **in_table)


def test_threads_do_not_change_a_bit() -> None:
    case = make_case(10, num_kv_heads=3)
    for router in ("mean_pool", "random"):
        results = [tilesieve.video_attention(case.q, case.k, case.v, router=router,
                                             layout="2x2x2", num_threads=threads, **case.sizes()) for threads in (1, 4)]
        assert results[0].tobytes() == results[1].tobytes(), router


def test_threads_call_at_once_and_get_the_same() -> None:
    case = make_case(8, segments="text:33,video:4x12x20")

    def call() -> list[bytes]:
        o = tilesieve.video_attention(case.q, case.k, case.v, layout="2x4x4", num_threads=2, **case.sizes())
        mass = tilesieve.video_mass(case.q, case.k, layouts=["2x4x4"], num_threads=2, **case.sizes())[0].mass
        slots = tilesieve.gather_tokens(case.k, segments=case.segments, layout="2x4x4", num_threads=2)
        return [x.tobytes() for x in (o, mass, slots)]

    want, wrong = call(), []

    def work() -> None:
        for _ in range(10):
            if call() != want:
                wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_bar_counts_to_its_total(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    case = make_case(9, segments="text:33,video:4x12x20")
    calls: list[tuple[str, Any]] = [
        ("route_video", lambda: tilesieve.route_video(case.q, case.k, progress=True, **case.sizes())),
        ("video_attention", lambda: tilesieve.video_attention(case.q, case.k, case.v, layout="2x4x4", progress=True,
                                                              **case.sizes())),
        ("video_mass", lambda: tilesieve.video_mass(case.q, case.k, progress=True, **case.sizes())),
        ("layout_search: layer 3", lambda: tilesieve.layout_search([(3, case.q, case.k)], menu=["raster", "2x2x4"],
                                                                   progress=True, **case.sizes())),
    ]
    for name, call in calls:
        call()
        assert f"{name}: 100%" in capsys.readouterr().err
