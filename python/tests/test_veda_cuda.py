# SPDX-License-Identifier: Apache-2.0
"""Veda on a Hopper GPU: its lists against the CPU's and float64, and attention over them. Skipped where test_cuda.py is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_cuda import pytestmark, torch
from test_veda import Rendering
from test_video_cuda import assert_near
from video_reference import attention, blocks_of

import tilesieve

SOUND = "text:70,audio:141,video:5x9x16"  # tiles of the video that fill no whole number of tiles of 64 keys
EXACT = "text:64,video:8x16x18,audio:130"  # tiles of the video of 128, 64 and 32 tokens: means are exact
BOXES = ("8x4x4", "2x8x8", "8x4x4")


class VedaCall:
    """Calls of heads 1 to 3 of a model of 5: [tokens, heads, dim] on the GPU, in the boxes of BOXES."""

    def __init__(self, segments: str = SOUND, dtype: Any = torch.bfloat16, dim: int = 128, num_sequences: int = 0,
                 **budget: float) -> None:
        torch.manual_seed(3)
        self.segments = segments
        self.lines, self.orders = zip(*(tilesieve.veda_sequence(segments, box) for box in BOXES), strict=True)
        batch = [num_sequences] if num_sequences > 0 else []
        self.q, self.k, self.v = (torch.randn(*batch, len(self.orders[0]), len(BOXES), dim, device="cuda").to(dtype)
                                  for _ in range(3))
        self.learned: dict[str, Any] = {name: 0.1 * torch.randn(5, 3 * dim, dim, device="cuda")
                                        for name in ("proj_q", "proj_k")}
        budget = budget or {"tiles_per_row": 4.6}  # of 12 tiles in SOUND
        self.tables = tilesieve.VideoTables.veda(self.q, segments=segments, boxes=BOXES, **budget)

    def fill_exactly(self, dtype: Any) -> None:
        """Numbers of which sums in f32 are exact, projections of a dtype; e4m3 ones have scales."""
        generator = np.random.default_rng(4)
        for x in (self.q, self.k):
            x.copy_(torch.from_numpy(generator.integers(-1, 2, tuple(x.shape))))
        for name, x in list(self.learned.items()):
            few = np.where(generator.random(tuple(x.shape)) < 0.02, generator.integers(-1, 2, tuple(x.shape)), 0)
            self.learned[name] = torch.from_numpy(few).float().to(dtype).cuda()
            if dtype == torch.float8_e4m3fn:
                self.learned[f"{name}_scale"] = torch.tensor([1.0, 2.0, 0.5, 1.0, 2.0], device="cuda")

    def route(self, **options: Any) -> Any:
        return tilesieve.route_veda(self.q, self.k, tables=self.tables, head_begin=1, **self.learned, **options)

    def attend(self, ids: Any, **options: Any) -> Any:
        return tilesieve.video_attention(self.q, self.k, self.v, tables=self.tables, block_index=ids, **options)

    def kept_tiles(self, ids: Any, head: int) -> Any:
        """Ids of Veda's tiles [1, tiles, tiles] as the CPU lists them, of lists [heads, rows, capacity] of one
        sequence, which hold whole tiles of this head and nothing behind its last row."""
        sizes = [block.end - block.begin for block in blocks_of(self.lines[head], 128)]
        first = np.cumsum([0, *(-(-size // 64) for size in sizes)])
        owner = np.repeat(np.arange(len(sizes)), np.diff(first))
        lists = ids[head].cpu().numpy()
        assert (lists[len(sizes) :] == -1).all()
        kept = np.full((1, len(sizes), len(sizes)), -1, np.int32)
        for row, found in enumerate(lists[: len(sizes)]):
            keys = found[found >= 0]
            assert (found[len(keys) :] == -1).all()
            tiles = np.unique(owner[keys])
            assert keys.tolist() == [key for tile in tiles for key in range(first[tile], first[tile + 1])]
            kept[0, row, : len(tiles)] = tiles
        return kept

    def on_cpu(self, x: Any, head: int) -> Any:
        """Of one sequence's tensor a head, in the order of its tiles."""
        return x[:, head : head + 1].cpu()[torch.from_numpy(self.orders[head]).long()]

    def want(self, ids: Any, sequence: int | None = None) -> tuple[Any, Any]:
        """o and lse of one sequence in f64, over the lists."""
        tensors = [x if sequence is None else x[sequence] for x in (self.q, self.k, self.v)]
        lists = (ids if sequence is None else ids[sequence]).cpu().numpy()
        o, lse = np.zeros(tensors[0].shape), np.zeros(tensors[0].shape[:2])
        for head, line in enumerate(self.lines):
            queries, keys = blocks_of(line, 128), blocks_of(line, 64)
            found = attention(*(self.on_cpu(x, head).float().numpy() for x in tensors),
                              lists[head : head + 1, : len(queries)], queries, keys, self.q.shape[-1] ** -0.5)
            o[self.orders[head], head], lse[self.orders[head], head] = found[0][:, 0], found[1][:, 0]
        return o, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("budget", [{"keep_ratio": 0.3}, {"tiles_per_row": 4.6}, {"keep_ratio": 1}])
