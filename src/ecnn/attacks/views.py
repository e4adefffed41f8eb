"""Where an attack looks: what it reads from the model, and the loss it raises there.

An attack on the decoder's scores and one on the encoder's logits are different experiments: a saturated decoder can
hide from the first and not from the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn

from ecnn.backbones import full_precision
from ecnn.errors import InputError
from ecnn.objectives import member_margin, member_targets, score_cross_entropy, score_margin

Loss = Literal["margin", "cross_entropy"]
#: What an attack raises: (model, images, labels) -> (batch,) loss, higher is worse for the model.
View = Callable[[nn.Module, Tensor, Tensor], Tensor]


def score_loss(scores: Tensor, labels: Tensor, loss: Loss, slack: float) -> Tensor:
    """(batch,) how wrong the scores are: softmax cross-entropy, or the margin of the best wrong class.

    The margin is not pushed further once a wrong class leads by `slack` (the paper's c).

    Departs: the printed hinge attack minimises minus a maximum, which helps the defender; this is its negative.
    """
    if loss == "cross_entropy":
        return score_cross_entropy(scores, labels)
    return (-score_margin(scores, labels)).clamp(max=slack)


def member_margins(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    """(batch, member) by how much each member prefers its right answer; a common level of its logits plays no part."""
    return member_margin(model.member_logits(images), member_targets(model.code_symbols, labels))


def linear_scores(model: Any, images: Tensor) -> Tensor:
    """(batch, class) correlation of the member logits with the codewords, with nothing that saturates in between."""
    logits = full_precision(model.member_logits(images))
    if logits.ndim == 2:
        return torch.matmul(logits, (2 * model.code_symbols.T - 1).to(logits.dtype))
    centred = logits - logits.mean(dim=2, keepdim=True)
    one_hot = F.one_hot(model.code_symbols, logits.shape[2]).to(logits.dtype)
    return torch.einsum("bnk,cnk->bc", centred, one_hot)


def _on_scores(loss: Loss, slack: float) -> View:
    return lambda model, images, labels: score_loss(model(images), labels, loss, slack)


def _on_linear(loss: Loss, slack: float) -> View:
    return lambda model, images, labels: score_loss(linear_scores(model, images), labels, loss, slack)


def _on_members(loss: Loss, slack: float) -> View:
    """All bits at once: members are pushed until each is wrong by `slack`."""
    return lambda model, images, labels: (-member_margins(model, images, labels)).clamp(max=slack).sum(dim=1)


def _on_member_losses(loss: Loss, slack: float) -> View:
    """The cross-entropy of each member, which stops caring about a member once it is wrong."""
    return lambda model, images, labels: F.softplus(-member_margins(model, images, labels)).sum(dim=1)


VIEWS: dict[str, Callable[[Loss, float], View]] = {
    "scores": _on_scores,
    "linear": _on_linear,
    "members": _on_members,
    "member_losses": _on_member_losses,
}


def make_view(on: str | View, loss: Loss, slack: float) -> View:
    """The view behind a name, or the callable itself."""
    if callable(on):
        return on
    if on not in VIEWS:
        raise InputError(f"an attack looks on={', '.join(map(repr, VIEWS))} or a callable, not {on!r}.")
    return VIEWS[on](loss, slack)
