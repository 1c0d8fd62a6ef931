# SPDX-License-Identifier: Apache-2.0
"""A report on what routes read and what that keeps: one HTML page that works offline, and its pictures as PNG.

    from tilesieve import report

    view = report.view_route("4x4x4", ids[head], segments=segments, order=tilesieve.box_order(grid, "4x4x4"), token=at)
    picture = report.Picture(report.draw_route(view, frames), "route", "What it reads", "...")
    report.write_report("report.html", title="My model", summary=[report.Text("...")],
                        sections=[report.Section("Routes", [picture])])

Pictures are drawn with Matplotlib: pip install 'tilesieve[video]'. `examples/denoise_clip.py` writes a whole one.
"""

from .charts import Curve, MassMap, draw_curves, draw_frames, draw_mass_map, draw_route, mark_frame, shown_frames
from .page import Picture, Section, Table, Text, page_html, write_report
from .tiles import RouteView, view_route, view_veda

__all__ = [
    "Curve",
    "MassMap",
    "Picture",
    "RouteView",
    "Section",
    "Table",
    "Text",
    "draw_curves",
    "draw_frames",
    "draw_mass_map",
    "draw_route",
    "mark_frame",
    "page_html",
    "shown_frames",
    "view_route",
    "view_veda",
    "write_report",
]
