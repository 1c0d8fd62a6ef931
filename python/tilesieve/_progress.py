# SPDX-License-Identifier: Apache-2.0
"""Progress bars: over a call, whose threads count while a thread here looks at the counters, and over frames."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from . import _core

REDRAW_SECONDS = 0.1
T = TypeVar("T")


def tqdm_bar(text: str, unit: str, total: int | None = None) -> Any:
    """A bar of tqdm, which the package does without where no bar is wanted."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress: needs the package tqdm: pip install tilesieve[progress]") from None
    return tqdm(desc=text, unit=unit, total=total)


def counted(wanted: bool, text: str, frames: Iterable[T], total: int | None) -> Iterator[T]:
    """The frames, with a bar that counts them where one is wanted."""
    if not wanted:
        yield from frames
        return
    with tqdm_bar(text, "frame", total) as bar:
        for frame in frames:
            yield frame
            bar.update()


@contextmanager
def progress_bar(wanted: bool, text: str) -> Iterator[_core.Progress | None]:
    """Shows a tqdm bar for as long as the block runs; gives the counters to hand to the engine, None if not wanted."""
    if not wanted:
        yield None
        return
    counters, finished = _core.Progress(), threading.Event()
    made = tqdm_bar(text, "item")

    def watch() -> None:
        with made as bar:
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