def test_on_exact_numbers_lists_are_those_of_the_cpu(budget: dict[str, float], dtype: Any) -> None:
    call = VedaCall(EXACT, dim=64, **budget)
    call.fill_exactly(dtype)
    ids = call.route()
    assert ids.is_cuda and ids.dtype == torch.int32 and ids.shape[:2] == (3, call.tables.num_q_tiles)
    learned = {name: x.cpu() for name, x in call.learned.items()}
    num_kept = []
    for head, box in enumerate(BOXES):
        want = tilesieve.route_veda(call.on_cpu(call.q, head), call.on_cpu(call.k, head), segments=EXACT, box=box,
                                    head_begin=1 + head, **learned, **budget).numpy()
        kept = call.kept_tiles(ids, head)
        np.testing.assert_array_equal(kept[:, :, : want.shape[2]], want)
        assert (kept[:, :, want.shape[2] :] == -1).all()
        num_kept.append((want >= 0).sum() / (want >= -1).sum())
    assert (min(num_kept) == 1) == (budget == {"keep_ratio": 1})


@pytest.mark.parametrize("arithmetic", ["int8", "storage"])
@pytest.mark.parametrize("budget", [{"keep_ratio": 0.9}, {"tiles_per_row": 2.5}])
@pytest.mark.parametrize("segments", [SOUND, "video:9x17x19"])
def test_a_whole_call_is_attention_over_the_tiles_of_the_rule(segments: str, budget: dict[str, float],
                                                              arithmetic: str) -> None:
    call = VedaCall(segments, **budget)
    ids = call.route()
    for head, box in enumerate(BOXES):
        q, k = (x[:, head : head + 1].float().cpu().numpy() for x in (call.q, call.k))
        proj_q, proj_k = (call.learned[name][1 + head : 2 + head].double().cpu().numpy() for name in ("proj_q", "proj_k"))
        rule = Rendering(q, k, segments, box, proj_q, proj_k, **budget)
        rule.check(call.kept_tiles(ids, head), exact=False)
    assert_near(call.attend(ids, arithmetic=arithmetic, return_lse=True), call.want(ids), arithmetic)


