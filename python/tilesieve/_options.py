# SPDX-License-Identifier: Apache-2.0
"""The keyword arguments that calls share, under one name and one meaning everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from ._arrays import Array

LoopOrder = Literal["auto", "q_outer", "kv_outer"]
Router = Literal["index", "qk-max", "mean-pool", "oracle", "random"]
Isa = Literal["best", "portable", "avx2", "avx512", "avx512_bf16", "amx"]
Lengths = Array | Sequence[int]


class Sizes(TypedDict, total=False):
    """What the shapes of the arrays do not say of a problem."""

    causal: bool
    softmax_scale: float | None
    kv_block_size: int
    cu_seqlens_q: Lengths | None
    cu_seqlens_kv: Lengths | None
    kv_lens: Lengths | None
    block_table: Array | None


class Scales(TypedDict, total=False):
    """Factors of stored numbers."""

    q_scale: Array | None
    k_scale: Array | None
    v_scale: Array | None


class Threads(TypedDict, total=False):
    """How a call runs on the CPU."""

    num_threads: int
    isa: Isa


class Planning(TypedDict, total=False):
    """How a call is planned."""

    loop_order: LoopOrder
    workspace_limit: int | None


class Outputs(TypedDict, total=False):
    """Where a call writes, and whether it says how far it has come."""

    out: Array | None
    lse: Array | None
    workspace: Array | None
    progress: bool


class Device(TypedDict, total=False):
    """How a call runs on a CUDA device."""

    max_kv_blocks: int
    stream: int | None


class Routing(TypedDict, total=False):
    """How blocks are chosen."""

    router: Router
    top_k: int
    index_q: Array | None
    index_k: Array | None
    local_blocks: int
    init_blocks: int
    seed: int


class Running(Scales, Outputs, Threads, total=False):
    """The keyword arguments of Plan.run."""

    block_table: Array | None


class Attending(Sizes, Scales, Outputs, Planning, Threads, Device, total=False):
    """The keyword arguments of attend."""


class Prefilling(Attending, Routing, total=False):
    """The keyword arguments of sparse_prefill."""
