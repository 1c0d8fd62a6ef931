# SPDX-License-Identifier: Apache-2.0
"""The report's pictures, as PNG bytes. Colours are Okabe and Ito's, which colour-blind readers tell apart, and no
picture says by colour alone what it says: lines differ in their marks, heat maps have numbers in their cells."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .tiles import RouteView

Pixels = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float64]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
SOURCE_COLOUR, READ_COLOUR = (230, 159, 0), (0, 114, 178)
DIMMED = 0.35  # of the brightness of tokens that are not read
FRAMES_SHOWN = 6
TOKEN_PIXELS = 10  # a token's side in a picture, at the least: room for its outline
CELLS_WITH_NUMBERS = 240


def new_figure(width: float, height: float) -> Any:
    """A figure of Matplotlib, in inches, without its global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"the report draws with Matplotlib, which is missing ({error.name}): "
                          "pip install 'tilesieve[video]'") from None
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def as_png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


# ---- what a route reads ----------------------------------------------------------------------------------------------


def _outline(marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The marked pixels that border on one that is not, or on the picture's edge."""
    inside = np.pad(marked, 1)
    around = inside[:-2, 1:-1] & inside[2:, 1:-1] & inside[1:-1, :-2] & inside[1:-1, 2:]
    return marked & ~around


def mark_frame(frame: Pixels, source: npt.NDArray[np.bool_], read: npt.NDArray[np.bool_]) -> Pixels:
    """A frame u8 [height, width, 3] with tokens [rows, columns] marked: those that are read keep their colours, with a
    blue outline; others are grey and dark; the block of queries is orange within a white outline."""
    rows, columns = read.shape
    scale = max(1, -(-TOKEN_PIXELS * rows // frame.shape[0]), -(-TOKEN_PIXELS * columns // frame.shape[1]))
    picture = frame.repeat(scale, axis=0).repeat(scale, axis=1)
    height, width = picture.shape[:2]
    place = np.ix_(np.arange(height) * rows // height, np.arange(width) * columns // width)
    marked, sources = read[place], source[place]
    grey = (picture.mean(axis=2, keepdims=True) * DIMMED).astype(np.uint8)
    picture = np.where(marked[..., None], picture, grey).astype(np.uint8)
    line = _outline(marked)
    picture[line] = READ_COLOUR
    picture[sources] = (0.35 * picture[sources] + 0.65 * np.array(SOURCE_COLOUR)).astype(np.uint8)
    picture[_outline(sources)] = 255
    return picture


def shown_frames(view: RouteView) -> list[int]:
    """Frames that a picture shows: the one with most of the queries, the rest evenly spread over the clip."""
    num_frames = len(view.source)
    most = int(view.source.sum(axis=(1, 2)).argmax())
    spread = np.linspace(0, num_frames - 1, min(FRAMES_SHOWN, num_frames)).round().astype(int).tolist()
    spread[int(np.argmin([abs(one - most) for one in spread]))] = most
    return sorted(set(spread))


def draw_route(view: RouteView, frames: Pixels, chosen: Sequence[int] | None = None) -> bytes:
    """What one block of queries reads, over the frames u8 [frames, height, width, 3], and its share of each frame."""
    if frames.shape[0] != len(view.source) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise ValueError(f"frames: got {frames.dtype} {frames.shape}, expected uint8 [{len(view.source)}, height, "
                         "width, 3], one for each frame of the route's grid")
    chosen = shown_frames(view) if chosen is None else list(chosen)
    across = min(3, len(chosen))
    down = -(-len(chosen) // across)
    aspect = frames.shape[1] / frames.shape[2]
    figure = new_figure(10, down * (10 / across * aspect + 0.3) + 1.9)
    axes = figure.subplot_mosaic(
        [[f"{row * across + column}" for column in range(across)] for row in range(down)] + [["strip"] * across],
        height_ratios=[10 / across * aspect] * down + [1.3])
    for place in range(down * across):
        axis = axes[f"{place}"]
        axis.set_axis_off()
        if place < len(chosen):
            frame = chosen[place]
            axis.imshow(mark_frame(frames[frame], view.source[frame], view.read[frame]), interpolation="nearest")
            has_source = " (queries)" if view.source[frame].any() else ""
            axis.set_title(f"frame {frame}{has_source}: {100 * view.read[frame].mean():.0f} % read", fontsize=9)
    _draw_strip(axes["strip"], view)
    return as_png(figure)


def _draw_strip(axis: Any, view: RouteView) -> None:
    shares = 100 * view.share_of_frames()
    has_source = np.asarray(view.source.any(axis=(1, 2)))
    colours = ["#E69F00" if own else "#0072B2" for own in has_source]
    axis.bar(np.arange(len(shares)), shares, color=colours, edgecolor="white", linewidth=0.4,
             hatch=["///" if own else "" for own in has_source])
    axis.set(xlim=(-0.6, len(shares) - 0.4), ylim=(0, 100), xlabel="frame (hatched, orange: those of the queries)",
             ylabel="tokens read, %")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", alpha=0.3)


# ---- mass ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class MassMap:
    """Mass by row and column, such as of a model's layers and heads, with what chance and the best choice keep.

    Attributes:
        row_names: of the rows.
        column_names: of the columns.
        floor: f64 [rows, columns], what a random choice of as many blocks keeps; 0 to 1.
        mass: likewise, what the route keeps.
        ceiling: likewise, the most that as many blocks can keep.
    """

    row_names: Sequence[str]
    column_names: Sequence[str]
    floor: Values
    mass: Values
    ceiling: Values


def draw_mass_map(mass_map: MassMap, row_label: str, column_label: str) -> bytes:
    """Three heat maps beside each other in one scale, 0 to 1: floor, mass, ceiling."""
    shape = (len(mass_map.row_names), len(mass_map.column_names))
    if 0 in shape:
        raise ValueError(f"row_names, column_names: got {shape[0]} and {shape[1]}, expected at least one of each")
    width = min(15.0, max(8.0, 3 * 0.62 * shape[1] + 3.5))
    figure = new_figure(width, min(16.0, 2.3 + 0.34 * shape[0]))
    panels = figure.subplots(1, 3, sharey=True)
    image = None
    for axis, name in zip(panels, ("floor", "mass", "ceiling"), strict=True):
        values = np.asarray(getattr(mass_map, name), np.float64)
        if values.shape != shape:
            raise ValueError(f"{name}: got shape {values.shape}, expected {shape}, as the names say")
        image = axis.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        axis.set(title=name, xlabel=column_label)
        axis.set_xticks(range(shape[1]), mass_map.column_names, fontsize=8,
                        rotation=60 if max(map(len, mass_map.column_names)) > 6 and shape[1] > 4 else 0)
        axis.set_yticks(range(shape[0]), mass_map.row_names, fontsize=8)
        if values.size <= CELLS_WITH_NUMBERS:
            for (row, column), value in np.ndenumerate(values):
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8,
                          color=_readable_on(image.cmap(image.norm(value))))
    panels[0].set_ylabel(row_label)
    figure.colorbar(image, ax=panels, label="share of the softmax")
    return as_png(figure)


def _readable_on(colour: Sequence[float]) -> str:
    """Black or white, whichever has the greater contrast on an RGB colour, as WCAG counts it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "white"


# ---- curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart. `style` "solid" has marks; "dotted" and "dashed" are limits beside a line of its colour.

    Attributes:
        name: for the legend.
        x: numbers.
        y: as many.
        colour: place in the palette; lines that belong together share it.
        style: "solid", "dashed" or "dotted".
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    style: str = "solid"


def draw_curves(panels: Sequence[tuple[str, Sequence[Curve]]], *, x_label: str, y_label: str,
                y_range: tuple[float, float] | None = None) -> bytes:
    """Charts (title, curves) beside each other in one scale. Without y_range the axis is cut to the values, which its
    label then says."""
    if not panels or not all(curves for _, curves in panels):
        raise ValueError("panels: a chart without a curve has nothing to show")
    figure = new_figure(max(7.0, 5.0 * len(panels)), 4.4)
    axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    for axis, (title, curves) in zip(axes, panels, strict=True):
        for curve in curves:
            axis.plot(curve.x, curve.y, linestyle=curve.style, color=COLOURS[curve.colour % len(COLOURS)],
                      marker=MARKS[curve.colour % len(MARKS)] if curve.style == "solid" else "", label=curve.name,
                      linewidth=1.8 if curve.style == "solid" else 1.2)
        axis.set(title=title, xlabel=x_label)
        axis.grid(alpha=0.3)
        axis.set_xticks(sorted({x for curve in curves for x in curve.x}))
        axis.set_xlim(left=0)
    low, high = (None, None) if y_range is None else y_range
    axes[0].set_ylim(low, high)
    cut = "" if y_range is not None else f"\n(axis cut: begins at {axes[0].get_ylim()[0]:.3g})"
    axes[0].set_ylabel(y_label + cut)
    axes[-1].legend(fontsize=8, loc="best")
    return as_png(figure)


def draw_frames(rows: Sequence[tuple[str, Pixels]], scale: int = 1) -> bytes:
    """Pictures u8 [height, width, 3] of one size beside each other, each under its name, pixels as they are."""
    across = min(3, len(rows))
    down = -(-len(rows) // across)
    height, width = rows[0][1].shape[:2]
    figure = new_figure(10, down * (10 / across * height / width + 0.35))
    axes = np.atleast_1d(figure.subplots(down, across)).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, (name, picture) in zip(axes, rows, strict=False):
        axis.imshow(picture.repeat(scale, axis=0).repeat(scale, axis=1), interpolation="nearest")
        axis.set_title(name, fontsize=9)
    return as_png(figure)
