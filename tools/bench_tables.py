# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of measured figures into the documents, from the result files of the bench.

    python tools/bench_tables.py          rewrites what stands between the markers
    python tools/bench_tables.py --check  fails where a table is not what its result file says

A table stands between `<!-- bench RESULTS CASE-PATTERN [COLUMNS] -->` and `<!-- end -->`: RESULTS is a file of
bench/results, CASE-PATTERN a regular expression that whole case names match, COLUMNS those of the columns below that
are shown, with commas between, all by default. A column that no case has anything for is left out.

Where the pattern has a group named `by`, as in `m3/call/(?P<by>bf16|e4m3)/.*`, what it matches gets a column each
instead, and a cell holds the value and what COLUMNS would have held.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/cpu.md", "docs/kv-outer.md", "docs/loops.md", "docs/sage.md", "docs/sage-sparse.md",
             "docs/video.md")
BLOCK = re.compile(r"(<!-- bench (\S+) (\S+)(?: (\S+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
COLUMNS = (
    ("kernel", "kernel"),
    ("spread", "spread"),
    ("clock", "clock"),
    ("workspace", "workspace"),
    ("bound", "x the bound"),
    ("triton", "x Triton"),
    ("flashinfer-msa", "x FlashInfer's MSA"),
    ("cudnn", "x dense cuDNN in time"),
    ("flash", "x dense FlashAttention in time"),
    ("fa3", "x dense FA3 in time"),
    ("fa3-e4m3", "x dense FA3 of e4m3 in time"),
    ("fa4", "x dense FA4 in time"),
    ("flashinfer", "x dense FlashInfer in time"),
    ("sage2", "x SageAttention 2 in time"),
    ("onednn", "x oneDNN's matmul"),
    ("torch-matmul", "x PyTorch's matmul"),
    ("dense-share", "x its share of dense"),
    ("dense", "x dense in time"),
    ("dense-kernel", "x dense in time"),
    ("dense-call", "x dense in time"),
    ("copy", "x a copy"),
    ("best-loop", "x the better loop"),
    ("f32", "x f32 in time"),
    ("bf16", "x bf16 in time"),
    ("torch", "x PyTorch's SDPA"),
    ("torch-full", "x SDPA without a mask"),
    ("flex", "x FlexAttention"),
    ("sparge", "x SpargeAttn in time"),
    ("sparge-call", "x SpargeAttn's call in time"),
    ("attend", "x less than attending"),
    ("sparse-kernel", "x less than sparse attention"),
    ("index", "x less than scoring"),
)


def cells_of(row: dict) -> dict[str, str]:
    """What one row of a result file puts into which column."""
    value = row["value"]
    cells = {"value": f"{value:.3g} {row['metric']}" if value < 1000 else f"{value:,.0f} {row['metric']}"}
    if "kernel" in row:
        cells["kernel"] = f"`{row['kernel']}`"
    if "spread" in row:
        cells["spread"] = f"{row['spread'] * 100:.0f} %"
    if "sm_mhz" in row:
        cells["clock"] = f"{row['sm_mhz']} MHz"
    if "workspace_bytes" in row:
        cells["workspace"] = f"{row['workspace_bytes'] / 2**20:.0f} MiB"
    if "baseline" in row:
        cells[row["baseline"]] = f"{row['ratio']:.2f}" if row["ratio"] < 10 else f"{row['ratio']:.0f}"
    return cells


def measured(results: dict) -> str:
    """Where and when, for the line above a table."""
    gpu = ""
    if "cuda" in results:
        gpu = f", driver {results['driver']}, CUDA {results['cuda']}, memory at {results['memory_mhz']} MHz"
    return f"{results['device']}{gpu}; {results['date']}; medians, commit {results['commit']}"


def columns_of(cases: list[dict[str, str]], shown: set[str]) -> list[tuple[str, str]]:
    """The columns of `shown` that any of the cases has something for, with their titles."""
    for unknown in (shown | {key for case in cases for key in case}) - {name for name, _ in COLUMNS} - {"value"}:
        sys.exit(f"bench_tables: no such column: {unknown}")
    return [(key, title) for key, title in COLUMNS if key in shown and any(key in case for case in cases)]


def markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" if cells else "|" + "---|" * len(header) for cells in [header, [], *rows]]


def table(results: dict, pattern: str, shown: set[str]) -> str:
    """One row a case, or where the pattern has a group `by`, one row for all cases that differ in it."""
    cases: dict[str, dict[str, str]] = {}
    for row in results["rows"]:
        if re.fullmatch(pattern, row["case"]):
            cases.setdefault(row["case"], {}).update(cells_of(row))
    if not cases:
        sys.exit(f"bench_tables: no case matches {pattern}")
    columns = columns_of(list(cases.values()), shown)
    spread = "; spread is longest less shortest time over the median" if ("spread", "spread") in columns else ""
    if "by" in re.compile(pattern).groupindex:
        header, rows = pivoted(cases, pattern, columns)
    else:
        columns.insert(0, ("value", "value"))
        header = ["case"] + [title for _, title in columns]
        rows = [[f"`{name}`"] + [case.get(key, "") for key, _ in columns] for name, case in cases.items()]
    return "\n".join([f"{measured(results)}{spread}:", "", *markdown(header, rows)]) + "\n"


def pivoted(cases: dict[str, dict[str, str]], pattern: str, columns: list[tuple[str, str]]) -> tuple[list, list]:
    """Header and rows with a column for each text of the group `by`, in the order of the cases."""
    rows: dict[str, dict[str, str]] = {}
    for name, case in cases.items():
        match = re.fullmatch(pattern, name)
        start, end = match.span("by")
        ratios = [f"{case[key]} {title}" for key, title in columns if key in case]
        rows.setdefault(f"{name[:start]}*{name[end:]}", {})[match["by"]] = ", ".join([case["value"], *ratios])
    header = list(dict.fromkeys(by for row in rows.values() for by in row))
    return ["case", *header], [[f"`{name}`"] + [row.get(by, "") for by in header] for name, row in rows.items()]


def rewritten(text: str) -> str:
    """The document with every table made anew."""

    def replace(match: re.Match) -> str:
        results = json.loads((ROOT / "bench" / "results" / match[2]).read_text())
        shown = set(match[4].split(",")) if match[4] else {name for name, _ in COLUMNS}
        return match[1] + "\n" + table(results, match[3], shown) + "\n" + match[6]

    if text.count("<!-- bench ") != len(BLOCK.findall(text)):
        sys.exit("bench_tables: a marker has no <!-- end -->")
    return BLOCK.sub(replace, text)


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        new = rewritten(text)
        if new != text and check:
            stale.append(name)
        elif new != text:
            path.write_text(new)
    if stale:
        print(f"bench_tables: {', '.join(stale)}: a table differs from bench/results; run tools/bench_tables.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
