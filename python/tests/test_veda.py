# SPDX-License-Identifier: Apache-2.0
"""Veda against a rendering of its description in NumPy: own tiles, own budgets, own scores in float64.

The predictors here are made up: files of the published format with random numbers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilesieve

Array = np.ndarray[Any, Any]
BOXES = ("8x4x4", "2x8x8", "4x4x8", "4x8x4", "8x2x8", "8x8x2")
H3 = (37, 24, 42)


# ---- the rendering

def tiles_of(grid: tuple[int, ...], box: str) -> list[Array]:
    """Tokens of each tile: the grid padded with -1, cut into boxes by h, w and t, and the -1 left out."""
    sides = [int(side) for side in box.split("x")]
    counts = [-(-size // side) for size, side in zip(grid, sides, strict=True)]
    padded = np.full([count * side for count, side in zip(counts, sides, strict=True)], -1)
    padded[: grid[0], : grid[1], : grid[2]] = np.arange(math.prod(grid)).reshape(grid)
    boxes = padded.reshape(counts[0], sides[0], counts[1], sides[1], counts[2], sides[2]).transpose(2, 4, 0, 1, 3, 5)
    return [tile[tile >= 0] for tile in boxes.reshape(-1, 128)]


def budgets_of(tokens: int, tiles: int, keep_ratio: float | None, tiles_per_row: float | None) -> list[int]:
    """Tiles of each row: a floor of at least 1, and Bresenham's line over the fraction."""
    ideal = math.ceil(tokens / 128)
    mean = tiles_per_row if tiles_per_row is not None else (keep_ratio or 0) * ideal**2 / tiles
    least = max(1, math.floor(mean))
    fraction = round(max(0.0, mean - least), 12)
    rows = [least + (math.floor((r + 1) * fraction) > math.floor(r * fraction)) for r in range(tiles)]
    return [min(row, tiles) for row in rows]


def vectors_of(tokens: Array, blocks: list[Array], proj: Array) -> Array:
    """[heads, blocks, head_dim]: [mean | max | min] · proj + mean, of tokens [tokens, heads, head_dim]."""
    tokens = tokens.astype(np.float64)
    vectors = []
    for block in blocks:
        rows = tokens[block]
        mean = rows.mean(axis=0)
        features = np.concatenate([mean, rows.max(axis=0), rows.min(axis=0)], axis=-1)
        vectors.append(np.einsum("hf,hfd->hd", features, proj) + mean)
    return np.stack(vectors, axis=1)


class Rendering:
    """Blocks, budgets and scores of one call, q and k in the order of the model."""

    def __init__(self, q: Array, k: Array, segments: str, box: str, proj_q: Array, proj_k: Array,
                 keep_ratio: float | None = None, tiles_per_row: float | None = None) -> None:
        self.blocks: list[Array] = []
        self.is_video: list[bool] = []
        first = 0
        for segment in segments.split(","):
            kind, _, size = segment.partition(":")
            grid = tuple(int(side) for side in size.split("x"))
            tokens = math.prod(grid)
            found = tiles_of(grid, box) if kind == "video" else [
                np.arange(i, min(i + 128, tokens)) for i in range(0, tokens, 128)]
            self.blocks += [first + tile for tile in found]
            self.is_video += [kind == "video"] * len(found)
            first += tokens
        self.order = np.concatenate(self.blocks)
        self.video = np.flatnonzero(self.is_video)
        tokens = sum(len(self.blocks[b]) for b in self.video)
        self.budgets = budgets_of(tokens, len(self.video), keep_ratio, tiles_per_row)
        q_hat, k_hat = vectors_of(q, self.blocks, proj_q), vectors_of(k, self.blocks, proj_k)
        self.scores = q_hat @ k_hat.transpose(0, 2, 1) / math.sqrt(q.shape[2])
        sizes = np.linalg.norm(q_hat, axis=2)[:, :, None] * np.linalg.norm(k_hat, axis=2)[:, None]
        self.rounding = 2e-5 * sizes / math.sqrt(q.shape[2])

    def check(self, ids: Array, *, exact: bool) -> None:
        """Whether block ids [heads, rows, capacity] are those of the rule, ties by the lower id where exact."""
        assert ids.shape[:2] == self.scores.shape[:2] and ids.dtype == np.int32
        for head in range(ids.shape[0]):
            for row in range(ids.shape[1]):
                got = ids[head, row][ids[head, row] >= 0]
                assert (np.diff(got) > 0).all() and (ids[head, row][len(got) :] == -1).all()
                if not self.is_video[row]:
                    assert list(got) == list(range(len(self.blocks)))
                    continue
                others = [b for b in self.video if b != row]
                beside = self.budgets[list(self.video).index(row)] - 1
                scores, rounding = self.scores[head, row], self.rounding[head, row]
                best = sorted(others, key=lambda b: (-scores[b], b))[:beside]
                always = set(range(len(self.blocks))) - set(others)
                assert always <= set(got) and len(got) == len(always) + beside
                if exact:
                    assert set(got) == always | set(best)
                elif best:
                    kth = scores[best[-1]]
                    for block in set(got) - always:
                        assert scores[block] >= kth - rounding[block] - rounding[best[-1]]


