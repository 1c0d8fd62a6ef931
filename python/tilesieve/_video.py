# SPDX-License-Identifier: Apache-2.0
"""Attention of video models: blocks chosen by a budget, in a layout, and what that would keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt

from . import _core
from ._arrays import A, Array, in_library_of, on_cuda, outputs
from ._attend import refuse_cuda_arguments
from ._layout import Layout, LayoutTable
from ._options import (
    Arithmetic,
    Isa,
    SageGroups,
    TensorLayout,
    VideoAttending,
    VideoAttendingInTables,
    VideoRouter,
    VideoRouting,
    VideoRoutingInTables,
)
from ._prefill import given
from ._progress import progress_bar
from ._video_cuda import VideoTables, attend_video_on_cuda, measure_video_on_cuda, route_video_on_cuda


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
        num_measured: blocks of queries measured of each head, of all sequences.
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
@overload
def route_video(q: A, k: Array, **options: Unpack[VideoRoutingInTables]) -> A: ...
def route_video(
    q: Array,
    k: Array,
    *,
    segments: str | None = None,
    tables: VideoTables | None = None,
    tensor_layout: TensorLayout = "nhd",
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
    """Chooses the blocks of keys that each block of queries of a video model attends to.

    On the CPU, or on a Hopper GPU where q lies there: its choice is the CPU's but for the rounding of scores in f32.
    What a GPU takes is marked CUDA below. Nothing waits for it, and with tables the call can be captured in a graph.

    Blocks begin anew with each segment, so that none spans two; the last of a segment may be short. Blocks of queries
    that are not video attend to all. A block of the video's queries attends to all blocks of keys that are not video
    and to those that hold its own tokens, which are forced, and to the best of the video's others.

    Args:
        q: queries [num_tokens, num_q_heads, head_dim] of one sequence, in f32, bf16, f16 or e4m3, in the order in which
            blocks are to cut them, see `gather_tokens`. head_dim is a multiple of 8 up to 256. CUDA: bf16 or f16,
            head_dim up to 128, in the model's own order, with one dimension of sequences in front or without.
        k: keys [num_tokens, num_kv_heads, head_dim], likewise. num_kv_heads divides num_q_heads.
        segments: what the tokens are, in their order: "text:594,audio:414,video:37x24x42" of kinds text, conditioning,
            reference, audio and video with their tokens, of a video latent frames x rows x tokens of a row, or as many
            as they are where no layout is needed. See `h3_segments`. None with tables.
        tables: CUDA: `VideoTables` of the sequence, in whose layout blocks are cut; None = they are made in each call
            from segments, in raster order, which waits for the device and cannot be captured.
        tensor_layout: CUDA: "nhd", or "hnd" where q and k are [num_heads, num_tokens, head_dim].
        router: how a block is scored. "mean_pool": mean query of the block (and of the heads of a group) · mean key of
            the block, in f32; "oracle": the share of the dense softmax that lies on it, mean over the block's queries,
            which costs as much as attending to all; "random": a seeded number. CUDA: "mean_pool".
        budget: 0 to 1. Without forced_inside_budget ceil(budget · the video's blocks) are chosen beside the forced ones.
        num_routed: so many are chosen beside the forced ones, whatever the budget; None = by the budget.
        forced_inside_budget: ceil(budget · all blocks) are kept, the forced ones among them.
        seed: of the router "random", 0 or more.
        softmax_scale: as of `attend`; the oracle's.
        q_block_size: queries of one block, 1 to 1,024. CUDA: 128.
        kv_block_size: keys of one block, a multiple of 8 up to 1,024. CUDA: 64.
        num_threads: as of `attend`.
        isa: as of `attend`.
        progress: as of `attend`.

    Returns:
        i32 [num_kv_heads, blocks of queries, capacity]: ascending ids of blocks of keys, counted over the whole
        sequence, then -1. Ties go to the lower id, NaN is chosen last. Of PyTorch where q is, else of NumPy. CUDA: of
        PyTorch or CuPy as q, with the dimension of sequences in front where q has one.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    if on_cuda(q):
        return route_video_on_cuda(
            q, k, segments=segments, tables=tables, tensor_layout=tensor_layout, router=router, budget=budget,
            num_routed=num_routed, forced_inside_budget=forced_inside_budget, seed=seed, softmax_scale=softmax_scale,
            q_block_size=q_block_size, kv_block_size=kv_block_size, num_threads=num_threads, isa=isa, progress=progress)
    refuse_cuda_arguments(tables=tables, tensor_layout=given(tensor_layout, "nhd"))
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
@overload
def video_attention(q: A, k: Array, v: Array, *, return_lse: Literal[False] = False,
                    **options: Unpack[VideoAttendingInTables]) -> A: ...
@overload
def video_attention(q: A, k: Array, v: Array, *, return_lse: Literal[True],
                    **options: Unpack[VideoAttendingInTables]) -> tuple[A, A]: ...
@overload
def video_attention(q: A, k: Array, v: Array, *, return_lse: bool,
                    **options: Unpack[VideoAttendingInTables]) -> A | tuple[A, A]: ...
def video_attention(
    q: Any,
    k: Array,
    v: Array,
    *,
    segments: str | None = None,
    layout: Layout = "raster",
    layer: int | None = None,
    head_begin: int = 0,
    tables: VideoTables | None = None,
    tensor_layout: TensorLayout = "nhd",
    policy: DensePolicy | None = None,
    step: int | None = None,
    block_index: Array | None = None,
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
    workspace: Array | None = None,
    arithmetic: Arithmetic | None = None,
    groups: SageGroups = "per_thread",
    smooth_k: bool = True,
    num_threads: int | None = None,
    isa: Isa = "best",
    stream: Any = None,
    progress: bool = False,
) -> Any:
    """Sparse attention of a video model in one call: layout, `route_video`, attention, layout back.

    On the CPU, or on a Hopper GPU where q lies there. What a GPU takes is marked CUDA below. There nothing waits for
    it, and with tables the call can be captured in a graph. The arithmetic differs by default: as tensors are stored
    on the CPU, in 8 bits on a GPU.

    Args:
        q: queries as of `route_video`, but in the model's own order; outputs lie in that order too.
        k: keys, likewise.
        v: values, as k.
        segments: as of `route_video`.
        layout: the order in which blocks cut the video's tokens, as of `gather_tokens`: of KV heads. Costs memory for
            the reordered tensors of some heads at a time, none where a head is in raster order.
        layer: of the model, from 0; with a LayoutTable, as of `gather_tokens`, and with a policy.
        head_begin: with a LayoutTable, as of `gather_tokens`; of KV heads.
        tables: CUDA: `VideoTables` made of segments and layout, which are then not given, nor is head_begin; None = they
            are made in each call, which waits for the device and cannot be captured.
        tensor_layout: CUDA: as of `route_video`, of v, out and lse too.
        policy: which calls stay dense: a call of those attends to all blocks, whatever the budget and num_routed.
        step: of the denoising, from 0, with a policy.
        block_index: CUDA: lists to attend to, as `route_video` or `route_veda` returns them of the same tables, instead of
            choosing; None = to choose. Ids may come in any order, with -1 and ids that no block has among them; one that
            comes twice counts once.
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
        workspace: CUDA: uint8 on the device to work in; None = from q's library. The error of one that is too small
            says what is needed.
        arithmetic: None = "storage" on the CPU, "int8" on CUDA. On the CPU as of `attend`; CUDA: "int8" is SageAttention
            2's, of bf16 or f16, with queries and keys in INT8, values in E4M3; "storage" is bf16. Blocks are chosen by q
            and k as they are stored.
        groups: CUDA, "int8": whose numbers share an INT8 scale, "per_thread" or "per_warp".
        smooth_k: CUDA, "int8": whether the mean key is taken off the keys.
        num_threads: as of `attend`.
        isa: as of `attend`.
        stream: CUDA: as of `attend`; with one, out, workspace, tables and a wanted lse are given.
        progress: as of `attend`; the bar counts KV heads.

    Returns:
        As of `attend`.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    if _is_dense(policy, step, layer, block_index):
        budget, num_routed = 1, None
    if policy is not None and not hasattr(layout, "box_of_head"):
        layer = None  # it was the policy's
    if on_cuda(q):
        return attend_video_on_cuda(
            q, k, v, segments=segments, layout=layout, layer=layer, head_begin=head_begin, tables=tables,
            tensor_layout=tensor_layout, block_index=block_index, router=router, budget=budget, num_routed=num_routed,
            forced_inside_budget=forced_inside_budget, seed=seed, softmax_scale=softmax_scale,
            q_block_size=q_block_size, kv_block_size=kv_block_size, out=out, lse=lse, return_lse=return_lse,
            workspace=workspace, arithmetic="int8" if arithmetic is None else arithmetic, groups=groups,
            smooth_k=smooth_k, num_threads=num_threads, isa=isa, stream=stream, progress=progress)
    refuse_cuda_arguments(tables=tables, tensor_layout=given(tensor_layout, "nhd"), block_index=block_index,
                          workspace=workspace, groups=given(groups, "per_thread"), smooth_k=given(smooth_k, True),
                          stream=stream)
    call = _core.VideoCall(q, k, v, segments, softmax_scale, q_block_size, kv_block_size)
    out, lse = outputs(q, out, lse, return_lse)
    with progress_bar(progress, "video_attention") as counters:
        call.attend(layout, layer, head_begin, router, budget, num_routed, forced_inside_budget, seed, out, lse,
                    "storage" if arithmetic is None else arithmetic, num_threads, isa, counters)
    return (out, lse) if return_lse else out


def _is_dense(policy: Any, step: Any, layer: Any, block_index: Any) -> bool:
    """Whether a policy wants the call dense; without one it does not."""
    if policy is None:
        if step is not None:
            raise _core.Error("step: got one without a policy that would read it")
        return False
    if not isinstance(policy, DensePolicy):
        raise TypeError(f"policy: got {type(policy).__name__}, expected DensePolicy or None")
    for name, got in (("step", step), ("layer", layer)):
        if got is None:
            raise _core.Error(f"{name}: got None, needed with a policy")
    if block_index is not None:
        raise _core.Error("block_index: got one beside a policy, whose dense calls have none")
    return policy.is_dense(step, layer)


def _items(argument: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{argument}: got {type(values).__name__}, expected a list or a tuple")
    return list(values)


def _measured(
    q: Any, k: Any, *, segments: Any, layouts: list[Any], layer: Any, head_begin: Any, routers: Any, budgets: Any,
    forced_inside_budget: Any, num_sampled: Any, seed: Any, softmax_scale: Any, q_block_size: Any, kv_block_size: Any,
    num_threads: Any, isa: Any, progress: bool, title: str,
) -> list[dict[str, Any]]:
    """What the library says of each layout, router and budget, where q lies."""
    if on_cuda(q):
        return measure_video_on_cuda(
            q, k, segments=segments, layouts=layouts, layer=layer, head_begin=head_begin, routers=routers,
            budgets=budgets, forced_inside_budget=forced_inside_budget, num_sampled=num_sampled, seed=seed,
            softmax_scale=softmax_scale, q_block_size=q_block_size, kv_block_size=kv_block_size,
            num_threads=num_threads, isa=isa, progress=progress)
    call = _core.VideoCall(q, k, None, segments, softmax_scale, q_block_size, kv_block_size)
    with progress_bar(progress, title) as counters:
        rows: list[dict[str, Any]] = call.mass(layouts, layer, head_begin, routers, budgets, forced_inside_budget, seed,
                                               num_sampled, num_threads, isa, counters)
    return rows


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
    """Measures what `video_attention` would keep of the dense softmax, from queries and keys alone.

    On the CPU, or on a Hopper GPU where q lies there: its masses and its choice are the CPU's but for the rounding of
    f32. What a GPU takes is marked CUDA below. It waits for the device, and cannot be captured in a graph.

    For each layout the scores of the sampled queries against all keys are computed once, whatever the number of routers
    and budgets. As memory it takes q and k of some heads, at most 256 MiB where a head is smaller; CUDA: the masses of
    one layout and the ids of one route.

    Args:
        q: queries as of `video_attention`. CUDA: of several sequences too, whose means are taken together.
        k: keys, likewise.
        segments: as of `route_video`.
        layouts: a list of layouts as `video_attention` takes them.
        layer: with a LayoutTable among the layouts, as of `gather_tokens`.
        head_begin: likewise.
        routers: a list of them, as of `route_video`.
        budgets: a list of them, as of `route_video`.
        forced_inside_budget: as of `route_video`.
        num_sampled: blocks of the video's queries that are measured of each sequence and head, evenly spread; None =
            all.
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
    rows = _measured(q, k, segments=segments, layouts=layouts, layer=layer, head_begin=head_begin, routers=routers,
                     budgets=budgets, forced_inside_budget=forced_inside_budget, num_sampled=num_sampled, seed=seed,
                     softmax_scale=softmax_scale, q_block_size=q_block_size, kv_block_size=kv_block_size,
                     num_threads=num_threads, isa=isa, progress=progress, title="video_mass")
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
    """Finds for each (layer, head) of a model the box whose "mean_pool" route keeps the most mass.

    Each call is measured where its q lies, on the CPU or on a Hopper GPU, as by `video_mass`.

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
            rows = _measured(q, k, segments=segments, layouts=boxes, layer=None, head_begin=0, routers=("mean_pool",),
                             budgets=(budget,), forced_inside_budget=forced_inside_budget, num_sampled=num_sampled,
                             seed=0, softmax_scale=softmax_scale, q_block_size=q_block_size,
                             kv_block_size=kv_block_size, num_threads=num_threads, isa=isa, progress=progress,
                             title=f"layout_search: layer {layer}")
        except (_core.Error, TypeError) as error:
            raise type(error)(f"calls[{place}]: {error}") from None
        masses.append((layer, [row["mass"] for row in rows]))
        try:  # what does not fit the others is refused now, not after the last
            _core.search_layouts(segments, boxes, [masses[0], masses[-1]])
        except (_core.Error, TypeError) as error:
            raise type(error)(str(error).replace("calls[1]", f"calls[{place}]")) from None
    report = _core.search_layouts(segments, boxes, masses)
    return LayoutTable(**report.pop("table")), report
