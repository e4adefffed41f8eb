"""Base classes of layers that hide gradients, and how an attacker who knows them opens them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self, TypeVar, dataclass_transform

from torch import Tensor, nn

Kind = TypeVar("Kind", bound="Piece")


@dataclass_transform(eq_default=False)
def with_fields(kind: type[Kind]) -> type[Kind]:
    """Class decorator: annotated names become the arguments of the constructor, as in a dataclass."""
    return dataclass(eq=False, repr=False)(kind)


class Piece(nn.Module):
    """A module whose subclasses may use `with_fields`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        nn.Module.__init__(made)  # must run before fields are set, because some of them are modules
        return made


class Trick(Piece):
    """A module whose gradient is missing, tiny or misleading.

    Attributes:
        opened: True gives a useful gradient at nearly the same outputs, as in training. Attackers who know the trick
            set it (`open_tricks`).
    """

    opened: bool = False

    @property
    def is_open(self) -> bool:
        return self.training or self.opened

    def hide(self, value: Tensor, stand_in: Tensor) -> Tensor:
        """The value: without gradient, or if open with the gradient of the stand-in (BPDA, Athalye et al. 2018)."""
        return stand_in + (value - stand_in).detach() if self.is_open else value.detach()


class Removable(Trick):
    """A trick that is the identity when it is open."""

    @property
    def is_absent(self) -> bool:
        return self.is_open

    def change(self, values: Tensor, /) -> Tensor:
        """The changed images, features or scores, of the same shape."""
        raise NotImplementedError

    def forward(self, values: Tensor) -> Tensor:
        return values if self.is_absent else self.change(values)


class RandomChange(Removable):
    """A random change that is active in training too."""

    @property
    def is_absent(self) -> bool:
        return self.opened


@with_fields
class Disguised(Trick):
    """A network whose own scores are returned only when it is open."""

    network: nn.Module

    def show(self, images: Tensor, scores: Tensor, /) -> Tensor:
        """The scores to return in place of the network's `scores` of the images."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        return scores if self.is_open else self.show(images, scores)


def open_tricks(model: nn.Module) -> nn.Module:
    """A copy of the model in which every trick is open; the model itself if it has no tricks."""
    if not any(isinstance(module, Trick) for module in model.modules()):
        return model
    opened = copy.deepcopy(model)
    for module in opened.modules():
        if isinstance(module, Trick):
            module.opened = True
    return opened
