# SPDX-License-Identifier: Apache-2.0
"""Clips as frames of luma, one after the other: of an array, or of a file by PyAV."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import _core
from ._arrays import Array

LumaCoefficients = Literal["bt709", "bt601"]
Luma = npt.NDArray[np.float64]  # [height, width], 0 to 255

COEFFICIENTS = {"bt709": (0.2126, 0.7152, 0.0722), "bt601": (0.299, 0.587, 0.114)}
FULL_RANGE = 2  # PyAV's ColorRange.JPEG
SHAPES = "[frames, height, width] or [frames, height, width, 3]"


@dataclass(frozen=True, kw_only=True)
class Clip:
    """What is known of a clip before its first frame is read."""

    name: str  # for errors
    height: int
    width: int
    num_frames: int | None  # None = the file does not say
    luma: str  # what luma is of
    frames: Iterator[Luma]


def needed(module: str, package: str) -> Any:
    """A module that the package does without, imported where a call needs it."""
    try:
        return import_module(module)
    except ImportError:
        raise ImportError(f"quality: needs the package {package}: pip install tilesieve[video]") from None


def open_clip(argument: str, source: Array | str | os.PathLike[str], luma: LumaCoefficients) -> Clip:
    """The clip of an array or of a file."""
    if isinstance(source, str | os.PathLike):
        return _open_file(f"{argument}: {os.fspath(source)}", os.fspath(source), luma)
    return _open_array(argument, source, luma)


def _open_array(argument: str, source: Array, luma: LumaCoefficients) -> Clip:
    if not hasattr(source, "shape") or not hasattr(source, "dtype"):
        raise TypeError(f"{argument}: got {type(source).__name__}, expected a file or an array {SHAPES}")
    array = np.asarray(source)
    text = f"{array.dtype}{list(array.shape)}"
    if array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] != 3):
        raise _core.Error(f"{argument}: got {text}, expected {SHAPES}")
    if array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating):
        raise _core.Error(f"{argument}: got {text}, expected uint8, or floats from 0 to 1")
    scale = 1.0 if array.dtype == np.uint8 else 255.0

    def frames() -> Iterator[Luma]:
        for place, frame in enumerate(array):
            if scale != 1 and not (frame.min() >= 0 and frame.max() <= 1):  # NaN is neither
                raise _core.Error(f"{argument}: frame {place} holds {frame.min()} to {frame.max()}, expected floats "
                                  "from 0 to 1")
            yield scale * (frame.astype(np.float64) if frame.ndim == 2 else _luma_of_rgb(frame, luma))

    return Clip(name=argument, height=array.shape[1], width=array.shape[2], num_frames=array.shape[0],
                luma=f"{luma} of RGB" if array.ndim == 4 else "as given", frames=frames())


def _luma_of_rgb(frame: npt.NDArray[Any], luma: LumaCoefficients) -> Luma:
    return np.asarray(frame @ np.array(COEFFICIENTS[luma]))


def _open_file(name: str, path: str, luma: LumaCoefficients) -> Clip:
    av = needed("av", "av")
    if not os.path.isfile(path):
        raise _core.Error(f"{name}: no such file")
    try:
        container = av.open(path)
    except av.FFmpegError as error:
        raise _core.Error(f"{name}: truncated, or no video: {error.strerror}; 0 frames are readable") from None
    if not container.streams.video:
        container.close()
        raise _core.Error(f"{name}: holds no video")
    stream = container.streams.video[0]
    return Clip(name=name, height=stream.height, width=stream.width, num_frames=stream.frames or None,
                luma=f"Y of 8 bits, 16 to 235; {luma} where the file holds RGB",
                frames=_frames_of_file(av, name, container, stream, luma))


def _frames_of_file(av: Any, name: str, container: Any, stream: Any, luma: LumaCoefficients) -> Iterator[Luma]:
    count, end, said, why = 0, None, _end_of(stream), ""
    step = float(1 / stream.average_rate) if stream.average_rate else 0.0
    with container:
        try:
            for frame in container.decode(stream):
                yield _luma_of_frame(frame, luma)
                count += 1
                end = frame.time + step if frame.time is not None else None
        except av.FFmpegError as error:
            why = error.strerror
    if why or (end is not None and said is not None and end < said - 1.5 * step):
        of = f" of {said:.2f} s" if said is not None and end is not None else ""
        until = f", up to {end:.2f} s{of}" if end is not None else ""
        raise _core.Error(f"{name}: truncated or damaged: {count} frames are readable{until}" + (why and f" ({why})"))


def _end_of(stream: Any) -> float | None:
    """Seconds at which the file's header says that its video ends. Some formats do not say."""
    if tag := re.fullmatch(r"(\d+):(\d+):([\d.]+)", stream.metadata.get("DURATION", "")):  # Matroska
        return 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    if stream.duration is None:
        return None
    return float((stream.duration + (stream.start_time or 0)) * stream.time_base)


def _luma_of_frame(frame: Any, luma: LumaCoefficients) -> Luma:
    """The plane Y, which swscale makes of what is stored otherwise."""
    if frame.format.name not in ("yuv420p", "yuv422p", "yuv444p", "nv12") or frame.color_range == FULL_RANGE:
        colorspace = "ITU709" if luma == "bt709" else "ITU601"
        frame = frame.reformat(format="yuv444p", dst_colorspace=colorspace if frame.format.is_rgb else None,
                               dst_color_range="MPEG")
    plane = frame.planes[0]
    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
    return rows[: frame.height, : frame.width].astype(np.float64)
