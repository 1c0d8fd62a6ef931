# SPDX-License-Identifier: Apache-2.0
"""Calls as users write them, for the type checker alone: what it must infer, and what it must refuse."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import tilesieve

Floats = npt.NDArray[np.float32]


class Tensor:
    """An array of another library."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


def attending(q: Floats, k: Floats, v: Floats, ids: npt.NDArray[np.int32]) -> None:
    assert_type(tilesieve.attend(q, k, v), Floats)
    assert_type(tilesieve.attend(q, k, v, ids, return_lse=True, kv_block_size=64), tuple[Floats, Floats])
    assert_type(tilesieve.sparse_prefill(q, k, v, router="qk_max", top_k=8), Floats)
    assert_type(tilesieve.plan(q, k, ids).run(q, k, v, return_lse=True), tuple[Floats, Floats])
    assert_type(tilesieve.plan(q, k, ids).problem, tilesieve.Problem)
    assert_type(tilesieve.workspace_bytes(q, k, v, ids), int)
    tilesieve.attend(q, k, v, kv_block_size=None, num_threads=None, k_scale=0.5, cu_seqlens_q=range(0, 9, 4))
    assert_type(tilesieve.workspace_bytes(q, k, v, index_q=q, index_k=k, dense_up_to=0), int)
    assert_type(tilesieve.workspace_bytes(q, k, v, router="qk_max"), int)
    assert_type(tilesieve.sparse_prefill(q, k, v, dense_up_to=0, tile_tokens=2), Floats)
    assert_type(tilesieve.attend(q, k, v, arithmetic="int8"), Floats)
    assert_type(tilesieve.plan(q, k, ids, arithmetic="int8").problem.arithmetic, tilesieve.Arithmetic)
    tilesieve.attend(q, k, v, arithmetic="fp4")  # type: ignore[call-overload]
    tilesieve.attend(q, k, v, dense_up_to=0)  # type: ignore[call-overload]
    tilesieve.attend(q, k, v, router="qk_max")  # type: ignore[call-overload]
    tilesieve.attend(q, k, v, loop_order="inside")  # type: ignore[call-overload]
    tilesieve.attend(q, k, v, ids, 64)  # type: ignore[call-overload]
    tilesieve.attend("q", k, v)  # type: ignore[call-overload]


def undecided(q: Floats, k: Floats, v: Floats, return_lse: bool) -> None:
    assert_type(tilesieve.attend(q, k, v, return_lse=return_lse), Floats | tuple[Floats, Floats])
    assert_type(tilesieve.sparse_prefill(q, k, v, return_lse=return_lse), Floats | tuple[Floats, Floats])
    assert_type(tilesieve.plan(q, k, v).run(q, k, v, return_lse=return_lse), Floats | tuple[Floats, Floats])


def dense(tensor: Tensor, return_lse: bool) -> None:
    assert_type(tilesieve.dense_attention(tensor, tensor, tensor, tensor_layout="hnd", causal=True, stream=0), Tensor)
    assert_type(tilesieve.dense_attention(tensor, tensor, tensor, return_lse=True), tuple[Tensor, Tensor])
    assert_type(tilesieve.dense_attention(tensor, tensor, tensor, return_lse=return_lse),
                Tensor | tuple[Tensor, Tensor])
    tilesieve.dense_attention(tensor, tensor, tensor, tensor_layout="dhn")  # type: ignore[call-overload]
    tilesieve.dense_attention(tensor, tensor, tensor, workspace=tensor)  # type: ignore[call-overload]


def routing(q: Floats, k: Floats, tensor: Tensor, router: tilesieve.Router, isa: tilesieve.Isa) -> None:
    assert_type(tilesieve.route(q, k, router=router, isa=isa), npt.NDArray[np.int32])
    assert_type(tilesieve.route_scores(q, k, router="oracle"), npt.NDArray[np.float32])
    assert_type(tilesieve.route(tensor, tensor), Tensor)
    tilesieve.route(index_q=q, index_k=k)
    tilesieve.route(q, k, router="qk-max")  # type: ignore[call-overload]
    tilesieve.route_scores(q, k, top_k=3)  # type: ignore[call-overload]


def measuring(q: Floats, k: Floats, ids: npt.NDArray[np.int32]) -> None:
    assert_type(tilesieve.mass(q, k, ids), tilesieve.Mass)
    assert_type(tilesieve.mass(q, k, [ids, ids]), list[tilesieve.Mass])
    assert_type(tilesieve.mass(q, k, ids).mass_per_head, tuple[float, ...])


def reading() -> None:
    file = tilesieve.read_tensors("capture.safetensors")
    assert_type(file["q"], np.ndarray[Any, Any])
    assert_type(file.metadata, dict[str, str])


