# SPDX-License-Identifier: Apache-2.0
"""The interface as a whole: one name, one meaning, one default, one order; and types that a checker agrees with."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import tilesieve

CALLS = {name: getattr(tilesieve, name) for name in tilesieve.__all__
         if inspect.isfunction(getattr(tilesieve, name))} | {"Plan.run": tilesieve.Plan.run}
OTHER = {("Plan.run", "isa"),  # None there: as planned
         ("layout_search", "num_sampled")}  # one number for many calls, as on the command line
# Blocks of a video are smaller, and its routers others.
VIDEO = ("route_video", "video_attention", "video_budget", "video_mass", "layout_search", "dense_attention",
         "sage_attention")
# Of what there may be none, or where what counts from 0 begins.
FROM_ZERO = ("init_blocks", "seed", "keyframes", "reference_tokens", "head_begin")
TENSORS = ("q", "k", "v", "block_index")


def test_a_keyword_has_one_default_everywhere() -> None:
    seen: dict[tuple[bool, str], tuple[str, object]] = {}
    for name, call in CALLS.items():
        for parameter in inspect.signature(call).parameters.values():
            if parameter.kind is not parameter.KEYWORD_ONLY or (name, parameter.name) in OTHER:
                continue
            if parameter.default is parameter.empty:  # needed here
                continue
            first, default = seen.setdefault((name in VIDEO, parameter.name), (name, parameter.default))
            assert parameter.default == default, f"{parameter.name} of {name} and of {first}"


def test_keywords_come_in_one_order_everywhere() -> None:
    order = [p.name for p in inspect.signature(tilesieve.sparse_prefill).parameters.values()]
    for name, call in CALLS.items():
        mine = [p for p in inspect.signature(call).parameters if p in order]
        assert mine == sorted(mine, key=order.index), name


def test_only_tensors_and_what_a_call_is_about_go_by_position() -> None:
    for name, call in CALLS.items():
        positional = [p.name for p in inspect.signature(call).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        if positional[:1] == ["q"]:
            assert tuple(positional) == tuple(t for t in TENSORS if t in positional), name


def test_what_is_not_given_is_none() -> None:
    """No number means "as you like": 0 is refused where it is not a size."""
    for name, call in CALLS.items():
        for parameter in inspect.signature(call).parameters.values():
            assert parameter.default != 0 or parameter.name in FROM_ZERO or parameter.default is False, (
                f"{parameter.name} of {name}")


def test_fields_of_values_go_by_name() -> None:
    values = [thing for thing in map(tilesieve.__dict__.get, tilesieve.__all__) if dataclasses.is_dataclass(thing)]
    assert len(values) >= 13
    for value in values:
        by_place = [field.name for field in dataclasses.fields(value) if not field.kw_only]
        assert by_place == (["q_lens", "kv_lens"] if value is tilesieve.Problem else []), value


def test_what_is_public_is_of_the_package() -> None:
    for name in tilesieve.__all__:
        thing = getattr(tilesieve, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__module__ == "tilesieve", name
    difference = tilesieve.Difference(rel_l2=0.5, cosine=1.0, max_abs=2.0)
    assert pickle.loads(pickle.dumps(difference)) == difference


def test_everything_public_is_described() -> None:
    for name in tilesieve.__all__:
        thing = getattr(tilesieve, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert inspect.getdoc(thing), name
    for name in ("attend", "route", "mass", "roofline", "combine", "route_video", "video_attention", "video_mass",
                 "layout_search", "quality", "gather_tokens", "h3_segments", "box_menu", "box_order"):
        text, described = inspect.getdoc(CALLS[name]) or "", set()
        for line in text.partition("Args:")[2].partition("\n\n")[0].splitlines():
            described.add(line.strip().partition(":")[0])
        missing = set(inspect.signature(CALLS[name]).parameters) - described
        assert not missing, f"{name} does not describe {missing}"


def test_a_type_checker_agrees() -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    folder = Path(__file__).parent
    package = Path(tilesieve.__file__).parent
    assert (package / "py.typed").exists()
    command = [sys.executable, "-m", "mypy", "--cache-dir", "/dev/null", "-p", "tilesieve", "-m", "typed_usage"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
