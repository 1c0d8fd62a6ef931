# SPDX-License-Identifier: Apache-2.0
"""Veda: tiles of padded boxes, budgets of rows, routing by learned scores, and the files of those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from . import _core
from ._arrays import A, Array, in_library_of, on_cuda
from ._attend import refuse_cuda_arguments
from ._files import Path, TensorFile, read_tensors
from ._options import Isa, TensorLayout, VedaRouting, VedaRoutingInTables
from ._prefill import given
from ._progress import progress_bar
from ._video_cuda import VideoTables, route_veda_on_cuda

Indices = npt.NDArray[np.int32]


def veda_tiling(grid: Sequence[int], box: str) -> tuple[Indices, Indices]:
    """Cuts a video's grid into tiles as Veda does (arXiv 2605.30325): padded to whole boxes of 128 tokens.

    Tiles go along t first, then w, then h; the tokens of a tile are in raster order. Padding takes no slots.

    Args:
        grid: (latent frames, rows, tokens of a row).
        box: "4x8x4", frames x rows x tokens of a row, 128 tokens together.

    Returns:
        i32 [tokens], slot -> token of the grid; i32 [tiles], tokens of each tile, 1 to 128.

    Raises:
        ValueError: a grid that has no tokens, or a box that has not 128, by name.
        TypeError: an argument of another type, by name.
    """
    order, valid_count = _core.veda_tiling(grid, box)
    return order, valid_count


def veda_menu(grid: Sequence[int], *, max_padding: float = 0.2) -> tuple[str, ...]:
    """The boxes of Veda's six that pad a grid by at most max_padding slots for each token, as texts.

    Arguments and errors as of `veda_tiling`.
    """
    return tuple(_core.veda_menu(grid, max_padding))


def veda_sequence(segments: str, box: str) -> tuple[str, Indices]:
    """The sequence of a request with its video in tiles: one segment for each, so that no block spans two.

    Args:
        segments: "text:594,audio:414,video:37x24x42", of which one is video. All else keeps its place.
        box: as of `veda_tiling`.

    Returns:
        The segments with the tiles, such as "text:594,audio:414,video:128,video:96"; i32 [tokens], slot -> token of the
        sequence.

    Raises:
        ValueError: segments without a video that has a grid, or with two, by name.
        TypeError: an argument of another type, by name.
    """
    line, order = _core.veda_sequence(segments, box)
    return line, order


def veda_budgets(
    num_tokens: int, num_tiles: int, *, keep_ratio: float | None = None, tiles_per_row: float | None = None
) -> Indices:
    """Tiles of keys that each tile of queries gets, its own among them: i32 [num_tiles].

    The mean is keep_ratio * ceil(num_tokens / 128)^2 / num_tiles, or tiles_per_row, but 1 at the least; its fraction is
    spread evenly over the rows.

    Args:
        num_tokens: of the video.
        num_tiles: that they lie in.
        keep_ratio: above 0, at most 1, which keeps all. None = 0.1 where there are no tiles_per_row.
        tiles_per_row: the mean itself.

    Raises:
        ValueError: an argument that does not fit, by name; both of the last two.
        TypeError: an argument of another type, by name.
    """
    return cast(Indices, _core.veda_budgets(num_tokens, num_tiles, keep_ratio, tiles_per_row))


@overload
def route_veda(q: np.ndarray[Any, Any], k: Array, **options: Unpack[VedaRouting]) -> Indices: ...
@overload
def route_veda(q: A, k: Array, **options: Unpack[VedaRouting]) -> A: ...
@overload
def route_veda(q: A, k: Array, **options: Unpack[VedaRoutingInTables]) -> A: ...
def route_veda(
    q: Array,
    k: Array,
    *,
    segments: str | None = None,
    box: str | None = None,
    tables: VideoTables | None = None,
    tensor_layout: TensorLayout = "nhd",
    proj_q: Array,
    proj_k: Array,
    proj_q_scale: Array | None = None,
    proj_k_scale: Array | None = None,
    keep_ratio: float | None = None,
    tiles_per_row: float | None = None,
    head_begin: int = 0,
    num_threads: int | None = None,
    isa: Isa = "best",
    progress: bool = False,
) -> Any:
    """Chooses the tiles of keys that each tile of queries attends to by Veda's learned scores.

    On the CPU, or on a Hopper GPU where q lies there: its choice is the CPU's but for the rounding of scores in f32.
    What a GPU takes is marked CUDA below. There nothing waits for it, and the call can be captured in a graph; heads of
    all boxes are one call, and `video_attention` takes the ids with the same tables.

    For each tile the features are [mean | max | min] of its tokens, its vector is features · proj[head] + mean, and a
    tile of queries takes its own tile, then those of the largest product of vectors, all in f32. What is not video is
    attended to by all and attends to all, in blocks of 128 outside the budget.

    Args:
        q: [num_tokens, num_heads, head_dim] in f32, bf16, f16 or e4m3, in the order of `veda_sequence`. CUDA: bf16 or
            f16, head_dim up to 128, in the model's own order, with one dimension of sequences in front or without.
        k: keys, likewise, with as many heads.
        segments: as of `veda_sequence`. None with tables.
        box: of the heads' tiles, as of `veda_tiling`. Heads of another box are another call. None with tables.
        tables: CUDA: of `VideoTables.veda`, which say the segments, the heads' boxes and the budget.
        tensor_layout: CUDA: as of `route_video`.
        proj_q: [heads of the model, 3 * head_dim, head_dim] in f32, bf16, f16 or e4m3; where q lies.
        proj_k: likewise.
        proj_q_scale: f32 [heads of the model]; a number is then bf16(scale · stored).
        proj_k_scale: likewise.
        keep_ratio: as of `veda_budgets`. None with tables.
        tiles_per_row: as of `veda_budgets`. None with tables.
        head_begin: the head of the projections that the first one here is.
        num_threads: as of `attend`.
        isa: as of `attend`.
        progress: as of `attend`.

    Returns:
        i32 [num_heads, blocks of queries, capacity]: ascending ids of blocks of keys, then -1. Ties go to the lower id,
        NaN is chosen last. Of PyTorch where q is, else of NumPy. CUDA: ids of tiles of 64 keys, of which one of Veda's
        has one or two, of PyTorch or CuPy as q, with the dimension of sequences in front where q has one.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    if on_cuda(q):
        return route_veda_on_cuda(
            q, k, segments=segments, box=box, tables=tables, tensor_layout=tensor_layout, proj_q=proj_q, proj_k=proj_k,
            proj_q_scale=proj_q_scale, proj_k_scale=proj_k_scale, keep_ratio=keep_ratio, tiles_per_row=tiles_per_row,
            head_begin=head_begin, num_threads=num_threads, isa=isa, progress=progress)
    refuse_cuda_arguments(tables=tables, tensor_layout=given(tensor_layout, "nhd"))
    with progress_bar(progress, "route") as counters:
        ids = _core.route_veda(q, k, segments, box, proj_q, proj_k, proj_q_scale, proj_k_scale, keep_ratio,
                               tiles_per_row, head_begin, num_threads, isa, counters)
    return in_library_of(q, ids)


