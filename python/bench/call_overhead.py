# SPDX-License-Identifier: Apache-2.0
"""What a call from Python costs over the same call from C++: the smallest problem, NumPy arrays, one thread.

    cmake -S . -B build/py -G Ninja -DTILESIEVE_BUILD_PYTHON=ON && cmake --build build/py --target smallest_call
    python python/bench/call_overhead.py build/py/python/libsmallest_call.so

Batches of calls in turns, C++, Python, C++, Python, ... in one process; the median of what each pair differs by.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import timeit

import numpy as np

import tilesieve

ROUNDS, CALLS = 201, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="libsmallest_call.so")
    cpp = ctypes.CDLL(parser.parse_args().library).smallest_calls
    cpp.restype = ctypes.c_double
    q, k, v, out = (np.zeros((1, 1, 8), np.float32) for _ in range(4))
    lse, block_index = np.zeros((1, 1), np.float32), np.zeros((1, 1, 1), np.int32)

    def given() -> object:
        return tilesieve.attend(q, k, v, block_index, kv_block_size=8, out=out, lse=lse, num_threads=1)

    def allocated() -> object:
        return tilesieve.attend(q, k, v, block_index, kv_block_size=8, num_threads=1)

    rounds = [(cpp(CALLS), timeit.timeit(given, number=CALLS), timeit.timeit(allocated, number=CALLS))
              for _ in range(ROUNDS)]
    scale = 1e6 / CALLS
    base, into, new = (statistics.median(seconds) * scale for seconds in (
        [c for c, _, _ in rounds], [g - c for c, g, _ in rounds], [a - c for c, _, a in rounds]))
    print(f"C++ {base:.2f} us; from Python into given outputs {into:+.2f} us, with a new output {new:+.2f} us")


if __name__ == "__main__":
    main()
