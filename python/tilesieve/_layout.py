# SPDX-License-Identifier: Apache-2.0
"""What a video model's sequence consists of, and in which order its heads take the video's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from ._arrays import A, new_like
from ._files import Path, encoded_path
from ._options import Isa


@dataclass(frozen=True, kw_only=True)
class LayoutTable:
    """A box for each (layer, head) of a model, for one grid of video tokens. `layout_search` finds one.

    Attributes:
        grid: (latent frames, rows, tokens of a row).
        menu: boxes as texts, "raster" or "4x4x4" (latent frames x rows x tokens of a row); at most 256.
        box_of_head: [num_layers][num_heads] places in the menu; at most 1,024 layers, 4,096 heads.

    Raises:
        ValueError: a field that does not fit, by name (`tilesieve.Error`).
        TypeError: a field of another type, by name.
    """

    grid: Sequence[int]
    menu: Sequence[str]
    box_of_head: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        for name, value in _core.validated_layout_table(self).items():  # plain tuples, which hash and compare
            object.__setattr__(self, name, value)

    @classmethod
    def load(cls, path: Path) -> LayoutTable:
        """Reads the JSON that `save` and the command `tilesieve layout-search` write.

        An OSError where the system does not let it be read, a ValueError where it is no such table.
        """
        return cls(**_core.load_layout_table(encoded_path(path)))

    def save(self, path: Path) -> None:
        """Writes it as JSON, through a temporary file. An OSError where the system does not let it be written."""
        _core.save_layout_table(self, encoded_path(path))

    def boxes(self, layer: int) -> tuple[str, ...]:
        """The boxes of a layer's heads, [num_heads], as texts."""
        return tuple(_core.boxes_of_layer(self, layer))


Layout = str | Sequence[str] | LayoutTable


def h3_segments(
    *,
    frames: int = 124,
    width: int = 1344,
    height: int = 768,
    text_tokens: int = 594,
    keyframes: int = 0,
    reference_tokens: int = 0,
    audio: bool = True,
) -> str:
    """The segments of a request to MiniMax-H3: "text:594,audio:414,video:37x24x42". Empty ones are left out.

    Sources: the model's config.json and the token packing of FastVideo.

    Args:
        frames: of the video, 24 a second: 17 n + 5, of which the model makes 5 n + 2 latent frames.
        width: pixels, a multiple of 32, which are a token.
        height: pixels, likewise.
        text_tokens: of the prompt.
        keyframes: conditioning images of the size of a frame.
        reference_tokens: of reference images.
        audio: whether there is sound: 40 tokens a second for each of two channels.

    Raises:
        ValueError: a request that the model does not take, by the argument's name (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    return _core.h3_segments(frames, width, height, text_tokens, keyframes, reference_tokens, audio)


def box_menu(grid: Sequence[int], num_tokens: int, max_cut: float = 0.15) -> list[str]:
    """The boxes of powers of two that hold num_tokens tokens and fit a grid well, such as "4x4x4".

    Args:
        grid: (latent frames, rows, tokens of a row).
        num_tokens: of a box, a power of two; kv_block_size for boxes that are blocks of keys.
        max_cut: share of slots that may stay empty when each box that crosses the grid's edge is counted whole, 0 to 1.

    Returns:
        Least cut first, then more latent frames, then more rows.

    Raises:
        ValueError: an argument that does not fit, by name (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    return _core.box_menu(grid, num_tokens, max_cut)


def box_order(grid: Sequence[int], box: str) -> npt.NDArray[np.int32]:
    """Which token of a grid stands in each slot, where tokens are taken box by box. A bijection; nothing is padded.

    Whole boxes come first, so that blocks of a box's size hold exactly one; then those that the grid's edge cuts short.
    Boxes follow each other there and back, each bordering on the next. Inside a box tokens are in raster order.

    Args:
        grid: (latent frames, rows, tokens of a row); token (f, y, x) is number (f * rows + y) * tokens of a row + x.
        box: "4x4x4" (latent frames x rows x tokens of a row), or "raster".

    Returns:
        i32 [tokens of the grid], slot -> token.

    Raises:
        ValueError: an argument that does not fit, by name (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    return np.asarray(_core.box_order(grid, box))


def _reordered(gathers: bool, source: A, segments: str, layout: Layout, layer: int | None, head_begin: int, out: Any,
               num_threads: int | None, isa: Isa) -> A:
    reordering = _core.Reordering(gathers, source, segments, layout, layer, head_begin)
    out = new_like(source) if out is None else out
    reordering.run(out, num_threads, isa)
    return out  # type: ignore[no-any-return]


def gather_tokens(
    tokens: A,
    *,
    segments: str,
    layout: Layout,
    layer: int | None = None,
    head_begin: int = 0,
    out: Any = None,
    num_threads: int | None = None,
    isa: Isa = "best",
) -> A:
    """Puts each head's tokens in the order of its box: out[s, h] = tokens[order of head h [s], h]. On the CPU.

    Video segments are taken box by box, in the order of `box_order`; all other tokens stay where they are.
    `video_attention` does this itself; here it is for kernels of your own.

    Args:
        tokens: [num_tokens, num_heads] or [num_tokens, num_heads, channels] of any type and strides, on the CPU.
        segments: of the sequence, as of `route_video`.
        layout: a box for all heads, "raster" or "4x4x4" (latent frames x rows x tokens of a row); a list of boxes, one
            for each head; or a `LayoutTable`.
        layer: of the model, with a LayoutTable, which has a box for each (layer, head).
        head_begin: with a LayoutTable, the head of the model that the first head here is, where a call has some of them.
        out: array to write to, of the shape and type of tokens, sharing no memory with it; None = a new one of its
            library (NumPy's where that is not PyTorch).
        num_threads: as of `attend`.
        isa: as of `attend`.

    Returns:
        out.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    return _reordered(True, tokens, segments, layout, layer, head_begin, out, num_threads, isa)


def scatter_tokens(
    slots: A,
    *,
    segments: str,
    layout: Layout,
    layer: int | None = None,
    head_begin: int = 0,
    out: Any = None,
    num_threads: int | None = None,
    isa: Isa = "best",
) -> A:
    """The way back of `gather_tokens`: out[order of head h [s], h] = slots[s, h]. Arguments and errors as there."""
    return _reordered(False, slots, segments, layout, layer, head_begin, out, num_threads, isa)
