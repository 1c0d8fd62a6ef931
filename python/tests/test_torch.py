# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors on the CPU, and its own attention as the oracle. Skipped where PyTorch is not installed."""

from __future__ import annotations

from typing import Any

import pytest

import tilesieve

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def tensors(dtype: Any, total_q: int = 70, total_kv: int = 70) -> list[Any]:
    torch.manual_seed(1)
    return [torch.randn(n, heads, 64).to(dtype) for n, heads in ((total_q, 6), (total_kv, 2), (total_kv, 2))]


def sdpa(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """PyTorch's own attention in f64, as [total_q, num_q_heads, head_dim]."""
    heads_first = [x.double().transpose(0, 1) for x in (q, k, v)]
    result = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    return result.transpose(0, 1)


def mask_of(block_index: Any, total_kv: int, kv_block_size: int, num_q_heads: int) -> Any:
    """[num_q_heads, total_q, total_kv]: visible, and in a block that was picked."""
    num_kv_heads, total_q, _ = block_index.shape
    blocks = torch.arange(total_kv) // kv_block_size
    picked = (block_index[..., None] == blocks).any(2)
    visible = torch.arange(total_kv) <= torch.arange(total_q)[:, None] + total_kv - total_q
    return (picked & visible).repeat_interleave(num_q_heads // num_kv_heads, 0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2),
                                                  (torch.float8_e4m3fn, 2e-2)])
def test_matches_torchs_attention(dtype: Any, tolerance: float) -> None:
    q, k, v = tensors(dtype, 70, 200)
    block_index = tilesieve.route(q, k, router="qk_max", top_k=3, kv_block_size=16)
    assert isinstance(block_index, torch.Tensor) and block_index.dtype == torch.int32
    o, lse = tilesieve.attend(q, k, v, block_index, kv_block_size=16, return_lse=True)
    assert o.dtype == (torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype) and lse.dtype == torch.float32
    want = sdpa(q, k, v, mask_of(block_index, 200, 16, 6))
    torch.testing.assert_close(o.double(), want, atol=tolerance, rtol=0)


def test_no_copy_is_made_of_strided_tensors() -> None:
    q, k, v = tensors(torch.float32)
    fused = torch.cat([q, k, v], 1)  # [tokens, 10, 64], as projections often leave it
    views = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    out = torch.empty(6, 70, 64).transpose(0, 1)
    assert tilesieve.attend(*views, out=out) is out
    torch.testing.assert_close(out, tilesieve.attend(q, k, v))
    before = out.data_ptr()
    tilesieve.attend(*views, out=out)
    assert out.data_ptr() == before


def test_gradients_are_refused_and_no_grad_is_fine() -> None:
    q, k, v = tensors(torch.float32)
    q.requires_grad_()
    with pytest.raises(ValueError, match="q: requires a gradient"):
        tilesieve.attend(q, k, v)
    with torch.no_grad():
        torch.testing.assert_close(tilesieve.attend(q, k, v), tilesieve.attend(q.detach(), k, v))


@pytest.mark.parametrize("convert", [lambda q: q.to_sparse(), lambda q: q.to("meta"),
                                     lambda q: torch.quantize_per_tensor(q, 1.0, 0, torch.qint8)])
def test_what_has_no_plain_memory_is_refused_by_name(convert: Any) -> None:
    q, k, v = tensors(torch.float32)
    with pytest.raises(ValueError, match="^q: torch.Tensor cannot be borrowed: "):
        tilesieve.attend(convert(q), k, v)


def test_combine_works_on_tensors() -> None:
    q, k, v = tensors(torch.float32)
    want = tilesieve.attend(q, k, v, causal=False, return_lse=True)
    parts = [tilesieve.attend(q, k[s], v[s], causal=False, return_lse=True) for s in (slice(0, 30), slice(30, 70),
                                                                                      slice(70, 70))]
    for got, whole in zip(tilesieve.combine(parts), want, strict=True):
        torch.testing.assert_close(got, whole, atol=1e-5, rtol=0)
