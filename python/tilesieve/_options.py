# SPDX-License-Identifier: Apache-2.0
"""The keyword arguments that calls share, under one name and one meaning everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict

from ._arrays import Array

if TYPE_CHECKING:
    from ._layout import Layout
    from ._video import DensePolicy
    from ._video_cuda import VideoTables

Arithmetic = Literal["storage", "int8"]
LoopOrder = Literal["auto", "q_outer", "kv_outer"]
Router = Literal["index", "qk_max", "mean_pool", "oracle", "random"]
VideoRouter = Literal["mean_pool", "oracle", "random"]
TensorLayout = Literal["nhd", "hnd"]
SageGroups = Literal["per_thread", "per_warp"]
Isa = Literal["best", "portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
Lengths = Array | Sequence[int]
Scale = Array | float


class Sizes(TypedDict, total=False):
    """What the shapes of the arrays do not say of a problem."""

    causal: bool
    softmax_scale: float | None
    kv_block_size: int | None
    cu_seqlens_q: Lengths | None
    cu_seqlens_kv: Lengths | None
    kv_lens: Lengths | None
    block_table: Array | None


class KeyScales(TypedDict, total=False):
    """Factors of stored queries and keys."""

    q_scale: Scale | None
    k_scale: Scale | None


class ValueScale(TypedDict, total=False):
    """Factor of stored values."""

    v_scale: Scale | None


class Threads(TypedDict, total=False):
    """How a call runs on the CPU, and whether it says how far it has come."""

    num_threads: int | None
    isa: Isa
    progress: bool


class Planning(TypedDict, total=False):
    """How a call is planned."""

    loop_order: LoopOrder
    workspace_limit: int | None


class Computing(TypedDict, total=False):
    """What a call multiplies."""

    arithmetic: Arithmetic


class Outputs(TypedDict, total=False):
    """Where a call writes."""

    out: Array | None
    lse: Array | None
    workspace: Array | None


class Device(TypedDict, total=False):
    """How a call runs on a CUDA device."""

    max_kv_blocks: int | None
    tile_tokens: int | None
    stream: Any


class Forced(TypedDict, total=False):
    """Blocks that are chosen whatever their score."""

    local_blocks: int
    init_blocks: int


class Choosing(Forced, total=False):
    """How blocks are chosen."""

    router: Router | None
    index_q: Array | None
    index_k: Array | None
    seed: int


class TopK(TypedDict, total=False):
    """How many blocks are chosen."""

    top_k: int


class Scoring(Sizes, KeyScales, Threads, Choosing, total=False):
    """The keyword arguments of route_scores."""


class Routing(Scoring, TopK, total=False):
    """The keyword arguments of route."""


class Measuring(Sizes, KeyScales, Threads, Forced, total=False):
    """The keyword arguments of mass."""

    sample_every: int


class Attending(Sizes, KeyScales, ValueScale, Threads, Outputs, Planning, Computing, Device, total=False):
    """The keyword arguments of attend."""


class Prefilling(Attending, Choosing, TopK, total=False):
    """The keyword arguments of sparse_prefill."""

    dense_up_to: int | None


class DenseAttending(TypedDict, total=False):
    """The keyword arguments of dense_attention."""

    tensor_layout: TensorLayout
    causal: bool
    softmax_scale: float | None
    out: Array | None
    lse: Array | None
    stream: Any


class Running(KeyScales, ValueScale, Outputs, total=False):
    """The keyword arguments of Plan.run."""

    block_table: Array | None
    num_threads: int | None
    isa: Isa | None
    progress: bool


class VideoChoosing(Threads, total=False):
    """How blocks of a video are chosen, whatever says what its tokens are."""

    tensor_layout: TensorLayout
    router: VideoRouter
    budget: float
    num_routed: int | None
    forced_inside_budget: bool
    seed: int
    softmax_scale: float | None
    q_block_size: int
    kv_block_size: int


class VideoRouting(VideoChoosing, total=False):
    """The keyword arguments of route_video by segments."""

    segments: Required[str]


class VideoRoutingInTables(VideoChoosing, total=False):
    """The keyword arguments of route_video with tables."""

    tables: Required[VideoTables]


class VedaScoring(Threads, total=False):
    """What route_veda scores by, and how it runs."""

    proj_q: Required[Array]
    proj_k: Required[Array]
    proj_q_scale: Array | None
    proj_k_scale: Array | None
    head_begin: int


class VedaRouting(VedaScoring, total=False):
    """The keyword arguments of route_veda by segments."""

    segments: Required[str]
    box: Required[str]
    keep_ratio: float | None
    tiles_per_row: float | None


class VedaRoutingInTables(VedaScoring, total=False):
    """The keyword arguments of route_veda with tables."""

    tables: Required[VideoTables]
    tensor_layout: TensorLayout


class VideoComputing(Outputs, total=False):
    """How chosen blocks of a video are attended to, and of which call of a model."""

    policy: DensePolicy | None
    step: int | None
    layer: int | None
    block_index: Array | None
    arithmetic: Arithmetic | None
    groups: SageGroups
    smooth_k: bool
    stream: Any


class VideoAttending(VideoRouting, VideoComputing, total=False):
    """The keyword arguments of video_attention by segments."""

    layout: Layout
    head_begin: int


class VideoAttendingInTables(VideoRoutingInTables, VideoComputing, total=False):
    """The keyword arguments of video_attention with tables."""
