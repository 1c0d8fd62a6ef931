# SPDX-License-Identifier: Apache-2.0
"""Measures PyTorch's attention on the CPU over the shapes of tilesieve_bench, for its option --torch.

    python bench/torch_baseline.py --json FILE [--threads N] [--repetitions N] [--cases REGEX]

  cpu/dense/<dtype>/<S>x<N>/torch        scaled_dot_product_attention, causal with the queries last, as a mask made
                                         ahead; the rate counts visible pairs
  cpu/dense/<dtype>/<S>x<N>/torch-full   the same without a mask: every key for every query, the most it can reach;
                                         the rate counts all pairs
  cpu/sparse/<dtype>/<S>x<N>/flex        flex_attention, compiled: 128 queries share 16 random blocks of 128 keys,
                                         the diagonal one among them, which alone is masked. (Selections of single
                                         queries are more than its block masks can say.) The rate counts whole blocks
  cpu/matmul/<dtype>/4096x4096/torch     PyTorch's matrix product, timed before each repetition of the others

Heads share keys as in the problem (enable_gqa). Cases run in rounds; figures are medians. Needs PyTorch 2.6 or newer;
Flex also a C++ compiler and Python's headers, without which it is left out and the file says why.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

try:
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as error:
    sys.exit(f"torch_baseline: needs PyTorch 2.6 or newer: {error}")

# As in bench/cases.cpp, which refuses a file of other problems.
SHAPES = (
    ("", "hq=64 hkv=4 d=128 q=2048 kv=32768 block=128 topk=16"),
    ("", "hq=64 hkv=4 d=128 q=2048 kv=131072 block=128 topk=16"),
    ("/smollm2", "hq=9 hkv=3 d=64 q=2048 kv=8192 block=128 topk=16"),
)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ROOF_SIZE = 4096


class Shape:
    """The tensors of one problem in one format."""

    def __init__(self, problem: str, dtype: torch.dtype) -> None:
        sizes = {key: int(value) for key, value in (field.split("=") for field in problem.split())}
        self.heads, self.kv_heads, self.head_dim = sizes["hq"], sizes["hkv"], sizes["d"]
        self.queries, self.keys, self.block, self.top_k = sizes["q"], sizes["kv"], sizes["block"], sizes["topk"]
        self.first = self.keys - self.queries  # position of query 0
        generator = torch.Generator().manual_seed(1)

        def normal(tokens: int, heads: int) -> torch.Tensor:
            # [1, heads, tokens, head_dim], lying in memory as [tokens, heads, head_dim]
            return torch.randn(1, tokens, heads, self.head_dim, generator=generator).to(dtype).transpose(1, 2)

        self.q = normal(self.queries, self.heads)
        self.k, self.v = normal(self.keys, self.kv_heads), normal(self.keys, self.kv_heads)
        seen = torch.ones(self.queries, self.keys, dtype=torch.bool).tril(self.first)
        self.mask = torch.zeros(self.queries, self.keys, dtype=dtype).masked_fill_(~seen, float("-inf"))
        self.picks = self.random_picks(generator)

    def random_picks(self, generator: torch.Generator) -> torch.Tensor:
        """[kv_heads, query blocks, top_k - 1]: blocks wholly before the query block, without replacement."""
        return torch.stack(
            [
                torch.stack(
                    [
                        torch.randperm(own, generator=generator)[: self.top_k - 1].sort().values
                        for own in range(self.first // self.block, self.keys // self.block)
                    ]
                )
                for _ in range(self.kv_heads)
            ]
        ).int()

    def block_mask(self) -> BlockMask:
        """The picks in full, and of the diagonal block what is not in the future."""
        first, num_blocks = self.first, self.keys // self.block
        query_blocks = self.queries // self.block
        size = (1, self.heads, query_blocks)
        full = torch.zeros(*size, num_blocks, dtype=torch.int32)
        full[0, :, :, : self.top_k - 1] = self.picks.repeat_interleave(self.heads // self.kv_heads, 0)
        diagonal = torch.zeros(*size, num_blocks, dtype=torch.int32)
        diagonal[..., 0] = first // self.block + torch.arange(query_blocks)
        return BlockMask.from_kv_blocks(
            torch.ones(size, dtype=torch.int32),
            diagonal,
            torch.full(size, self.top_k - 1, dtype=torch.int32),
            full,
            BLOCK_SIZE=self.block,
            mask_mod=lambda batch, head, query, key: query + first >= key,
            seq_lengths=(self.queries, self.keys),
        )

    def visible_pairs(self) -> int:
        return self.queries * self.first + self.queries * (self.queries + 1) // 2

    def flop(self, pairs: int) -> float:
        return 4.0 * self.heads * self.head_dim * pairs

    def check(self, output: torch.Tensor, sees) -> None:
        """Compares sampled rows with float64; sees(head, query) = the keys seen, as a boolean row."""
        for head, query in ((0, self.queries - 1), (self.heads - 1, self.queries // 3)):
            keys = self.k[0, head * self.kv_heads // self.heads].double()
            values = self.v[0, head * self.kv_heads // self.heads].double()
            scores = keys @ self.q[0, head, query].double() / self.head_dim**0.5
            weights = scores.masked_fill(~sees(head, query), float("-inf")).softmax(0)
            error = (output[0, head, query].double() - weights @ values).abs().max().item()
            if error > (1e-4 if output.dtype == torch.float32 else 1e-2):
                sys.exit(f"torch_baseline: head {head}, query {query} is off by {error}")

    def sees_past(self, head: int, query: int) -> torch.Tensor:
        return torch.arange(self.keys) <= self.first + query

    def sees_all(self, head: int, query: int) -> torch.Tensor:
        return torch.ones(self.keys, dtype=torch.bool)

    def sees_picks(self, head: int, query: int) -> torch.Tensor:
        seen = torch.zeros(self.keys // self.block, dtype=torch.bool)
        seen[self.picks[head * self.kv_heads // self.heads, query // self.block].long()] = True
        seen[(self.first + query) // self.block] = True
        return seen.repeat_interleave(self.block) & self.sees_past(head, query)


class Matmul:
    """The product that goes before each repetition, and its times."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.a, self.b = (torch.randn(ROOF_SIZE, ROOF_SIZE).to(dtype) for _ in range(2))
        self.seconds: list[float] = []
        self.a @ self.b

    def measure(self) -> None:
        self.seconds.append(seconds_of(lambda: self.a @ self.b))