# ---- tiles and budgets

@pytest.mark.parametrize("grid", [H3, (1, 1, 1), (9, 5, 3), (3, 17, 30)])
def test_tiles_are_those_of_the_padded_grid(grid: tuple[int, int, int]) -> None:
    for box in BOXES:
        order, valid_count = tilesieve.veda_tiling(grid, box)
        tiles = tiles_of(grid, box)
        assert valid_count.tolist() == [len(tile) for tile in tiles]
        np.testing.assert_array_equal(order, np.concatenate(tiles))


def test_menu_is_what_pads_little() -> None:
    padding = {box: 128 * len(tiles_of(H3, box)) / math.prod(H3) - 1 for box in BOXES}
    assert tilesieve.veda_menu(H3) == tuple(box for box in BOXES if padding[box] <= 0.2)
    assert len(tilesieve.veda_menu(H3)) == 4 and tilesieve.veda_menu(H3, max_padding=0.3) == BOXES


def test_a_sequence_has_a_segment_for_each_tile() -> None:
    line, order = tilesieve.veda_sequence("text:7,video:5x9x10,audio:3", "2x8x8")
    tiles = tiles_of((5, 9, 10), "2x8x8")
    assert line == ",".join(["text:7", *[f"video:{len(tile)}" for tile in tiles], "audio:3"])
    want = np.concatenate([np.arange(7), *[7 + tile for tile in tiles], 457 + np.arange(3)])
    np.testing.assert_array_equal(order, want)


@pytest.mark.parametrize(("box", "at_10", "at_15"),
                         [("8x4x4", 25.84, 38.76), ("4x8x4", 25.84, 38.76), ("2x8x8", 24.93, 37.40),
                          ("8x8x2", 27.07, 40.60)])
def test_budgets_of_the_published_figures(box: str, at_10: float, at_15: float) -> None:
    tiles = len(tiles_of(H3, box))
    for ratio, mean in ((0.10, at_10), (0.15, at_15)):
        budgets = tilesieve.veda_budgets(math.prod(H3), tiles, keep_ratio=ratio)
        assert abs(budgets.mean() - mean) < 0.005 + 1 / tiles
        assert budgets.tolist() == budgets_of(math.prod(H3), tiles, ratio, None)


def test_budgets_are_the_rules() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        tiles = int(rng.integers(1, 400))
        tokens = int(rng.integers(1, 128 * tiles + 1))
        ratio, mean = float(rng.uniform(0.001, 0.999)), float(np.round(rng.uniform(0.1, tiles), rng.integers(0, 4)))
        for options in ((ratio, None), (None, mean)):
            if options[1] == 0:
                continue
            budgets = tilesieve.veda_budgets(tokens, tiles, keep_ratio=options[0], tiles_per_row=options[1])
            assert budgets.tolist() == budgets_of(tokens, tiles, *options)
    assert tilesieve.veda_budgets(129, 4, keep_ratio=1).tolist() == [4] * 4
    assert tilesieve.veda_budgets(1280, 10).tolist() == tilesieve.veda_budgets(1280, 10, keep_ratio=0.1).tolist()


# ---- routing

def normal_case(seed: int, tokens: int, heads: int, dim: int, dtype: Any = np.float32) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((tokens, heads, dim)).astype(dtype) for _ in range(2))
    proj_q, proj_k = (rng.normal(0, 0.05, (heads, 3 * dim, dim)).astype(np.float32) for _ in range(2))
    return q, k, proj_q, proj_k


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("box", BOXES)
def test_routes_are_the_rules(box: str, dtype: Any) -> None:
    segments = "text:130,video:9x17x19,audio:5"
    q, k, proj_q, proj_k = normal_case(2, 130 + 9 * 17 * 19 + 5, 2, 32, dtype)
    for options in ({"keep_ratio": 0.25}, {"tiles_per_row": 7.3}):
        want = Rendering(q, k, segments, box, proj_q, proj_k, **options)
        ids = tilesieve.route_veda(q[want.order], k[want.order], segments=segments, box=box, proj_q=proj_q,
                                   proj_k=proj_k, **options)
        want.check(ids, exact=False)


