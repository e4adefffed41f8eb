"""Traits of a model that decide which attacks make sense, found by classifying a few images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ecnn.asking import copy_in_double, full_precision, undisturbed, without_tf32
from ecnn.attacks.images import at_once
from ecnn.attacks.views import Aim, View, has_code
from ecnn.auditing.adaptive import (
    CheapestBits,
    InnerScores,
    MeanMembers,
    features_of,
    gradient_lengths,
    last_layers,
)
from ecnn.auditing.bpda import can_pass_through
from ecnn.auditing.levels import is_on_bytes
from ecnn.comparing import scores_apart

_RANDOM = 1e-4  # difference of two passes, relative to the spread of the scores
_TINY = 1e-30  # gradients this short are near the end of float32
_PROBED = 64
_HARDLY = 1e-4  # a change of pixels that no network notices, a fortieth of a grey level
_MUCH = 0.02  # a large change of scores, relative to their spread
_SOME = 0.1  # least share of images that change that much


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The traits of a model that decide which attacks make sense.

    Attributes:
        is_random: two passes over the same images differ.
        gives_probabilities: scores lie in [0, 1] and sum to 1.
        blind: share of images whose gradient is zero, not finite, or too small for float32.
        hides_derivatives: it rounds, compares, casts or detaches somewhere, and `straight_through` gives a gradient.
        hides_scores: its last layer with one output per class differs from its scores.
        can_be_double: a copy in float64 runs without an error.
        knows_bytes: noise of a fortieth of a grey level changes its scores much, or makes it fail: it treats 8-bit
            images differently from all others.
        has_members, has_votes, has_features: attacks on members, on votes and on features can read these.
    """

    is_random: bool
    gives_probabilities: bool
    blind: float
    hides_derivatives: bool
    hides_scores: bool
    can_be_double: bool
    knows_bytes: bool
    has_members: bool
    has_votes: bool
    has_features: bool


def find_traits(model: nn.Module, images: Tensor, num_classes: int) -> Traits:
    """Classifies a few of the images and reports what decides the choice of attacks.

    Images and model must be on one device.
    """
    images = images[:_PROBED]
    with undisturbed(model), without_tf32():
        with torch.no_grad():
            scores, again = (
                torch.cat([full_precision(model(part)).double() for part in _pieces(images)])
                for _ in range(2)
            )
        lengths = torch.cat([gradient_lengths(model, part) for part in _pieces(images)])
        is_random = bool((scores_apart(scores, again) > _RANDOM).any())
        in_range = bool((scores >= -1e-5).all()) and bool((scores <= 1 + 1e-5).all())
        return Traits(
            is_random=is_random,
            gives_probabilities=in_range and bool(((scores.sum(dim=1) - 1).abs() < 1e-4).all()),
            blind=float((~(lengths > _TINY) | ~lengths.isfinite()).double().mean()),
            hides_derivatives=not is_random and can_pass_through(model, images[:4]),
            hides_scores=_hides_scores(model, images[:4], num_classes),
            can_be_double=_answers(lambda: _ask_in_double(model, images[:4])),
            knows_bytes=not is_random and _knows_bytes(model, images, scores),
            has_members=has_code(model) and _answers(lambda: _ask(CheapestBits(), model, images[:4])),
            has_votes=hasattr(model, "member_scores")
            and _answers(lambda: _ask(MeanMembers(), model, images[:4])),
            has_features=_answers(lambda: features_of(model, images[:4])),
        )


def unseen_traits(model: nn.Module) -> Traits:
    """The traits of a model that is not called: only members and votes are looked for, all others are False or 0."""
    return Traits(
        is_random=False,
        gives_probabilities=False,
        blind=0.0,
        hides_derivatives=False,
        hides_scores=False,
        can_be_double=False,
        knows_bytes=False,
        has_members=has_code(model),
        has_votes=hasattr(model, "member_scores"),
        has_features=False,
    )


def _pieces(images: Tensor) -> tuple[Tensor, ...]:
    return torch.split(images, at_once(_PROBED))


def _answers(ask: Callable[[], object]) -> bool:
    """Whether `ask` runs without an error; a model that was not made for it may raise anything."""
    try:
        with torch.no_grad():
            ask()
    except Exception:
        return False
    return True


def _ask(view: View, model: nn.Module, images: Tensor) -> None:
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    view.look(model, images, Aim(labels))


def _ask_in_double(model: nn.Module, images: Tensor) -> None:
    copy_in_double(model)(images.double())


def _knows_bytes(model: nn.Module, images: Tensor, scores: Tensor) -> bool:
    """Whether tiny noise on 8-bit images changes the scores of a tenth of them much, or makes the model fail."""
    if not is_on_bytes(images):
        return False
    signs = torch.where(images < 0.5, _HARDLY, -_HARDLY)
    try:
        with torch.no_grad():
            moved = torch.cat([full_precision(model(part)).double() for part in _pieces(images + signs)])
    except Exception:  # a model may refuse images that are not on whole levels
        return True
    return float((scores_apart(scores, moved) > _MUCH).double().mean()) >= _SOME


def _hides_scores(model: nn.Module, images: Tensor, num_classes: int) -> bool:
    if not last_layers(model, num_classes):
        return False
    try:
        with torch.no_grad():
            inner, scores = InnerScores(num_classes=num_classes).read(model, images)
    except Exception:  # a model that was not made for this may raise anything
        return False
    return inner.shape == scores.shape and not torch.equal(inner, scores)
