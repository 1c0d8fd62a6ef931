# SPDX-License-Identifier: Apache-2.0
"""python -m tilesieve: what the package has as commands."""

from __future__ import annotations

import argparse
import json
import math
import sys
from importlib.util import find_spec
from typing import Any

from ._core import Error
from ._quality import Quality, quality


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tilesieve", description="Commands of the Python package.")
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "quality", help="how a clip differs from a reference",
        description="SSIM, PSNR and Laplacian loss of a clip against a reference, such as of a sparse render against "
                    "the dense one of the same seed.")
    command.add_argument("clip", metavar="A", help="file of video")
    command.add_argument("reference", metavar="B", help="file that A is measured against")
    command.add_argument("--luma", choices=("bt709", "bt601"), default="bt709", help="of files of RGB (bt709)")
    command.add_argument("--frames", action="store_true", help="print each frame, too")
    command.add_argument("--json", action="store_true",
                         help="print one object, with each frame; what is undefined is null, what is infinite \"inf\"")
    arguments = parser.parse_args()
    try:
        result = quality(arguments.clip, arguments.reference, luma=arguments.luma,
                         progress=sys.stderr.isatty() and find_spec("tqdm") is not None)
    except (Error, ImportError) as error:
        print(f"tilesieve: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(as_json(result, arguments.clip, arguments.reference))
    else:
        print(as_text(result, arguments.frames))
    return 0


def as_json(result: Quality, clip: str, reference: str) -> str:
    """One object; JSON has no NaN and no infinity."""
    def plain(value: float) -> float | str | None:
        return None if math.isnan(value) else "inf" if math.isinf(value) else value

    fields: dict[str, Any] = {"clip": clip, "reference": reference}
    fields |= {name: getattr(result, name) for name in ("num_frames", "height", "width", "luma")}
    for name, measure in result.measures.items():
        fields[name] = {"variant": measure.variant, "mean": plain(measure.mean),
                        "frames": [plain(value) for value in measure.frames.tolist()]}
    return json.dumps(fields, indent=1, allow_nan=False)


def as_text(result: Quality, with_frames: bool) -> str:
    """A line a figure, with its variant; with frames a table of them before."""
    lines = []
    if with_frames:
        lines.append("frame" + "".join(f"{name:>16}" for name in result.measures))
        for place in range(result.num_frames):
            lines.append(f"{place:>5}" + "".join(f"{m.frames[place]:>16.6f}" for m in result.measures.values()))
        lines.append("")
    lines.append(f"{result.num_frames} frames of {result.width} x {result.height}; luma: {result.luma}")
    for name, measure in result.measures.items():
        value = "undefined: the reference is flat" if math.isnan(measure.mean) else f"{measure.mean:.6f}"
        lines.append(f"{name:<15} {value:<12} {measure.variant}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
