"""Doors: what is let in, and what the sentence says of what is not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch

import ecnn
from ecnn.attacks import FGSM, Square
from ecnn.baselines import TRADESObjective
from ecnn.checks import (
    build,
    check_array,
    check_choice,
    check_count,
    check_entries,
    check_has,
    check_number,
    check_options,
    eps_text,
    parse_eps,
)
from ecnn.errors import InputError


@pytest.mark.parametrize("value", [1, 7, np.int64(3)])
def test_counts_are_whole_numbers(value: Any) -> None:
    check_count("steps", value, most=7)


@pytest.mark.parametrize("value", [0, -1, 8, 2.0, True, "3", None, math.nan])
def test_what_is_no_count_is_named(value: Any) -> None:
    with pytest.raises(InputError, match=r"steps must be a whole number from 1 to 7, not "):
        check_count("steps", value, most=7)


@pytest.mark.parametrize("value", [0, 0.5, 1, np.float32(0.25)])
def test_numbers_may_be_of_any_kind(value: Any) -> None:
    check_number("beta", value, most=1)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, True, "1", None, 1j])
def test_what_is_no_number_is_named(value: Any) -> None:
    with pytest.raises(InputError, match=r"beta must be a number from 0 to 1, not "):
        check_number("beta", value, most=1)


def test_a_whole_number_that_is_too_large_is_told_so() -> None:
    """A sentence that asks for a whole number in place of one would be a riddle."""
    for kind in (int, int | None):
        with pytest.raises(
            InputError, match=f"seed must be a whole number of at most {2**63 - 1} in size, not 1000"
        ):
            check_entries("it", {"seed": 10**30}, {"seed": kind})
    with pytest.raises(InputError, match=r"seed must be a whole number, not 0\.5"):
        check_entries("it", {"seed": 0.5}, {"seed": int})
    with pytest.raises(InputError, match="share must be a finite number, not"):
        check_entries("it", {"share": 10**400}, {"share": float})


def test_an_end_can_be_left_out() -> None:
    check_number("lr", 1e-9, above=True)
    with pytest.raises(InputError, match=r"lr must be a number above 0, not 0\."):
        check_number("lr", 0, above=True)
    with pytest.raises(InputError, match=r"ratio must be a number above 0 and up to 1, not 2\."):
        check_number("ratio", 2, above=True, most=1)
    check_number("share", 0, most=1, below=True)
    with pytest.raises(InputError, match=r"share must be a number from 0 to below 1, not 1\."):
        check_number("share", 1, most=1, below=True)
    with pytest.raises(InputError, match=r"ema must be a number above 0 and below 1, not 1\.0\."):
        check_number("ema", 1.0, above=True, most=1, below=True)


@pytest.mark.parametrize("made_by", [np, torch])
def test_arrays_have_the_axes_and_numbers_asked_for(made_by: Any) -> None:
    prefix = "torch." if made_by is torch else ""
    check_array("images", made_by.zeros((2, 3, 8, 8)), "image", 3, "height", "width")
    check_array("images", made_by.zeros((2, 3), dtype=made_by.uint8), 2, "row", dtype=f"{prefix}uint8")
    for kind in (made_by.uint8, made_by.int32, made_by.int64):
        check_array("labels", made_by.zeros(2, dtype=kind), 2, dtype="whole numbers")
    floats = made_by.zeros((2, 4), dtype=made_by.float32)
    found = rf"not {prefix}float32 of shape \(2, 4\)\.$"
    with pytest.raises(InputError, match=rf"^images must be of shape \(image, 3\), {found}"):
        check_array("images", floats, "image", 3)
    with pytest.raises(InputError, match=rf"^labels must be whole numbers of shape \(2,\), {found}"):
        check_array("labels", floats, 2, dtype="whole numbers")


def test_what_is_no_array_is_named_by_its_kind() -> None:
    with pytest.raises(InputError, match=r"^labels must be int64 of shape \(image,\), not list\.$"):
        check_array("labels", [1, 2], "image", dtype="int64")


def test_a_sentence_does_not_ask_for_what_came() -> None:
    """Where the numbers are right and the axes are not, only the axes are said to be wrong; and the other way round."""
    kinds = ("torch.uint8", "torch.float32")
    check_array("images", torch.zeros(2, 3), "image", 3, dtype=kinds)
    with pytest.raises(
        InputError,
        match=r"^images must be torch.uint8 or torch.float32 of shape \(image, 3\), not of shape \(2, 4\)\.$",
    ):
        check_array("images", torch.zeros(2, 4), "image", 3, dtype=kinds)
    with pytest.raises(InputError, match=r"torch.uint8 or torch.float32 .*, not torch.float64 of shape"):
        check_array("images", torch.zeros(2, 3).double(), "image", 3, dtype=kinds)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (list[int], [0.0], r"a list of whole numbers, not \[0\.0\]"),
        (dict[str, float], {"clean": "90"}, "a table of finite numbers, not"),
        (list[dict[str, Any]], [1], "a list of tables, not"),
        (list[list[int]] | None, [1], "a list of lists of whole numbers, not"),
        (dict[str, str | list[str]], {"pgd": 1}, "a table of text or lists of text, not"),
        (int | list[int], "x", "a whole number or a list of whole numbers, not"),
        (list, 1, "a list, not 1"),
        (dict[str, Any], 1, "a table, not 1"),
        (Literal[1, 2], 3, "1 or 2, not 3"),
    ],
)
def test_the_kind_of_elements_is_said(kind: Any, value: Any, words: str) -> None:
    """A list that came when a list is asked for would be a riddle."""
    with pytest.raises(InputError, match=f"^it: entry must be {words}"):
        check_entries("it", {"entry": value}, {"entry": kind})


def test_a_model_without_the_attribute_is_named() -> None:
    check_has("ADP", torch.nn.Linear(1, 1), "weight")
    with pytest.raises(
        InputError, match=r"^ADP needs a model with the attribute member_scores, which Linear lacks\.$"
    ):
        check_has("ADP", torch.nn.Linear(1, 1), "member_scores")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    check_choice("norm", "l2", ("linf", "l2"))
    with pytest.raises(InputError, match=r"norm must be linf or l2, not 'Linf'; did you mean 'linf'\?$"):
        check_choice("norm", "Linf", ("linf", "l2"))
    with pytest.raises(InputError, match=r"start must be one of uniform, image, odi, not 3\.$"):
        check_choice("start", 3, ("uniform", "image", "odi"))
    with pytest.raises(InputError, match=r"not \['l2'\]"):
        check_choice("norm", ["l2"], ("linf", "l2"))


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"pgd has no option 'step'; it has eps, steps; did you mean 'steps'\?$"
    ):
        check_options("pgd", ["eps", "step"], ("eps", "steps"))
    with pytest.raises(InputError, match=r"it has none\.$"):
        check_options("nothing", ["eps"], ())


@dataclass(frozen=True)
class _Wall:
    height: float
    width: float = 1.0
    bricks: list[str] = field(default_factory=list)
    area: float = field(default=0.0, init=False)


def test_a_dataclass_is_built_from_names() -> None:
    assert build("a wall", _Wall, {"height": 2.0}) == _Wall(2.0)
    with pytest.raises(
        InputError, match="a wall needs height: settings that decide a result have no default"
    ):
        build("a wall", _Wall, {"width": 2.0})
    with pytest.raises(InputError, match="a wall has no option 'area'"):
        build("a wall", _Wall, {"height": 2.0, "area": 4.0})


@pytest.mark.parametrize(
    "value", ["x", "1/0", "1/2/3", "", None, [0.1], True, -0.1, "-1/255", "inf", math.nan]
)
def test_what_is_no_radius_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="step_size must be a number"):
        parse_eps(value, "step_size")


def test_radii_are_read_as_people_write_them_everywhere() -> None:
    assert parse_eps("0.5/255") == 0.5 / 255
    assert TRADESObjective(eps="0.5/255", steps=1, step_size="0.1/255").eps == "0.5/255"


@pytest.mark.parametrize(
    ("thing", "name_of_it"),
    [
        (None, "None"),
        ("x", "a str"),
        (3, "an int"),
        ([], "a list"),
        (len, "a builtin_function_or_method"),
    ],
)
def test_what_is_no_model_code_audit_or_split_is_named_at_every_door(thing: Any, name_of_it: str) -> None:
    net, images, labels = torch.nn.Flatten(), torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64)
    split = ecnn.load_data("digits").test.take(2)
    attack = FGSM(norm="linf", eps=0.1)
    doors: list[tuple[str, Any]] = [
        ("model", lambda: attack(thing, images, labels)),
        ("model", lambda: ecnn.evaluate(thing, split, {}, limit=1)),
        ("model", lambda: ecnn.audit(thing, split, norm="linf", eps=0.1)),
        ("model", lambda: ecnn.fit(thing, split, val=None, recipe="small", seed=0)),
        ("split", lambda: ecnn.evaluate(net, thing, {}, limit=1)),
        ("attacks", lambda: ecnn.evaluate(net, split, thing, limit=1)),
        ("train", lambda: ecnn.fit(net, thing, val=None, recipe="small", seed=0)),
        ("images", lambda: ecnn.ResNet(2, 1, depth=8, width=2)(thing)),
        ("code", lambda: ecnn.plot_code(thing, "x.png")),
        ("audit", lambda: ecnn.plot_audit(thing, "x.png")),
        ("evaluation", lambda: ecnn.plot_curve(thing, "x.png")),
        ("matrix", lambda: ecnn.plot_transfer(thing, "x.png")),
        ("flips", lambda: ecnn.plot_members(thing, "x.png")),
    ]
    if thing == []:  # no items are a list of (image, label) all the same
        doors = [door for door in doors if door[0] != "split"]
    for name, call in doors:
        with pytest.raises(InputError, match=f"{name} must be .*, not {name_of_it}"):
            call()


@pytest.mark.parametrize("device", ["8/255", -1, 2**63, None, "cpu:x", "meta"])
def test_a_device_that_is_none_is_named(device: Any) -> None:
    with pytest.raises(InputError, match=r"the device '.*' cannot be used here"):
        ecnn.load_model("mnist-tanh16", device=device)


def test_whole_numbers_of_numpy_count_as_those_of_python() -> None:
    small: Any = np.uint8(40)
    made, wanted = (ecnn.design_code(size, size, steps=1, chains=1, seed=0) for size in (small, 40))
    assert made == wanted
    assert ecnn.CodeMatrix(made.symbols, small).arity == 40
    assert type(Square(norm="linf", eps=0.1, queries=small).queries) is int
    split, seed = ecnn.load_data("digits").test, np.int64(2**40)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    assert ecnn.evaluate(net, split, {}, limit=2, seed=seed).clean.index.tolist() == [0, 1]  # type: ignore[arg-type]


def test_a_depth_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(InputError, match=r"depth .* must be a whole number from 8 to 10000, not 2147483648"):
        ecnn.ResNet(2, depth=2**31)


@pytest.mark.parametrize(
    ("eps", "text"),
    [(8 / 255, "8/255"), (0.5, "0.5"), (0.12, "0.12"), (0.0, "0"), (1.0, "1"), (2.0, "2"), (1e-5, "1e-05")],
)
def test_a_radius_is_written_as_it_is_read(eps: float, text: str) -> None:
    assert eps_text(eps) == text
    assert parse_eps(text) == eps