def seconds_of(run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Case:
    def __init__(self, name: str, problem: str, flop: float, run, matmul: Matmul) -> None:
        self.name, self.problem, self.flop, self.run, self.matmul = name, problem, flop, run, matmul
        self.seconds: list[float] = []
        self.matmul_seconds: list[float] = []

    def repeat(self) -> None:
        self.matmul.measure()
        self.matmul_seconds.append(self.matmul.seconds[-1])
        self.seconds.append(seconds_of(self.run))

    def row(self) -> dict:
        share = statistics.median(roof / own for roof, own in zip(self.matmul_seconds, self.seconds))
        return rate_row(self.name, self.flop, self.seconds) | {
            "problem": self.problem,
            "baseline": "torch-matmul",
            "ratio": share * self.flop / (2.0 * ROOF_SIZE**3),
        }


def rate_row(name: str, flop: float, seconds: list[float]) -> dict:
    middle = statistics.median(seconds)
    return {
        "case": name,
        "metric": "TFLOP/s",
        "value": flop / middle * 1e-12,
        "spread": (max(seconds) - min(seconds)) / middle,
    }


def cases_of(suffix: str, problem: str, dtype: str, wanted, matmul: Matmul, missing: dict) -> list[Case]:
    """The wanted cases of one problem in one format, each run once and checked."""
    sizes = re.search(r"q=(\d+) kv=(\d+)", problem)
    names = {
        kind: f"cpu/{what}/{dtype}/{sizes[2]}x{sizes[1]}/{kind}{suffix}"
        for what, kind in (("dense", "torch"), ("dense", "torch-full"), ("sparse", "flex"))
    }
    names = {kind: name for kind, name in names.items() if wanted.fullmatch(name)}
    if not names:
        return []
    shape = Shape(problem, DTYPES[dtype])
    q, k, v = shape.q, shape.k, shape.v
    cases = []

    def add(kind: str, pairs: int, run, sees) -> None:
        if kind in names:
            shape.check(run(), sees)
            cases.append(Case(names[kind], problem, shape.flop(pairs), run, matmul))

    mask = shape.mask
    add(
        "torch",
        shape.visible_pairs(),
        lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        shape.sees_past,
    )
    add(
        "torch-full",
        shape.queries * shape.keys,
        lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        shape.sees_all,
    )
    if "flex" in names and "flex" not in missing:
        blocks = shape.block_mask()
        compiled = torch.compile(flex_attention, dynamic=False)  # for this shape alone
        run = lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True)  # noqa: E731
        try:
            run()
        except Exception as error:  # of whatever the compiler and its compiler are short of
            missing["flex"] = f"cannot be compiled here: {type(error).__name__}: {first_line(error)}"
            print(f"torch_baseline: flex_attention {missing['flex']}; it is left out", file=sys.stderr)
        else:
            add("flex", shape.queries * shape.top_k * shape.block, run, shape.sees_picks)
    return cases


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return "unknown CPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, metavar="FILE")
    default_threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))  # as OpenMP has it
    parser.add_argument("--threads", type=int, default=default_threads)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cases", default=".*", metavar="REGEX", help="of whole case names")
    arguments = parser.parse_args()
    if arguments.threads < 1 or arguments.repetitions < 1:
        parser.error("--threads and --repetitions are 1 or more")
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    wanted = re.compile(arguments.cases)

    missing: dict[str, str] = {}
    matmuls = {dtype: Matmul(DTYPES[dtype]) for dtype in DTYPES}
    cases = []
    for suffix, problem in SHAPES:
        for dtype in DTYPES:
            cases += cases_of(suffix, problem, dtype, wanted, matmuls[dtype], missing)
    if not cases:
        why = "is left to run" if missing else f"matches {arguments.cases}"
        sys.exit(f"torch_baseline: no case {why}")
    for number in range(1, arguments.repetitions + 1):
        seconds = seconds_of(lambda: [case.repeat() for case in cases])
        print(f"torch: round {number} of {arguments.repetitions}: {seconds:.0f} s", flush=True)

    rows = [
        rate_row(f"cpu/matmul/{dtype}/{ROOF_SIZE}x{ROOF_SIZE}/torch", 2.0 * ROOF_SIZE**3, matmul.seconds)
        for dtype, matmul in matmuls.items()
        if matmul.seconds
    ] + [case.row() for case in cases]
    results = {
        "cpu": cpu_name(),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "rows": rows,
    }
    if missing:
        results["missing"] = missing
    for row in rows:
        print(f"{row['case']:<46} {row['value']:10.4g} {row['metric']} {row.get('ratio', 1):8.3g}")
    Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
