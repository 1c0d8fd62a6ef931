# SPDX-License-Identifier: Apache-2.0
"""`video_attention`, `route_video`, `route_veda` and `video_mass` on a Hopper GPU, and the tables of tiles that calls
share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from ._arrays import Array, new_array, on_cuda, on_host, outputs
from ._prefill import given, handle_of, refuse_cpu_arguments, refuse_other_libraries, require_with_stream

if TYPE_CHECKING:
    from ._layout import Layout


class VideoTables:
    """Which tokens lie in which tile of a video's sequence, in the memory of a CUDA device: made once for many calls.

    For `video_attention`, `route_video` and `route_veda` on a Hopper GPU. Of each layer whose heads have a layout of
    their own there is one, for all of its steps, batches and replays of a graph.

    Attributes:
        segments: as they were given.
        num_tokens: of the sequence.
        num_kv_heads: heads that have a layout.
        num_q_tiles: tiles of 128 queries; they begin anew with each segment.
        num_kv_tiles: tiles of 64 keys, likewise.
    """

    def __init__(
        self,
        like: Array,
        *,
        segments: str,
        layout: Layout = "raster",
        layer: int | None = None,
        head_begin: int = 0,
        num_kv_heads: int | None = None,
    ) -> None:
        """Makes them, copies them to the device and waits for it. Cannot be captured in a graph.

        Args:
            like: an array of PyTorch or CuPy on the device where they are to lie, in memory of its library: q, say.
            segments: as of `route_video`.
            layout: as of `video_attention`.
            layer: with a LayoutTable, as of `gather_tokens`.
            head_begin: with a LayoutTable, as of `gather_tokens`; of KV heads.
            num_kv_heads: of the calls; None = all that a list of boxes has, or a LayoutTable from head_begin.

        Raises:
            ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
            TypeError: an argument of another type, by name.
        """
        self._place(like, segments, _core.VideoTables(segments, layout, layer, head_begin, num_kv_heads))

    @classmethod
    def veda(
        cls,
        like: Array,
        *,
        segments: str,
        boxes: Sequence[str],
        keep_ratio: float | None = None,
        tiles_per_row: float | None = None,
    ) -> VideoTables:
        """Of Veda's tiles, with what each of them gets: makes them, copies them to the device and waits for it.

        For `route_veda`, and `video_attention` with its ids. A tile of queries is one of Veda's (`veda_tiling`), its
        keys are one tile of 64 or two. Heads of other boxes may have other numbers of tiles: num_q_tiles and
        num_kv_tiles are of those that have most. Cannot be captured in a graph.

        Args:
            like: as of `VideoTables`.
            segments: as of `veda_sequence`.
            boxes: of each head's tiles, as of `veda_tiling`, such as those of `VedaPlan.boxes`.
            keep_ratio: as of `veda_budgets`, as the predictor has it.
            tiles_per_row: as of `veda_budgets`.

        Raises:
            ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
            TypeError: an argument of another type, by name.
        """
        tables = cls.__new__(cls)
        tables._place(like, segments, _core.VideoTables.of_veda(segments, boxes, keep_ratio, tiles_per_row))
        return tables

    def _place(self, like: Any, segments: str, made: Any) -> None:
        """Copies the module's object to the device of `like`."""
        if not on_cuda(like):
            raise _core.Error("like: lies on the CPU, expected an array on a CUDA device")
        refuse_other_libraries("like", like)
        self._core = made
        self._core.upload(new_array(like, (made.bytes,), "uint8", "like"))
        self.segments = segments
        self.num_tokens: int = self._core.num_tokens
        self.num_kv_heads: int = self._core.num_kv_heads
        self.num_q_tiles: int = self._core.num_q_tiles
        self.num_kv_tiles: int = self._core.num_kv_tiles

    def __repr__(self) -> str:
        return f"VideoTables(segments={self.segments!r}, num_kv_heads={self.num_kv_heads})"


def _core_of(tables: Any, **beside: Any) -> Any:
    """The module's object of tables, which are all that says what `beside` does; None where there are no tables."""
    if tables is None:
        if beside["segments"] is None:
            raise TypeError("segments: got None, expected str, or tables instead")
        return None
    if not isinstance(tables, VideoTables):
        raise TypeError(f"tables: got {type(tables).__name__}, expected VideoTables or None")
    for name, got in beside.items():
        if got is not None:
            raise _core.Error(f"{name}: got one beside tables, which were made of theirs")
    return tables._core


def _upload_tables(call: Any, q: Any) -> None:
    """Copies tables that the call has made to its device; those that were given lie there."""
    if call.tables_bytes > 0:
        call.upload_tables(new_array(q, (call.tables_bytes,), "uint8", "tables"))


