# SPDX-License-Identifier: Apache-2.0
"""Non-local-means denoising as attention: each patch becomes the mean of all patches, weighted by exp(-|a-b|^2 / h^2).

|a-b|^2 = |a|^2 - 2 a.b + |b|^2, and |a|^2 is the same for all keys of a query, so the weights are the softmax of
(2 a.b - |b|^2) / h^2: a key is the patch b with -|b|^2 / 2 in an extra channel against a 1 in the query, the scale
2 / h^2, a value the pixels of the patch. Heads differ by their h, and a call has one scale, 1 / sqrt(head_dim) where
nothing else is said: q is multiplied by 2 sqrt(head_dim) / h^2, so that this one does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

# The extra number is larger than a pixel by far, and INT8 gives a block one scale for all channels: it is spread over
# the channels that fill up head_dim, against this in q, about the size of a centred pixel.
EXTRA_IN_Q = 0.5


def to_patches(frames: Float32, patch: int) -> Float32:
    """Frames [frames, height, width, colours] -> the pixels of their patches [tokens, patch * patch * colours]."""
    num_frames, height, width, colours = frames.shape
    cut = frames.reshape(num_frames, height // patch, patch, width // patch, patch, colours)
    return np.ascontiguousarray(cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, patch * patch * colours))


def to_frames(patches: Float32, grid: tuple[int, int, int], patch: int) -> Float32:
    """The way back of `to_patches`, for frames of a grid (frames, rows, columns)."""
    num_frames, rows, columns = grid
    cut = patches.reshape(num_frames, rows, columns, patch, patch, -1)
    return np.ascontiguousarray(cut.transpose(0, 1, 3, 2, 4, 5).reshape(num_frames, rows * patch, columns * patch, -1))


def nlm_inputs(patches: Float32, bandwidths: Sequence[float]) -> tuple[Float32, Float32, Float32]:
    """q, k, v [tokens, a head for each bandwidth, head_dim] of patches [tokens, pixels]; head_dim is a multiple of 8
    with room for the extra number. The first channels of the output, as many as pixels, are the denoised patches."""
    num_tokens, pixels = patches.shape
    head_dim = -(-(pixels + 1) // 8) * 8
    q, k, v = (np.zeros((num_tokens, len(bandwidths), head_dim), np.float32) for _ in range(3))
    centred = patches - patches.mean(axis=0)  # distances stay, numbers get small
    extra = -(centred.astype(np.float64) ** 2).sum(axis=1) / 2 / EXTRA_IN_Q / (head_dim - pixels)
    for head, bandwidth in enumerate(bandwidths):
        scale = 2 * head_dim**0.5 / bandwidth**2
        q[:, head, :pixels] = scale * centred
        q[:, head, pixels:] = scale * EXTRA_IN_Q
        k[:, head, :pixels] = centred
        k[:, head, pixels:] = extra[:, None]
        v[:, head, :pixels] = patches
    return q, k, v
