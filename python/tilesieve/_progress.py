# SPDX-License-Identifier: Apache-2.0
"""A progress bar over a call: the engine's threads count, and a thread here looks at the counters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from . import _core

REDRAW_SECONDS = 0.1


@contextmanager
def progress_bar(wanted: bool, text: str) -> Iterator[_core.Progress | None]:
    """Shows a tqdm bar for as long as the block runs; gives the counters to hand to the engine, None if not wanted."""
    if not wanted:
        yield None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress: needs the package tqdm: pip install tilesieve[progress]") from None
    counters, finished = _core.Progress(), threading.Event()

    def watch() -> None:
        with tqdm(desc=text, unit="item") as bar:
            over = False
            while not over:
                over = finished.wait(REDRAW_SECONDS)
                bar.total = counters.total or None
                bar.update(counters.done - bar.n)

    watcher = threading.Thread(target=watch, name="tilesieve progress", daemon=True)
    watcher.start()
    try:
        yield counters
    finally:
        finished.set()
        watcher.join()
