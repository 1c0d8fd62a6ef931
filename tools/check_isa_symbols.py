#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold code of one instruction set inside the functions that are only called where the machine has it.

Two ways lead out of an object file that was compiled with, say, -mavx512f. An inline function or a template that it did
not inline is a weak symbol: of the copies of all objects the linker keeps one, perhaps this one, for the whole program.
And a static initialiser runs in every program, on every machine. So the objects of an instruction set may define weak
symbols only where the name holds their own namespace, which no other object does, and no static initialiser.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The exception handler's own pointer: the same data in every object.
HARMLESS = re.compile(r"DW\.ref\.")
INITIALISER = re.compile(r"_GLOBAL__sub_I_|__static_initialization_and_destruction")
SYMBOL = re.compile(r"[0-9a-fA-F]+ (\S) (.*)")


def faults_of(nm: str, path: Path, isa: str) -> list[str]:
    """The symbols of an object file that may run outside the code of its instruction set."""
    faults = []
    for demangled in (True, False):
        command = [nm, "--defined-only", "-C" if demangled else "--no-demangle", str(path)]
        output = subprocess.run(command, check=True, capture_output=True, text=True)
        for line in output.stdout.splitlines():
            match = SYMBOL.match(line)
            if match is None:
                continue
            kind, name = match.groups()
            if not demangled and INITIALISER.search(name):
                faults.append(f"{path}: {name}: a static initialiser runs on every machine")
            if demangled and kind in "WVu" and f"tilesieve::{isa}::" not in name and not HARMLESS.match(name):
                faults.append(f"{path}: {name}: weak and outside tilesieve::{isa}")
    return faults


def check(nm: str, build: Path, isas: list[str]) -> list[str]:
    """The faults of all objects of the targets tilesieve_<step>_<isa> below `build`."""
    faults = []
    for isa in isas:
        objects = sorted(build.glob(f"**/CMakeFiles/tilesieve_*_{isa}.dir/**/*.o"))
        if not objects:
            faults.append(f"{build}: no object file of tilesieve_*_{isa}; build first")
        for path in objects:
            faults += faults_of(nm, path, isa)
    return faults


SELF_TEST = {
    "good": ("namespace tilesieve::{isa} {{ template <class T> struct S {{ __attribute__((noinline)) T f(T x) {{"
             " return x * x; }} }}; float g(float x) {{ return S<float>().f(x); }} }}", False),
    "leak": ("namespace tilesieve {{ __attribute__((noinline)) inline float f(float x) {{ return x * x; }} }}"
             " namespace tilesieve::{isa} {{ float g(float x) {{ return f(x); }} }}", True),
    "initialiser": ("int now(); namespace tilesieve::{isa} {{ int table = now(); }}", True),
}


def self_test(nm: str, compiler: str) -> list[str]:
    """What the check gets wrong on three small objects, and on a build without any."""
    wrong = []
    for name, (code, bad) in SELF_TEST.items():
        with tempfile.TemporaryDirectory() as folder:
            objects = Path(folder) / "CMakeFiles" / "tilesieve_attend_avx2.dir"
            objects.mkdir(parents=True)
            source = objects / "source.cpp"
            source.write_text(code.format(isa="avx2"), encoding="utf-8")
            subprocess.run([compiler, "-std=c++20", "-O2", "-c", source, "-o", objects / "source.cpp.o"], check=True)
            if bool(check(nm, Path(folder), ["avx2"])) != bad:
                wrong.append(f"self-test: {name}: {'accepted' if bad else 'refused'}")
            if not check(nm, Path(folder), ["avx512"]):
                wrong.append("self-test: a build without objects was accepted")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nm", default="nm", help="the nm to read object files with")
    parser.add_argument("--cxx", default="c++", help="the compiler of the self-test")
    parser.add_argument("--self-test", action="store_true", help="check the checker on objects of its own")
    parser.add_argument("build", nargs="?", type=Path, help="a build folder")
    parser.add_argument("isas", nargs="*", help="the instruction sets, as in the names of the targets")
    arguments = parser.parse_args()
    if not arguments.self_test and not arguments.isas:
        parser.error("give a build folder and its instruction sets, or --self-test")
    faults = (self_test(arguments.nm, arguments.cxx) if arguments.self_test else
              check(arguments.nm, arguments.build, arguments.isas))
    for text in faults:
        print(text, file=sys.stderr)
    print(f"instruction sets: {len(faults)} leaks" if faults else "instruction sets: each in its own namespace")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
