# SPDX-License-Identifier: Apache-2.0
"""Every Python snippet of the README and of docs/ runs: those of a page one after the other, in the sources' folder.
Every C++ snippet compiles.

A fence may say what its snippet needs: ```python torch, ```python cuda, ```python video. It is skipped where that is
missing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import tilesieve

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.exists()]
SNIPPET = re.compile(r"^```python *([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CPP_SNIPPET = re.compile(r"^```cpp\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The tensors that the README's text has introduced.
CPP_NAMES = "tilesieve::TensorView q, k, v, index_q, index_k, o, lse;"


def why_not(need: str) -> str:
    """Empty where what a snippet needs is here."""
    if need in ("torch", "cuda") and importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    if need == "cuda" and not any(kernel.available for kernel in tilesieve.kernels() if kernel.device == "cuda"):
        return "there is no Hopper GPU, or no CUDA in the build"
    if need == "video" and any(importlib.util.find_spec(module) is None for module in ("av", "skimage", "scipy")):
        return "the packages of tilesieve[video] are not installed"
    assert need in ("", "torch", "cuda", "video"), f"a fence says 'python {need}', which means nothing here"
    return ""


def pages_with(snippet: re.Pattern[str]) -> list[Path]:
    return [page for page in PAGES if snippet.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", pages_with(SNIPPET), ids=lambda page: page.name)
def test_snippets_run(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    text = page.read_text(encoding="utf-8")
    left_out = []
    for snippet in SNIPPET.finditer(text):
        if reason := why_not(snippet[1]):
            left_out.append(reason)
            continue
        line = text.count("\n", 0, snippet.start(2))
        exec(compile("\n" * line + snippet[2], str(page), "exec"), names)
    with capsys.disabled():
        for reason in left_out:
            print(f"\n{page.name}: a snippet was skipped: {reason}")


def test_the_readme_has_a_snippet() -> None:
    if not (ROOT / "README.md").exists():
        pytest.skip("the sources are not here")
    assert ROOT / "README.md" in pages_with(SNIPPET)


@pytest.mark.parametrize("page", pages_with(CPP_SNIPPET), ids=lambda page: page.name)
def test_cpp_snippets_compile(page: Path, tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = ["#include <tilesieve/tilesieve.h>", CPP_NAMES]
    for i, snippet in enumerate(CPP_SNIPPET.findall(page.read_text(encoding="utf-8"))):
        outside = [line for line in snippet.splitlines() if line.startswith(("#include", "using namespace"))]
        inside = [line for line in snippet.splitlines() if line not in outside]
        program += [*outside, f"void snippet_{i}() {{", *inside, "}"]
    (tmp_path / "snippets.cpp").write_text("\n".join(program), encoding="utf-8")
    command = [*shlex.split(compiler), "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'include'}", "snippets.cpp"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
