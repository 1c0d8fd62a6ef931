# SPDX-License-Identifier: Apache-2.0
"""Calls as users write them, for the type checker alone: what it must infer, and what it must refuse."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import tilesieve

Floats = npt.NDArray[np.float32]


def attending(q: Floats, k: Floats, v: Floats, ids: npt.NDArray[np.int32]) -> None:
    assert_type(tilesieve.attend(q, k, v), Floats)
    assert_type(tilesieve.attend(q, k, v, ids, return_lse=True, kv_block_size=64), tuple[Floats, Floats])
    assert_type(tilesieve.sparse_prefill(q, k, v, router="qk-max", top_k=8), Floats)
    assert_type(tilesieve.plan(q, k, ids).run(q, k, v, return_lse=True), tuple[Floats, Floats])
    tilesieve.attend(q, k, v, router="qk-max")  # type: ignore[call-overload]
    tilesieve.attend(q, k, v, loop_order="inside")  # type: ignore[call-overload]
    tilesieve.attend(q, k, v, ids, 64)  # type: ignore[call-overload]
    tilesieve.attend("q", k, v)  # type: ignore[call-overload]


def measuring(q: Floats, k: Floats, ids: npt.NDArray[np.int32]) -> None:
    assert_type(tilesieve.mass(q, k, ids), tilesieve.Mass)
    assert_type(tilesieve.mass(q, k, [ids, ids]), list[tilesieve.Mass])
    assert_type(tilesieve.mass(q, k, ids).mass_per_head, tuple[float, ...])


def reading() -> None:
    file = tilesieve.read_tensors("capture.safetensors")
    assert_type(file["q"], np.ndarray[Any, Any])
    assert_type(file.metadata, dict[str, str])
