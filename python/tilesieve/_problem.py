# SPDX-License-Identifier: Apache-2.0
"""The sizes of a call as one value and as one line of text, and the kernels that run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from . import _core
from ._options import Arithmetic, Isa

DType = Literal["f32", "bf16", "f16", "e4m3"]


@dataclass(frozen=True)
class Problem:
    """The sizes of one call. ``str(problem)`` is the line that the command line, the bench and errors use.

    Attributes:
        q_lens: query tokens of each sequence of the batch.
        kv_lens: keys of each sequence, the prefix included.
        num_q_heads: query heads.
        num_kv_heads: KV heads; divides num_q_heads.
        head_dim: channels of a head; a multiple of 8 up to 256.
        segments: where blocks of queries and keys begin anew, as "text:594,audio:414,video:37x24x42"; "" = a sequence
            is one piece. Each sequence's queries are then its keys, with no causal mask.
        q_block_size: query tokens that share a row of the block index, up to 1,024; above 1 with no causal mask only.
        kv_block_size: keys of one block; a multiple of 8 up to 1,024.
        top_k: blocks that a row of the block index may hold.
        causal: bottom-right aligned.
        softmax_scale: above 0; None = 1 / sqrt(head_dim).
        q_dtype: as queries are stored: "f32", "bf16", "f16" or "e4m3".
        kv_dtype: as keys and values are stored, likewise.
        arithmetic: "storage" or "int8", as of `attend`.

    Raises:
        ValueError: a field that no kernel could honour.
        TypeError: a field of another type, by name.
    """

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    _: KW_ONLY
    num_q_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 64
    segments: str = ""
    q_block_size: int = 1
    kv_block_size: int = 128
    top_k: int = 16
    causal: bool = True
    softmax_scale: float | None = None
    q_dtype: DType = "f32"
    kv_dtype: DType = "f32"
    arithmetic: Arithmetic = "storage"

    def __post_init__(self) -> None:
        for name, value in _core.validated_problem(self).items():  # plain numbers and tuples, which hash and compare
            object.__setattr__(self, name, value)

    @classmethod
    def parse(cls, line: str) -> Problem:
        """Reads a line such as "hq=64 hkv=4 d=128 q=2048 kv=32768 block=128 topk=16 dtype=bf16"."""
        if not isinstance(line, str):
            raise TypeError(f"line: got {type(line).__name__}, expected str")
        return cls(**_core.parse_problem(line))

    def __str__(self) -> str:
        return _core.problem_line(self)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel that exists in this build.

    Attributes:
        name: "avx512.q_outer.bf16", "sm90.kv_outer.e4m3.d128.b128".
        device: "cpu" or "cuda".
        arithmetic: of the factors of both products: "f32", "bf16", "e4m3", or "i8" for a problem's "int8".
        available: this machine can run it.
        why_not: why it cannot run, here or the problem that was asked for; "" where it can.
    """

    name: str
    device: str
    arithmetic: str
    available: bool
    why_not: str


def problem_of(problem: Problem | str | None) -> Problem | None:
    """A problem that may have been given as a line."""
    if isinstance(problem, str):
        return Problem.parse(problem)
    if not isinstance(problem, Problem | None):
        raise TypeError(f"problem: got {type(problem).__name__}, expected Problem or its line")
    return problem


def kernels(problem: Problem | str | None = None) -> list[Kernel]:
    """The kernels of this build, best first within a device and a loop order.

    With a problem, or the line of one, `Kernel.why_not` also says of each whether it runs it.
    """
    return [Kernel(**row) for row in _core.kernels(problem_of(problem))]


def available_isas() -> list[Isa]:
    """Instruction sets that this build has and this machine runs, worst first."""
    return _core.available_isas()
