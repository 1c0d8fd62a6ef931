#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold the direction of the tree: check every #include against the tables below.

base <- cpu <- tensor <- {layout, route, plan, quant, attend, combine, metrics, io} <- src/tilesieve.cpp
     <- {cli, python, bench, tests}
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

# Public headers, lowest first: what each may include of the others. A new header needs a row.
_SIZES = {"error", "execution", "tensor", "sequence", "problem"}
HEADERS: dict[str, set[str]] = {
    "error": set(),
    "execution": {"error"},
    "tensor": {"error"},
    "sequence": {"error"},
    "problem": {"error", "tensor", "sequence"},
    "io": {"error", "tensor"},
    "layout": _SIZES,
    "route": _SIZES,
    "plan": _SIZES | {"route"},
    "quant": _SIZES,
    "attend": _SIZES | {"route", "plan", "quant"},
    "combine": _SIZES | {"route", "plan", "quant", "attend"},
    "metrics": _SIZES | {"route", "plan", "quant", "attend"},
    "roofline": _SIZES | {"route", "plan", "quant", "attend"},
}
HEADERS["video_route"] = HEADERS["video_mass"] = _SIZES | {"route"}
HEADERS["veda_tiling"] = _SIZES | {"layout"}
HEADERS["veda_route"] = _SIZES
HEADERS["veda_predictor"] = _SIZES | {"io", "layout", "veda_route"}
HEADERS["video"] = set(HEADERS) - {"io", "veda_predictor"}
HEADERS["sage"] = _SIZES | {"route", "plan", "attend"}
HEADERS["index_sm90"] = _SIZES | {"route"}
HEADERS["dense_sm90"] = {"error", "tensor"}
HEADERS["sage_sm90"] = HEADERS["sage"] | {"sage", "dense_sm90"}
HEADERS["video_tables_sm90"] = _SIZES | {"layout"}
HEADERS["video_sm90"] = (HEADERS["video_tables_sm90"] | HEADERS["sage_sm90"]
                         | {"video_tables_sm90", "video_route", "veda_route", "sage_sm90"})
HEADERS["veda_sm90"] = HEADERS["video_tables_sm90"] | {"video_tables_sm90", "veda_route", "dense_sm90"}
HEADERS["video_mass_sm90"] = HEADERS["video_tables_sm90"] | {"video_tables_sm90", "dense_sm90", "route", "video_mass"}
HEADERS["sparse_prefill_sm90"] = _SIZES | {"route", "plan"}
HEADERS["tilesieve"] = set(HEADERS)  # the umbrella

# Folders of src/: which others each may include, and the public headers that it implements. It may include these, and
# what these may include. A new step needs a row.
_BELOW = {"base", "cpu", "tensor"}
FOLDERS: dict[str, tuple[set[str], set[str]]] = {
    "base": (set(), {"error"}),
    "cpu": ({"base"}, {"execution", "tensor"}),
    "cuda": ({"base"}, {"execution"}),
    "tensor": ({"base", "cpu"}, {"tensor", "sequence", "problem", "dense_sm90"}),
    "layout": (_BELOW, {"layout", "veda_tiling", "video_tables_sm90"}),
    "route": (_BELOW, {"route", "video_route", "veda_route"}),
    "plan": (_BELOW, {"plan"}),
    "quant": (_BELOW, {"quant", "sage"}),
    "attend": (_BELOW, {"attend", "sage"}),
    "combine": (_BELOW, {"combine"}),
    "metrics": (_BELOW, {"metrics", "roofline", "video_mass"}),
    "io": (_BELOW, {"io", "veda_predictor"}),
}

# Users of the library: may they look inside src/?
USERS = {"cli": False, "python": False, "examples": False, "bench": True, "tests": True}

