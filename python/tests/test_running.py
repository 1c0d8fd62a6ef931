# SPDX-License-Identifier: Apache-2.0
"""How calls behave in a process: memory, threads, imports, a bar where one is asked for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cases import make_case

import tilesieve


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_ten_thousand_calls_leak_nothing() -> None:
    case = make_case(1)
    read_only = np.zeros(case.q.shape, np.float32)
    read_only.flags.writeable = False

    def call() -> None:
        ids = tilesieve.route(case.q, case.k, router="qk_max", top_k=3, num_threads=1, **case.sizes())
        tilesieve.attend(case.q, case.k, case.v, ids, num_threads=1, **case.sizes())
        with pytest.raises(ValueError, match="out: is read-only"):
            tilesieve.attend(case.q, case.k, case.v, ids, out=read_only, **case.sizes())
        with pytest.raises(ValueError, match="k: got elements"):
            tilesieve.attend(case.q, case.k.astype(complex), case.v, ids, **case.sizes())

    for _ in range(500):
        call()
    before = resident_bytes()
    for _ in range(10_000):
        call()
    # An array of outputs is 37 KB: one that stayed behind in a hundred calls would be seen.
    assert resident_bytes() - before < 2 << 20


def test_threads_call_at_once_and_get_the_same() -> None:
    case = make_case(2, q_lens=(300,), kv_lens=(500,))
    want = tilesieve.attend(case.q, case.k, case.v, case.block_index, **case.sizes()).tobytes()
    wrong = []

    def work() -> None:
        for _ in range(20):
            got = tilesieve.attend(case.q, case.k, case.v, case.block_index, num_threads=2, **case.sizes())
            if got.tobytes() != want:
                wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_other_threads_run_meanwhile() -> None:
    case = make_case(3, q_lens=(4000,), kv_lens=(4000,))
    finished, turns, calls = threading.Event(), 0, 0

    def count() -> None:
        nonlocal turns
        while not finished.wait(0.001):
            turns += 1

    counter = threading.Thread(target=count)
    counter.start()
    started = time.monotonic()
    while time.monotonic() - started < 0.5:
        tilesieve.attend(case.q, case.k, case.v, num_threads=1, **case.sizes())
        calls += 1
    finished.set()
    counter.join()
    assert turns > 4 * calls  # with the lock held it would be about one a call


def test_a_bar_counts_to_its_total(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    case = make_case(4, q_lens=(3000,), kv_lens=(3000,))
    ids = tilesieve.route(case.q, case.k, router="qk_max", progress=True, **case.sizes())
    assert "route: 100%" in capsys.readouterr().err
    tilesieve.mass(case.q, case.k, ids, progress=True, **case.sizes())
    assert "mass: 100%" in capsys.readouterr().err
    for loop_order in ("q_outer", "kv_outer"):
        tilesieve.attend(case.q, case.k, case.v, ids, progress=True, loop_order=loop_order, **case.sizes())
        assert "attend: 100%" in capsys.readouterr().err


def test_importing_loads_no_framework() -> None:
    """Neither PyTorch nor tqdm nor ml_dtypes is loaded before it is needed."""
    program = ("import sys, numpy, tilesieve; tilesieve.attend(*[numpy.zeros((4, 2, 8), numpy.float32)] * 3);"
               "print([name for name in ('torch', 'cupy', 'jax', 'tqdm', 'ml_dtypes') if name in sys.modules])")
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_results_outlive_their_making() -> None:
    case = make_case(5)
    ids = tilesieve.route(case.q, case.k, router="qk_max", top_k=3, **case.sizes())
    copy = ids.copy()
    for _ in range(50):
        tilesieve.route(case.k.repeat(3, axis=1)[: len(case.q)], case.k, router="random", **case.sizes())
    np.testing.assert_array_equal(ids, copy)