def rendering(clip: npt.NDArray[np.uint8]) -> None:
    assert_type(tilesieve.quality(clip, "dense.mp4", luma="bt601"), tilesieve.Quality)
    assert_type(tilesieve.quality(clip, clip).measures, dict[str, tilesieve.QualityMeasure])
    assert_type(tilesieve.quality(clip, clip).ssim.mean, float)
    tilesieve.quality(clip, clip, luma="bt2020")  # type: ignore[arg-type]


def video(q: Floats, k: Floats, v: Floats, tensor: Tensor, router: tilesieve.VideoRouter, return_lse: bool) -> None:
    segments = tilesieve.h3_segments(frames=243)
    assert_type(segments, str)
    assert_type(tilesieve.box_menu((37, 24, 42), 64), list[str])
    assert_type(tilesieve.box_order((37, 24, 42), "4x4x4"), npt.NDArray[np.int32])
    assert_type(tilesieve.route_video(q, k, segments=segments, router=router), npt.NDArray[np.int32])
    assert_type(tilesieve.route_video(tensor, tensor, segments=segments, num_routed=3), Tensor)
    assert_type(tilesieve.video_budget(segments=segments).num_slots, int)
    table, report = tilesieve.layout_search([(0, q, k)], segments=segments, menu=["raster", "4x4x4"])
    assert_type(table, tilesieve.LayoutTable)
    assert_type(report, dict[str, Any])
    assert_type(tilesieve.LayoutTable.load("table.json").boxes(3), tuple[str, ...])
    assert_type(tilesieve.gather_tokens(q, segments=segments, layout=table, layer=3), Floats)
    assert_type(tilesieve.scatter_tokens(tensor, segments=segments, layout=["4x4x4", "raster"]), Tensor)
    assert_type(tilesieve.video_attention(q, k, v, segments=segments, layout=table, layer=3), Floats)
    assert_type(tilesieve.video_attention(q, k, v, segments=segments, return_lse=True), tuple[Floats, Floats])
    assert_type(tilesieve.video_attention(q, k, v, segments=segments, return_lse=return_lse),
                Floats | tuple[Floats, Floats])
    masses = tilesieve.video_mass(q, k, segments=segments, layouts=["raster", ["4x4x4", "raster"], table], layer=3)
    assert_type(masses, list[tilesieve.VideoMass])
    assert_type(masses[0].mass, npt.NDArray[np.float64])
    assert_type(tilesieve.DensePolicy(layers=[7]).is_dense(1, 2), bool)
    tables = tilesieve.VideoTables(tensor, segments=segments, layout=table, layer=3, head_begin=7, num_kv_heads=7)
    assert_type(tables.num_kv_tiles, int)
    assert_type(tilesieve.route_video(tensor, tensor, tables=tables, tensor_layout="hnd"), Tensor)
    policy = tilesieve.DensePolicy(first_layers=2)
    assert_type(tilesieve.video_attention(tensor, tensor, tensor, tables=tables, policy=policy, step=1, layer=3,
                                          arithmetic=None, groups="per_warp", smooth_k=False, stream=0), Tensor)
    assert_type(tilesieve.video_attention(tensor, tensor, tensor, tables=tables, return_lse=True, block_index=tensor,
                                          workspace=tensor), tuple[Tensor, Tensor])
    assert_type(tilesieve.video_attention(q, k, v, tables=tables, return_lse=return_lse),
                Floats | tuple[Floats, Floats])
    of_veda = tilesieve.VideoTables.veda(tensor, segments=segments, boxes=["4x4x8"] * 7, tiles_per_row=9.5)
    assert_type(of_veda, tilesieve.VideoTables)
    ids = tilesieve.route_veda(tensor, tensor, tables=of_veda, proj_q=tensor, proj_k=tensor, head_begin=7)
    assert_type(tilesieve.video_attention(tensor, tensor, tensor, tables=of_veda, block_index=ids), Tensor)
    assert_type(tilesieve.route_veda(q, k, segments=segments, box="4x4x8", proj_q=q, proj_k=k), npt.NDArray[np.int32])
    tilesieve.route_veda(q, k, tables=of_veda, box="4x4x8", proj_q=q, proj_k=k)  # type: ignore[call-overload]
    tilesieve.route_veda(q, k, segments=segments, box="4x4x8")  # type: ignore[call-overload]
    tilesieve.video_attention(q, k, v, tables=tables, layout="4x4x4")  # type: ignore[call-overload]
    tilesieve.route_video(q, k, tables=tables, stream=0)  # type: ignore[call-overload]
    tilesieve.VideoTables(tensor)  # type: ignore[call-arg]
    tilesieve.video_attention(q, k, v)  # type: ignore[call-overload]
    tilesieve.video_attention(q, k, v, segments=segments, router="index")  # type: ignore[call-overload]
    assert_type(tilesieve.video_attention(q, k, v, segments=segments, arithmetic="int8"), Floats)
    tilesieve.route_video(q, k, segments=segments, arithmetic="int8")  # type: ignore[call-overload]
    tilesieve.route_video(q, k, segments=segments, layout="4x4x4")  # type: ignore[call-overload]
