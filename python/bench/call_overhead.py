# SPDX-License-Identifier: Apache-2.0
"""What a call from Python costs over the same call from C++: the smallest problem, NumPy arrays, one thread.

    cmake -S . -B build/py -G Ninja -DTILESIEVE_BUILD_PYTHON=ON && cmake --build build/py --target smallest_call
    python python/bench/call_overhead.py build/py/python/smallest_call

Both are medians of batches of calls, taken in turns: C++, Python, C++, Python, ...
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import timeit
from collections.abc import Callable

import numpy as np

import tilesieve

ROUNDS, BATCHES, CALLS = 5, 41, 5000


def microseconds(call: Callable[[], object]) -> float:
    """Median time of one call."""
    return statistics.median(timeit.repeat(call, number=CALLS, repeat=BATCHES)) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smallest_call", help="the C++ program of that name")
    program = parser.parse_args().smallest_call
    q, k, v, out = (np.zeros((1, 1, 8), np.float32) for _ in range(4))
    lse, block_index = np.zeros((1, 1), np.float32), np.zeros((1, 1, 1), np.int32)

    def given() -> object:
        return tilesieve.attend(q, k, v, block_index, kv_block_size=8, out=out, lse=lse, num_threads=1)

    def allocated() -> object:
        return tilesieve.attend(q, k, v, block_index, kv_block_size=8, num_threads=1)

    rounds = [(float(subprocess.run([program], check=True, capture_output=True, text=True).stdout), microseconds(given),
               microseconds(allocated)) for _ in range(ROUNDS)]
    cpp, into, new = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"C++ {cpp:.2f} us; Python into given outputs {into:.2f} us, {into - cpp:+.2f}; "
          f"with new outputs {new:.2f} us, {new - cpp:+.2f}")


if __name__ == "__main__":
    main()