def route_video_on_cuda(
    q: Any, k: Any, *, segments: Any, tables: Any, tensor_layout: Any, router: Any, budget: Any, num_routed: Any,
    forced_inside_budget: Any, seed: Any, softmax_scale: Any, q_block_size: Any, kv_block_size: Any, num_threads: Any,
    isa: Any, progress: Any,
) -> Any:
    """`route_video` where q lies on a CUDA device."""
    refuse_cpu_arguments(num_threads, isa, progress)
    call = _core.VideoRouteCall(q, k, tensor_layout, _core_of(tables, segments=segments), segments, router, budget,
                                num_routed, forced_inside_budget, seed, softmax_scale, q_block_size, kv_block_size)
    workspace_bytes, shape = call.workspace_bytes, tuple(call.shape)
    refuse_other_libraries("q", q)
    _upload_tables(call, q)
    ids = new_array(q, shape, "int32", "q")
    call.run(ids, new_array(q, (workspace_bytes,), "uint8", "q"))
    return ids


def route_veda_on_cuda(
    q: Any, k: Any, *, segments: Any, box: Any, tables: Any, tensor_layout: Any, proj_q: Any, proj_k: Any,
    proj_q_scale: Any, proj_k_scale: Any, keep_ratio: Any, tiles_per_row: Any, head_begin: Any, num_threads: Any,
    isa: Any, progress: Any,
) -> Any:
    """`route_veda` where q lies on a CUDA device."""
    refuse_cpu_arguments(num_threads, isa, progress)
    if tables is None:
        raise _core.Error("tables: got None, needed where q lies on a CUDA device: of VideoTables.veda")
    core = _core_of(tables, segments=segments, box=box, keep_ratio=keep_ratio, tiles_per_row=tiles_per_row)
    call = _core.VedaRouteCall(q, k, tensor_layout, core, proj_q, proj_k, proj_q_scale, proj_k_scale, head_begin)
    refuse_other_libraries("q", q)
    ids = new_array(q, tuple(call.shape), "int32", "q")
    call.run(ids, new_array(q, (call.workspace_bytes,), "uint8", "q"))
    return ids


def attend_video_on_cuda(
    q: Any, k: Any, v: Any, *, segments: Any, layout: Any, layer: Any, head_begin: Any, tables: Any, tensor_layout: Any,
    block_index: Any, router: Any, budget: Any, num_routed: Any, forced_inside_budget: Any, seed: Any,
    softmax_scale: Any, q_block_size: Any, kv_block_size: Any, out: Any, lse: Any, return_lse: bool, workspace: Any,
    arithmetic: Any, groups: Any, smooth_k: Any, num_threads: Any, isa: Any, stream: Any, progress: Any,
) -> Any:
    """`video_attention` where q lies on a CUDA device."""
    refuse_cpu_arguments(num_threads, isa, progress)
    handle = handle_of(stream)
    require_with_stream(handle, out=out, workspace=workspace, tables=tables, lse=lse if return_lse else out)
    core = _core_of(tables, segments=segments, layout=given(layout, "raster"), layer=layer,
                    head_begin=given(head_begin, 0))
    out, lse = outputs(q, out, lse, return_lse)
    call = _core.VideoAttendCall(q, k, v, block_index, out, lse, tensor_layout, core, segments, layout, layer,
                                 head_begin, router, budget, num_routed, forced_inside_budget, seed, softmax_scale,
                                 q_block_size, kv_block_size, arithmetic, groups, smooth_k, handle)
    workspace_bytes = call.workspace_bytes  # which says what does not fit
    if workspace is None:
        workspace = new_array(q, (workspace_bytes,), "uint8", "workspace")
    call.take_workspace(workspace)
    _upload_tables(call, q)
    call.run()
    return (out, lse) if return_lse else out


def measure_video_on_cuda(
    q: Any, k: Any, *, segments: Any, layouts: list[Any], layer: Any, head_begin: Any, routers: Any, budgets: Any,
    forced_inside_budget: Any, num_sampled: Any, seed: Any, softmax_scale: Any, q_block_size: Any, kv_block_size: Any,
    num_threads: Any, isa: Any, progress: Any,
) -> list[dict[str, Any]]:
    """`video_mass` where q lies on a CUDA device: the fields of each row that the library fills."""
    refuse_cpu_arguments(num_threads, isa, progress)
    has_table = any(hasattr(layout, "box_of_head") for layout in layouts)
    calls = []
    for place, layout in enumerate(layouts):
        is_beside = has_table and not hasattr(layout, "box_of_head")  # a LayoutTable, whose place in the model it is
        calls.append(_core.VideoMassCall(q, k, segments, f"layouts[{place}]", layout, None if is_beside else layer,
                                         0 if is_beside else head_begin, routers, budgets, forced_inside_budget, seed,
                                         num_sampled, softmax_scale, q_block_size, kv_block_size))
    refuse_other_libraries("q", q)
    rows: list[dict[str, Any]] = []
    for call in calls:
        _upload_tables(call, q)
        masses = new_array(q, tuple(call.shape_of_masses), "float32", "q")
        call.measure(masses)
        workspace = new_array(q, (call.workspace_bytes,), "uint8", "q")
        routes = []
        for place, shape in enumerate(call.shapes_of_ids):
            ids = new_array(q, tuple(shape), "int32", "q")
            call.route(place, ids, workspace)
            routes.append(on_host(ids))
        rows += call.judge(on_host(masses), routes)
    return rows
