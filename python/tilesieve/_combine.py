# SPDX-License-Identifier: Apache-2.0
"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import _core
from ._arrays import A, library_of


def combine(parts: Iterable[tuple[A, A]]) -> tuple[A, A]:
    """Merges results of attention over disjoint sets of keys into the result over all of them.

    What `attend(..., return_lse=True)` gave for a prefix and for the rest, say, or for the shares of several devices:
    lse = log Σ exp(lse_i), o = Σ exp(lse_i - lse) o_i, as softmax is merged in "Online normalizer calculation for
    softmax" (arXiv 1805.02867) and attention over chunks of keys in "Self-attention Does Not Need O(n²) Memory" (arXiv
    2112.05682). In f32; o is rounded once, to the type of the first part.

    Args:
        parts: pairs (o [total_q, num_q_heads, head_dim], lse [total_q, num_q_heads], its natural logarithm) of each set,
            of NumPy or PyTorch.

    Returns:
        (o, lse); where every part saw nothing, 0 and -inf.

    Raises:
        ValueError: no parts, or shapes that differ.
        TypeError: a part that is no pair of arrays.
    """
    try:
        pairs = list(parts)
    except TypeError:
        raise TypeError(f"parts: got {type(parts).__name__}, expected pairs of o and lse") from None
    if not pairs:
        raise _core.Error("parts: got none, expected one or more pairs of o and lse")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"parts[{i}]: got {type(pair).__name__}, expected a pair of o and lse")
        for array in pair:
            if library_of(array) not in ("numpy", "torch"):
                raise TypeError(f"parts[{i}]: got {type(array).__name__}, expected arrays of NumPy or PyTorch")
        o, lse = pair
        if len(o.shape) != 3 or o.shape != pairs[0][0].shape or lse.shape != o.shape[:2]:
            raise _core.Error(f"parts[{i}]: got o {list(o.shape)} and lse {list(lse.shape)}, expected o [total_q, "
                              "num_q_heads, head_dim] and lse of the same tokens and heads, alike in all parts")
    return _combine_torch(pairs) if library_of(pairs[0][0]) == "torch" else _combine_numpy(pairs)


def _combine_numpy(parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    lses = np.stack([lse for _, lse in parts])
    largest = lses.max(axis=0)
    # Where all are -inf, any finite number keeps the differences from being NaN.
    weights = np.exp(lses - np.where(np.isneginf(largest), 0, largest))
    total = weights.sum(axis=0)
    o = sum(part[0].astype(np.float32) * weight[..., None] for part, weight in zip(parts, weights, strict=True))
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isneginf(largest), 0, largest)
    return (o / np.where(total == 0, 1, total)[..., None]).astype(parts[0][0].dtype), lse


def _combine_torch(parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    import torch

    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(torch.isneginf(lse), 0.0, lse))
    o: Any = sum(part[0].float() * weight[..., None] for part, weight in zip(parts, weights, strict=True))
    return o.to(parts[0][0].dtype), lse
