# SPDX-License-Identifier: Apache-2.0
"""The report of `denoise_clip.py`: pictures and tables of a finished study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import denoise_clip as demo
import numpy as np
import numpy.typing as npt

import tilesieve
from tilesieve import report

if TYPE_CHECKING:
    from denoise_clip import Study

COLOUR_OF_ROUTE = {"raster": 1, "3D": 0, "dense": 6}
TERMS = [
    ("mass", "share of the dense softmax, over all keys, on the blocks that are read: 1 = nothing is lost"),
    ("floor", "what a random choice of as many blocks keeps on average"),
    ("ceiling", "the most that as many blocks of this shape can keep, whatever the router"),
    ("budget", "share of the clip's blocks of keys that is chosen for each block of queries, beside those that hold "
               "its own tokens"),
    ("raster, 3D", "order in which blocks cut the tokens: row by row, or in boxes of frames x rows x columns"),
    ("PSNR", "against the clean clip, on luma: how well the denoising works; higher is better"),
    ("SSIM", "against dense attention in f32, Wang et al. 2004: 1 = the same"),
    ("Laplacian loss", "share of dense attention's detail that is missing, by variance of the Laplacian; below 0: more "
                       "detail than dense, which may be noise"),
    ("INT8", "arithmetic as of SageAttention: q, and k less its mean, are rounded to 8 bits, v and the weights to 8 or "
             "16; blocks are chosen by what is stored, so that mass is the same"),
]


def query_token(grid: tuple[int, int, int], wanted: Sequence[int] | None) -> tuple[int, int, int]:
    """The token whose block of queries is drawn."""
    if wanted is None:
        return grid[0] // 2, grid[1] // 2, grid[2] // 2
    if not all(0 <= at < axis for at, axis in zip(wanted, grid, strict=True)):
        raise demo.DenoiseError(f"--query: got {tuple(wanted)}, expected frame, row and column inside {grid}")
    return wanted[0], wanted[1], wanted[2]


def as_pixels(frames: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return (np.clip(frames, 0, 1) * 255).round().astype(np.uint8)


def route_views(study: Study, token: tuple[int, int, int], head: int) -> list[report.RouteView]:
    """What the token's block of queries reads, dense and by both routes at 15 %."""
    raster = tilesieve.box_order(study.clip.grid, "raster")
    views = [report.view_route("dense", None, segments=study.segments, order=raster, token=token)]
    assert study.table is not None
    for route, box in (("raster", "raster"), ("3D", study.table.boxes(0)[head])):
        q, k = (tilesieve.gather_tokens(x, segments=study.segments, **study.layout(route)) for x in (study.q, study.k))
        ids = tilesieve.route_video(q, k, segments=study.segments, budget=demo.ARTICLE_BUDGET,
                                    num_threads=study.num_threads)
        name = "raster order" if route == "raster" else f"3D, boxes of {box}"
        views.append(report.view_route(name, ids[head], segments=study.segments,
                                       order=tilesieve.box_order(study.clip.grid, box), token=token))
    return views


def route_section(study: Study, token: tuple[int, int, int]) -> report.Section:
    head = 0
    views = route_views(study, token, head)
    # One choice of frames for all, so that pictures can be compared.
    chosen = report.shown_frames(views[0])
    frames = as_pixels(study.clip.frames)
    blocks: list[report.Text | report.Picture | report.Table] = [report.Text(
        f"The block of 128 queries that holds the token at frame {token[0]}, row {token[1]}, column {token[2]}, at "
        f"h = {study.bandwidths[head]:.3f} and a budget of {100 * demo.ARTICLE_BUDGET:.0f} %. Tokens that it reads "
        "keep their colours, inside a blue outline; all others are dark and grey. Its own tokens are orange inside a "
        f"white outline. Each picture shows {len(chosen)} of the {len(frames)} frames, which are numbered from 0; its "
        "bars have them all.")]
    for view in views:
        slug = view.name.split()[0].strip(",").lower()
        share = 100 * view.read.mean()
        caption = f"{view.name}: {view.num_read} of {view.num_blocks} blocks of keys, {share:.1f} % of the tokens"
        shares = ", ".join(f"{place}: {100 * one:.0f}" for place, one in enumerate(view.share_of_frames()))
        blocks.append(report.Picture(report.draw_route(view, frames, chosen), f"route-{slug}", caption,
                                     f"{caption}. Share of each frame in percent: {shares}."))
    blocks.append(report.Table("Share of each frame that is read, %", ["frame", *(view.name for view in views)],
                               [[str(frame), *(f"{100 * view.share_of_frames()[frame]:.1f}" for view in views)]
                                for frame in range(len(frames))], folded=True))
    blocks.append(report.Text("Veda's routes need weights that were trained for a model; there are none for this "
                              "attention. tilesieve.report.view_veda draws them where there are."))
    return report.Section("What a block of queries reads", blocks)


