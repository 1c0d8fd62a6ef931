#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold the rules of the tree that need no compiler: names, depth, length, licence line, and a place in the build."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

# Names that say nothing about what is inside.
EMPTY_NAMES = {"util", "utils", "common", "misc", "helper", "helpers"}
MAX_FOLDERS = 3
MAX_LINES = 600
SOURCES = {".h", ".cpp", ".cu", ".cuh", ".inc", ".py", ".sh", ".cmake"}
LICENCE = "SPDX-License-Identifier: Apache-2.0"


def is_source(path: Path) -> bool:
    return path.suffix in SOURCES or path.name == "CMakeLists.txt" or str(path) in ("dev", ".ci/run")


def files_of(root: Path) -> list[Path]:
    """The files git knows or would add, relative to `root`."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
    return sorted({Path(name) for name in names if name and (root / name).is_file()})


def check(root: Path, files: list[Path]) -> list[str]:
    """All faults of `files`, one text each."""
    faults = []
    build = (root / "CMakeLists.txt").read_text(encoding="utf-8")
    for path in files:
        for part in path.parts:
            if part.split(".")[0].lower() in EMPTY_NAMES:
                faults.append(f"{path}: '{part}' names nothing; name what is inside")
        if not is_source(path):
            continue
        if len(path.parts) - 1 > MAX_FOLDERS:
            faults.append(f"{path}: {len(path.parts) - 1} folders deep, {MAX_FOLDERS} at the most")
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        if len(lines) > MAX_LINES:
            faults.append(f"{path}: {len(lines)} lines, {MAX_LINES} at the most")
        if not any(LICENCE in line for line in lines[:2]):
            faults.append(f"{path}: '{LICENCE}' is not in its first line (or second, after #!)")
        if path.parts[0] == "src" and path.suffix == ".cpp" and str(path) not in build:
            faults.append(f"{path}: in no step of CMakeLists.txt")
    if not files:
        faults.append(f"{root}: holds no file")
    return faults


def self_test() -> list[str]:
    """What the check gets wrong on files that are right and wrong in every way it knows."""
    licence = f"// {LICENCE}\n"
    build = f"# {LICENCE}\ntilesieve_step(plan SOURCES src/plan/plan.cpp src/plan/long_enough.cpp)\n"
    cases = {
        "CMakeLists.txt": (build, False),
        "src/plan/plan.cpp": (licence, False),
        "src/plan/long_enough.cpp": (licence + "\n" * (MAX_LINES - 1), False),
        "src/plan/forgotten.cpp": (licence, True),
        "tests/too_long.cpp": (licence + "\n" * MAX_LINES, True),
        "tests/no_licence.cpp": ("\n\n" + licence, True),
        "src/plan/utils.h": (licence, True),
        "src/common/plan.h": (licence, True),
        "src/plan/common_tile.h": (licence, False),
        "src/attend/sm90/kernel.cu": (licence, False),
        "src/attend/sm90/deep/kernel.cu": (licence, True),
        "tools/check.py": (f"#!/usr/bin/env python3\n# {LICENCE}\n", False),
        "docs/design.md": ("# Design\n", False),
        "dev": ("#!/usr/bin/env bash\n", True),
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, (text, _) in cases.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        refused = {text.split(":")[0] for text in check(root, [Path(name) for name in cases])}
    return [f"self-test: {name}: {'accepted' if bad else 'refused'}, though it is {'wrong' if bad else 'right'}"
            for name, (_, bad) in cases.items() if (name in refused) != bad]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--self-test", action="store_true", help="check the checker on files of its own")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    if not arguments.self_test and not (root / ".git").exists():
        print("tree: not checked, this is not a git checkout")
        return 0
    faults = self_test() if arguments.self_test else check(root, files_of(root))
    for text in faults:
        print(text, file=sys.stderr)
    print(f"tree: {len(faults)} faults" if faults else "tree: in order")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
