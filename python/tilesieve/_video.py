# SPDX-License-Identifier: Apache-2.0
"""Attention of video models on the CPU: blocks chosen by a budget, in a layout, and what that would keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt

from . import _core
from ._arrays import A, Array, in_library_of, outputs
from ._layout import Layout, LayoutTable
from ._options import Arithmetic, Isa, VideoAttending, VideoRouter, VideoRouting
from ._progress import progress_bar


@dataclass(frozen=True, kw_only=True)
class VideoBudget:
    """How many blocks of keys a block of the video's queries gets. Of `video_budget`.

    Attributes:
        num_forced: blocks that it gets whatever their score.
        num_routed: blocks that are chosen beside those.
        num_blocks: blocks of the whole sequence.
        num_slots: keys that the kept blocks have room for, kv_block_size each.
    """

    num_forced: int
    num_routed: int
    num_blocks: int
    num_slots: int


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoMass:
    """What one way to lay out and to route keeps of attention, for each KV head: shares from 0 to 1.

    Means over measured blocks of the video's queries. The mass of a block is the mean over its queries (and the query
    heads of a group) of the share of the dense softmax, over all keys of the sequence, on the blocks of keys that it
    keeps. F is the mass on its forced blocks, r the number of its others, M that of all blocks that are not forced.

    Attributes:
        layout: as it was given.
        router: by which the blocks are chosen.
        budget: as it was given.
        mass: f64 [num_kv_heads], what is kept.
        floor: f64 [num_kv_heads], F + (r / M) (1 - F): what r blocks chosen at random keep on average.
        ceiling: f64 [num_kv_heads], F + the r largest masses of the M: the most that r blocks could keep.
        recall: f64 [num_kv_heads], share of the ceiling's blocks that are kept too.
        kept_share: kept blocks over all blocks, of the measured blocks of queries.
        num_measured: blocks of queries measured of each head.
    """

    layout: Layout
    router: VideoRouter
    budget: float
    mass: npt.NDArray[np.float64]
    floor: npt.NDArray[np.float64]
    ceiling: npt.NDArray[np.float64]
    recall: npt.NDArray[np.float64]
    kept_share: float
    num_measured: int


@dataclass(frozen=True, kw_only=True)
class DensePolicy:
    """Which calls of a model stay dense.

    Attributes:
        first_steps: of the denoising, in all layers.
        first_layers: in all steps.
        layers: more of them, in all steps.

    Raises:
        ValueError: a number below 0, by name (`tilesieve.Error`).
        TypeError: a field of another type, by name.
    """

    first_steps: int = 1
    first_layers: int = 1
    layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _core.layers_of_policy(self))

    def is_dense(self, step: int, layer: int) -> bool:
        """Whether the call of a layer (from 0) in a step (from 0) is dense."""
        return _core.is_dense(self, step, layer)


def video_budget(
    *,
    segments: str,
    budget: float = 0.15,
    num_routed: int | None = None,
    forced_inside_budget: bool = False,
    q_block_size: int = 128,
    kv_block_size: int = 64,
) -> VideoBudget:
    """What a budget comes to for a block of the video's queries that lies inside its segment.

    Arguments and errors as of `route_video`.
    """
    return VideoBudget(**_core.video_budget(segments, budget, num_routed, forced_inside_budget, q_block_size,
                                            kv_block_size))


@overload
def route_video(q: np.ndarray[Any, Any], k: Array, **options: Unpack[VideoRouting]) -> npt.NDArray[np.int32]: ...
@overload
def route_video(q: A, k: Array, **options: Unpack[VideoRouting]) -> A: ...
def route_video(
    q: Array,
    k: Array,
    *,
    segments: str,
    router: VideoRouter = "mean_pool",
    budget: float = 0.15,
    num_routed: int | None = None,
    forced_inside_budget: bool = False,
    seed: int = 0,
    softmax_scale: float | None = None,
    q_block_size: int = 128,
    kv_block_size: int = 64,
    num_threads: int | None = None,
    isa: Isa = "best",
    progress: bool = False,
) -> Any:
    """Chooses the blocks of keys that each block of queries of a video model attends to. On the CPU.

    Blocks begin anew with each segment, so that none spans two; the last of a segment may be short. Blocks of queries
    that are not video attend to all. A block of the video's queries attends to all blocks of keys that are not video
    and to those that hold its own tokens, which are forced, and to the best of the video's others.

    Args:
        q: queries [num_tokens, num_q_heads, head_dim] of one sequence, in f32, bf16, f16 or e4m3, in the order in which
            blocks are to cut them, see `gather_tokens`. head_dim is a multiple of 8 up to 256.
        k: keys [num_tokens, num_kv_heads, head_dim], likewise. num_kv_heads divides num_q_heads.
        segments: what the tokens are, in their order: "text:594,audio:414,video:37x24x42" of kinds text, conditioning,
            reference, audio and video with their tokens, of a video latent frames x rows x tokens of a row, or as many
            as they are where no layout is needed. See `h3_segments`.
        router: how a block is scored. "mean_pool": mean query of the block (and of the heads of a group) · mean key of
            the block, in f32; "oracle": the share of the dense softmax that lies on it, mean over the block's queries,
            which costs as much as attending to all; "random": a seeded number.
        budget: 0 to 1. Without forced_inside_budget ceil(budget · the video's blocks) are chosen beside the forced ones.
        num_routed: so many are chosen beside the forced ones, whatever the budget; None = by the budget.
        forced_inside_budget: ceil(budget · all blocks) are kept, the forced ones among them.
        seed: of the router "random", 0 or more.
        softmax_scale: as of `attend`; the oracle's.
        q_block_size: queries of one block, 1 to 1,024.
        kv_block_size: keys of one block, a multiple of 8 up to 1,024.
        num_threads: as of `attend`.
        isa: as of `attend`.
        progress: as of `attend`.

    Returns:
        i32 [num_kv_heads, blocks of queries, capacity]: ascending ids of blocks of keys, counted over the whole
        sequence, then -1. Ties go to the lower id, NaN is chosen last. Of PyTorch where q is, else of NumPy.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    call = _core.VideoCall(q, k, None, segments, softmax_scale, q_block_size, kv_block_size)
    with progress_bar(progress, "route_video") as counters:
        ids = call.route(router, budget, num_routed, forced_inside_budget, seed, num_threads, isa, counters)
    return in_library_of(q, ids)


@overload
def video_attention(q: A, k: Array, v: Array, *, return_lse: Literal[False] = False,
                    **options: Unpack[VideoAttending]) -> A: ...
@overload
def video_attention(q: A, k: Array, v: Array, *, return_lse: Literal[True],
                    **options: Unpack[VideoAttending]) -> tuple[A, A]: ...
@overload
def video_attention(q: A, k: Array, v: Array, *, return_lse: bool,
                    **options: Unpack[VideoAttending]) -> A | tuple[A, A]: ...
def video_attention(
    q: Any,
    k: Array,
    v: Array,
    *,
    segments: str,
    layout: Layout = "raster",
    layer: int | None = None,
    head_begin: int = 0,
    router: VideoRouter = "mean_pool",
    budget: float = 0.15,
    num_routed: int | None = None,
    forced_inside_budget: bool = False,
    seed: int = 0,
    softmax_scale: float | None = None,
    q_block_size: int = 128,
    kv_block_size: int = 64,
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    arithmetic: Arithmetic = "storage",
    num_threads: int | None = None,
    isa: Isa = "best",
    progress: bool = False,
) -> Any:
    """Sparse attention of a video model in one call: layout, `route_video`, attention, layout back. On the CPU.

    Args:
        q: queries as of `route_video`, but in the model's own order; outputs lie in that order too.
        k: keys, likewise.
        v: values, as k.
        segments: as of `route_video`.
        layout: the order in which blocks cut the video's tokens, as of `gather_tokens`: of KV heads. Costs memory for
            the reordered tensors of some heads at a time, none where a head is in raster order.
        layer: with a LayoutTable, as of `gather_tokens`.
        head_begin: with a LayoutTable, as of `gather_tokens`; of KV heads.
        router: as of `route_video`.
        budget: as of `route_video`; 1 = all blocks, the result of dense attention.
        num_routed: as of `route_video`.
        forced_inside_budget: as of `route_video`.
        seed: as of `route_video`.
        softmax_scale: as of `attend`.
        q_block_size: as of `route_video`.
        kv_block_size: as of `route_video`.
        out: as of `attend`.
        lse: as of `attend`.
        return_lse: as of `attend`.
        arithmetic: as of `attend`; blocks are chosen by q and k as they are stored.
        num_threads: as of `attend`.
        isa: as of `attend`.
        progress: as of `attend`; the bar counts KV heads.

    Returns:
        As of `attend`.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    call = _core.VideoCall(q, k, v, segments, softmax_scale, q_block_size, kv_block_size)
    out, lse = outputs(q, out, lse, return_lse)
    with progress_bar(progress, "video_attention") as counters:
        call.attend(layout, layer, head_begin, router, budget, num_routed, forced_inside_budget, seed, out, lse,
                    arithmetic, num_threads, isa, counters)
    return (out, lse) if return_lse else out


def _items(argument: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{argument}: got {type(values).__name__}, expected a list or a tuple")
    return list(values)


def video_mass(
    q: Array,
    k: Array,
    *,
    segments: str,
    layouts: Sequence[Layout] = ("raster",),
    layer: int | None = None,
    head_begin: int = 0,
    routers: Sequence[VideoRouter] = ("mean_pool",),
    budgets: Sequence[float] = (0.15,),
    forced_inside_budget: bool = False,
    num_sampled: int | None = 48,
    seed: int = 0,
    softmax_scale: float | None = None,
    q_block_size: int = 128,
    kv_block_size: int = 64,
    num_threads: int | None = None,
    isa: Isa = "best",
    progress: bool = False,
) -> list[VideoMass]:
    """Measures what `video_attention` would keep of the dense softmax, from queries and keys alone. On the CPU.

    For each layout the scores of the sampled queries against all keys are computed once, whatever the number of routers
    and budgets. As memory it takes q and k of some heads, at most 256 MiB where a head is smaller.

    Args:
        q: queries as of `video_attention`.
        k: keys, likewise.
        segments: as of `route_video`.
        layouts: a list of layouts as `video_attention` takes them.
        layer: with a LayoutTable among the layouts, as of `gather_tokens`.
        head_begin: likewise.
        routers: a list of them, as of `route_video`.
        budgets: a list of them, as of `route_video`.
        forced_inside_budget: as of `route_video`.
        num_sampled: blocks of the video's queries that are measured of each head, evenly spread; None = all.
        seed: as of `route_video`.
        softmax_scale: as of `attend`.
        q_block_size: as of `route_video`.
        kv_block_size: as of `route_video`.
        num_threads: as of `attend`.
        isa: as of `attend`.
        progress: as of `attend`; the bar counts KV heads of all layouts.

    Returns:
        A `VideoMass` for each layout, router and budget: budgets change fastest, layouts slowest.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    layouts, routers, budgets = (_items(name, values) for name, values in
                                 (("layouts", layouts), ("routers", routers), ("budgets", budgets)))
    call = _core.VideoCall(q, k, None, segments, softmax_scale, q_block_size, kv_block_size)
    with progress_bar(progress, "video_mass") as counters:
        rows = call.mass(layouts, layer, head_begin, routers, budgets, forced_inside_budget, seed, num_sampled,
                         num_threads, isa, counters)
    masses = []
    for (layout, router, budget), row in zip(product(layouts, routers, budgets), rows, strict=True):
        for name in ("mass", "floor", "ceiling", "recall"):
            row[name] = np.array(row[name])
        masses.append(VideoMass(layout=layout, router=router, budget=float(budget), **row))
    return masses


def layout_search(
    calls: Iterable[tuple[int, Array, Array]],
    *,
    segments: str,
    menu: Sequence[str] | None = None,
    budget: float = 0.15,
    forced_inside_budget: bool = False,
    num_sampled: int | None = 16,
    softmax_scale: float | None = None,
    q_block_size: int = 128,
    kv_block_size: int = 64,
    num_threads: int | None = None,
    isa: Isa = "best",
    progress: bool = False,
) -> tuple[LayoutTable, dict[str, Any]]:
    """Finds for each (layer, head) of a model the box whose "mean_pool" route keeps the most mass. On the CPU.

    The mass is the mean over the calls of the layer; ties go to the earlier entry of the menu. Layers below the last
    one that no call is of take the best box overall. The command `tilesieve layout-search` does the same with files.

    Args:
        calls: (layer, q, k) of captured calls, q and k as of `video_attention`, one after the other, so that a generator
            may load them as they are wanted. Several of a layer, such as of several steps, are averaged. All have as
            many KV heads.
        segments: of all calls, as of `route_video`; its videos have one grid.
        menu: the boxes that are tried, as texts; None = "raster" and `box_menu` of boxes of kv_block_size tokens.
        budget: as of `route_video`.
        forced_inside_budget: as of `route_video`.
        num_sampled: as of `video_mass`.
        softmax_scale: as of `attend`.
        q_block_size: as of `route_video`.
        kv_block_size: as of `route_video`.
        num_threads: as of `attend`.
        isa: as of `attend`.
        progress: as of `attend`; a bar for each call.

    Returns:
        (table, report): a `LayoutTable`, and a dict with chosen_mass, the table's mean over captured layers and heads;
        menu, a list of dicts with layout, mass (of that box alone, the same mean) and num_chosen ((layer, head) pairs);
        layers, a list of dicts with layer, boxes [num_kv_heads] and mass [num_kv_heads], those of the boxes chosen.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    if not isinstance(calls, Iterable):
        raise TypeError(f"calls: got {type(calls).__name__}, expected (layer, q, k) one after the other")
    boxes = _core.search_menu(segments, menu, kv_block_size)
    video_budget(segments=segments, budget=budget, forced_inside_budget=forced_inside_budget,
                 q_block_size=q_block_size, kv_block_size=kv_block_size)  # which says what is wrong with them
    masses: list[tuple[int, list[Any]]] = []
    for place, one in enumerate(calls):
        if not isinstance(one, tuple | list) or len(one) != 3:
            raise TypeError(f"calls[{place}]: got {type(one).__name__}, expected (layer, q, k)")
        layer, q, k = one
        try:
            call = _core.VideoCall(q, k, None, segments, softmax_scale, q_block_size, kv_block_size)
            with progress_bar(progress, f"layout_search: layer {layer}") as counters:
                rows = call.mass(boxes, None, 0, ("mean_pool",), (budget,), forced_inside_budget, 0, num_sampled,
                                 num_threads, isa, counters)
        except (_core.Error, TypeError) as error:
            raise type(error)(f"calls[{place}]: {error}") from None
        masses.append((layer, [row["mass"] for row in rows]))
        try:  # what does not fit the others is refused now, not after the last
            _core.search_layouts(segments, boxes, [masses[0], masses[-1]])
        except (_core.Error, TypeError) as error:
            raise type(error)(str(error).replace("calls[1]", f"calls[{place}]")) from None
    report = _core.search_layouts(segments, boxes, masses)
    return LayoutTable(**report.pop("table")), report
