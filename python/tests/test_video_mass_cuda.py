# SPDX-License-Identifier: Apache-2.0
"""What routes of video models keep, measured on a Hopper GPU: against float64 and the CPU. Skipped where test_cuda.py
is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_cuda import pytestmark, torch
from test_video import boxes_and_frames, planted
from test_video_cuda import SOUND, VIDEO, VideoCall
from video_reference import masses

import tilesieve

BUDGETS = (0.1, 0.4)
LAYOUTS: tuple[Any, ...] = ("raster", ("4x4x4", "8x8x1"))
FIELDS = ("mass", "floor", "ceiling", "recall")


def assert_same(got: list[tilesieve.VideoMass], want: list[tilesieve.VideoMass], atol: float) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one.layout, one.router, one.budget, one.kept_share, one.num_measured) == (
            other.layout, other.router, other.budget, pytest.approx(other.kept_share), other.num_measured)
        for field in FIELDS:
            np.testing.assert_allclose(getattr(one, field), getattr(other, field), atol=atol, rtol=0)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("segments", [SOUND, VIDEO])
def test_mass_is_the_share_of_the_true_softmax(segments: str, inside: bool) -> None:
    call = VideoCall(segments)
    got = tilesieve.video_mass(call.q, call.k, segments=segments, layouts=LAYOUTS, budgets=BUDGETS, num_sampled=None,
                               forced_inside_budget=inside, softmax_scale=0.2)
    videos = [row for row, query in enumerate(call.queries) if query.is_video]
    assert [(one.layout, one.budget) for one in got] == [(layout, budget) for layout in LAYOUTS for budget in BUDGETS]
    for one in got:
        assert one.num_measured == len(videos) and one.mass.shape == (2,)
        call.boxes = ("raster", "raster") if isinstance(one.layout, str) else tuple(one.layout)
        call.tables = tilesieve.VideoTables(call.q, segments=segments, layout=call.boxes)
        ids = call.route(budget=one.budget, forced_inside_budget=inside).cpu().numpy()[:, videos]
        for head in range(2):
            truth = masses(call.head(call.q, head), call.head(call.k, head), call.queries, call.keys, 0.2)[0, videos]
            kept = np.where(ids[head] >= 0, np.take_along_axis(truth, np.maximum(ids[head], 0), 1), 0).sum(axis=1)
            np.testing.assert_allclose(one.mass[head], kept.mean(), atol=1e-5)
        assert one.kept_share == pytest.approx((ids >= 0).sum() / (ids.shape[0] * ids.shape[1] * len(call.keys)))


@pytest.mark.parametrize("num_sampled", [2, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mass_is_that_of_the_cpu(dtype: Any, num_sampled: int) -> None:
    call = VideoCall(dtype=dtype)
    table = tilesieve.LayoutTable(grid=(5, 9, 16), menu=["raster", "2x4x8"], box_of_head=[[0, 0, 0], [0, 1, 0]])
    options: dict[str, Any] = {"segments": SOUND, "layouts": [*LAYOUTS, table], "layer": 1, "head_begin": 1,
                               "budgets": [*BUDGETS, 1.0], "num_sampled": num_sampled}
    want = tilesieve.video_mass(call.q.cpu(), call.k.cpu(), **options)
    assert_same(tilesieve.video_mass(call.q, call.k, **options), want, 1e-5)
    stored = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (call.q, call.k)]  # heads first in memory
    assert_same(tilesieve.video_mass(*stored, **options), want, 1e-5)


def test_mass_of_a_batch_is_the_mean_of_its_sequences() -> None:
    call = VideoCall(num_sequences=3)
    options: dict[str, Any] = {"segments": SOUND, "layouts": LAYOUTS, "budgets": BUDGETS, "num_sampled": 3}
    got = tilesieve.video_mass(call.q, call.k, **options)
    each = [tilesieve.video_mass(q, k, **options) for q, k in zip(call.q, call.k, strict=True)]
    for place, one in enumerate(got):
        assert one.num_measured == 9
        for field in FIELDS:
            np.testing.assert_allclose(getattr(one, field), np.mean([getattr(row[place], field) for row in each], axis=0),
                                       atol=1e-12, rtol=0)


def test_a_search_finds_the_table_of_the_cpu() -> None:
    options: dict[str, Any] = {"segments": "text:30,audio:14,video:8x8x8", "menu": ("raster", "4x4x4", "8x8x1"),
                               "budget": 0.05, "num_sampled": None}
    captured = [(layer, *(torch.from_numpy(x).bfloat16() for x in planted(10 * layer + step, boxes_and_frames)))
                for layer in (3, 1) for step in (1, 2)]
    want, want_report = tilesieve.layout_search(captured, **options)
    table, report = tilesieve.layout_search(((layer, q.cuda(), k.cuda()) for layer, q, k in captured), **options)
    assert table == want and table.boxes(1) == table.boxes(3) == ("4x4x4", "raster")
    assert report["chosen_mass"] == pytest.approx(want_report["chosen_mass"], abs=1e-4)
    for row, other in zip(report["menu"], want_report["menu"], strict=True):
        assert row["mass"] == pytest.approx(other["mass"], abs=1e-4) and row["num_chosen"] == other["num_chosen"]
    mixed = [(layer, q.cuda(), k.cuda()) if layer == 3 else (layer, q, k) for layer, q, k in captured]
    assert tilesieve.layout_search(mixed, **options)[0] == want


def test_arrays_of_cupy_are_measured() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    call = VideoCall(dtype=torch.float16)
    want = tilesieve.video_mass(call.q, call.k, segments=SOUND)
    assert_same(tilesieve.video_mass(*(cupy.from_dlpack(x) for x in (call.q, call.k)), segments=SOUND), want, 0)