def test_a_budget_of_all_tiles_is_dense() -> None:
    call = VedaCall(keep_ratio=1)
    got = call.attend(call.route(), return_lse=True)
    every = torch.arange(call.tables.num_kv_tiles).expand(3, call.tables.num_q_tiles, -1)
    of_head = torch.tensor([len(blocks_of(line, 64)) for line in call.lines])[:, None, None]
    want = call.want(torch.where(every < of_head, every, -1))
    assert_near(got, want, "int8")
    assert_near(call.attend(None, policy=tilesieve.DensePolicy(), step=0, layer=4, return_lse=True), want, "int8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batches_and_heads_first_are_taken(dtype: Any) -> None:
    call = VedaCall(dtype=dtype, num_sequences=2)
    ids = call.route()
    o, lse = call.attend(ids, return_lse=True)
    for sequence in range(2):
        alone = tilesieve.route_veda(call.q[sequence], call.k[sequence], tables=call.tables, head_begin=1, **call.learned)
        assert torch.equal(ids[sequence], alone)
        assert_near((o[sequence], lse[sequence]), call.want(ids, sequence), "int8")
    heads_first = [x.transpose(1, 2).contiguous() for x in (call.q, call.k, call.v)]
    options: dict[str, Any] = {"tables": call.tables, "tensor_layout": "hnd"}
    assert torch.equal(tilesieve.route_veda(*heads_first[:2], head_begin=1, **call.learned, **options), ids)
    assert torch.equal(tilesieve.video_attention(*heads_first, block_index=ids, **options).transpose(1, 2), o)


def test_routing_and_attention_are_captured_in_one_graph() -> None:
    call = VedaCall()
    call.attend(call.route())  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = call.route()
        o, lse = call.attend(ids, return_lse=True)
    lists = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        for tensor in (call.q, call.k, call.v, call.learned["proj_q"]):
            tensor.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(ids, call.route())
        want = call.attend(ids, return_lse=True)
        assert torch.equal(o, want[0]) and torch.equal(lse, want[1])
        assert_near((o, lse), call.want(ids), "int8")
        lists.append(ids.clone())
    assert not torch.equal(*lists)


def test_tables_of_veda_cannot_be_made_in_a_capture() -> None:
    call = VedaCall()
    want = call.route()
    graph = torch.cuda.CUDAGraph()
    with (pytest.raises(ValueError, match=r"^VideoTables: cannot be made while a graph is captured"),
          torch.cuda.graph(graph)):
        tilesieve.VideoTables.veda(call.q, segments=call.segments, boxes=BOXES)
    assert torch.equal(call.route(), want)


def test_refuses_what_it_cannot() -> None:
    call = VedaCall()
    raster = tilesieve.VideoTables(call.q, segments=SOUND, num_kv_heads=3)
    good: dict[str, Any] = {"q": call.q, "k": call.k, "tables": call.tables, "head_begin": 1, **call.learned}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"tables": None}, "tables: got None, needed where q lies on a CUDA device"),
        ({"tables": raster}, "tables: got none of Veda's tiles, expected some of VideoTables.veda"),
        ({"segments": SOUND}, "segments: got one beside tables"),
        ({"q": call.q.repeat(1, 2, 1)}, "k: got 3 heads for 6 of q, expected as many"),
        ({"q": call.q[:, :2], "k": call.k[:, :2]}, "tables: got some of 3 KV heads, expected the 2 of k"),
        ({"q": call.q[1:], "k": call.k[1:]}, "q: got 930 tokens, expected 931"),
        ({"proj_k": call.learned["proj_k"].cpu()}, "proj_k: lies on the CPU, expected cuda:0 as q"),
        ({"proj_q": call.learned["proj_q"][:, :-1]}, r"proj_q: got f32\[5, 383, 128\]"),
        ({"head_begin": 3}, "head_begin: got 3 for 3 heads, expected some of the 5 heads of proj_q"),
    ]
    for change, words in changes:
        with pytest.raises(ValueError, match="^" + words):
            tilesieve.route_veda(**(good | change))
    lists = call.route()
    with pytest.raises(ValueError, match=r"^block_index: got i32\["):
        call.attend(lists[:, :-1])


def test_arrays_of_cupy_are_taken() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    call = VedaCall(dtype=torch.float16)
    arrays = {name: cupy.from_dlpack(x) for name, x in {"q": call.q, "k": call.k, **call.learned}.items()}
    ids = tilesieve.route_veda(tables=call.tables, head_begin=1, **arrays)
    assert isinstance(ids, cupy.ndarray) and (cupy.asnumpy(ids) == call.route().cpu().numpy()).all()
