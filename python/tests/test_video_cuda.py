# SPDX-License-Identifier: Apache-2.0
"""Video models on a Hopper GPU through PyTorch, against plain renderings in float64. Skipped where test_cuda.py is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_cuda import pytestmark, torch
from video_reference import attention, blocks_of, is_forced, mean_scores, num_chosen

import tilesieve

SOUND = "text:70,audio:41,video:5x9x16"  # 831 tokens, and 720 of video that fill no whole number of tiles
VIDEO = "video:6x8x16"


class VideoCall:
    """Calls of a video model: bf16 [tokens, heads, 128] on the GPU, 2 KV heads of 2 query heads each, in two boxes."""

    def __init__(self, segments: str = SOUND, boxes: tuple[str, ...] = ("4x4x4", "raster"), dtype: Any = torch.bfloat16,
                 num_sequences: int = 0) -> None:
        torch.manual_seed(3)
        self.segments, self.boxes = segments, boxes
        self.queries, self.keys = blocks_of(segments, 128), blocks_of(segments, 64)
        batch = [num_sequences] if num_sequences > 0 else []
        self.q, self.k, self.v = (torch.randn(*batch, self.keys[-1].end, heads, 128, device="cuda").to(dtype)
                                  for heads in (4, 2, 2))
        self.tables = tilesieve.VideoTables(self.q, segments=segments, layout=boxes)

    def run(self, **options: Any) -> Any:
        return tilesieve.video_attention(self.q, self.k, self.v, tables=self.tables, **options)

    def route(self, **options: Any) -> Any:
        return tilesieve.route_video(self.q, self.k, tables=self.tables, **options)

    def head(self, x: Any, head: int) -> Any:
        """Of one sequence's tensor the query heads of a KV head, or that one, in NumPy and in its box's order."""
        count = x.shape[1] // 2
        of_head = x[:, head * count : (head + 1) * count].float().cpu().numpy()
        return tilesieve.gather_tokens(of_head, segments=self.segments, layout=self.boxes[head])

    def want(self, ids: Any, sequence: int | None = None) -> tuple[Any, Any]:
        """o and lse of one sequence in f64, over the lists."""
        q, k, v = (x if sequence is None else x[sequence] for x in (self.q, self.k, self.v))
        lists = (ids if sequence is None else ids[sequence]).cpu().numpy()
        heads = []
        for head, box in enumerate(self.boxes):
            found = attention(self.head(q, head), self.head(k, head), self.head(v, head), lists[head : head + 1],
                              self.queries, self.keys, 128**-0.5)
            heads.append([tilesieve.scatter_tokens(x, segments=self.segments, layout=box) for x in found])
        return tuple(np.concatenate(parts, axis=1) for parts in zip(*heads, strict=True))


def rel_l2(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got.double().cpu().numpy() - want) / np.linalg.norm(want))


def assert_near(got: Any, want: Any, arithmetic: str) -> None:
    """o and lse are as near to float64 as the arithmetic allows."""
    assert rel_l2(got[0], want[0]) < (0.05 if arithmetic == "int8" else 0.01)
    np.testing.assert_allclose(got[1].double().cpu().numpy(), want[1], atol=0.05 if arithmetic == "int8" else 2e-3, rtol=0)


@pytest.mark.parametrize("arithmetic", ["int8", "storage"])
@pytest.mark.parametrize("boxes", [("raster", "raster"), ("4x4x4", "raster"), ("8x8x1", "2x4x8")])
@pytest.mark.parametrize("segments", [SOUND, VIDEO])
def test_video_attention_is_attention_over_what_route_video_chooses(segments: str, boxes: tuple[str, ...],
                                                                    arithmetic: str) -> None:
    call = VideoCall(segments, boxes)
    options: dict[str, Any] = {"budget": 0.2, "forced_inside_budget": segments == VIDEO}
    ids = call.route(**options)
    got = call.run(arithmetic=arithmetic, return_lse=True, **options)
    assert_near(got, call.want(ids), arithmetic)
    given = call.run(arithmetic=arithmetic, block_index=ids, return_lse=True)
    assert torch.equal(given[0], got[0]) and torch.equal(given[1], got[1])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("boxes", [("raster", "raster"), ("4x4x4", "8x8x1")])
@pytest.mark.parametrize("segments", [SOUND, VIDEO])
def test_route_video_chooses_the_forced_and_the_best(segments: str, boxes: tuple[str, ...], inside: bool) -> None:
    call = VideoCall(segments, boxes)
    ids = call.route(budget=0.4, forced_inside_budget=inside)
    assert ids.is_cuda and ids.dtype == torch.int32 and ids.shape[:2] == (2, len(call.queries))
    for head in range(2):
        scores = mean_scores(call.head(call.q, head), call.head(call.k, head), call.queries, call.keys)[0]
        for row, query in enumerate(call.queries):
            found = ids[head, row].cpu().numpy()
            kept = found[found >= 0]
            assert (np.diff(kept) > 0).all() and (found[len(kept) :] == -1).all()
            if not query.is_video:
                assert kept.tolist() == list(range(len(call.keys)))
                continue
            forced = {i for i, key in enumerate(call.keys) if is_forced(query, key)}
            others = sorted(set(range(len(call.keys))) - forced)
            chosen = sorted(set(kept.tolist()) - forced)
            assert forced <= set(kept.tolist())
            assert len(chosen) == min(len(others), num_chosen(call.keys, len(forced), 0.4, inside))
            best = np.sort(scores[row, others])[len(others) - len(chosen) :]
            np.testing.assert_allclose(np.sort(scores[row, chosen]), best, atol=1e-3, rtol=0)


@pytest.mark.parametrize("arithmetic", ["int8", "storage"])
def test_video_attention_takes_heads_first_and_batches(arithmetic: str) -> None:
    call = VideoCall(num_sequences=2)
    ids = call.route()
    o, lse = call.run(arithmetic=arithmetic, return_lse=True)
    for sequence in range(2):
        assert_near((o[sequence], lse[sequence]), call.want(ids, sequence), arithmetic)
    heads_first = [x.transpose(1, 2).contiguous() for x in (call.q, call.k, call.v)]
    options: dict[str, Any] = {"tables": call.tables, "tensor_layout": "hnd"}
    got, got_lse = tilesieve.video_attention(*heads_first, arithmetic=arithmetic, return_lse=True, **options)
    assert torch.equal(got.transpose(1, 2), o) and torch.equal(got_lse.transpose(1, 2), lse)
    assert torch.equal(tilesieve.route_video(*heads_first[:2], **options), ids)


def test_video_attention_takes_f16_in_8_bits_and_smooths_keys() -> None:
    call = VideoCall(dtype=torch.float16)
    call.k += 8 * torch.randn(2, 128, device="cuda").half()
    want = call.want(call.route())
    for groups in ("per_thread", "per_warp"):
        got = call.run(groups=groups, return_lse=True)
        assert got[0].dtype == torch.float16
        assert_near(got, want, "int8")
        assert rel_l2(call.run(groups=groups, smooth_k=False), want[0]) > rel_l2(got[0], want[0])
    with pytest.raises(ValueError, match=r"^q: got f16"):
        call.run(arithmetic="storage")


@pytest.mark.parametrize("arithmetic", ["int8", "storage"])
def test_video_attention_takes_given_lists(arithmetic: str) -> None:
    call = VideoCall()
    scores = torch.rand(2, len(call.queries), len(call.keys))
    ids = scores.argsort(2)[:, :, :7].sort(2).values.int()
    ids[:, ::2, 5:] = -1
    ids = ids.cuda()
    assert_near(call.run(arithmetic=arithmetic, block_index=ids, return_lse=True), call.want(ids), arithmetic)


def test_video_attention_makes_tables_of_segments() -> None:
    call = VideoCall()
    want, ids = call.run(), call.route()
    got = tilesieve.video_attention(call.q, call.k, call.v, segments=call.segments, layout=call.boxes)
    assert torch.equal(got, want)
    table = tilesieve.LayoutTable(grid=(5, 9, 16), menu=["raster", "4x4x4"], box_of_head=[[0, 0, 0], [0, 1, 0]])
    in_table: dict[str, Any] = {"segments": call.segments, "layout": table, "layer": 1, "head_begin": 1}
    assert torch.equal(tilesieve.video_attention(call.q, call.k, call.v, **in_table), want)
    call.tables = tilesieve.VideoTables(call.q, **in_table)
    assert call.tables.num_kv_heads == 2 and call.tables.num_tokens == 831
    assert (call.tables.num_q_tiles, call.tables.num_kv_tiles) == (len(call.queries), len(call.keys))
    assert torch.equal(call.run(), want) and torch.equal(call.route(), ids)
    raster = VideoCall(boxes=("raster", "raster"))
    assert torch.equal(tilesieve.route_video(call.q, call.k, segments=call.segments), raster.route())


def test_a_policy_makes_video_calls_dense() -> None:
    call = VideoCall()
    every = torch.arange(len(call.keys), dtype=torch.int32).expand(2, len(call.queries), -1)
    policy = tilesieve.DensePolicy()
    got = call.run(policy=policy, step=0, layer=4, num_routed=1, return_lse=True)
    assert torch.equal(got[0], call.run(budget=1))
    assert_near(got, call.want(every), "int8")
    assert torch.equal(call.run(policy=policy, step=1, layer=4), call.run())


def test_video_calls_are_captured_and_replayed_with_other_data() -> None:
    call = VideoCall()
    for options in ({}, {"arithmetic": "storage"}, {"budget": 1}):  # loads the kernels
        call.run(**options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = call.run(return_lse=True)
        stored, dense, ids = call.run(arithmetic="storage"), call.run(budget=1), call.route()
    for seed in (5, 6):
        torch.manual_seed(seed)
        for tensor in (call.q, call.k, call.v):
            tensor.normal_()
        graph.replay()
        torch.cuda.synchronize()
        want = call.run(return_lse=True)
        assert torch.equal(o, want[0]) and torch.equal(lse, want[1]) and torch.equal(ids, call.route())
        assert torch.equal(stored, call.run(arithmetic="storage")) and torch.equal(dense, call.run(budget=1))
        assert_near((o, lse), call.want(ids), "int8")


def test_video_tables_cannot_be_made_in_a_capture() -> None:
    call = VideoCall()
    want = call.run()
    graph = torch.cuda.CUDAGraph()
    with (pytest.raises(ValueError, match=r"^VideoTables: cannot be made while a graph is captured"),
          torch.cuda.graph(graph)):
        tilesieve.video_attention(call.q, call.k, call.v, segments=call.segments)
    assert torch.equal(call.run(), want)


def test_video_attention_works_in_given_memory_on_a_given_stream() -> None:
    call = VideoCall()
    want, want_lse = call.run(return_lse=True)
    out, lse = torch.zeros_like(want), torch.zeros_like(want_lse)
    with pytest.raises(ValueError, match=r"^workspace: got 256 bytes, need \d+") as caught:
        call.run(return_lse=True, workspace=torch.empty(256, dtype=torch.uint8, device="cuda"))
    needed = int(str(caught.value).split("need ")[1].split()[0])
    workspace = torch.empty(needed, dtype=torch.uint8, device="cuda").fill_(255)
    side = torch.cuda.Stream()
    call.run(out=out, lse=lse, return_lse=True, workspace=workspace, stream=side)
    side.synchronize()
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
