# SPDX-License-Identifier: Apache-2.0
"""Problems, kernels and the roofline model."""

from __future__ import annotations

import pytest

import tilesieve


def test_a_problem_and_its_line_are_the_same() -> None:
    problem = tilesieve.Problem(q_lens=[5, 0, 17], kv_lens=[128, 64, 300], num_q_heads=8, num_kv_heads=2, head_dim=32,
                                softmax_scale=0.25, causal=False, q_dtype="bf16", kv_dtype="e4m3")
    assert tilesieve.Problem.parse(str(problem)) == problem
    with pytest.raises(ValueError, match=r"problem\.head_dim: got 9"):
        tilesieve.Problem(q_lens=[1], kv_lens=[1], head_dim=9)
    with pytest.raises(TypeError, match=r"problem\.q_lens"):
        tilesieve.Problem(q_lens="ab", kv_lens=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"q_dtype: got 'f64'"):
        tilesieve.Problem(q_lens=[1], kv_lens=[1], q_dtype="f64")  # type: ignore[arg-type]
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
    own = tilesieve.RooflineDevice("mine", hbm_bandwidth=1e12, l2_bandwidth=2e12)
    line = "hq=64 hkv=4 d=128 q=8192 kv=131072"
    slower = tilesieve.roofline(line, num_selected_blocks=8192 * 4, device=own, sizes=article)
    assert slower.rows["q_outer"].seconds > result.rows["q_outer"].seconds
    assert "H200" in [device.name for device in tilesieve.roofline_devices()]
    with pytest.raises(ValueError, match="B200"):
        tilesieve.roofline(num_selected_blocks=1, device="abacus")
    with pytest.raises(ValueError, match="num_selected_blocks"):
        tilesieve.roofline(num_selected_blocks=-1)
