# SPDX-License-Identifier: Apache-2.0
"""Figures of a render against plain NumPy, scikit-image and ffmpeg, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilesieve

av = pytest.importorskip("av", reason="the packages of tilesieve[video] are not installed")
metrics = pytest.importorskip("skimage.metrics", reason="the packages of tilesieve[video] are not installed")
ndimage = pytest.importorskip("scipy.ndimage", reason="the packages of tilesieve[video] are not installed")

Clip = np.ndarray[Any, Any]
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not installed")


def moving(num_frames: int = 4, height: int = 46, width: int = 59) -> Clip:
    """A smooth scene that moves, in uint8; sides that no window divides."""
    noise = np.random.default_rng(1).standard_normal((height, width + 2 * num_frames))
    scene = ndimage.gaussian_filter(noise, 2.0)
    scene = np.rint(20 + 200 * (scene - scene.min()) / np.ptp(scene)).astype(np.uint8)
    return np.stack([scene[:, 2 * i : 2 * i + width] for i in range(num_frames)])


def noisy(clip: Clip) -> Clip:
    noise = np.random.default_rng(2).normal(0, 12, clip.shape)
    return np.clip(np.rint(clip + noise), 0, 255).astype(np.uint8)


WIDER = moving(width=60)
REFERENCE = WIDER[:, :, :59]
PAIRS: dict[str, Clip] = {
    "identical": REFERENCE,
    "shifted": WIDER[:, :, 1:],
    "blurred": ndimage.gaussian_filter(REFERENCE, (0, 1.2, 1.2)),
    "noisy": noisy(REFERENCE),
}


def write(path: Path, clip: Clip, pixels: str = "yuv444p", codec: str = "ffv1", color_range: int = 0) -> Path:
    """A file whose frames are the clip's luma, or RGB, without loss where the codec has none."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.codec_context.color_range = color_range
        stream.height, stream.width, stream.pix_fmt = clip.shape[1], clip.shape[2], pixels
        for picture in clip:
            if picture.ndim == 3:
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            else:
                planes = np.stack([picture, np.full_like(picture, 128), np.full_like(picture, 128)])
                frame = av.VideoFrame.from_ndarray(planes, format="yuv444p")
                frame.color_range = color_range
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def plain_ssim(a: Clip, b: Clip) -> float:
    """Wang et al. 2004, window by window."""
    line = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    weights = np.outer(line, line) / line.sum() ** 2
    values = []
    for y in range(a.shape[0] - 10):
        for x in range(a.shape[1] - 10):
            p, q = (z[y : y + 11, x : x + 11].astype(float) for z in (a, b))
            mp, mq = (weights * p).sum(), (weights * q).sum()
            vp, vq = (weights * (p - mp) ** 2).sum(), (weights * (q - mq) ** 2).sum()
            covariance = (weights * (p - mp) * (q - mq)).sum()
            c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
            values.append((2 * mp * mq + c1) * (2 * covariance + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
    return float(np.mean(values))


def plain_detail(frame: Clip) -> float:
    """Variance of the 4-neighbour Laplacian, the border reflected without its own pixel."""
    x = np.pad(frame.astype(float), 1, mode="reflect")
    return float((x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]).var())


@pytest.mark.parametrize("pair", PAIRS)
def test_figures_are_those_of_plain_numpy_and_scikit_image(pair: str) -> None:
    clip = PAIRS[pair]
    got = tilesieve.quality(clip, REFERENCE)
    assert (got.num_frames, got.height, got.width, got.luma) == (4, 46, 59, "as given")
    for i, (a, b) in enumerate(zip(clip, REFERENCE, strict=True)):
        want = metrics.structural_similarity(a, b, gaussian_weights=True, sigma=1.5, use_sample_covariance=False)
        assert got.ssim.frames[i] == pytest.approx(want, abs=1e-12)
        assert got.laplacian_loss.frames[i] == pytest.approx(1 - plain_detail(a) / plain_detail(b), abs=1e-12)
    assert got.ssim.frames[0] == pytest.approx(plain_ssim(clip[0], REFERENCE[0]), abs=1e-9)
    assert got.ssim.mean == pytest.approx(got.ssim.frames.mean())
    details = [np.mean([plain_detail(frame) for frame in one]) for one in (clip, REFERENCE)]
    assert got.laplacian_loss.mean == pytest.approx(1 - details[0] / details[1], abs=1e-12)
    error = np.mean((clip.astype(float) - REFERENCE) ** 2)
    assert got.psnr.mean == (pytest.approx(10 * math.log10(255**2 / error)) if error else math.inf)


def test_known_pairs_lie_where_they_should() -> None:
    identical, shifted, blurred, noise = (tilesieve.quality(PAIRS[pair], REFERENCE) for pair in PAIRS)
    for measure in (identical.ssim, identical.ssim_ffmpeg):
        assert measure.mean == pytest.approx(1, abs=1e-12) and (measure.frames <= 1 + 1e-12).all()
    assert np.isposinf(identical.psnr.frames).all() and identical.laplacian_loss.mean == 0
    for other in (shifted, blurred, noise):
        assert 0 < other.ssim.mean < 0.999 and 0 < other.ssim_ffmpeg.mean < 0.999 and other.psnr.mean < 60
        assert other.ssim.mean != pytest.approx(other.ssim_ffmpeg.mean, abs=1e-4)  # they are two measures
    assert shifted.laplacian_loss.mean == pytest.approx(0, abs=0.1)
    assert 0.2 < blurred.laplacian_loss.mean < 1
    assert noise.laplacian_loss.mean < -1  # noise counts as detail
    names = [measure.variant for measure in noise.measures.values()]
    assert len(set(names)) == 4 and names[0].startswith("Wang 2004") and names[1].startswith("ffmpeg")


def test_laplacian_of_known_frames() -> None:
    flat = np.full((1, 16, 16), 90, np.uint8)
    checkered = (10 * (np.indices((16, 16)).sum(axis=0)[None] % 2)).astype(np.uint8)
    undefined = tilesieve.quality(checkered, flat).laplacian_loss
    assert math.isnan(undefined.mean) and np.isnan(undefined.frames).all()
    assert math.isnan(tilesieve.quality(flat, flat).laplacian_loss.mean)
    assert tilesieve.quality(flat, checkered).laplacian_loss.mean == 1
    # Every neighbour of a 0 is a 10 and the other way round, across the border too: the Laplacian is +40 and -40.
    assert tilesieve.quality(checkered * 3, checkered).laplacian_loss.mean == 1 - 9
    # A ramp along x: 0 inside; 2 at the left and -2 at the right, where the border is reflected. V = 4 / 8.
    ramp = np.broadcast_to(np.arange(16, dtype=np.uint8), (1, 16, 16))
    assert tilesieve.quality(ramp, checkered).laplacian_loss.mean == pytest.approx(1 - 0.5 / 1600, abs=1e-12)
    half = np.concatenate([checkered, flat])  # a flat frame in a reference that is not flat
    loss = tilesieve.quality(np.concatenate([checkered, checkered]), half).laplacian_loss
    assert loss.mean == -1 and loss.frames[0] == 0 and math.isnan(loss.frames[1])


def test_rgb_is_measured_on_its_luma() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 256, (2, 20, 24, 3), dtype=np.uint8) for _ in range(2))
    seen = []
    for luma, weights in (("bt709", (0.2126, 0.7152, 0.0722)), ("bt601", (0.299, 0.587, 0.114))):
        got = tilesieve.quality(a, b, luma=luma)  # type: ignore[arg-type]
        want = tilesieve.quality(*(np.clip(x @ np.array(weights) / 255, 0, 1) for x in (a, b)))
        for name, measure in got.measures.items():
            np.testing.assert_allclose(measure.frames, want.measures[name].frames, rtol=1e-9)
        seen.append(got.ssim.mean)
        assert got.luma == f"{luma} of RGB"
    assert seen[0] != seen[1]
    floats = tilesieve.quality(a.astype(np.float32) / 255, b.astype(np.float32) / 255)
    assert floats.ssim.mean == pytest.approx(tilesieve.quality(a, b).ssim.mean, abs=1e-5)


