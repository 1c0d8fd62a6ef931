# SPDX-License-Identifier: Apache-2.0
"""Problems for tests: drawn by hypothesis, or one of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import tilesieve

Array = np.ndarray[Any, Any]

# Storage types, and how far f32 sums of them may lie from float64 ones (of outputs of size 1). bf16 rounds the weights
# of a softmax where the machine multiplies bf16, and the output once more.
TOLERANCES = {np.dtype(np.float32): 2e-5, np.dtype(np.float16): 2e-3, np.dtype(ml_dtypes.bfloat16): 3e-2,
              np.dtype(ml_dtypes.float8_e4m3fn): 3e-2}

# Rounding to 8 bits costs Gaussian numbers more than this share of o in no call.
INT8_REL_L2 = 2.5e-2


def has_int8(dtype: str = "f32") -> bool:
    """Whether this machine has a kernel in int8 arithmetic."""
    problem = f"hq=1 hkv=1 d=64 q=1 kv=1 dtype={dtype} arithmetic=int8"
    return any(kernel.why_not == "" for kernel in tilesieve.kernels(problem))


@dataclass
class Case:
    """Arrays of one call and its lengths."""

    q: Array
    k: Array
    v: Array
    block_index: Array
    q_lens: list[int]
    kv_lens: list[int]
    causal: bool
    kv_block_size: int

    @property
    def scale(self) -> float:
        return float(self.q.shape[2]) ** -0.5

    def sizes(self) -> dict[str, Any]:
        """The keyword arguments of a call."""
        return {"causal": self.causal, "kv_block_size": self.kv_block_size,
                "cu_seqlens_q": np.cumsum([0, *self.q_lens], dtype=np.int32),
                "cu_seqlens_kv": np.cumsum([0, *self.kv_lens], dtype=np.int32)}


def strided(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Random numbers in an array with gaps between tokens and heads; what lies in the gaps is NaN."""
    wide = np.full((shape[0], shape[1] + 1, shape[2] + 8), np.nan, np.float32).astype(dtype)
    view = wide[:, : shape[1], : shape[2]]
    view[...] = rng.standard_normal(shape, np.float32).astype(dtype)
    return view


def make_case(
    seed: int, *, dtype: Any = np.float32, q_lens: tuple[int, ...] = (40, 0, 9),
    kv_lens: tuple[int, ...] = (40, 5, 100), num_kv_heads: int = 2, group: int = 3, head_dim: int = 32,
    kv_block_size: int = 16, capacity: int = 4, causal: bool = True,
) -> Case:
    """A case with hostile ids: out of range, in the future, -1 and twice."""
    rng = np.random.default_rng(seed)
    total_q, total_kv = sum(q_lens), sum(kv_lens)
    blocks = max(1, -(-max(kv_lens, default=0) // kv_block_size))
    block_index = rng.integers(-1, blocks + 2, (num_kv_heads, total_q, capacity), dtype=np.int32)
    block_index[rng.random(block_index.shape) < 0.1] = 2**31 - 1
    return Case(strided(rng, (total_q, num_kv_heads * group, head_dim), dtype),
                strided(rng, (total_kv, num_kv_heads, head_dim), dtype),
                strided(rng, (total_kv, num_kv_heads, head_dim), dtype),
                block_index, list(q_lens), list(kv_lens), causal, kv_block_size)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cases of any number of sequences, empty ones among them."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 70)), min_size=0, max_size=3))
    return make_case(
        draw(st.integers(0, 2**32 - 1)), dtype=draw(st.sampled_from(list(TOLERANCES))),
        q_lens=tuple(q for q, _ in lengths), kv_lens=tuple(kv for _, kv in lengths),
        num_kv_heads=draw(st.integers(1, 3)), group=draw(st.integers(1, 4)),
        head_dim=8 * draw(st.integers(1, 6)), kv_block_size=8 * draw(st.integers(1, 4)),
        capacity=draw(st.integers(0, 5)), causal=draw(st.booleans()))
