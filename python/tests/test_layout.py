# SPDX-License-Identifier: Apache-2.0
"""Sequences of video models, boxes, tables, and tokens into the order of boxes and back."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_arrays import OnlyDlpack
from test_cuda_arguments import OnCuda
from test_files import TYPES

import tilesieve

SEGMENTS = "text:7,video:3x4x5,audio:2,video:3x4x5"
GRID = (3, 4, 5)
TABLE = tilesieve.LayoutTable(grid=GRID, menu=["raster", "2x2x2", "1x4x4"], box_of_head=[[0, 1, 2], [2, 2, 1]])


def order_of(box: str) -> Any:
    """Slot -> token of SEGMENTS."""
    grid = tilesieve.box_order(GRID, box)
    return np.concatenate([np.arange(7), 7 + grid, [67, 68], 69 + grid])


@pytest.mark.parametrize(("frames", "video"), [(5, 2), (124, 37), (243, 72), (345, 102), (362, 107)])
def test_segments_of_h3(frames: int, video: int) -> None:
    audio = 2 * round(frames / 24 * 40)
    assert tilesieve.h3_segments(frames=frames) == f"text:594,audio:{audio},video:{video}x24x42"


def test_segments_of_h3_with_everything_and_with_nothing() -> None:
    got = tilesieve.h3_segments(width=64, height=32, text_tokens=3, keyframes=2, reference_tokens=9)
    assert got == "text:3,conditioning:4,reference:9,audio:414,video:37x1x2"
    assert tilesieve.h3_segments(frames=5, width=32, height=32, text_tokens=0, audio=False) == "video:2x1x1"


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({"frames": 123}, ValueError, "frames: got 123, expected 17 n"),
    ({"width": 1340}, ValueError, "width: got 1340"),
    ({"height": 0}, ValueError, "height: got 0"),
    ({"text_tokens": -1}, ValueError, "text_tokens: got -1"),
    ({"keyframes": 1 << 31}, ValueError, "keyframes: got 2147483648"),
    ({"keyframes": 10**7}, ValueError, "request: 124 frames of 1344 x 768 pixels and 10000000 keyframes"),
    ({"audio": 1}, TypeError, "audio: got int, expected bool"),
    ({"frames": 124.0}, TypeError, "frames: got float"),
])
def test_h3_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    with pytest.raises(exception, match="^" + words):
        tilesieve.h3_segments(**change)


@given(st.tuples(*[st.integers(1, 12)] * 3), st.tuples(*[st.integers(1, 5)] * 3))
def test_an_order_is_a_bijection_of_boxes(grid: tuple[int, int, int], box: tuple[int, int, int]) -> None:
    order = tilesieve.box_order(grid, "x".join(map(str, box)))
    assert order.dtype == np.int32 and sorted(order) == list(range(math.prod(grid)))
    whole = math.prod(size // side for size, side in zip(grid, box, strict=True))
    for slots in order[: whole * math.prod(box)].reshape(whole, *box):
        places = np.stack(np.unravel_index(slots, grid))
        first = places[:, 0, 0, 0]
        assert (first % box == 0).all()
        assert (places - first[:, None, None, None] == np.indices(box)).all()
    assert (tilesieve.box_order(grid, "raster") == np.arange(math.prod(grid))).all()


def test_a_menu_has_the_boxes_that_fit() -> None:
    menu = tilesieve.box_menu((37, 24, 42), 64)  # docs: 627 boxes of 2x8x4 for 583 blocks, 7.0 % of whose slots are empty
    assert menu[0] == "2x8x4" and "4x4x4" in menu and "1x2x32" not in menu
    assert len(tilesieve.box_menu(np.array([37, 24, 42]), 64, 1.0)) == 23  # type: ignore[arg-type]
    cut = [1 - 37 * 24 * 42 / 64 / math.prod(-(-size // int(side)) for size, side in
                                            zip((37, 24, 42), box.split("x"), strict=True)) for box in menu]
    assert cut == sorted(cut) and cut[-1] <= 0.15


def test_boxes_are_refused_by_name() -> None:
    refused: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (tilesieve.box_menu, (GRID, 48), ValueError, "num_tokens: got 48, expected a power of two"),
        (tilesieve.box_menu, (GRID, 8, 1.5), ValueError, "max_cut: got 1.5"),
        (tilesieve.box_menu, (GRID, 8, "x"), TypeError, "max_cut: got str"),
        (tilesieve.box_menu, ((3, 4), 8), ValueError, "grid: got 2 numbers, expected three"),
        (tilesieve.box_menu, ("3x4x5", 8), TypeError, "grid: got str"),
        (tilesieve.box_menu, ((3, 0, 5), 8), ValueError, "grid: got 3x0x5"),
        (tilesieve.box_menu, ((3, 4.0, 5), 8), TypeError, r"grid\[1\]: got float"),
        (tilesieve.box_order, (GRID, "4x4"), ValueError, "box: got '4x4', expected raster or t x h x w"),
        (tilesieve.box_order, (GRID, 4), TypeError, "box: got int, expected str"),
    ]
    for call, arguments, exception, words in refused:
        with pytest.raises(exception, match="^" + words):
            call(*arguments)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("channels", [(), (1,), (24,)])
def test_gathers_by_the_order_and_scatters_back(dtype: Any, channels: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    wide = (rng.standard_normal((2 * 129, 5, *channels)) * 4).astype(dtype)
    tokens = wide[::-2, 1:4]
    boxes = ["2x2x2", "raster", "1x4x4"]
    slots = tilesieve.gather_tokens(tokens, segments=SEGMENTS, layout=boxes)
    assert slots.dtype == tokens.dtype and slots.shape == tokens.shape
    for head, box in enumerate(boxes):
        assert slots[:, head].tobytes() == tokens[order_of(box), head].tobytes()
    back = np.zeros((3, 129, *channels), dtype).swapaxes(0, 1)
    got = tilesieve.scatter_tokens(slots, segments=SEGMENTS, layout=boxes, out=back, num_threads=2)
    assert got is back and back.tobytes() == tokens.tobytes()


def test_a_table_says_the_boxes_of_a_layer() -> None:
    tokens = np.random.default_rng(2).standard_normal((129, 2, 8), np.float32)
    options: dict[str, Any] = {"segments": SEGMENTS}
    got = tilesieve.gather_tokens(tokens, layout=TABLE, layer=1, head_begin=1, **options)
    want = tilesieve.gather_tokens(tokens, layout=["1x4x4", "2x2x2"], **options)
    assert got.tobytes() == want.tobytes() != tokens.tobytes()
    assert TABLE.boxes(1) == ("1x4x4", "1x4x4", "2x2x2") and TABLE.boxes(0)[0] == "raster"
    same = tilesieve.gather_tokens(tokens, layout=np.array(["1x4x4", "2x2x2"]), **options)  # type: ignore[arg-type]
    assert same.tobytes() == want.tobytes()


@pytest.mark.parametrize("knows_versions", [True, False])
def test_takes_objects_that_are_dlpack_alone(knows_versions: bool) -> None:
    tokens = np.random.default_rng(3).standard_normal((129, 2, 8), np.float32)
    got: Any = tilesieve.gather_tokens(OnlyDlpack(tokens, knows_versions), segments=SEGMENTS, layout="2x2x2")
    assert type(got) is np.ndarray and (got == tokens[order_of("2x2x2")]).all()


def test_gathers_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        tokens = torch.randn(129, 3, 16).to(dtype)
        slots = tilesieve.gather_tokens(tokens, segments=SEGMENTS, layout="2x2x2")
        assert isinstance(slots, torch.Tensor) and slots.dtype == dtype
        assert (slots.float() == tokens.float()[torch.from_numpy(order_of("2x2x2"))]).all()
        assert (tilesieve.scatter_tokens(slots, segments=SEGMENTS, layout="2x2x2").float() == tokens.float()).all()


TOKENS = np.zeros((129, 3, 8), np.float32)


@pytest.mark.parametrize(("change", "exception", "words"), [
    ({"tokens": None}, ValueError, r"tokens: got None, expected \[num_tokens, num_heads\]"),
    ({"tokens": TOKENS[:, 0, 0]}, ValueError, r"tokens: got f32\[129\]"),
    ({"tokens": TOKENS[1:]}, ValueError, r"tokens: got f32\[128, 3, 8\], expected 129 tokens"),
    ({"tokens": [[1.0]]}, TypeError, "tokens: got list"),
    ({"tokens": OnCuda(TOKENS)}, ValueError, "tokens: lies on a CUDA device, expected the CPU"),
    ({"out": OnCuda(TOKENS)}, ValueError, "out: lies on a CUDA device"),
    ({"out": TOKENS}, ValueError, "out: shares memory with tokens"),
    ({"out": np.zeros((129, 3, 8), np.float16)}, ValueError, r"out: got f16\[129, 3, 8\], expected the dtype and sizes"),
    ({"out": np.zeros((129, 3, 9), np.float32)}, ValueError, r"out: got f32\[129, 3, 9\]"),
    ({"out": np.broadcast_to(np.zeros(8, np.float32), (129, 3, 8))}, ValueError, "out: is read-only"),
    ({"segments": None}, TypeError, "segments: got None, expected str"),
    ({"segments": "film:3"}, ValueError, "segments: got 'film', expected text"),
    ({"segments": "text"}, ValueError, "segments: got 'text', expected kind:tokens"),
    ({"segments": "text:69,video:60"}, ValueError, "segments: a video segment of 60 tokens has no grid"),
    ({"layout": "2x2"}, ValueError, "layout: got '2x2', expected raster"),
    ({"layout": 3}, TypeError, "layout: got int, expected a list or a tuple"),
    ({"layout": ["2x2x2"]}, ValueError, "layout: got 1 boxes, expected 3, one for each head"),
    ({"layout": ["2x2x2", "2x2x2", "0x1x1"]}, ValueError, r"layout\[2\]: got '?0x1x1"),
    ({"layout": ["2x2x2", None, "raster"]}, TypeError, r"layout\[1\]: got None, expected str"),
    ({"layer": 0}, ValueError, "layer: got one without a LayoutTable"),
    ({"head_begin": 1}, ValueError, "head_begin: got one without a LayoutTable"),
    ({"layout": TABLE}, ValueError, "layer: got None, needed with a LayoutTable"),
    ({"layout": TABLE, "layer": 2}, ValueError, "layer: got 2, expected 0 to 1"),
    ({"layout": TABLE, "layer": "0"}, TypeError, "layer: got str"),
    ({"layout": TABLE, "layer": 0, "head_begin": 1}, ValueError, "head_begin: got 1, with the 3 heads of the call"),
    ({"layout": TABLE, "layer": 0, "head_begin": -1}, ValueError, "head_begin: got -1"),
    ({"layout": TABLE, "layer": 0, "head_begin": 2**62}, ValueError, "head_begin: got 4611"),
    ({"layout": TABLE, "layer": 0, "segments": "text:69,video:5x4x3"}, ValueError,
     r"segments\[1\].grid: got 5x4x3, the layout table is for 3x4x5"),
    ({"num_threads": 0}, ValueError, "num_threads: got 0"),
    ({"isa": "mmx"}, ValueError, "isa: got 'mmx'"),
])
def test_gather_refuses_by_name(change: dict[str, Any], exception: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {"tokens": TOKENS, "segments": SEGMENTS, "layout": "2x2x2"}
    tilesieve.gather_tokens(**arguments)
    with pytest.raises(exception, match="^" + words) as caught:
        tilesieve.gather_tokens(**(arguments | change))
    assert exception is not ValueError or isinstance(caught.value, tilesieve.Error)


def test_scatter_refuses_by_name() -> None:
    refused: list[tuple[dict[str, Any], str]] = [({"slots": TOKENS[1:]}, r"slots: got f32\[128, 3, 8\], expected 129 tokens"),
                          ({"out": TOKENS}, "out: shares memory with slots"),
                                                 ({"slots": None}, "slots: got None")]
    for change, words in refused:
        arguments: dict[str, Any] = {"slots": TOKENS, "segments": SEGMENTS, "layout": "2x2x2"}
        with pytest.raises(tilesieve.Error, match="^" + words):
            tilesieve.scatter_tokens(**(arguments | change))


def test_a_table_comes_back_as_it_went(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    TABLE.save(path)
    read = tilesieve.LayoutTable.load(str(path))
    assert read == TABLE and hash(read) == hash(TABLE) and pickle.loads(pickle.dumps(TABLE)) == TABLE
    assert read.menu == ("raster", "2x2x2", "1x4x4") and read.box_of_head == ((0, 1, 2), (2, 2, 1))
    arrays = tilesieve.LayoutTable(grid=np.array(GRID), menu=list(TABLE.menu),  # type: ignore[arg-type]
                                   box_of_head=np.array(TABLE.box_of_head))  # type: ignore[arg-type]
    assert arrays == TABLE
    assert '"format": "tilesieve-layout-1"' in path.read_text()


def test_a_file_that_is_no_table_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for text, words in (("[]", "does not begin"), ('{"grid": [1, 2]}', "grid: got 2 numbers"), ("{", "not JSON")):
        path.write_text(text)
        with pytest.raises(tilesieve.Error, match=f"^{path}: layout table: {words}"):
            tilesieve.LayoutTable.load(path)
    with pytest.raises(FileNotFoundError):
        tilesieve.LayoutTable.load(tmp_path / "missing.json")
    with pytest.raises(FileNotFoundError):
        TABLE.save(tmp_path / "missing" / "table.json")
    with pytest.raises(TypeError, match="path: got int"):
        tilesieve.LayoutTable.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fields", "exception", "words"), [
    ({"grid": (3, 4)}, ValueError, "grid: got 2 numbers"),
    ({"grid": (0, 4, 5)}, ValueError, "grid: got 0x4x5"),
    ({"menu": ()}, ValueError, "menu: got 0 boxes"),
    ({"menu": "raster"}, TypeError, "menu: got str, expected a list or a tuple"),
    ({"menu": ["raster", 3, "1x1x1"]}, TypeError, r"menu\[1\]: got int, expected str"),
    ({"menu": ["raster", "2x2", "1x1x1"]}, ValueError, r"menu\[1\]: got '2x2'"),
    ({"box_of_head": []}, ValueError, "box_of_head: got 0 layers"),
    ({"box_of_head": [[0, 1], [2]]}, ValueError, r"box_of_head\[1\]: got 1 heads, expected 2"),
    ({"box_of_head": [[0, 3]]}, ValueError, r"box_of_head\[0\]\[1\]: got 3, expected a place in the menu, 0 to 2"),
    ({"box_of_head": [[0, 2**32]]}, ValueError, r"box_of_head\[0\]\[1\]: got 4294967296, expected a place"),
    ({"box_of_head": [[0, 1.5]]}, TypeError, r"box_of_head\[0\]\[1\]: got float"),
    ({"box_of_head": 3}, TypeError, "box_of_head: got int"),
    ({"box_of_head": [3]}, TypeError, r"box_of_head\[0\]: got int"),
])
def test_a_table_refuses_by_name(fields: dict[str, Any], exception: type[Exception], words: str) -> None:
    with pytest.raises(exception, match="^" + words):
        dataclasses.replace(TABLE, **fields)
    with pytest.raises(ValueError, match="layer: got -1, expected 0 to 1"):
        TABLE.boxes(-1)
