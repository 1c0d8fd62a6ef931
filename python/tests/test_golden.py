# SPDX-License-Identifier: Apache-2.0
"""ONNX's own vectors of its Attention operator, from golden/onnx_attention.{json,bin} in the folder that the variable
TILESIEVE_TEST_DATA names. Skipped without it; cases that ask for what the operator here does not have are left out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilesieve

FOLDER = os.environ.get("TILESIEVE_TEST_DATA", "")
Array = np.ndarray[Any, Any]


def nodes() -> list[Any]:
    """The nodes that attend, each under its name."""
    if not FOLDER:
        return [pytest.param(None, marks=pytest.mark.skip("TILESIEVE_TEST_DATA names no folder of real tensors"))]
    file = json.loads((Path(FOLDER) / "golden/onnx_attention.json").read_text())
    return [pytest.param(node, id=node["name"]) for node in file["cases"] if node["op"].endswith("Attention")]


def load(entry: dict[str, Any]) -> Array:
    data = (Path(FOLDER) / "golden/onnx_attention.bin").read_bytes()
    begin = entry["offset"]
    return np.frombuffer(data[begin : begin + entry["nbytes"]], entry["dtype"]).reshape(entry["shape"])


def heads_first(x: Array, heads: int) -> Array:
    """[batch, tokens, heads * channels] as [batch, heads, tokens, channels]; four dimensions stay."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def packed(x: Array, lengths: list[int]) -> Array:
    """The first tokens of each batch entry one after the other: [total, heads, channels]."""
    return np.concatenate([entry[:, :length].swapaxes(0, 1) for entry, length in zip(x, lengths, strict=True)])


@pytest.mark.parametrize("node", nodes())
def test_onnx_attention(node: dict[str, Any]) -> None:
    attrs = node["attrs"]
    inputs = {entry["name"]: load(entry) for entry in node["inputs"]}
    if attrs.get("softcap"):
        pytest.skip("there is no soft cap")
    mask = inputs.get("attn_mask")
    if mask is not None and not (mask.dtype == bool and mask.all()):
        pytest.skip("there is no mask but causality and the block index")
    q = heads_first(inputs["Q"], attrs.get("q_num_heads", 1))
    k, v = (heads_first(inputs[name], attrs.get("kv_num_heads", 1)) for name in ("K", "V"))
    if "past_key" in inputs:
        k, v = np.concatenate([inputs["past_key"], k], 2), np.concatenate([inputs["past_value"], v], 2)
    q_lens = [q.shape[2]] * len(q)
    kv_lens = [int(n) for n in inputs.get("nonpad_kv_seqlen", [k.shape[2]] * len(k))]
    causal = bool(attrs.get("is_causal"))
    if causal and "past_key" not in inputs and "nonpad_kv_seqlen" not in inputs and q_lens != kv_lens:
        pytest.skip("causal at the top left; here it is at the bottom right")
    channels = v.shape[3]
    if channels != k.shape[3]:  # as many channels everywhere, of zeros: q and k no others, v what is cut off again
        width = -(-max(channels, k.shape[3]) // 8) * 8
        scale = attrs.get("scale", k.shape[3] ** -0.5)
        q, k, v = (np.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[3])]) for x in (q, k, v))
    else:
        scale = attrs.get("scale")
    storage = np.float16 if q.dtype == np.float16 else np.float32
    o = tilesieve.attend(
        packed(q, q_lens).astype(storage), packed(k, kv_lens).astype(storage), packed(v, kv_lens).astype(storage),
        causal=causal, softmax_scale=scale, cu_seqlens_q=np.cumsum([0, *q_lens]),
        cu_seqlens_kv=np.cumsum([0, *kv_lens]))
    want = packed(heads_first(load(node["outputs"][0]), q.shape[1]), q_lens)
    np.testing.assert_allclose(o[..., :channels], want, atol=1e-3 if storage is np.float16 else 2e-6)
