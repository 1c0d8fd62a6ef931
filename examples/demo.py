# SPDX-License-Identifier: Apache-2.0
"""Shows what block-sparse attention keeps, loses and saves on a captured model: runs the command-line tool, one layer
after the other, and ends with one table.

    python examples/demo.py build/cpu/cli/tilesieve examples/data/smollm2_layer9_group2.safetensors

With --report it writes a page with pictures, too, which needs NumPy and Matplotlib and python/tilesieve on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

BLOCK, TOP_K = 64, 16
BUDGETS = (4, 8, 16, 32)
ROUTERS = ("qk_max", "mean_pool", "oracle", "random")


def run(tool: str, *arguments: str) -> None:
    """Runs the tool with its own output on the terminal, after the command that a reader can repeat."""
    print(f"\n$ tilesieve {' '.join(arguments)}", flush=True)
    subprocess.run([tool, *arguments], check=True)


def run_json(tool: str, *arguments: str) -> dict:
    """Runs the tool and returns what it says as JSON."""
    return json.loads(subprocess.run([tool, *arguments, "--json"], check=True, capture_output=True, text=True).stdout)


def layers_of(tool: str, capture: str) -> list[int]:
    """Layers that the capture holds, ascending."""
    names = json.dumps(run_json(tool, "inspect", capture))
    return sorted({int(layer) for layer in re.findall(r"layer\.(\d+)\.q\b", names)})


def summary(tool: str, capture: str, layers: list[int]) -> list[tuple[int, dict]]:
    """One (layer, row) for each layer and router."""
    rows = []
    for layer in layers:
        print(f"layer {layer} ...", file=sys.stderr, flush=True)
        arguments = ["attend", capture, "--layer", str(layer), "--block", str(BLOCK), "--top-k", str(TOP_K)]
        for router in ROUTERS:
            arguments += ["--router", router]
        rows += [(layer, row) for row in run_json(tool, *arguments, "--repeat", "1")["rows"]]
    return rows


def print_summary(rows: list[tuple[int, dict]]) -> None:
    print(f"\nWhat each router keeps, when every query attends to {TOP_K} blocks of {BLOCK} keys at the most:\n")
    print("layer  router      blocks kept   mass  (floor  ceiling)   output error   speed-up  with the choice")
    for layer, row in rows:
        print(
            f"{layer:5d}  {row['router']:10s}  {100 * row['kept_share']:9.1f} %  {row['mass']:5.3f}  "
            f"({row['floor']:5.3f}   {row['ceiling']:5.3f} )  {100 * row['rel_l2']:10.1f} %  "
            f"{row['speedup_attend']:8.2f}x  {row['speedup_all']:13.2f}x"
        )
    print(
        """
  mass      share of the full attention's weight that lies on the kept blocks: 1 = nothing is lost
  floor     what a random choice of as many blocks would keep
  ceiling   the most that any choice of as many blocks could keep; the oracle, which has seen it all, reaches it
  error     relative L2 distance of the layer's output from full attention's
  speed-up  full attention's time over the sparse one's, choosing the blocks left out and counted in

qk_max sees the model's own queries and keys; a model trained with an index branch brings a better and cheaper choice.
With 7.6k tokens a query sees 60 blocks on average, so the speed-up is small; it grows with the text.

Where to go next:
  another budget     tilesieve mass CAPTURE --layer 9 --block 64 --top-k 4,8,16,32
  your own tensors   tilesieve attend --q q.npy --k k.npy --v v.npy        (tilesieve attend --help)
  from C++           #include <tilesieve/tilesieve.h>                      (README.md, docs/design.md)
  what a GPU would   tilesieve roofline --device H200                      (docs/roofline.md)"""
    )


def masses(tool: str, capture: str, layers: list[int]) -> dict[int, list[dict]]:
    """By layer, a row for each router and budget."""
    budgets = ",".join(map(str, BUDGETS))
    found = {}
    for layer in layers:
        print(f"layer {layer}: mass by budget ...", file=sys.stderr, flush=True)
        found[layer] = run_json(tool, "mass", capture, "--layer", str(layer), "--block", str(BLOCK), "--top-k",
                                budgets)["rows"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", metavar="TOOL", help="the program tilesieve")
    parser.add_argument("capture", metavar="CAPTURE", help="file that capture_smollm2.py wrote")
    parser.add_argument("--report", type=Path, metavar="FILE", help="HTML page to write")
    options = parser.parse_args()
    tool, capture = options.tool, options.capture
    layers = layers_of(tool, capture)
    if not layers:
        print(f"demo.py: {capture} holds no tensor named layer.N.q", file=sys.stderr)
        return 1
    shown = 9 if 9 in layers else layers[0]
    run(tool, "kernels")
    run(tool, "inspect", capture)
    run(tool, "mass", capture, "--layer", str(shown), "--block", str(BLOCK), "--top-k", ",".join(map(str, BUDGETS)))
    print()
    rows = summary(tool, capture, layers)
    print_summary(rows)
    if options.report is not None:
        from demo_report import write_demo_report

        page = write_demo_report(options.report, Path(capture).name, BLOCK, TOP_K, shown, masses(tool, capture, layers),
                                 rows)
        print(f"\nreport: {page.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
