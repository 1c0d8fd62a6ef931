# SPDX-License-Identifier: Apache-2.0
"""The roofline model: what the two loop orders move on a device, and where they cross."""

from __future__ import annotations

from dataclasses import dataclass

from . import _core
from ._problem import Problem, problem_of


@dataclass(frozen=True, kw_only=True)
class RooflineDevice:
    """A device as the model sees it. On a CPU "hbm" is main memory and "l2" the last cache.

    Attributes:
        name: any.
        hbm_bandwidth: bytes/s.
        l2_bandwidth: bytes/s.
        usable_l2_bytes: that K and V may occupy; 0 = not known, they are taken to fit.
        peak_flops: FLOP/s of the data's type; 0 = arithmetic is not modelled.
    """

    name: str = "custom"
    hbm_bandwidth: float = 0.0
    l2_bandwidth: float = 0.0
    usable_l2_bytes: float = 0.0
    peak_flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RooflineSizes:
    """Bytes of one element as it lies in memory; fractions are allowed.

    Attributes:
        q: of queries.
        kv: of keys and values.
        o: of outputs.
        partial: of partial outputs.
        stats: per row and split: 0 = none, 4 = lse, 8 = maximum and sum.
    """

    q: float = 1.0
    kv: float = 1.0
    o: float = 2.0
    partial: float = 2.0
    stats: float = 8.0


@dataclass(frozen=True, kw_only=True)
class RooflineRow:
    """One way of walking the blocks. Bytes over all KV heads; hbm_kv_bytes and l2_kv_bytes are those of K and V.

    `seconds` is the longest of hbm_seconds, l2_seconds and compute_seconds (0 where the device has no peak_flops), of
    kv_outer the sum of its two stages; `binds` says which: "hbm", "l2" or "compute". `flops` is what is executed.
    """

    name: str
    hbm_bytes: float
    l2_bytes: float
    hbm_kv_bytes: float
    l2_kv_bytes: float
    flops: float
    hbm_seconds: float
    l2_seconds: float
    compute_seconds: float
    seconds: float
    binds: str


@dataclass(frozen=True, kw_only=True)
class RooflineCrossover:
    """kv_outer is faster below so many distinct selected blocks per query token and KV head; 0 = nowhere.

    `q_outer` against one token at a time, `q_outer_union` against union tiles.
    """

    accounting: str
    q_outer: float
    q_outer_union: float


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What the model says.

    Attributes:
        rows: by name: q_outer, q_outer_union, kv_outer_attend, kv_outer_combine, kv_outer (the sum of those two),
            kv_outer_moved_once (its partials crossing main memory once).
        crossovers: by accounting of the partials: moved_once, written_and_read.
        blocks_per_token: num_selected_blocks over query tokens, to be compared with the crossovers.
        num_l2_blocks: blocks of one KV head that fit the last cache; 0 = not known.
        l2_miss_rate: of q_outer's repeated reads of K and V.
        flops: as rates count: 4 · query heads · head_dim · kv_block_size · all picks.
    """

    rows: dict[str, RooflineRow]
    crossovers: dict[str, RooflineCrossover]
    blocks_per_token: float
    num_l2_blocks: float
    l2_miss_rate: float
    flops: float


def roofline_devices() -> list[RooflineDevice]:
    """The devices that `roofline` knows by name."""
    return [RooflineDevice(**device) for device in _core.roofline_devices()]


def measure_roofline_device() -> RooflineDevice:
    """The current CUDA device as kernels that only read find it, for `roofline`. About 20 ms.

    Main memory is read over a GiB, the L2 over a quarter of it, of which 80 % are taken to be usable. peak_flops is 0.

    Raises:
        ValueError: there is no CUDA device, or no CUDA in the build (`tilesieve.Error`).
    """
    return RooflineDevice(**_core.measure_roofline_device())


def roofline(
    problem: Problem | str | None = None,
    *,
    num_selected_blocks: float,
    device: RooflineDevice | str = "B200",
    sizes: RooflineSizes | None = None,
    tile_tokens: int | None = None,
    union_blocks: float | None = None,
    work_items_per_block: float = 1.0,
    num_resident_kv_heads: int = 1,
) -> Roofline:
    """Models the bytes that each loop order moves and the time that they take. A model, not a measurement.

    docs/roofline.md of the sources has the formulas, their sources and their limits.

    Args:
        problem: sizes and types, as a `Problem` or its line; every row is taken to pick top_k blocks, the lengths of the
            keys are not read. None = "hq=64 hkv=4 d=128 q=8192 kv=131072 block=128 topk=16 dtype=e4m3".
        num_selected_blocks: distinct KV blocks selected under one KV head, mean of the heads.
        device: a name of `roofline_devices()`, in any case, or a device of your own, as of `measure_roofline_device()`.
        sizes: bytes of the elements; None = q, k and v as the problem stores them, o as `attend` returns it (of q's
            type, bf16 where that is e4m3), the rest as the defaults of `RooflineSizes`.
        tile_tokens: query tokens of a union tile, with union_blocks; None = one row of the block index.
        union_blocks: distinct blocks that such a tile selects, mean of the tiles.
        work_items_per_block: kv_outer: work items that read one selected block, mean.
        num_resident_kv_heads: KV heads whose blocks share the last cache at one time.

    Raises:
        ValueError: a field that is negative, not finite, zero where it may not be, or more than the picks allow.
        TypeError: an argument of another type, by name.
    """
    if isinstance(device, str):
        device = RooflineDevice(**_core.roofline_device(device))
    if not isinstance(device, RooflineDevice):
        raise TypeError(f"device: got {type(device).__name__}, expected a RooflineDevice or a name")
    if not isinstance(sizes, RooflineSizes | None):
        raise TypeError(f"sizes: got {type(sizes).__name__}, expected RooflineSizes or None")
    result = _core.roofline(problem_of(problem), num_selected_blocks, device, sizes, tile_tokens, union_blocks,
                            work_items_per_block, num_resident_kv_heads)
    result["rows"] = {name: RooflineRow(**row) for name, row in result["rows"].items()}
    result["crossovers"] = {name: RooflineCrossover(**row) for name, row in result["crossovers"].items()}
    return Roofline(**result)
