# SPDX-License-Identifier: Apache-2.0
"""The report of `demo.py`: what routers keep of a language model's attention, by layer and budget. Drawn by the
package's module `report`, which needs NumPy and Matplotlib, and nothing that is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import Curve, MassMap, Picture, Section, Table, Text, draw_curves, draw_mass_map, write_report

# By layer, rows of `tilesieve mass --json`: router, top_k, mass, floor, ceiling, kept_share.
Masses = dict[int, list[dict[str, Any]]]


def one_row(masses: Masses, layer: int, router: str, top_k: int) -> dict[str, Any]:
    return next(row for row in masses[layer] if (row["router"], row["top_k"]) == (router, top_k))


def mass_map(masses: Masses, routers: Sequence[str], top_k: int) -> MassMap:
    """Layers down, routers across."""
    values = {name: np.array([[one_row(masses, layer, router, top_k)[name] for router in routers] for layer in masses])
              for name in ("floor", "mass", "ceiling")}
    return MassMap(row_names=[str(layer) for layer in masses], column_names=list(routers), **values)


def curves_of_layer(masses: Masses, layer: int, routers: Sequence[str], budgets: Sequence[int]) -> list[Curve]:
    """The routers that choose; floor and ceiling are the same for all of them."""
    def line(router: str, name: str) -> list[float]:
        return [one_row(masses, layer, router, top_k)[name] for top_k in budgets]

    chosen = [router for router in routers if router not in ("oracle", "random")]
    curves = [Curve(name=router, x=budgets, y=line(router, "mass"), colour=place)
              for place, router in enumerate(chosen)]
    return [Curve(name="ceiling", x=budgets, y=line(routers[0], "ceiling"), colour=6, style="dashed"), *curves,
            Curve(name="floor", x=budgets, y=line(routers[0], "floor"), colour=6, style="dotted")]


def write_demo_report(path: Path, capture: str, block: int, top_k: int, shown: int, masses: Masses,
                      attended: Sequence[tuple[int, dict[str, Any]]]) -> Path:
    """The page about a capture; `attended` are (layer, row) of `tilesieve attend --json` at top_k blocks."""
    routers = list(dict.fromkeys(row["router"] for row in masses[shown]))
    budgets = sorted({row["top_k"] for row in masses[shown]})
    best = [router for router in routers if router not in ("oracle", "random")]
    summary = [Text(f"{capture}: queries and keys of a language model as it ran over a text. The budget is the number "
                    f"of blocks of {block} keys that a query reads.")]
    summary += [Text(f"Layer {shown} at {top_k} blocks: {router} keeps {row['mass']:.3f} of the attention; a random "
                     f"choice {row['floor']:.3f}, the best possible {row['ceiling']:.3f}.", verdict=True)
                for router in best for row in [one_row(masses, shown, router, top_k)]]
    curves = curves_of_layer(masses, shown, routers, budgets)
    spoken = "; ".join(f"{curve.name}: " + ", ".join(f"{y:.3f}" for y in curve.y) for curve in curves)
    caption = f"Mass by budget in layer {shown}; dashed and dotted: the best and a random choice"
    map_caption = f"Mass by layer and router, {top_k} blocks of {block} keys for each query"
    rows = [[str(layer), row["router"], f"{100 * row['kept_share']:.1f}", f"{row['mass']:.3f}", f"{row['floor']:.3f}",
             f"{row['ceiling']:.3f}", f"{100 * row['rel_l2']:.1f}", f"{row['speedup_attend']:.2f}",
             f"{row['speedup_all']:.2f}"] for layer, row in attended]
    columns = ["layer", "router", "blocks kept, %", "mass", "floor", "ceiling", "output error, %", "speed-up",
               "with the choice"]
    all_rows = [[str(layer), row["router"], str(row["top_k"]), f"{100 * row['kept_share']:.1f}", f"{row['mass']:.3f}",
                 f"{row['floor']:.3f}", f"{row['ceiling']:.3f}"] for layer in masses for row in masses[layer]]
    terms = [["mass", "share of the full attention's weight on the kept blocks: 1 = nothing is lost"],
             ["floor, ceiling", "what a random choice and the best choice of as many blocks keep"],
             ["output error", "relative L2 distance of the layer's output from full attention's"],
             ["speed-up", "full attention's time over the sparse one's, each measured once on this machine"]]
    return write_report(path, title="What sparse attention keeps of a language model", summary=summary, sections=[
        Section("Mass", [
            Picture(draw_mass_map(mass_map(masses, routers, top_k), "layer", "router"), "mass-map", map_caption,
                    f"{map_caption}; the numbers are in the last table."),
            Picture(draw_curves([(f"layer {shown}", curves)], x_label=f"budget, blocks of {block} keys for each query",
                                y_label="share of the softmax", y_range=(0, 1)), "mass-curves", caption,
                    f"{caption}, at {', '.join(map(str, budgets))} blocks. {spoken}.")]),
        Section("Numbers", [Table(f"Attention at {top_k} blocks of {block} keys", columns, rows),
                            Table("What the words mean", ["word", "meaning"], terms),
                            Table("Mass of every layer, router and budget",
                                  ["layer", "router", "blocks", "blocks kept, %", "mass", "floor", "ceiling"], all_rows,
                                  folded=True)]),
    ])[0]