@needs_ffmpeg
@pytest.mark.parametrize("pair", ["shifted", "blurred", "noisy"])
def test_ssim_and_psnr_are_those_of_ffmpeg(pair: str, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.mkv", PAIRS[pair]), write(tmp_path / "b.mkv", REFERENCE)
    got, arrays = tilesieve.quality(a, b), tilesieve.quality(PAIRS[pair], REFERENCE)
    for name, measure in got.measures.items():
        np.testing.assert_array_equal(measure.frames, arrays.measures[name].frames)
    for name, measure, digits in (("ssim", got.ssim_ffmpeg, 2e-6), ("psnr", got.psnr, 6e-3)):
        log = tmp_path / f"{name}.log"
        # Without SIMD: on x86 ffmpeg 5.1 gives other sums than its own C code where width // 4 is 2 more than a
        # multiple of 4, as it is here.
        done = subprocess.run(["ffmpeg", "-cpuflags", "0", "-hide_banner", "-i", a, "-i", b, "-lavfi",
                               f"{name}=stats_file={log}", "-f", "null", "-"], capture_output=True, text=True, check=True)
        field = r"\bY:([\d.]+)" if name == "ssim" else r"\bpsnr_y:([\d.]+)"
        frames = [float(value) for value in re.findall(field, log.read_text())]
        np.testing.assert_allclose(measure.frames, frames, atol=digits, rtol=0)
        mean = re.search(rf"{name.upper()} [yY]:([\d.]+)", done.stderr)
        assert mean and measure.mean == pytest.approx(float(mean[1]), abs=digits)


def video_range(luma: Clip) -> Clip:
    """Luma from 0 to 255 in the numbers of video, 16 to 235."""
    return np.rint(16 + luma * (219 / 255)).astype(np.uint8)


@pytest.mark.parametrize(("pixels", "color_range", "make"), [
    ("yuv422p", 0, lambda luma: luma),
    ("yuv420p10le", 0, lambda luma: luma),
    ("gray", 0, lambda luma: luma),
    ("yuv444p", 2, video_range),  # the whole range of 8 bits
])
def test_luma_of_files_however_it_is_stored(pixels: str, color_range: int, make: Callable[[Clip], Clip],
                                            tmp_path: Path) -> None:
    stored = write(tmp_path / "a.mkv", REFERENCE, pixels=pixels, color_range=color_range)
    got = tilesieve.quality(stored, write(tmp_path / "b.mkv", make(REFERENCE)))
    assert got.psnr.mean > 48.1 if color_range else got.psnr.mean == math.inf  # 48.1 dB: every pixel off by 1


@pytest.mark.parametrize(("luma", "weights"), [("bt709", (0.2126, 0.7152, 0.0722)), ("bt601", (0.299, 0.587, 0.114))])
def test_files_of_rgb_become_luma_of_video_range(luma: Any, weights: tuple[float, ...], tmp_path: Path) -> None:
    rgb = np.stack([REFERENCE, REFERENCE[:, ::-1], REFERENCE[:, :, ::-1]], axis=3)
    reference = write(tmp_path / "luma.mkv", video_range(rgb @ np.array(weights)))
    written = write(tmp_path / "rgb.mkv", rgb, pixels="bgr0")
    got, other = (tilesieve.quality(written, reference, luma=name).psnr.mean
                  for name in (luma, "bt601" if luma == "bt709" else "bt709"))
    assert got > 48.1 > other  # likewise


def test_clips_of_one_frame_and_of_odd_sizes(tmp_path: Path) -> None:
    one = REFERENCE[:1, :11, :13]
    got = tilesieve.quality(write(tmp_path / "a.mkv", noisy(one)), write(tmp_path / "b.mkv", one))
    assert (got.num_frames, got.height, got.width) == (1, 11, 13) and got.ssim.frames.shape == (1,)
    want = tilesieve.quality(noisy(one), one)
    assert got.ssim.mean == want.ssim.mean and got.laplacian_loss.mean == want.laplacian_loss.mean


ARRAY = np.zeros((3, 16, 20), np.uint8)


@pytest.mark.parametrize(("arguments", "exception", "words"), [
    ((ARRAY[:2], ARRAY), ValueError, "clip: 2 frames, but reference has 3"),
    ((ARRAY, ARRAY[:, :12]), ValueError, "clip: frames of 20 x 16, but those of reference are of 20 x 12"),
    ((ARRAY[:0], ARRAY[:0]), ValueError, "clip: holds no frames"),
    ((ARRAY[:, :10], ARRAY[:, :10]), ValueError, "clip: frames of 20 x 10, expected 11 x 11 or more"),
    ((ARRAY[0], ARRAY), ValueError, r"clip: got uint8\[16, 20\], expected \[frames, height, width\]"),
    ((ARRAY, ARRAY[..., None]), ValueError, r"reference: got uint8\[3, 16, 20, 1\]"),
    ((ARRAY.astype(np.int32), ARRAY), ValueError, r"clip: got int32\[3, 16, 20\], expected uint8, or floats"),
    ((ARRAY, ARRAY + 2.5), ValueError, "reference: frame 0 holds 2.5 to 2.5, expected floats from 0 to 1"),
    ((ARRAY, ARRAY + math.nan), ValueError, "reference: frame 0 holds nan"),
    ((ARRAY, np.zeros((3, 16, 20, 3))), ValueError, "clip: luma as given, but that of reference is bt709 of RGB"),
    ((ARRAY.tolist(), ARRAY), TypeError, "clip: got list, expected a file or an array"),
    (("nowhere.mp4", ARRAY), ValueError, "clip: nowhere.mp4: no such file"),
    ((ARRAY, Path("nowhere.mp4")), ValueError, "reference: nowhere.mp4: no such file"),
])
def test_refuses_by_name(arguments: Any, exception: type[Exception], words: str) -> None:
    with pytest.raises(exception, match="^" + words) as caught:
        tilesieve.quality(*arguments)
    assert exception is not ValueError or isinstance(caught.value, tilesieve.Error)


def test_refuses_other_coefficients() -> None:
    with pytest.raises(ValueError, match="^luma: got 'bt2020', expected bt709 or bt601"):
        tilesieve.quality(ARRAY, ARRAY, luma="bt2020")  # type: ignore[arg-type]


def cut(path: Path, share: float) -> Path:
    shorter = path.with_stem("cut")
    shorter.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    return shorter


def text(path: Path, _: Path) -> Path:
    path.write_text("no video at all, and longer than any header\n" * 20)
    return path


@pytest.mark.parametrize(("make", "words"), [
    (lambda a, b: cut(write(a, moving(30)), 0.6),
     r"truncated or damaged: 1\d frames are readable, up to 0\.\d+ s of 1\.20 s"),
    (lambda a, b: cut(write(a.with_suffix(".avi"), moving(30)), 0.6), r"truncated or damaged: 1\d frames are readable"),
    (lambda a, b: cut(write(a.with_suffix(".mp4"), moving(30), "yuv420p", "mpeg4"), 0.6),
     "truncated, or no video: .*; 0 frames are readable"),
    (text, "truncated, or no video: .*; 0 frames are readable"),
    (lambda a, b: write(a, moving(12)), "12 frames, but reference: .*b.mkv has 30"),
])
def test_files_that_are_broken_are_refused_by_name(make: Callable[[Path, Path], Path], words: str,
                                                   tmp_path: Path) -> None:
    whole = write(tmp_path / "b.mkv", moving(30))
    broken = make(tmp_path / "a.mkv", whole)
    with pytest.raises(tilesieve.Error, match=f"^clip: {re.escape(str(broken))}: {words}"):
        tilesieve.quality(broken, whole)
    if "but" in words:
        with pytest.raises(tilesieve.Error, match="^clip: .*b.mkv: 30 frames, but reference: .*a.mkv has 12"):
            tilesieve.quality(whole, broken)
    else:
        with pytest.raises(tilesieve.Error, match=f"^reference: {re.escape(str(broken))}: {words}"):
            tilesieve.quality(whole, broken)


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tilesieve", "quality", *map(str, arguments)], capture_output=True,
                          text=True, cwd=cwd)


