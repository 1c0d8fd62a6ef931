# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a video a block of queries reads: from the numbers of a route to marks on the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteView:
    """What one block of the video's queries reads. Of `view_route` and `view_veda`.

    Attributes:
        name: of the route, as a reader is to see it.
        source: bool [frames, rows, columns], the tokens of the block of queries.
        read: bool [frames, rows, columns], the tokens of the blocks of keys that it reads.
        num_read: blocks of the video's keys that it reads.
        num_blocks: blocks of the video's keys.
    """

    name: str
    source: Marks
    read: Marks
    num_read: int
    num_blocks: int

    def share_of_frames(self) -> npt.NDArray[np.float64]:
        """f64 [frames], the share of each frame's tokens that is read."""
        return np.asarray(self.read.mean(axis=(1, 2)), np.float64)


def _video_segment(segments: str) -> tuple[list[int], int, tuple[int, int, int]]:
    """Tokens of each segment, the place of the video among them, its grid."""
    sizes: list[int] = []
    videos: list[tuple[int, tuple[int, int, int]]] = []
    for place, segment in enumerate(segments.split(",")):
        kind, _, size = segment.strip().partition(":")
        try:
            axes = [int(axis) for axis in size.split("x")]
        except ValueError:
            raise ValueError(f"segments: got {segment!r}, expected such as 'text:594' or 'video:37x24x42'") from None
        if kind == "video" and len(axes) == 3:
            videos.append((place, (axes[0], axes[1], axes[2])))
        sizes.append(int(np.prod(axes)))
    if len(videos) != 1:
        raise ValueError(f"segments: got {segments!r} with {len(videos)} videos that have a grid, expected one")
    return sizes, *videos[0]


def _number_of_token(token: Sequence[int], grid: tuple[int, int, int]) -> int:
    if len(token) != 3 or not all(0 <= at < axis for at, axis in zip(token, grid, strict=True)):
        raise ValueError(f"token: got {tuple(token)}, expected (frame, row, column) inside {grid}")
    return int(np.ravel_multi_index(tuple(token), grid))


def _view(name: str, block_index: Indices | None, grid: tuple[int, int, int], order: Indices, token: Sequence[int],
          q_ends: Indices, kv_ends: Indices, q_before: int, kv_before: int) -> RouteView:
    """`ends` are the slots of the video at which its blocks end, `before` the blocks of the sequence before them."""
    num_tokens = int(np.prod(grid))
    if sorted(np.asarray(order).tolist()) != list(range(num_tokens)):
        raise ValueError(f"order: got {len(order)} slots, expected each of the {num_tokens} tokens of {grid} once")
    slot = int(np.flatnonzero(order == _number_of_token(token, grid))[0])
    block = int(np.searchsorted(q_ends, slot, side="right"))

    def marks(ends: Indices, blocks: Sequence[int]) -> Marks:
        marked = np.zeros(len(order), bool)
        for one in blocks:
            marked[order[(ends[one - 1] if one else 0):ends[one]]] = True
        return marked.reshape(grid)

    if block_index is None:
        blocks = list(range(len(kv_ends)))
    else:
        if block_index.ndim != 2 or len(block_index) < q_before + len(q_ends):
            raise ValueError(f"block_index: got shape {block_index.shape}, expected one head's [blocks of queries, "
                             f"capacity] with at least {q_before + len(q_ends)} blocks of queries")
        row = block_index[q_before + block] - kv_before
        blocks = [int(one) for one in row if 0 <= one < len(kv_ends)]
    return RouteView(name=name, source=marks(q_ends, [block]), read=marks(kv_ends, blocks), num_read=len(blocks),
                     num_blocks=len(kv_ends))


def _ends(num_tokens: int, block_size: int) -> Indices:
    return np.minimum(np.arange(block_size, num_tokens + block_size, block_size), num_tokens)


def _blocks_before(sizes: Sequence[int], block_size: int) -> int:
    return sum(-(-size // block_size) for size in sizes)


def view_route(
    name: str,
    block_index: Indices | None,
    *,
    segments: str,
    order: Indices,
    token: Sequence[int],
    q_block_size: int = 128,
    kv_block_size: int = 64,
) -> RouteView:
    """What the block of queries that holds a token reads by a route of `tilesieve.route_video`.

    Args:
        name: of the route, as a reader is to see it.
        block_index: i32 [blocks of queries, capacity] of one head; None = all, which is dense attention.
        segments: as of `tilesieve.route_video`, with one video that has a grid.
        order: slot -> token of the grid, in which blocks cut it: `tilesieve.box_order` of the head's box.
        token: (frame, row, column) on the grid.
        q_block_size: as of `tilesieve.route_video`.
        kv_block_size: as of `tilesieve.route_video`.

    Raises:
        ValueError: an argument that does not fit, by name.
    """
    sizes, place, grid = _video_segment(segments)
    return _view(name, block_index, grid, order, token, _ends(sizes[place], q_block_size),
                 _ends(sizes[place], kv_block_size), _blocks_before(sizes[:place], q_block_size),
                 _blocks_before(sizes[:place], kv_block_size))


def view_veda(
    name: str,
    block_index: Indices,
    *,
    segments: str,
    order: Indices,
    valid_count: Indices,
    token: Sequence[int],
) -> RouteView:
    """As `view_route`, of a head's route by `tilesieve.route_veda`.

    Args:
        name: as of `view_route`.
        block_index: i32 [blocks of queries, capacity] of one head.
        segments: the request's own, as of `tilesieve.route_veda`.
        order: slot -> token of the grid, the first of `tilesieve.veda_tiling`.
        valid_count: tokens of each tile, the second.
        token: as of `view_route`.

    Raises:
        ValueError: an argument that does not fit, by name.
    """
    sizes, place, grid = _video_segment(segments)
    ends, before = np.cumsum(valid_count), _blocks_before(sizes[:place], 128)
    return _view(name, block_index, grid, order, token, ends, ends, before, before)
