# SPDX-License-Identifier: Apache-2.0
"""Write the reference in docs/python.md from the docstrings of python/tilesieve, read as text: nothing is imported.

    python tools/python_api.py            # writes it
    python tools/python_api.py --check    # says whether it is as written
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/python.md"
BEGIN, END = "<!-- reference, written by tools/python_api.py -->\n", "<!-- end -->\n"

# The order of the reference; every public name stands here once.
SECTIONS = {
    "Attending": ["attend", "sparse_prefill", "dense_attention", "sage_attention", "plan", "Plan", "explain",
                  "workspace_bytes", "combine"],
    "Routing and measuring": ["route", "route_scores", "mass", "Mass", "compare", "Difference"],
    "Video models": ["video_attention", "route_video", "video_budget", "VideoBudget", "video_mass", "VideoMass",
                     "layout_search", "LayoutTable", "DensePolicy", "VideoTables", "h3_segments", "box_menu", "box_order",
                     "gather_tokens", "scatter_tokens"],
    "Veda": ["route_veda", "veda_tiling", "veda_menu", "veda_sequence", "veda_budgets", "read_veda_predictor",
             "VedaPredictor", "VedaPlan"],
    "Quality of a render": ["quality", "Quality", "QualityMeasure"],
    "Files": ["read_tensors", "TensorFile", "write_safetensors", "write_npy"],
    "Sizes and kernels": ["Problem", "Kernel", "kernels", "available_isas"],
    "Roofline": ["roofline", "Roofline", "RooflineRow", "RooflineCrossover", "RooflineDevice", "RooflineSizes",
                 "roofline_devices", "measure_roofline_device"],
}
# Described in the text of the page.
ELSEWHERE = {"Arithmetic", "Array", "DType", "Error", "Isa", "Layout", "LoopOrder", "Router", "VideoRouter", "__version__"}

Definition = ast.FunctionDef | ast.ClassDef


def definitions() -> dict[str, Definition]:
    """Every function and class of the package by name; of an overloaded one the implementation."""
    found: dict[str, Definition] = {}
    for path in sorted((ROOT / "python/tilesieve").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, Definition):
                found[node.name] = node  # the implementation comes last
    return found


def public_names() -> set[str]:
    """__all__ of the package."""
    for node in ast.parse((ROOT / "python/tilesieve/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise SystemExit("python/tilesieve/__init__.py: has no __all__")


def signature(name: str, node: ast.FunctionDef) -> str:
    """The call without types, as it is written: attend(q, k, v, block_index=None, *, causal=True, ...)."""
    arguments = node.args
    parts = []
    positional = [argument for argument in arguments.args if argument.arg not in ("self", "cls")]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        parts.append(argument.arg + (f"={ast.unparse(default)}" if default else ""))
    if arguments.kwonlyargs:
        parts.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(argument.arg + (f"={ast.unparse(default)}" if default else ""))
    text, lines = f"{name}(", []
    for i, part in enumerate(parts):
        piece = part + (", " if i + 1 < len(parts) else ")")
        if len(text) + len(piece.rstrip()) > 110:
            lines.append(text.rstrip())
            text = " " * (len(name) + 1)
        text += piece
    return "\n".join([*lines, text if parts else f"{name}()"])


def as_markdown(docstring: str) -> str:
    """A docstring with its lists of arguments and attributes as lists."""
    lines: list[str] = []
    in_list = False
    for line in inspect.cleandoc(docstring).splitlines():
        if line in ("Args:", "Attributes:", "Raises:"):
            in_list = True
            lines += [f"*{line}*", ""]
        elif line == "Returns:":
            in_list = False
            lines += ["*Returns:*", ""]
        elif in_list and (entry := re.match(r" {4}(\w+): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif in_list and line.startswith("        "):
            lines.append("  " + line.strip())
        else:
            lines.append(line.strip() if line.startswith("    ") else line)
    return "\n".join(lines).replace("``", "`")


def describe(name: str, node: Definition) -> str:
    """The reference of one name."""
    docstring = ast.get_docstring(node)
    if docstring is None:
        raise SystemExit(f"{name}: has no docstring")
    if isinstance(node, ast.FunctionDef):
        return f"### {name}\n\n```\n{signature(name, node)}\n```\n\n{as_markdown(docstring)}\n"
    parts = [f"### {name}\n", as_markdown(docstring) + "\n"]
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__" and (made := ast.get_docstring(member)):
            parts.append(f"```\n{signature(name, member)}\n```\n\n{as_markdown(made)}\n")
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_") or not ast.get_docstring(member):
            continue
        if any(ast.unparse(decorator) == "property" for decorator in member.decorator_list):
            parts.append(f"**{name}.{member.name}**: {as_markdown(ast.get_docstring(member) or '').strip()}\n")
        else:
            parts.append(f"```\n{signature(f'{name}.{member.name}', member)}\n```\n")
            parts.append(as_markdown(ast.get_docstring(member) or "") + "\n")
    return "\n".join(parts)


def reference() -> str:
    """The whole reference."""
    found, named = definitions(), {name for names in SECTIONS.values() for name in names}
    if named | ELSEWHERE != public_names():
        raise SystemExit(f"public and in no section, or the other way round: {named | ELSEWHERE ^ public_names()}")
    parts = []
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [describe(name, found[name]) for name in names]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where the page is not as written")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name}: has no {BEGIN.strip()} ... {END.strip()}")
    written = before + BEGIN + "\n" + reference() + "\n" + END + after
    if written == page:
        print("python reference: in order")
    elif check:
        print("docs/python.md: not as the docstrings say; run tools/python_api.py", file=sys.stderr)
        return 1
    else:
        PAGE.write_text(written, encoding="utf-8")
        print("docs/python.md: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
