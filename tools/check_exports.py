#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Look at the shared library from outside: it has a SONAME, and exports what the public headers declare and no more."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_ERROR = re.compile(r"(typeinfo|typeinfo name|vtable) for tilesieve::(File)?Error$")


def fault(symbol: str, words: set[str]) -> str | None:
    """What is wrong with one demangled name, or None. `words` are those of the public headers."""
    if OF_ERROR.match(symbol):
        return None
    name = re.sub(r"\[abi:\w+\]", "", symbol).partition("(")[0]
    if not name.startswith("tilesieve::"):
        return f"exported, and not of tilesieve: {symbol}"
    unknown = [part for part in re.findall(r"\w+", name) if part not in words]
    return f"exported, and in no public header: {symbol}" if unknown else None


def check(symbols: list[str], soname: str, words: set[str]) -> list[str]:
    """All faults, one text each."""
    faults = [text for symbol in symbols if (text := fault(symbol, words))]
    if not any(symbol.startswith("tilesieve::route(") for symbol in symbols):
        faults.append("tilesieve::route is not exported")
    if not re.fullmatch(r"libtilesieve\.so\.\d+", soname):
        faults.append(f"SONAME: got '{soname}', expected libtilesieve.so.N")
    return faults


def words_of_headers() -> set[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "include/tilesieve").glob("*.h")]
    return {word for text in texts for word in re.findall(r"\w+", re.sub(r"//.*", "", text))}


def self_test() -> list[str]:
    """What the check gets wrong on names that are right and wrong."""
    words = {"tilesieve", "route", "Problem", "parse"}
    cases = {"tilesieve::route(int)": False, "tilesieve::Problem::parse[abi:cxx11](int)": False,
             "typeinfo for tilesieve::Error": False, "tilesieve::inner_loop(int)": True,
             "std::vector<int>::push_back(int)": True, "fmt::v9::format(int)": True}
    wrong = [f"self-test: {name}" for name, bad in cases.items() if (fault(name, words) is not None) != bad]
    if len(check(["tilesieve::Problem::parse(int)"], "libtilesieve.so", words)) != 2:
        wrong.append("self-test: a library without route and without a version was accepted")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--self-test", action="store_true", help="check the checker on names of its own")
    parser.add_argument("library", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.self_test:
        faults = self_test()
    else:
        def lines_of(*command: str) -> list[str]:
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

        symbols = [line.split(" ", 2)[2]
                   for line in lines_of("nm", "-DC", "--defined-only", "--format=bsd", str(arguments.library))]
        soname = "".join(re.findall(r"SONAME.*\[(.*)\]", "\n".join(lines_of("readelf", "-d", str(arguments.library)))))
        faults = check(symbols, soname, words_of_headers())
    for text in faults:
        print(text, file=sys.stderr)
    print(f"exports: {len(faults)} faults" if faults else "exports: in order")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