def test_on_exact_numbers_a_route_is_the_rule_itself() -> None:
    rng = np.random.default_rng(3)
    q, k = (rng.integers(-1, 2, (8 * 16 * 18, 2, 16)).astype(np.float32) for _ in range(2))
    proj_q, proj_k = (np.where(rng.random((2, 48, 16)) < 0.1, rng.integers(-1, 2, (2, 48, 16)), 0).astype(np.float32)
                      for _ in range(2))
    segments = "video:8x16x18"  # tiles of 128 and of 64: means are exact
    for options in ({"keep_ratio": 0.2}, {"tiles_per_row": 6.5}):
        want = Rendering(q, k, segments, "8x4x4", proj_q, proj_k, **options)
        assert np.abs(want.scores).max() * 4 < 1024
        for isa in tilesieve.available_isas():
            ids = tilesieve.route_veda(q[want.order], k[want.order], segments=segments, box="8x4x4", proj_q=proj_q,
                                       proj_k=proj_k, isa=isa, num_threads=2, **options)
            want.check(ids, exact=True)


def test_some_heads_take_their_own_projections() -> None:
    q, k, proj_q, proj_k = normal_case(4, 9 * 17 * 19, 5, 16)
    shared: dict[str, Any] = {"segments": "video:9x17x19", "box": "4x8x4", "keep_ratio": 0.3}
    _, order = tilesieve.veda_sequence("video:9x17x19", "4x8x4")
    q, k = q[order], k[order]
    whole = tilesieve.route_veda(q, k, proj_q=proj_q, proj_k=proj_k, **shared)
    some = tilesieve.route_veda(q[:, 3:], k[:, 3:], proj_q=proj_q, proj_k=proj_k, head_begin=3, **shared)
    np.testing.assert_array_equal(some, whole[3:])
    with pytest.raises(ValueError, match="head_begin: got 4 for 2 heads"):
        tilesieve.route_veda(q[:, 3:], k[:, 3:], proj_q=proj_q, proj_k=proj_k, head_begin=4, **shared)


# ---- files

def metadata(dtype: str, plans: Any) -> dict[str, str]:
    return {"format": "miowtion-veda-predictor-v1", "num_layers": "2", "num_heads": "3", "head_dim": "16",
            "dtype": dtype, "tile_conditions": "false", "source": "made up", "step": "7", "keep_ratio": "0.25",
            "target_budget_kind": "ratio", "target_budget_value": "0.25", "plans": json.dumps(plans)}


def plan(name: str, grid: tuple[int, ...]) -> dict[str, Any]:
    return {"geometry": name, "grid": grid, "shapes": ["2x8x8", "8x4x4"], "head_shape": [[0, 1, 0], [1, 1, 1]],
            "provenance": {"mse": 0.25, "clips": [1, 2]}}


PLANS = {name: plan(name, grid)
         for name, grid in (("16x9_t37", H3), ("16x9_t72", (72, 24, 42)), ("9x16_t37", (37, 42, 24)))}