def pictures_section(study: Study) -> report.Section:
    frame = len(study.noisy) // 2
    psnr = study.noisy_psnr
    rows = [("clean", as_pixels(study.clip.frames[frame])), (f"noisy, {psnr:.2f} dB", as_pixels(study.noisy[frame]))]
    for route in ("dense", "raster", "3D"):
        run = study.run_of(route, 1.0 if route == "dense" else demo.ARTICLE_BUDGET)
        budget = "" if route == "dense" else f" {100 * run.budget:.0f} %"
        rows.append((f"{route}{budget}, {run.psnr[0]:.2f} dB", as_pixels(study.outputs[route][0][frame])))
    scale = max(1, round(640 / rows[0][1].shape[1]))
    caption = (f"Frame {frame} of 0 to {len(study.noisy) - 1}, enlarged {scale} times, h = {study.bandwidths[0]:.3f}. "
               "PSNR is of the whole clip")
    picture = report.Picture(report.draw_frames(rows, scale), "frames", caption,
                             f"{caption}: " + "; ".join(name for name, _ in rows))
    return report.Section("The clip, before and after", [picture])


def budget_names() -> list[str]:
    return [f"{100 * budget:.0f} %" for budget in demo.BUDGETS]


def mass_section(study: Study) -> report.Section:
    rows = [(route, budget) for route in ("raster", "3D") for budget in demo.BUDGETS]
    runs = [study.run_of(*row) for row in rows]
    heads = [f"h = {bandwidth:.3f}" for bandwidth in study.bandwidths]
    mass_map = report.MassMap(row_names=[f"{route}, {100 * budget:.0f} %" for route, budget in rows],
                              column_names=heads, **{name: np.array([getattr(run, name) for run in runs])
                                 for name in ("floor", "mass", "ceiling")})
    budgets = [100 * budget for budget in demo.BUDGETS]
    panels = []
    for head, title in enumerate(heads):
        curves = []
        for route in ("3D", "raster"):
            of_route = [study.run_of(route, budget) for budget in demo.BUDGETS]
            for name, style in (("ceiling", "dashed"), ("mass", "solid"), ("floor", "dotted")):
                curves.append(report.Curve(name=f"{route}: {name}", x=budgets,
                                           y=[getattr(run, name)[head] for run in of_route],
                                           colour=COLOUR_OF_ROUTE[route], style=style))
        panels.append((title, curves))
    spoken = "; ".join(f"{route} at {100 * run.budget:.0f} %: " + ", ".join(f"{mass:.3f}" for mass in run.mass)
                       for (route, _), run in zip(rows, runs, strict=True))
    return report.Section("Mass", [
        report.Picture(report.draw_curves(panels, x_label="budget, % of the blocks of keys",
                                          y_label="share of the softmax", y_range=(0, 1)), "mass-curves",
                       "Mass by budget, between what chance keeps (dotted) and the most that is possible (dashed)",
                       f"Mass of each h: {spoken}."),
        report.Picture(report.draw_mass_map(mass_map, "route, budget", "head"), "mass-map",
                       "Floor, mass and ceiling of each route and head, one scale",
                       f"Mass of each h: {spoken}."),
    ])


MEASURES = (  # name, factor, label of the axis, caption
    ("psnr", 1.0, "PSNR against the clean clip, dB", "How well the denoising works, by budget"),
    ("ssim", 1.0, "SSIM against dense, 1 = the same", "Likeness to dense attention, by budget"),
    ("laplacian_loss", 100.0, "Laplacian loss against dense, %",
     "Detail that dense attention has and the route has not, by budget; below 0 the route leaves more, here noise"),
)


