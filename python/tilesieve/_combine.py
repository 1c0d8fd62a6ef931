# SPDX-License-Identifier: Apache-2.0
"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _core
from ._arrays import A, library_of


def combine(parts: Sequence[tuple[A, A]]) -> tuple[A, A]:
    """Merges results of attention over disjoint sets of keys into the result over all of them.

    What `attend(..., return_lse=True)` gave for a prefix and for the rest, say, or for the shares of several devices:
    lse = log Σ exp(lse_i), o = Σ exp(lse_i - lse) o_i. In f32; o is rounded once, to the type of the first part.

    Args:
        parts: (o [total_q, num_q_heads, head_dim], lse f32 [total_q, num_q_heads]) of each set, of NumPy or PyTorch.

    Returns:
        (o, lse); where every part saw nothing, 0 and -inf.

    Raises:
        ValueError: no parts, or shapes that differ.
    """
    if not parts:
        raise _core.Error("parts: got none, expected one or more pairs of o and lse")
    for i, (o, lse) in enumerate(parts):
        if o.shape != parts[0][0].shape or lse.shape != o.shape[:2]:
            raise _core.Error(f"parts[{i}]: got o {list(o.shape)} and lse {list(lse.shape)}, expected o "
                             f"{list(parts[0][0].shape)} and lse of the same tokens and heads")
    return _combine_torch(parts) if library_of(parts[0][0]) == "torch" else _combine_numpy(parts)


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