CUDA_HEADER = re.compile(r"(cuda|cuda_\w+|cooperative_groups|mma)\.h$|(cub|cuda|nv|nvtx3|thrust|cutlass|cute)/")
FRAMEWORK_HEADER = re.compile(r"(torch|ATen|c10|pybind11|nanobind)/|Python\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".inc"}


def may_use_cuda(path: Path) -> bool:
    """Whether a file, given relative to the root, belongs to the CUDA half of the library."""
    return path.parts[:2] == ("src", "cuda") or path.parts[:3] == ("src", "attend", "sm90") or "_sm90" in path.name


def fault(root: Path, path: Path, bracket: str, name: str) -> str | None:
    """What is wrong with one #include of `path`, or None."""
    top = path.parts[0]
    in_library = top in ("include", "src")
    if ".." in Path(name).parts:
        return "includes go down from include/ or src/, never up with .."
    if in_library and FRAMEWORK_HEADER.match(name):
        return "the library knows no framework"
    if in_library and CUDA_HEADER.match(name) and not may_use_cuda(path):
        return "CUDA headers belong to src/cuda, src/attend/sm90 and files named *_sm90"

    if name.startswith("tilesieve/"):
        header = name.removeprefix("tilesieve/").removesuffix(".h")
        if header not in HEADERS:
            return "no such public header in the table of tools/check_layers.py"
        return fault_of_header(path, header)

    inside = bracket == '"' and ((root / "src" / name).is_file() or name.split("/")[0] in FOLDERS and "/" in name)
    beside = bracket == '"' and (root / path.parent / name).is_file()
    if not inside:
        if bracket == '"' and not beside and not ((root / top / name).is_file() and top in USERS):
            return "neither in include/, nor in src/, nor beside the file; use <> for other people's headers"
        if beside and in_library:
            return "write the path from src/, as in \"plan/select.h\""
        return None
    if top in USERS:
        return None if USERS[top] else "only the public headers of include/tilesieve are for this folder"
    if top == "include":
        return "a public header never includes src/"
    return fault_of_folder(path, Path(name).parts[0])


def fault_of_header(path: Path, header: str) -> str | None:
    if path.parts[0] == "include":
        return None if header in HEADERS[path.stem] else f"{path.stem}.h stands below {header}.h, or beside it"
    if path.parts[0] == "src" and len(path.parts) > 2:
        folder = path.parts[1]
        own = FOLDERS[folder][1]
        allowed = own.union(*(HEADERS[name] for name in own))
        return None if header in allowed else f"src/{folder} stands below {header}.h, or beside it"
    return None


def fault_of_folder(path: Path, target: str) -> str | None:
    if len(path.parts) == 2:  # src/tilesieve.cpp strings the steps
        return None
    folder = path.parts[1]
    if target == "cuda" and folder != "cuda":
        return None if may_use_cuda(path) else "src/cuda is for src/attend/sm90 and files named *_sm90"
    if target == folder or target in FOLDERS[folder][0]:
        return None
    return f"src/{folder} may include src/ of {', '.join(sorted(FOLDERS[folder][0] | {folder}))}"


def check(root: Path) -> list[str]:
    """All faults below `root`, one text each."""
    faults = []
    files = 0
    for top in ("include", "src", *USERS):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            files += 1
            relative = path.relative_to(root)
            if top == "include" and path.stem not in HEADERS:
                faults.append(f"{relative}: no row for this header in the table of tools/check_layers.py")
                continue
            if top == "src" and len(relative.parts) > 2 and relative.parts[1] not in FOLDERS:
                faults.append(f"{relative}: no row for this folder in the table of tools/check_layers.py")
                continue
            text = path.read_text(encoding="utf-8")
            for match in INCLUDE.finditer(text):
                problem = fault(root, relative, match[1], match[2])
                if problem:
                    line = text.count("\n", 0, match.start(2)) + 1
                    faults.append(f"{relative}:{line}: {match[2]}: {problem}")
    if files == 0:
        faults.append(f"{root}: holds no source file")
    return faults


# File -> (its text, whether it must be refused). Every file is checked inside a tree that holds all of them.
SELF_TEST = {
    "include/tilesieve/error.h": ("#include <string>\n", False),
    "include/tilesieve/route.h": ('#include "tilesieve/problem.h"\n', False),
    "include/tilesieve/plan.h": ('#include "tilesieve/attend.h"\n', True),
    "include/tilesieve/attend.h": ('#include "base/fail.h"\n', True),
    "include/tilesieve/surprise.h": ("", True),
    "src/tilesieve.cpp": ('#include "attend/lookup.h"\n#include "plan/select.h"\n', False),
    "src/base/fail.h": ('#include <fmt/format.h>\n#include "tilesieve/error.h"\n', False),
    "src/base/up.h": ('#include "tensor/checks.h"\n', True),
    "src/cpu/vec.h": ('#include "base/fail.h"\n', False),
    "src/cuda/launch.h": ("#include <cuda_runtime.h>\n", False),
    "src/tensor/checks.h": ('#include "tilesieve/problem.h"\n', False),
    "src/tensor/up.h": ('#include "tilesieve/route.h"\n', True),
    "src/plan/select.h": ('#include "cpu/vec.h"\n', False),
    "src/plan/select.cpp": ('#include "plan/select.h"\n#include "tilesieve/route.h"\n', False),
    "src/plan/beside.cpp": ('#include "select.h"\n', True),
    "src/plan/up.cpp": ("#include <tilesieve/tilesieve.h>\n", True),
    "src/plan/framework.cpp": ("#include <torch/torch.h>\n", True),
    "src/attend/lookup.h": ("#include <cuda_runtime.h>\n", True),
    "src/attend/sideways.cpp": ('#include "plan/select.h"\n', True),
    "src/attend/cpu/kernel.cpp": ('#include "attend/lookup.h"\n', False),
    "src/attend/gpu.cpp": ('#include "cuda/launch.h"\n', True),
    "src/attend/sm90/kernel.cu": ('#include "cuda/launch.h"\n#include <cuda_fp8.h>\n', False),
    "src/route/top_k_sm90.cu": ('#include "cuda/launch.h"\n', False),
    "src/route/dots.cpp": ('#include "../plan/select.h"\n', True),
    "src/surprise/new.cpp": ("", True),
    "cli/main.cpp": ('#include "tilesieve/tilesieve.h"\n#include <CLI/CLI.hpp>\n', False),
    "cli/inside.cpp": ('#include "plan/select.h"\n', True),
    "tests/plan_test.cpp": ('#include "plan/select.h"\n#include "reference.h"\n', False),
    "tests/reference.h": ("", False),
    "tests/lost_test.cpp": ('#include "nowhere.h"\n', True),
}


def self_test() -> list[str]:
    """What the check gets wrong on a tree that is wrong in every way it knows."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, (text, _) in SELF_TEST.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        refused = {text.split(":")[0] for text in check(root)}
    wrong = [f"self-test: {name}: {'accepted' if bad else 'refused'}, though it is {'wrong' if bad else 'right'}"
             for name, (_, bad) in SELF_TEST.items() if (name in refused) != bad]
    with tempfile.TemporaryDirectory() as folder:
        if not check(Path(folder)):
            wrong.append("self-test: an empty tree was accepted")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="check the checker on a faulty tree of its own")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    arguments = parser.parse_args()
    faults = self_test() if arguments.self_test else check(arguments.root)
    for text in faults:
        print(text, file=sys.stderr)
    print(f"layers: {len(faults)} faults" if faults else "layers: in order")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