def psnr_against_mass(study: Study) -> list[list[str]]:
    """Where the route with less mass has the better PSNR."""
    rows = []
    for head, bandwidth in enumerate(study.bandwidths):
        for budget in demo.BUDGETS:
            boxes, raster = (study.run_of(route, budget) for route in ("3D", "raster"))
            if (boxes.psnr[head] - raster.psnr[head]) * (boxes.mass[head] - raster.mass[head]) < 0:
                decibels = (boxes.psnr[head], raster.psnr[head], study.run_of("dense", 1.0).psnr[head])
                rows.append([f"h = {bandwidth:.3f}", f"{100 * budget:.0f} %", *(f"{one:.2f}" for one in decibels)])
    return rows


def quality_section(study: Study) -> report.Section:
    budgets = [100 * budget for budget in demo.BUDGETS]
    blocks: list[report.Text | report.Picture | report.Table] = []
    if rows := psnr_against_mass(study):
        blocks += [report.Text(
            "Mass says how near a route is to dense attention, not how good dense attention is: in the rows below the "
            "route with less mass comes nearer to the clean clip. SSIM and Laplacian loss compare with dense "
            "attention."),
            report.Table("Where PSNR does not follow mass, dB", ["head", "budget", "3D", "raster", "dense"], rows)]
    for name, factor, label, caption in MEASURES:
        panels = []
        for head, bandwidth in enumerate(study.bandwidths):
            curves = [report.Curve(name=route, x=budgets, colour=COLOUR_OF_ROUTE[route],
                                   y=[factor * getattr(study.run_of(route, budget), name)[head]
                                      for budget in demo.BUDGETS]) for route in ("3D", "raster")]
            dense = factor * getattr(study.run_of("dense", 1.0), name)[head]
            curves.append(report.Curve(name="dense", x=budgets, y=[dense] * len(budgets), style="dashed",
                                       colour=COLOUR_OF_ROUTE["dense"]))
            panels.append((f"h = {bandwidth:.3f}", curves))
        spoken = "; ".join(f"{title}, {curve.name}: " + ", ".join(f"{y:.4g}" for y in curve.y)
                           for title, curves in panels for curve in curves)
        blocks.append(report.Picture(
            report.draw_curves(panels, x_label="budget, % of the blocks of keys", y_label=label),
            name.replace("_", "-"), caption, f"{caption}, at {', '.join(budget_names())}. {spoken}."))
    return report.Section("What is lost in pictures", blocks)


def layout_section(study: Study) -> report.Section:
    layer = study.search["layers"][0]
    chosen = [[f"h = {bandwidth:.3f}", box, f"{mass:.3f}"]
              for bandwidth, box, mass in zip(study.bandwidths, layer["boxes"], layer["mass"], strict=True)]
    menu = [[entry["layout"], f"{entry['mass']:.3f}", str(entry["num_chosen"])]
            for entry in sorted(study.search["menu"], key=lambda entry: -entry["mass"])]
    return report.Section("Layouts", [
        report.Table("The layout table: the best box of each head, frames x rows x columns", ["head", "box", "mass"],
                     chosen),
        report.Table(f"All boxes tried, at {100 * demo.ARTICLE_BUDGET:.0f} %, mean over heads, of 16 blocks of queries "
                     "each", ["box", "mass", "heads that chose it"], menu),
    ])


def numbers_section(study: Study) -> report.Section:
    tables = [report.Table(f"h = {bandwidth:.3f}; seconds of one call with both heads, measured once",
                           list(demo.RUN_COLUMNS), demo.run_rows(study, head))
              for head, bandwidth in enumerate(study.bandwidths)]
    return report.Section("All numbers", [
        *tables,
        report.Table("How the run was made", ["what", "value"], [list(row) for row in demo.settings(study)]),
        report.Table("What the words mean", ["word", "meaning"], [list(row) for row in TERMS]),
    ])


def write_study(study: Study, path: Path, token: tuple[int, int, int]) -> list[Path]:
    """The page and its pictures; the page comes first."""
    frames, rows, columns = study.clip.grid
    summary = [report.Text(f"{study.name}: {frames * rows * columns:,} tokens, denoised by non-local means, which is "
                           "attention; dense, and by routes that read some of the keys.")]
    summary += [report.Text(line, verdict=True) for line in demo.verdicts(study)]
    return report.write_report(path, title="What sparse attention keeps of a clip", summary=summary, sections=[
        pictures_section(study), route_section(study, token), mass_section(study), quality_section(study),
        layout_section(study), numbers_section(study)])
