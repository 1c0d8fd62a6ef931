# SPDX-License-Identifier: Apache-2.0
"""Measuring what a route keeps, and how far one result lies from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack, overload

from . import _core
from ._arrays import Array
from ._options import Isa, Lengths, Measuring, Scale
from ._progress import progress_bar


@dataclass(frozen=True, kw_only=True)
class Mass:
    """What a route keeps of attention: means over (token, KV head), shares from 0 to 1.

    For a row, F is the mass on its forced picks, r the number of its other picks, M the visible blocks that are not
    forced picks. floor <= ceiling and mass <= ceiling hold row by row. Rows that see no key are left out.

    Attributes:
        mass: share of the dense softmax that lies on the picked blocks.
        floor: F + (r / M) (1 - F), what a random route of the same size keeps on average.
        ceiling: F + the r largest masses of the M, the most that any route of the same size could keep.
        recall: share of the ceiling's blocks that the route picked too.
        kept_share: picked visible blocks over visible blocks, of all rows.
        mass_per_head: [num_kv_heads].
        floor_per_head: [num_kv_heads].
        ceiling_per_head: [num_kv_heads].
        num_rows: (token, KV head) rows measured.
    """

    mass: float
    floor: float
    ceiling: float
    recall: float
    kept_share: float
    mass_per_head: tuple[float, ...]
    floor_per_head: tuple[float, ...]
    ceiling_per_head: tuple[float, ...]
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one array lies from another, accumulated in f64.

    Attributes:
        rel_l2: ||got - want|| / ||want||; 0 where both are 0.
        cosine: <got, want> / (||got|| ||want||); 1 where both are 0, 0 where one is.
        max_abs: the largest |got - want|.
    """

    rel_l2: float
    cosine: float
    max_abs: float


@overload
def mass(q: Array, k: Array, block_index: Array, **options: Unpack[Measuring]) -> Mass: ...
@overload
def mass(q: Array, k: Array, block_index: list[Array] | tuple[Array, ...],
         **options: Unpack[Measuring]) -> list[Mass]: ...
def mass(
    q: Array,
    k: Array,
    block_index: Any,
    *,
    local_blocks: int = 1,
    init_blocks: int = 0,
    sample_every: int = 1,
    causal: bool = True,
    softmax_scale: float | None = None,
    kv_block_size: int | None = None,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_kv: Lengths | None = None,
    kv_lens: Lengths | None = None,
    block_table: Array | None = None,
    q_scale: Scale | None = None,
    k_scale: Scale | None = None,
    num_threads: int | None = None,
    isa: Isa = "best",
    progress: bool = False,
) -> Any:
    """Measures the share of the dense softmax that a route keeps, between a random route and the best one. On the CPU.

    Costs half of a dense attention, whatever the number of routes.

    Args:
        q: queries, as of `attend`.
        k: keys, as of `attend`.
        block_index: i32 [num_kv_heads, total_q, capacity] as of `attend`, or a list or tuple of several, measured in
            one pass.
        local_blocks: as of `route`: which picks count as forced.
        init_blocks: as of `route`: likewise.
        sample_every: n = measure every n-th token of each sequence, the last one included.
        causal: as of `attend`.
        softmax_scale: as of `attend`.
        kv_block_size: as of `attend`.
        cu_seqlens_q: as of `attend`.
        cu_seqlens_kv: as of `attend`.
        kv_lens: as of `attend`.
        block_table: as of `attend`.
        q_scale: as of `attend`.
        k_scale: as of `attend`.
        num_threads: as of `attend`.
        isa: as of `attend`.
        progress: as of `attend`.

    Returns:
        A `Mass`, or a list of them where block_index is a list.

    Raises:
        ValueError: an argument that does not fit, by name, with what was got and what exists (`tilesieve.Error`).
        TypeError: an argument of another type, by name.
    """
    call = _core.Call(q, k, None, None, None, block_table, q_scale, k_scale, None, cu_seqlens_q, cu_seqlens_kv, kv_lens,
                      kv_block_size, 1, causal, softmax_scale)
    with progress_bar(progress, "mass") as counters:
        rows = call.mass(block_index, local_blocks, init_blocks, sample_every, num_threads, isa, counters)
    masses = [Mass(**row) for row in rows]
    return masses if isinstance(block_index, (list, tuple)) else masses[0]


def compare(got: Array, want: Array) -> Difference:
    """Measures how far an array lies from another, say a sparse output from a dense one. On the CPU.

    Args:
        got: f32, bf16, f16 or e4m3 of any shape and strides.
        want: what it should be: of the same shape, in any of those types.

    Raises:
        ValueError: shapes that differ, or a type that is not among those.
        TypeError: an argument that is no array.
    """
    return Difference(**_core.compare(got, want))
