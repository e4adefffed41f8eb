"""`ModelKind`: how a kind of model is built, which objectives train it, and its published settings by dataset.

Each kind is defined in the file of its model; `ecnn.models` lists them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ecnn.backbones import Mean
from ecnn.checks import check_options
from ecnn.codes import CodeMatrix
from ecnn.errors import InputError
from ecnn.objectives import Objective
from ecnn.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Published:
    """Settings that suit a kind of model on images of one sort.

    Attributes:
        recipe: name of the recipe; None for "small" on digits and "paper" elsewhere.
        options: options of the model.
        settings: options of the kind's own objective.
    """

    recipe: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """One kind of model: what is needed to build and train it by name.

    Attributes:
        name: its name in a spec.
        model: (num_classes, in_channels, mean=, **options) -> module, usually the class; with `needs_code` its first
            argument is the code.
        objectives: names of the objectives that can train it, its own first.
        needs_code: whether it is built from a code.
        own_objectives: objectives that it brings, by name.
        own_recipes: recipes that it brings, by name.
        published: settings by sort of images, see `sort_of_images`.
        more_options: names of options beside the keyword arguments of `model`.
    """

    name: str
    model: Callable[..., nn.Module]
    objectives: tuple[str, ...]
    needs_code: bool = False
    own_objectives: Mapping[str, Callable[..., Objective]] = field(default_factory=dict)
    own_recipes: Mapping[str, Recipe] = field(default_factory=dict)
    published: Mapping[str, Published] = field(default_factory=dict)
    more_options: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Names of its options; `module.config` holds their values."""
        return (*options_of(self.model), *self.more_options)

    def build(
        self,
        num_classes: int,
        in_channels: int,
        mean: Mean | None,
        *,
        code: CodeMatrix | None = None,
        **options: Any,
    ) -> nn.Module:
        """A model of this kind, with weights drawn from torch's generator."""
        if not self.needs_code:
            return self.model(num_classes, in_channels, mean=mean, **options)
        if code is None:
            raise InputError(f"a model of kind {self.name!r} needs a code.")
        if code.num_classes != num_classes:
            raise InputError(
                f"the code has {code.num_classes} classes, but {num_classes} are wanted: use a code for as many."
            )
        return self.model(code, in_channels, mean=mean, **options)

    def check(self, options: Iterable[str]) -> None:
        """Raises InputError for an option that models of this kind do not have."""
        check_options(f"the model {self.name!r}", options, self.options)

    def suited_to(self, in_channels: int, image_size: tuple[int, int]) -> Published:
        """The settings that suit it on images of that form; their recipe is never None."""
        sort = sort_of_images(in_channels, image_size)
        found = self.published.get(sort, Published())
        return Published(
            recipe=found.recipe or ("small" if sort == "digits" else "paper"),
            options=found.options,
            settings=found.settings,
        )


def options_of(model: Callable[..., nn.Module]) -> tuple[str, ...]:
    """Names of the keyword-only arguments that a spec may set; `mean` and `threshold` are kept with the weights."""
    parameters = inspect.signature(model).parameters.values()
    return tuple(
        entry.name
        for entry in parameters
        if entry.kind is entry.KEYWORD_ONLY and entry.name not in ("mean", "threshold")
    )


def sort_of_images(in_channels: int, image_size: tuple[int, int]) -> str:
    """Name of the settings that suit these images: "digits" below 20 pixels, else "mnist" if grey, else "cifar10"."""
    if image_size[0] < 20:
        return "digits"
    return "mnist" if in_channels == 1 else "cifar10"