def test_the_command_prints_each_figure_with_its_variant(tmp_path: Path) -> None:
    write(tmp_path / "a.mkv", PAIRS["noisy"])
    write(tmp_path / "b.mkv", REFERENCE)
    write(tmp_path / "flat.mkv", np.full_like(REFERENCE, 90))
    want = tilesieve.quality(PAIRS["noisy"], REFERENCE)
    done = run("a.mkv", "b.mkv", "--frames", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["frame", *want.measures]
    assert [float(value) for value in lines[3].split()] == pytest.approx(
        [2, *(measure.frames[2] for measure in want.measures.values())], abs=1e-6)
    for name, measure in want.measures.items():
        line = next(line for line in lines[5:] if line.startswith(name + " "))
        assert float(line.split()[1]) == pytest.approx(measure.mean, abs=1e-6) and line.endswith(measure.variant)
    fields = json.loads(run("a.mkv", "b.mkv", "--json", cwd=tmp_path).stdout)
    assert fields["clip"] == "a.mkv" and fields["num_frames"] == 4
    assert fields["ssim_ffmpeg"] == {"variant": want.ssim_ffmpeg.variant, "mean": want.ssim_ffmpeg.mean,
                                     "frames": want.ssim_ffmpeg.frames.tolist()}
    flat = json.loads(run("flat.mkv", "flat.mkv", "--json", cwd=tmp_path).stdout)
    assert flat["psnr"]["mean"] == "inf" and flat["laplacian_loss"]["mean"] is None
    assert "undefined: the reference is flat" in run("a.mkv", "flat.mkv", cwd=tmp_path).stdout
    missing = run("a.mkv", "c.mkv", cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == "tilesieve: reference: c.mkv: no such file\n"


def test_progress_counts_frames(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    tilesieve.quality(REFERENCE, REFERENCE, progress=True)
    assert "quality: 100%" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "package"), [("av", "av"), ("skimage.metrics", "scikit-image"),
                                                 ("scipy.ndimage", "scipy")])
def test_a_missing_package_is_named(module: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path / "a.mkv", REFERENCE)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"^quality: needs the package {package}: pip install tilesieve\[video\]"):
        tilesieve.quality(path, path)