def write_predictor(path: Path, dtype: str) -> dict[str, tuple[Array, Array]]:
    """Writes a made-up predictor; returns the numbers of proj_q and proj_k of each layer in float64."""
    rng = np.random.default_rng(5)
    tensors: dict[str, Array] = {}
    numbers: dict[str, Array] = {}
    for name in ("layers.0.proj_q", "layers.0.proj_k", "layers.1.proj_q", "layers.1.proj_k"):
        weights = rng.normal(0, 0.05, (3, 48, 16)).astype(np.float32)
        if dtype == "float8_e4m3fn":
            scale = (np.abs(weights).max(axis=(1, 2)) / 448).astype(np.float32)
            stored = (weights / scale[:, None, None]).astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}.__scale"] = scale
            numbers[name] = (stored.astype(np.float32) * scale[:, None, None]).astype(ml_dtypes.bfloat16)
        else:
            stored = weights.astype(dtype if dtype == "float32" else ml_dtypes.bfloat16)
            numbers[name] = stored
        tensors[name] = stored
    tilesieve.write_safetensors(path, tensors, metadata(dtype, PLANS))
    return {layer: (numbers[f"layers.{layer}.proj_q"].astype(np.float64),
                    numbers[f"layers.{layer}.proj_k"].astype(np.float64)) for layer in ("0", "1")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_predictor_routes_as_its_numbers_say(tmp_path: Path, dtype: str) -> None:
    numbers = write_predictor(tmp_path / "predictor.safetensors", dtype)
    predictor = tilesieve.read_veda_predictor(tmp_path / "predictor.safetensors")
    assert (predictor.num_layers, predictor.num_heads, predictor.head_dim) == (2, 3, 16)
    assert (predictor.keep_ratio, predictor.tiles_per_row) == (0.25, None)
    assert (predictor.step, predictor.source) == (7, "made up")
    assert predictor.tensors.metadata["plans"] == json.dumps(PLANS)
    q, k, _, _ = normal_case(6, 9 * 17 * 19, 3, 16, ml_dtypes.bfloat16)
    for layer in range(2):
        projections = predictor.projections(layer)
        assert (set(projections) == {"proj_q", "proj_k"}) == (dtype != "float8_e4m3fn")
        boxes = predictor.plan_for((9, 17, 19)).boxes(layer)
        for box in set(boxes):
            heads = [head for head in range(3) if boxes[head] == box]
            proj_q, proj_k = (proj[heads] for proj in numbers[str(layer)])
            want = Rendering(q[:, heads], k[:, heads], "video:9x17x19", box, proj_q, proj_k, predictor.keep_ratio)
            ids = tilesieve.route_veda(
                q[want.order][:, heads], k[want.order][:, heads], segments="video:9x17x19", box=box,
                keep_ratio=predictor.keep_ratio, **{name: proj[heads] for name, proj in projections.items()})
            want.check(ids, exact=False)


def test_plans_are_those_of_the_file(tmp_path: Path) -> None:
    write_predictor(tmp_path / "predictor.safetensors", "float32")
    predictor = tilesieve.read_veda_predictor(tmp_path / "predictor.safetensors")
    assert [found.geometry for found in predictor.plans] == list(PLANS)
    first = predictor.plans[0]
    assert first.grid == H3 and first.shapes == ("2x8x8", "8x4x4") and first.shape_of_head == ((0, 1, 0), (1, 1, 1))
    assert first.boxes(0) == ("2x8x8", "8x4x4", "2x8x8")
    for grid, name in ((H3, "16x9_t37"), ((60, 24, 42), "16x9_t72"), ((72, 42, 24), "9x16_t37")):
        assert predictor.plan_for(grid).geometry == name


def test_files_with_faults_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "predictor.safetensors"
    write_predictor(path, "float32")
    tensors = dict(tilesieve.read_tensors(path))
    for field in ("format", "num_heads", "plans", "source"):
        fields = metadata("float32", PLANS)
        del fields[field]
        tilesieve.write_safetensors(tmp_path / "x", tensors, fields)
        with pytest.raises(ValueError, match=f"x: metadata: {field} is missing"):
            tilesieve.read_veda_predictor(tmp_path / "x")
    tilesieve.write_safetensors(tmp_path / "x", tensors, metadata("bfloat16", PLANS))
    with pytest.raises(ValueError, match=r"tensor layers\.0\.proj_q: got f32"):
        tilesieve.read_veda_predictor(tmp_path / "x")
    tilesieve.write_safetensors(tmp_path / "x", tensors, metadata("float32", {"a": plan("a", (0, 1, 1))}))
    with pytest.raises(ValueError, match="plans: 'a': grid: got 0x1x1"):
        tilesieve.read_veda_predictor(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        tilesieve.read_veda_predictor(tmp_path / "nowhere")


def test_refuses_what_it_cannot() -> None:
    q, k, proj_q, proj_k = normal_case(7, 450, 1, 16)
    good: dict[str, Any] = {"segments": "video:5x9x10", "box": "2x8x8", "proj_q": proj_q, "proj_k": proj_k}
    for change, words in (({"box": "2x8x4"}, "box: got 2x8x4"), ({"box": "raster"}, "box: got raster"),
                          ({"segments": "video:450"}, "has no grid"), ({"proj_k": None}, "proj_k: got None"),
                          ({"proj_q": proj_q[:, :47]}, "proj_q: got"), ({"keep_ratio": 0}, "keep_ratio: got 0"),
                          ({"keep_ratio": 0.1, "tiles_per_row": 3}, "tiles_per_row: got one beside"),
                          ({"tiles_per_row": -1}, "tiles_per_row: got -1"), ({"segments": "video:5x9x9"}, "q: got"),
                          ({"proj_q_scale": np.ones(2, np.float32)}, "proj_q_scale: got")):
        with pytest.raises(ValueError, match=words):
            tilesieve.route_veda(q, k, **(good | change))
    with pytest.raises(ValueError, match="k: got"):
        tilesieve.route_veda(q, k[:-1], **good)
    with pytest.raises(TypeError, match="box: got int"):
        tilesieve.veda_tiling((1, 2, 3), 128)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grid: got 2 numbers"):
        tilesieve.veda_tiling((1, 2), "2x8x8")
