# SPDX-License-Identifier: Apache-2.0
"""Dense attention on a Hopper GPU through PyTorch, in bf16 and in SageAttention 2's arithmetic, against float64. Skipped
where test_cuda.py is."""

from __future__ import annotations

from typing import Any

import pytest
from test_cuda import assert_close, pytestmark, torch

import tilesieve


def wanted_of_dense(q: Any, k: Any, v: Any, layout: str, causal: bool, scale: float | None = None) -> tuple[Any, Any]:
    """o and lse of dense attention in f64, in the layout of q."""
    q, k, v = ((x.transpose(-2, -3) if layout == "nhd" else x).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    logits = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device="cuda")
    if causal:
        visible = visible.tril(k.shape[-2] - q.shape[-2])
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale).nan_to_num()
    lse = logits.masked_fill(~visible, -torch.inf).logsumexp(-1)
    return (o.transpose(-2, -3), lse.transpose(-1, -2)) if layout == "nhd" else (o, lse)


def dense_tensors(layout: str, num_sequences: int | None, heads: tuple[int, int], lens: tuple[int, int],
                  head_dim: int) -> list[Any]:
    """q, k and v."""
    torch.manual_seed(3)
    tensors = []
    for count, tokens in ((heads[0], lens[0]), (heads[1], lens[1]), (heads[1], lens[1])):
        shape = (tokens, count, head_dim) if layout == "nhd" else (count, tokens, head_dim)
        batch = () if num_sequences is None else (num_sequences,)
        tensors.append(torch.randn(batch + shape, device="cuda").bfloat16())
    return tensors


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize(("num_sequences", "heads", "lens", "head_dim"), [
    (None, (4, 4), (300, 300), 128),
    (2, (4, 2), (77, 300), 64),  # queries at the end of their keys
    (1, (6, 1), (300, 77), 128),  # the first 223 queries see no key where it is causal
    (3, (2, 2), (129, 193), 40),
])
def test_dense_attention_matches_torch(layout: str, causal: bool, num_sequences: int | None, heads: tuple[int, int],
                                       lens: tuple[int, int], head_dim: int) -> None:
    q, k, v = dense_tensors(layout, num_sequences, heads, lens, head_dim)
    out, lse = tilesieve.dense_attention(q, k, v, tensor_layout=layout, causal=causal, return_lse=True)
    assert out.dtype == torch.bfloat16 and out.shape == q.shape and out.device == q.device
    assert lse.dtype == torch.float32 and lse.shape == q.shape[:-1]
    want = wanted_of_dense(q, k, v, layout, causal)
    assert ((out - want[0]).norm() / want[0].norm()).item() < 0.005
    assert_close((out, lse), want, 2e-2, 1e-3)
    assert torch.equal(out, tilesieve.dense_attention(q, k, v, tensor_layout=layout, causal=causal))


def test_dense_attention_writes_to_what_is_given_on_a_stream() -> None:
    q, k, v = dense_tensors("nhd", None, (4, 2), (300, 500), 128)
    want = wanted_of_dense(q, k, v, "nhd", True, 0.2)
    for dtype, stream in ((torch.bfloat16, None), (torch.float16, torch.cuda.Stream())):
        out = torch.full_like(q, torch.nan, dtype=dtype)
        lse = torch.full(q.shape[:-1], torch.nan, device="cuda")
        got = tilesieve.dense_attention(q, k, v, causal=True, softmax_scale=0.2, out=out, lse=lse, return_lse=True,
                                        stream=stream)
        assert got[0] is out and got[1] is lse
        if stream is not None:
            stream.synchronize()
        assert_close(got, want, 2e-2, 1e-3)
    with pytest.raises(ValueError, match=r"^out: got None, needed with a stream"):
        tilesieve.dense_attention(q, k, v, stream=torch.cuda.Stream())


def test_dense_attention_works_on_the_current_stream() -> None:
    q, k, v = dense_tensors("nhd", None, (4, 4), (500, 500), 128)
    want = tilesieve.dense_attention(q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # what comes now is late
        late = q * 1
        out = tilesieve.dense_attention(late, k, v)
    side.synchronize()
    assert torch.equal(out, want)


def test_dense_attention_is_captured_in_a_graph() -> None:
    q, k, v = dense_tensors("hnd", 1, (4, 4), (500, 500), 128)
    want = tilesieve.dense_attention(q, k, v, tensor_layout="hnd", causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilesieve.dense_attention(q, k, v, tensor_layout="hnd", causal=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


def test_dense_attention_refuses_by_name() -> None:
    q, k, v = dense_tensors("nhd", None, (4, 2), (30, 50), 64)
    for change, words in (({"q": q.half()}, "q: got f16"), ({"k": k.half()}, "k: got f16"),
                          ({"k": k.cpu()}, "k: lies on the CPU, expected cuda:0 as q"),
                          ({"v": v[:49]}, r"v: got bf16\[49, 2, 64\]"), ({"out": q}, "out: overlaps q")):
        with pytest.raises(ValueError, match="^" + words):
            tilesieve.dense_attention(**({"q": q, "k": k, "v": v} | change))


@pytest.mark.parametrize("rounding", ["exact", "relaxed"])
@pytest.mark.parametrize(("layout", "shape"), [("nhd", (2, 300, 4, 64)), ("hnd", (4, 300, 128)), ("nhd", (1, 77, 8, 96))])
def test_sage_attention_is_near_torch(rounding: str, layout: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))
    out, lse = tilesieve.sage_attention(q, k, v, tensor_layout=layout, rounding=rounding, return_lse=True)
    by_head = [(x.transpose(-2, -3) if layout == "nhd" else x).double() for x in (q, k, v)]
    logits = by_head[0] @ by_head[1].transpose(-1, -2) * shape[-1] ** -0.5
    want, want_lse = logits.softmax(-1) @ by_head[2], logits.logsumexp(-1)
    got = (out.transpose(-2, -3) if layout == "nhd" else out).double()
    assert ((got - want).norm() / want.norm()).item() < 0.04
    assert ((lse.transpose(-1, -2) if layout == "nhd" else lse) - want_lse).abs().max().item() < 0.05


def test_sage_attention_is_captured_in_a_graph() -> None:
    q, k, v = (torch.randn(500, 4, 128, device="cuda").bfloat16() for _ in range(3))
    want = tilesieve.sage_attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilesieve.sage_attention(q, k, v, causal=True)
    graph.replay()
    assert torch.equal(out, want)