@dataclass(frozen=True, kw_only=True)
class VedaPlan:
    """The box of each head, for videos of one grid. Of `VedaPredictor`.

    Attributes:
        geometry: its name, such as "16x9_t37".
        grid: (latent frames, rows, tokens of a row).
        shapes: boxes as texts.
        shape_of_head: [num_layers][num_heads] places in shapes.
    """

    geometry: str
    grid: tuple[int, int, int]
    shapes: tuple[str, ...]
    shape_of_head: tuple[tuple[int, ...], ...]

    def boxes(self, layer: int) -> tuple[str, ...]:
        """The boxes of a layer's heads, [num_heads]."""
        return tuple(self.shapes[place] for place in self.shape_of_head[layer])


@dataclass(frozen=True, kw_only=True, eq=False)
class VedaPredictor:
    """A file of Veda's learned scores, of `read_veda_predictor`.

    Attributes:
        num_layers: of the model.
        num_heads: of the model.
        head_dim: of the model.
        keep_ratio: that it was trained for; None where that was a number of tiles.
        tiles_per_row: that number, or None.
        step: of its training.
        source: of its weights.
        plans: in the order of the file.
        tensors: of the file, with its metadata.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    keep_ratio: float | None
    tiles_per_row: float | None
    step: int
    source: str
    plans: tuple[VedaPlan, ...]
    tensors: TensorFile

    def plan_for(self, grid: Sequence[int]) -> VedaPlan:
        """The plan of the nearest ratio of height to width, then of the nearest number of frames."""
        return self.plans[_core.nearest_veda_plan([plan.grid for plan in self.plans], grid)]

    def projections(self, layer: int) -> dict[str, np.ndarray[Any, Any]]:
        """proj_q and proj_k of a layer, and their scales where the file has such, as `route_veda` takes them."""
        names = {name: f"layers.{layer}.{name}" for name in ("proj_q", "proj_k")}
        names |= {f"{name}_scale": f"{key}.__scale" for name, key in names.items() if f"{key}.__scale" in self.tensors}
        return {name: self.tensors[key] for name, key in names.items()}


def read_veda_predictor(path: Path) -> VedaPredictor:
    """Reads a predictor as Miowtion writes it: safetensors in the format miowtion-veda-predictor-v1.

    Raises:
        OSError: a file that the system does not let be read, such as FileNotFoundError.
        ValueError: a file that is no such predictor, by name and fault: a field of its metadata, a plan, a tensor.
    """
    tensors = read_tensors(path)
    fields, plans = _core.read_veda_predictor(tensors.path.encode("utf-8", "surrogateescape"))
    return VedaPredictor(**fields, plans=tuple(VedaPlan(**plan) for plan in plans), tensors=tensors)
