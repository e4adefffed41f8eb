"""All named models, objectives and recipes, and functions that make one from its name.

A new kind of model is one file with its `KIND` and one line here.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ecnn import model, objectives, recipes
from ecnn.backbones import MOST_OF_ANYTHING, Mean
from ecnn.baselines import adp, ecoc, empir, multiscale, resnet, specialists, squeezing, tanh_ensemble, trades
from ecnn.checks import check_choice, check_count, check_entries, check_kind, check_options, plain
from ecnn.codes import CodeMatrix
from ecnn.errors import InputError
from ecnn.kinds import ModelKind
from ecnn.objectives import Objective, make_objective
from ecnn.recipes import MEMBER_OPTIONS, Recipe

#: Most weights that the model of a spec may have (1 GiB in float32).
MOST_WEIGHTS = 2**28

_FILES: tuple[Any, ...] = (model, resnet, multiscale, adp, tanh_ensemble, ecoc, specialists, squeezing, empir)

#: Kinds of models.
MODELS: dict[str, ModelKind] = {file.KIND.name: file.KIND for file in _FILES}
#: Objectives: those for any model, those for any model with a code, and those of single kinds.
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    **objectives.OBJECTIVES,
    "trades": trades.TRADESObjective,
    **{name: made for kind in MODELS.values() for name, made in kind.own_objectives.items()},
}
#: Recipes: those for any model, and those of single kinds.
RECIPES: dict[str, Recipe] = {
    **recipes.RECIPES,
    **{name: recipe for kind in MODELS.values() for name, recipe in kind.own_recipes.items()},
}


def find_kind(name: str) -> ModelKind:
    """The kind of model of that name."""
    check_choice("model.kind", name, MODELS)
    return MODELS[name]


def build_model(
    kind: str,
    *,
    code: CodeMatrix | None = None,
    num_classes: int,
    in_channels: int,
    mean: Mean | None,
    **options: Any,
) -> nn.Module:
    """A model by name, with weights drawn from torch's generator; options are its keyword arguments.

    It is first built on torch's meta device, which takes no memory, so that an impossible size is an InputError.
    """
    entry = find_kind(kind)
    entry.check(options)
    made_by: Any = entry.model.__init__ if inspect.isclass(entry.model) else entry.model
    kinds = {
        **typing.get_type_hints(made_by),
        "trunk": str | None,
    }  # a spec holds the name of a trunk, not a module
    check_entries("[model]", options, {name: kinds[name] for name in options if name in kinds})
    for name, value in {"num_classes": num_classes, "in_channels": in_channels, **options}.items():
        if isinstance(value, int) and not isinstance(value, bool):
            check_count(f"model.{name}", value, least=0, most=MOST_OF_ANYTHING)
    coded = {"code": code} if entry.needs_code else {}
    build = functools.partial(entry.build, num_classes, in_channels, mean=mean, **coded, **options)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            weights = sum(parameter.numel() for parameter in build().parameters())
    except InputError:
        raise
    # On the meta device nothing but the options can be wrong.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"the model {kind!r} cannot be built with these options: {reason}.") from error
    if weights > MOST_WEIGHTS:
        raise InputError(
            f"the model {kind!r} would have {weights:,} weights, more than the {MOST_WEIGHTS:,} that fit in memory "
            "with room to train: make it smaller."
        )
    return build()


def describe_model(model: nn.Module, num_classes: int, image_shape: Sequence[int]) -> dict[str, Any] | None:
    """Plain JSON values from which `rebuild_model` builds the model; None for a class or trunk of the caller's own.

    Args:
        image_shape: (channel, height, width).
    """
    made_by = (type(model), type(model).__module__)
    kind = next((kind for kind in MODELS.values() if {kind.model, kind.model.__module__} & {*made_by}), None)
    try:
        config: dict[str, Any] = getattr(model, "config", {})
    except InputError:  # the trunk is a module of the caller's own
        return None
    if kind is None:
        return None
    code: Any = getattr(model, "code", None) if kind.needs_code else None
    options = {name: plain(value) for name, value in config.items() if name in kind.options}
    size = {"num_classes": num_classes, "image_shape": plain(list(image_shape))}
    return {"kind": kind.name, **size, "options": options, "code": code and code.to_dict()}


def rebuild_model(owner: str, described: Any, mean: Mean) -> nn.Module:
    """The model that `describe_model` described, with random weights.

    Args:
        owner: what an error message calls the description.
    """
    kinds = {"kind": str, "num_classes": int, "image_shape": list[int], "options": dict, "code": dict | None}
    check_entries(owner, described, kinds)
    code = None if described["code"] is None else CodeMatrix.from_dict(described["code"])
    channels = (*described["image_shape"], 0)[0]
    sizes: Any = {"num_classes": described["num_classes"], "in_channels": channels}
    return build_model(described["kind"], code=code, mean=mean, **sizes, **described["options"])


def resolve_recipe(recipe: str | Recipe, **changes: Any) -> Recipe:
    """The recipe, given as such or by name, with every change that is not None."""
    if isinstance(recipe, str):
        check_choice("recipe", recipe, RECIPES)
        recipe = RECIPES[recipe]
    check_kind("recipe", recipe, Recipe, "a Recipe or the name of one")
    check_options("a recipe", changes, [entry.name for entry in dataclasses.fields(Recipe)])
    changes = {key: value for key, value in changes.items() if value is not None}
    if changes.get("objective", recipe.objective) != recipe.objective:
        # The recipe's options belong to the objective that is replaced.
        changes = {"objective_options": {}, **changes}
    return dataclasses.replace(recipe, **changes)


def objective_of(recipe: Recipe) -> Objective:
    """The recipe's objective as a callable."""
    options = {key: getattr(recipe, key) for key in MEMBER_OPTIONS if recipe.objective.startswith("member")}
    twice = sorted(options.keys() & recipe.objective_options.keys())
    if twice:
        raise InputError(f"{twice[0]} is an entry of the recipe itself, not of objective_options.")
    return make_objective(recipe.objective, known=OBJECTIVES, **options, **recipe.objective_options)


def spell_out(recipe: Recipe) -> Recipe:
    """The recipe with every setting of its objective written out, so that later defaults cannot change an old run."""
    objective: Any = objective_of(recipe)
    options = {
        entry.name: getattr(objective, entry.name)
        for entry in dataclasses.fields(objective)
        if entry.name not in ("kind", *MEMBER_OPTIONS)
    }
    return dataclasses.replace(recipe, objective_options=options)
