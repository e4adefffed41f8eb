"""What hides a gradient: the base of all such pieces, and how somebody who knows them opens them."""

from __future__ import annotations

import copy

from torch import Tensor, nn


class Trick(nn.Module):
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


def open_tricks(model: nn.Module) -> nn.Module:
    """A copy in which every trick shows a useful gradient; the model itself if there is none."""
    if not any(isinstance(module, Trick) for module in model.modules()):
        return model
    opened = copy.deepcopy(model)
    for module in opened.modules():
        if isinstance(module, Trick):
            module.opened = True
    return opened
