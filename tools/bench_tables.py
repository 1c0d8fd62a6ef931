# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of measured figures into the documents, from the result files of the bench.

    python tools/bench_tables.py          rewrites what stands between the markers
    python tools/bench_tables.py --check  fails where a table is not what its result file says

A table stands between `<!-- bench RESULTS CASE-PATTERN -->` and `<!-- end -->`, RESULTS being a file of bench/results and
CASE-PATTERN a regular expression that whole case names match.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "docs/cpu.md")
BLOCK = re.compile(r"(<!-- bench (\S+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BASELINES = (
    ("onednn", "x oneDNN's matmul"),
    ("dense-share", "x its share of dense"),
    ("dense", "x dense in time"),
    ("attend", "x less than attending"),
    ("index", "x less than scoring"),
)


def table(results: dict, pattern: str) -> str:
    """One row a case, one column for each baseline that any of the cases has."""
    cases: dict[str, dict] = {}
    for row in results["rows"]:
        if re.fullmatch(pattern, row["case"]):
            case = cases.setdefault(row["case"], {"value": f"{row['value']:.3g} {row['metric']}"})
            if "baseline" in row:
                case[row["baseline"]] = f"{row['ratio']:.2f}" if row["ratio"] < 10 else f"{row['ratio']:.0f}"
    columns = [(name, title) for name, title in BASELINES if any(name in case for case in cases.values())]
    lines = [
        f"{results['device']}; {results['date']}; medians, commit {results['commit']}:",
        "",
        "| case | value | " + " | ".join(title for _, title in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for name, case in cases.items():
        lines.append(f"| `{name}` | {case['value']} | " + " | ".join(case.get(key, "") for key, _ in columns) + " |")
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """The document with every table made anew."""

    def replace(match: re.Match) -> str:
        results = json.loads((ROOT / "bench" / "results" / match[2]).read_text())
        return match[1] + "\n" + table(results, match[3]) + "\n" + match[5]

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
