# SPDX-License-Identifier: Apache-2.0
"""Problems, kernels and the roofline model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilesieve


def test_a_problem_and_its_line_are_the_same() -> None:
    problem = tilesieve.Problem(q_lens=[5, 0, 17], kv_lens=[128, 64, 300], num_q_heads=8, num_kv_heads=2, head_dim=32,
                                softmax_scale=0.25, causal=False, q_dtype="bf16", kv_dtype="e4m3",
                                arithmetic="int8")
    assert tilesieve.Problem.parse(str(problem)) == problem
    same = tilesieve.Problem(range(3), np.arange(3), top_k=np.int32(16))  # type: ignore[arg-type]
    assert same == tilesieve.Problem([0, 1, 2], (0, 1, 2)) and hash(same) == hash(tilesieve.Problem.parse(str(same)))
    assert type(same.top_k) is int and same.kv_lens == (0, 1, 2)


@pytest.mark.parametrize(("fields", "exception", "words"), [
    ({"head_dim": 9}, ValueError, "head_dim: got 9"),
    ({"q_block_size": 2}, ValueError, "q_block_size: got 2"),
    ({"q_lens": "ab"}, TypeError, "q_lens: got str"),
    ({"q_lens": 3}, TypeError, "q_lens: got int"),
    ({"q_lens": np.array(3)}, ValueError, r"q_lens: got i64\[\], expected i32 or i64 of one dimension"),
    ({"q_lens": [1.5]}, TypeError, r"q_lens\[0\]: got float"),
    ({"q_lens": [1, 2]}, ValueError, "kv_lens: got 1 sequences"),
    ({"q_dtype": "f64"}, ValueError, "q_dtype: got 'f64'"),
    ({"q_dtype": None}, TypeError, "q_dtype: got None"),
    ({"arithmetic": "fp4"}, ValueError, "arithmetic: got 'fp4', expected storage or int8"),
    ({"arithmetic": 8}, TypeError, "arithmetic: got int"),
    ({"causal": 1}, TypeError, "causal: got int"),
    ({"top_k": "many"}, TypeError, "top_k: got str"),
    ({"softmax_scale": 0}, ValueError, "softmax_scale: got 0"),
])
def test_a_problem_refuses_by_name(fields: dict[str, Any], exception: type[Exception], words: str) -> None:
    with pytest.raises(exception, match="^" + words):
        tilesieve.Problem(**({"q_lens": [1], "kv_lens": [1]} | fields))


def test_what_is_no_problem_is_refused() -> None:
    for call in (tilesieve.kernels, lambda problem: tilesieve.roofline(problem, num_selected_blocks=1)):
        for problem, name in ((3, "int"), (b"hq=1", "bytes"), ([], "list")):
            with pytest.raises(TypeError, match=f"^problem: got {name}, expected Problem or its line"):
                call(problem)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="line: got int"):
        tilesieve.Problem.parse(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="banana"):
        tilesieve.Problem.parse("hq=banana")


def test_kernels_say_whether_they_run() -> None:
    kernels = {kernel.name: kernel for kernel in tilesieve.kernels()}
    assert kernels["portable.q_outer.f32"].available and kernels["portable.q_outer.f32"].device == "cpu"
    for kernel in kernels.values():
        assert kernel.available == (kernel.why_not == "")
    asked = {kernel.name: kernel for kernel in tilesieve.kernels("hq=2 hkv=1 d=64 q=10 kv=10 dtype=bf16")}
    assert asked["portable.q_outer.bf16"].why_not == ""
    assert "bf16" in asked["portable.q_outer.f32"].why_not
    assert kernels["portable.q_outer.f32"].arithmetic == "f32"
    for kernel in tilesieve.kernels("hq=2 hkv=1 d=64 q=10 kv=10 arithmetic=int8"):
        assert kernel.why_not or kernel.arithmetic == "i8"
    assert "portable" in tilesieve.available_isas()


def test_roofline_gives_the_articles_crossover() -> None:
    """docs/roofline.md: under the article's own accounting the orders cross at 2.85 blocks a token on a B200."""
    article = tilesieve.RooflineSizes(q=1, kv=1, o=1, partial=2, stats=0)
    result = tilesieve.roofline(num_selected_blocks=8192 * 4, sizes=article)
    assert result.blocks_per_token == 4
    assert result.crossovers["moved_once"].q_outer == pytest.approx(2.85, abs=0.005)
    assert set(result.rows) == {"q_outer", "q_outer_union", "kv_outer_attend", "kv_outer_combine", "kv_outer",
                                "kv_outer_moved_once"}
    halves = result.rows["kv_outer_attend"].seconds + result.rows["kv_outer_combine"].seconds
    assert result.rows["kv_outer"].seconds == pytest.approx(halves)
    own = tilesieve.RooflineDevice(name="mine", hbm_bandwidth=1e12, l2_bandwidth=2e12)
    line = "hq=64 hkv=4 d=128 q=8192 kv=131072"
    slower = tilesieve.roofline(line, num_selected_blocks=8192 * 4, device=own, sizes=article)
    assert slower.rows["q_outer"].seconds > result.rows["q_outer"].seconds
    assert "H200" in [device.name for device in tilesieve.roofline_devices()]
    with pytest.raises(ValueError, match="B200"):
        tilesieve.roofline(num_selected_blocks=1, device="abacus")
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"num_selected_blocks": -1}, ValueError, "num_selected_blocks: got -1"),
        ({"num_selected_blocks": "x"}, TypeError, "num_selected_blocks: got str"),
        ({"device": 3}, TypeError, "device: got int, expected a RooflineDevice or a name"),
        ({"device": tilesieve.RooflineDevice(hbm_bandwidth="x")}, TypeError,  # type: ignore[arg-type]
         "device.hbm_bandwidth: got str"),
        ({"sizes": 2}, TypeError, "sizes: got int"),
        ({"tile_tokens": 0, "union_blocks": 8}, ValueError, "tile_tokens: got 0, expected 1 or more, or None"),
        ({"tile_tokens": 4}, ValueError, "union_blocks: got None"),
        ({"union_blocks": 8}, ValueError, "tile_tokens: got None"),
    ]
    for options, exception, words in refused:
        with pytest.raises(exception, match="^" + words):
            tilesieve.roofline(**({"num_selected_blocks": 1} | options))


def test_roofline_counts_bytes_as_the_problem_stores_them() -> None:
    line = "hq=64 hkv=4 d=128 q=8192 kv=131072"
    sizes = {"": (4, 4, 4), " dtype=bf16": (2, 2, 2), " dtype=e4m3": (1, 1, 2), " dtype=e4m3 qdtype=bf16": (2, 1, 2)}
    for types, (q, kv, o) in sizes.items():
        got = tilesieve.roofline(line + types, num_selected_blocks=8192)
        assert got == tilesieve.roofline(line, num_selected_blocks=8192, sizes=tilesieve.RooflineSizes(q=q, kv=kv, o=o))
    assert tilesieve.roofline(num_selected_blocks=8192) == tilesieve.roofline(line + " dtype=e4m3",
                                                                              num_selected_blocks=8192)
