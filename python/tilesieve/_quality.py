# SPDX-License-Identifier: Apache-2.0
"""What a sparse render has lost: SSIM, PSNR and the Laplacian loss of a clip against a reference."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from . import _core
from ._arrays import Array
from ._clips import COEFFICIENTS, Clip, Luma, LumaCoefficients, needed, open_clip
from ._progress import counted

PEAK = 255.0
SSIM_WINDOW = 11  # pixels a side; smaller frames have no SSIM

VARIANTS = {
    "ssim": "Wang 2004: Gaussian 11x11, sigma 1.5, K1 0.01, K2 0.03, population statistics",
    "ssim_ffmpeg": "ffmpeg's filter ssim: luma of 8 bits, windows of 8x8 at stride 4, integer sums",
    "psnr": "dB, peak 255; the mean is of the squared error of all frames",
    "laplacian_loss": "1 - V / V of the reference; V: population variance of the 4-neighbour Laplacian, border "
                      "reflect-101, mean over frames",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class QualityMeasure:
    """One figure of `Quality`.

    Attributes:
        variant: how it is computed; figures of other variants are not to be compared with it.
        mean: of the whole clip; NaN where it is undefined.
        frames: f64 [num_frames], of each frame by itself; NaN where it is undefined.
    """

    variant: str
    mean: float
    frames: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Quality:
    """How a clip differs from a reference. Of `quality`.

    Attributes:
        num_frames: of each clip.
        height: rows of a frame.
        width: pixels of a row.
        luma: what all is measured on, 0 to 255.
        ssim: of Wang et al. 2004: 1 = the same.
        ssim_ffmpeg: of ffmpeg's filter, whose numbers are others.
        psnr: dB; infinite where nothing differs.
        laplacian_loss: share of the reference's detail that is missing. Below 0 where the clip has more of it: noise
            counts as detail. Undefined where the reference is flat.
    """

    num_frames: int
    height: int
    width: int
    luma: str
    ssim: QualityMeasure
    ssim_ffmpeg: QualityMeasure
    psnr: QualityMeasure
    laplacian_loss: QualityMeasure

    @property
    def measures(self) -> dict[str, QualityMeasure]:
        """All four by name."""
        return {name: getattr(self, name) for name in VARIANTS}


def quality(
    clip: Array | str | os.PathLike[str],
    reference: Array | str | os.PathLike[str],
    *,
    luma: LumaCoefficients = "bt709",
    progress: bool = False,
) -> Quality:
    """Measures how a clip differs from a reference, such as a sparse render from the dense one of the same seed.

    Needs the packages of `pip install tilesieve[video]`. The command `python -m tilesieve quality` does the same.

    Args:
        clip: a file of video that PyAV reads, or an array [frames, height, width] of luma or [frames, height, width, 3]
            of RGB, in uint8 or in floats from 0 to 1. Files are read frame by frame. A file's luma is its plane Y, in 8
            bits, 16 to 235, as ffmpeg's filters see it.
        reference: likewise, of as many frames of the same size.
        luma: coefficients by which RGB becomes luma, "bt709" or "bt601".
        progress: whether to show a tqdm bar.

    Returns:
        A `Quality`.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
        ImportError: a package that is missing, by name.
    """
    if luma not in COEFFICIENTS:
        raise _core.Error(f"luma: got {luma!r}, expected bt709 or bt601")
    clips = open_clip("clip", clip, luma), open_clip("reference", reference, luma)
    _check(*clips)
    total = clips[0].num_frames or clips[1].num_frames
    rows = np.array([(_ssim(a, b), _ssim_ffmpeg(a, b), np.mean((a - b) ** 2), _detail(a), _detail(b))
                     for a, b in counted(progress, "quality", _pairs(*clips), total)])
    if not len(rows):
        raise _core.Error(f"{clips[0].name}: holds no frames")
    ssim, ssim_ffmpeg, error, detail, of_reference = rows.T
    figures = {"ssim": (ssim.mean(), ssim), "ssim_ffmpeg": (ssim_ffmpeg.mean(), ssim_ffmpeg),
               "psnr": (_decibels(error.mean()), _decibels(error)),
               "laplacian_loss": (_loss(detail.mean(), of_reference.mean()), _loss(detail, of_reference))}
    measures = {name: QualityMeasure(variant=VARIANTS[name], mean=float(mean), frames=np.asarray(frames))
                for name, (mean, frames) in figures.items()}
    return Quality(num_frames=len(rows), height=clips[0].height, width=clips[0].width, luma=clips[0].luma, **measures)


def _check(clip: Clip, reference: Clip) -> None:
    sizes = [f"{one.width} x {one.height}" for one in (clip, reference)]
    if sizes[0] != sizes[1]:
        raise _core.Error(f"{clip.name}: frames of {sizes[0]}, but those of {reference.name} are of {sizes[1]}")
    if clip.luma != reference.luma:
        raise _core.Error(f"{clip.name}: luma {clip.luma}, but that of {reference.name} is {reference.luma}")
    if min(clip.height, clip.width) < SSIM_WINDOW:
        raise _core.Error(f"{clip.name}: frames of {sizes[0]}, expected {SSIM_WINDOW} x {SSIM_WINDOW} or more, the "
                          "window of SSIM")
    if clip.num_frames and reference.num_frames and clip.num_frames != reference.num_frames:
        _refuse_lengths(clip, clip.num_frames, reference, reference.num_frames)


def _refuse_lengths(clip: Clip, num_frames: int, reference: Clip, num_reference: int) -> None:
    raise _core.Error(f"{clip.name}: {num_frames} frames, but {reference.name} has {num_reference}")


def _pairs(clip: Clip, reference: Clip) -> Iterator[tuple[Luma, Luma]]:
    """Both clips frame by frame, to the end of both."""
    for place, (a, b) in enumerate(zip_longest(clip.frames, reference.frames)):
        if a is None or b is None:
            longer = place + 1 + sum(1 for _ in (reference if a is None else clip).frames)
            _refuse_lengths(clip, place if a is None else longer, reference, longer if a is None else place)
        for one, frame in ((clip, a), (reference, b)):
            if frame.shape != (one.height, one.width):
                raise _core.Error(f"{one.name}: frame {place} is of {frame.shape[1]} x {frame.shape[0]}, those before "
                                  f"of {one.width} x {one.height}")
        yield a, b


def _ssim(a: Luma, b: Luma) -> float:
    """Over windows that lie inside the frame, as Wang et al. have it."""
    metrics = needed("skimage.metrics", "scikit-image")
    return float(metrics.structural_similarity(a, b, data_range=PEAK, gaussian_weights=True, sigma=1.5,
                                               use_sample_covariance=False))


def _ssim_ffmpeg(a: Luma, b: Luma) -> float:
    x, y = (np.rint(frame).astype(np.int64) for frame in (a, b))
    n = 64  # pixels of a window
    c1, c2 = int((0.01 * PEAK) ** 2 * n + 0.5), int((0.03 * PEAK) ** 2 * n * (n - 1) + 0.5)
    sum_x, sum_y, squares, products = (_window_sums(z) for z in (x, y, x * x + y * y, x * y))
    means = sum_x**2 + sum_y**2
    variances, covariance = n * squares - means, n * products - sum_x * sum_y
    windows = (2 * sum_x * sum_y + c1) / (means + c1) * ((2 * covariance + c2) / (variances + c2))
    return float(windows.mean())


def _window_sums(x: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Of windows of 8x8 at stride 4; what is left at the right and at the bottom is not read."""
    height, width = x.shape[0] // 4, x.shape[1] // 4
    cells = x[: 4 * height, : 4 * width].reshape(height, 4, width, 4).sum(axis=(1, 3))
    pairs = cells[1:] + cells[:-1]
    windows: npt.NDArray[np.int64] = pairs[:, 1:] + pairs[:, :-1]
    return windows


def _detail(frame: Luma) -> float:
    """V of a frame; "mirror" is what OpenCV calls reflect-101."""
    return float(needed("scipy.ndimage", "scipy").laplace(frame, mode="mirror").var())


def _decibels(error: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.asarray(10 * np.log10(PEAK**2 / error))


def _loss(detail: npt.NDArray[np.float64], of_reference: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    flat = of_reference == 0
    return np.where(flat, math.nan, 1 - detail / np.where(flat, 1, of_reference))
