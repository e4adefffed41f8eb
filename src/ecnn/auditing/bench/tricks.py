"""What hides a gradient: the bases of all such pieces, and how somebody who knows them opens them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self, TypeVar, dataclass_transform

from torch import Tensor, nn

Kind = TypeVar("Kind", bound="Piece")


@dataclass_transform(eq_default=False)
def with_fields(kind: type[Kind]) -> type[Kind]:
    """A piece whose annotated names are the arguments of its constructor, as in a dataclass."""
    return dataclass(eq=False, repr=False)(kind)


class Piece(nn.Module):
    """A piece of a network that may be made by `with_fields`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        nn.Module.__init__(made)  # before fields are set: some of them are modules
        return made


class Trick(Piece):
    """A piece of a network whose gradient is missing, tiny or misleading.

    Attributes:
        opened: True gives a useful gradient at nearly the same outputs, as in training: for an attacker who knows.
    """

    opened: bool = False

    @property
    def is_open(self) -> bool:
        return self.training or self.opened

    def hide(self, value: Tensor, stand_in: Tensor) -> Tensor:
        """The value, without a gradient or with that of what stands in for it (Athalye et al. 2018)."""
        return stand_in + (value - stand_in).detach() if self.is_open else value.detach()


class Removable(Trick):
    """A trick that is not there when it is open: what it is given goes on as it is."""

    @property
    def is_absent(self) -> bool:
        return self.is_open

    def change(self, values: Tensor, /) -> Tensor:
        """What the trick makes of images, features or scores."""
        raise NotImplementedError

    def forward(self, values: Tensor) -> Tensor:
        return values if self.is_absent else self.change(values)


class RandomChange(Removable):
    """A change by chance, which a network is trained with."""

    @property
    def is_absent(self) -> bool:
        return self.opened


@with_fields
class Disguised(Trick):
    """A network whose scores are shown as they are only when it is open."""

    network: nn.Module

    def show(self, images: Tensor, scores: Tensor, /) -> Tensor:
        """What is shown in place of the network's scores of the images."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        return scores if self.is_open else self.show(images, scores)


def open_tricks(model: nn.Module) -> nn.Module:
    """A copy in which every trick shows a useful gradient; the model itself if there is none."""
    if not any(isinstance(module, Trick) for module in model.modules()):
        return model
    opened = copy.deepcopy(model)
    for module in opened.modules():
        if isinstance(module, Trick):
            module.opened = True
    return opened
