"""Attacks made for what they attack: where else to look at a model, and the searches that need a loop of their own.

Tramer et al. (2020) broke thirteen defences, two of them ensembles and one a code, by attacking the part that matters
in place of the scores. A view here is such a place; the attacks take any of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ecnn.attacks import NORMS, PGD, Attack, Draws, Transfer
from ecnn.attacks.base import Target, gradient_of
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import Norm, l2_norm
from ecnn.attacks.views import Look, View, decode_linearly, members_of, score_loss
from ecnn.backbones import full_precision
from ecnn.checks import check_choice, parse_eps
from ecnn.codes import CodeMatrix
from ecnn.errors import InputError
from ecnn.objectives import member_margin, member_targets, score_cross_entropy


@runtime_checkable
class Coded(Protocol):
    """A model whose members speak a code: the attacks on members take any such, an ECNN is one."""

    code: CodeMatrix

    def member_logits(self, images: Tensor) -> Tensor:
        """(batch, member), or (batch, member, symbol)."""


@runtime_checkable
class Voting(Protocol):
    """An ensemble whose members each know all classes."""

    def member_scores(self, images: Tensor) -> Tensor:
        """(batch, member, class)."""


def _decoded(model: nn.Module, logits: Tensor) -> Tensor | None:
    """(batch, class) the model's own scores of member logits, where it can decode them without another pass."""
    anything: Any = model
    if not hasattr(model, "decode"):
        return None
    with torch.no_grad():
        return full_precision(anything.decode(logits.detach()))


def cheapest_bits(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
    """How few members still stand between the image and another codeword, in units of their own logits. A `View`.

    A codeword at Hamming distance d is reached for a decoder when half of the d members have changed sides. So of the
    members in which two codewords differ only the half that is nearest to changing counts, and of the other classes
    the one that needs least: members that would be hard to turn are left alone. A member that has changed sides is
    pushed on until it is as wrong as an average member is sure, since soft decoders weigh.
    """
    logits, symbols = members_of(model, images)
    own = member_targets(symbols, labels)
    margins = member_margin(logits, own)
    differs = symbols[None] != own[:, None]  # (batch, class, member)
    others = torch.where(differs, margins[:, None], math.inf).sort(dim=2).values
    needed = differs.sum(dim=2) // 2 + 1
    counted = torch.arange(others.shape[2], device=others.device) < needed[:, :, None]
    lowest = -margins.detach().abs().mean(dim=1)[:, None, None]
    remaining = torch.where(counted & torch.isfinite(others), torch.maximum(others, lowest), 0.0).sum(dim=2)
    if goals is None:
        remaining = remaining.scatter(1, labels[:, None], math.inf)
        losses = -remaining.amin(dim=1)
    else:
        losses = -remaining.gather(1, goals[:, None]).squeeze(1)
    return Look(losses, _decoded(model, logits))


def weakest_bit(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
    """How far the member that is furthest from its bit of the goal's codeword is on the right side. A `View`.

    The loss of Zhang et al. (2020), on logits before any tanh: once it is positive every bit is the goal's, whatever
    the decoder. Without goals it is that of the class which is nearest to it.
    """
    logits, symbols = members_of(model, images)
    if goals is not None:
        losses = member_margin(logits, member_targets(symbols, goals)).amin(dim=1)
        return Look(losses, _decoded(model, logits))
    wanted = symbols[None].expand(len(logits), -1, -1)
    spread = logits[:, None].expand(-1, len(symbols), *logits.shape[1:])
    flat = member_margin(spread.flatten(0, 1), wanted.flatten(0, 1)).amin(dim=1)
    losses = flat.view(len(logits), -1).scatter(1, labels[:, None], -math.inf).amax(dim=1)
    return Look(losses, _decoded(model, logits))


def linear_margin(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
    """The margin of the linear decode of the members: nothing saturates, no common level counts. A `View`."""
    logits, symbols = members_of(model, images)
    losses = score_loss(decode_linearly(logits, symbols), labels, "margin", goals=goals)
    return Look(losses, _decoded(model, logits))


def mean_margin(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
    """The margin of the mean of all members' scores before any softmax, whoever is outvoted. A `View`."""
    anything: Any = model
    read = full_precision(anything.member_scores(images)).mean(dim=1)
    return Look(score_loss(read, labels, "margin", goals=goals), None)


def worst_members(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
    """Margins of the members, weighted by how little each needs to change sides. A `View`.

    A member that is already wrong, or far from being so, gets little weight, as in the reweighing of MORA (Yu et al.
    2022): the vote falls with the members that are about to.

    Departs: MORA derives its weights from the ensemble's own loss and its softmax; these depend on the members' leads
        alone, each on its own scale, so that a rule of voting without a gradient can be attacked too.
    """
    anything: Any = model
    scores = full_precision(anything.member_scores(images))
    batch, members = scores.shape[:2]
    flat = scores.flatten(0, 1)
    own_goals = None if goals is None else goals.repeat_interleave(members)
    leads = score_loss(flat, labels.repeat_interleave(members), "margin", goals=own_goals)
    scale = flat.detach().std(dim=1).clamp_min(1e-12)
    leads = (leads / scale).view(batch, members)
    standing = torch.where(leads.detach() < 0, leads.detach(), -1e4)
    weights = torch.softmax(standing, dim=1)
    # Where every member is wrong already, all of them are pushed on.
    weights = torch.where((leads.detach() < 0).any(dim=1, keepdim=True), weights, 1 / members)
    return Look((weights * leads).sum(dim=1) + leads.clamp(max=0).mean(dim=1), None)


def log_margin(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
    """The margin of the logarithms of scores that are probabilities: the logits' own, up to rounding. A `View`."""
    scores = full_precision(model(images))
    logs = scores.clamp_min(torch.finfo(scores.dtype).tiny).log()
    return Look(score_loss(logs, labels, "margin", goals=goals), scores.detach())


def scaled_cross_entropy(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
    """Cross-entropy of scores brought to spread 1, image by image: neither rounding to 1 nor to 0. A `View`."""
    scores = full_precision(model(images))
    spread = (scores - scores.mean(dim=1, keepdim=True)).detach().abs().amax(dim=1, keepdim=True)
    scaled = scores / spread.clamp_min(torch.finfo(scores.dtype).tiny)
    losses = score_cross_entropy(scaled, labels) if goals is None else -score_cross_entropy(scaled, goals)
    return Look(losses, scores.detach())


def last_layers(model: nn.Module, num_classes: int) -> list[nn.Module]:
    """The layers of a model that give one number, or one map, per class."""
    return [
        layer
        for layer in model.modules()
        if (isinstance(layer, nn.Linear) and layer.out_features == num_classes)
        or (isinstance(layer, nn.Conv2d) and layer.out_channels == num_classes)
    ]


@contextmanager
def _overhearing(layers: list[nn.Module], heard: list[Tensor], *, inputs: bool) -> Iterator[None]:
    """What the layers say, or what they are told, is put into a list as long as this lasts."""

    def hear(module: nn.Module, told: tuple[Any, ...], said: Any) -> None:
        heard.append(told[0] if inputs else said)

    handles = [layer.register_forward_hook(hear) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class InnerScores:
    """The margin of what the last layer with one output per class says, before whatever is made of it. A `View`.

    A softmax, a temperature, a rounding or a noise behind that layer cannot hide its gradient.

    Attributes:
        num_classes: of the model.
    """

    num_classes: int

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, class) what the layer says, and the model's own scores."""
        heard: list[Tensor] = []
        with _overhearing(last_layers(model, self.num_classes), heard, inputs=False):
            scores = full_precision(model(images))
        if not heard or len(heard[-1]) != len(images):
            raise InputError(
                f"{type(model).__name__} has no layer with {self.num_classes} outputs to look at."
            )
        inner = full_precision(heard[-1])
        return (inner if inner.ndim == 2 else inner.flatten(2).mean(dim=2)), scores

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
        inner, scores = self.read(model, images)
        return Look(score_loss(inner, labels, "margin", goals=goals), scores.detach())


def features_of(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """(batch, feature) what the model sees before it decides, and its scores where the same pass gives them.

    That is what its `trunk` gives, averaged over the image; or `model.features(images)`; or else the input of the last
    linear layer to be run.
    """
    anything: Any = model
    trunk, own = getattr(model, "trunk", None), getattr(model, "features", None)
    has_trunk = isinstance(trunk, nn.Module)
    if not has_trunk and callable(own) and not isinstance(own, nn.Module):
        return full_precision(anything.features(images)).flatten(1), None
    linear: list[nn.Module] = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    layers = [trunk] if isinstance(trunk, nn.Module) else linear
    heard: list[Tensor] = []
    with _overhearing(layers, heard, inputs=not has_trunk):
        scores = full_precision(model(images))
    if not heard or not isinstance(heard[-1], Tensor) or len(heard[-1]) != len(images):
        raise InputError(
            f"{type(model).__name__} has no trunk, no features(images) and no linear layer to listen at."
        )
    features = full_precision(heard[-1])
    if has_trunk and features.ndim == 4:
        features = features.mean(dim=(2, 3))
    return features.flatten(1), scores.detach()


@dataclass(frozen=True, eq=False)
class FeatureDistance:
    """How much nearer the features are to another class's mean than to their own. A `View`.

    What comes after the features, a decoder or whatever hides gradients there, plays no part.

    Attributes:
        means: (class, feature) mean features of each class; a class without examples has NaN and is never aimed at.
    """

    means: Tensor

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
        features, scores = features_of(model, images)
        means = self.means.to(features)
        known = torch.isfinite(means).all(dim=1)
        distances = torch.cdist(features[None], torch.where(known[:, None], means, 0.0)[None]).squeeze(0)
        own = distances.gather(1, labels[:, None]).squeeze(1) * known[labels]
        if goals is None:
            nearest = (
                torch.where(known, distances, math.inf).scatter(1, labels[:, None], math.inf).amin(dim=1)
            )
            other = torch.where(torch.isfinite(nearest), nearest, 0.0)
        else:
            other = distances.gather(1, goals[:, None]).squeeze(1) * known[goals]
        return Look(own - other, scores)


@dataclass(frozen=True)
class Averaged:
    """Another view's loss, averaged over several passes of a random model (EOT, Athalye et al. 2018). A `View`.

    Attributes:
        view: what is averaged.
        passes: how many.
    """

    view: View
    passes: int

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
        losses = [self.view(model, images, labels, goals).losses for _ in range(self.passes)]
        return Look(torch.stack(losses).mean(dim=0), None)


def mean_probability(model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None) -> Look:
    """Minus the probability of the label: averaged over passes it is what a random model is judged by. A `View`."""
    probabilities = torch.softmax(full_precision(model(images)), dim=1)
    return Look(-probabilities.gather(1, labels[:, None]).squeeze(1), None)


@dataclass(frozen=True, kw_only=True)
class Pursuit(PGD):
    """`PGD` at any view, one with goals too.

    Attributes:
        view: (model, images, labels, goals) -> Look.
        place: where that looks, in a word for the records.
        passes: of the model that one look at the view takes, for the count.
    """

    view: View
    place: str
    passes: int = 1

    def _view(self) -> View:
        return self.view

    def _climb(
        self, target: Target, images: Tensor, labels: Tensor, goals: Tensor | None, draws: Draws
    ) -> tuple[Tensor, Tensor, Tensor]:
        best, broken, losses = super()._climb(target, images, labels, goals, draws)
        # A view that does not say what the model says leaves all of them standing, and the model must be asked.
        rows = torch.nonzero(~broken).squeeze(1)
        if len(rows):
            broken[rows] = target.narrow(rows).scores(best[rows]).argmax(dim=1) != labels[rows]
        return best, broken, losses

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        if self.passes == 1:
            return super().search(target, images, labels, draws)
        before = target.asked
        points = super().search(target, images, labels, draws)
        target.count(
            *((self.passes - 1) * (new - old) for old, new in zip(before, target.asked, strict=True))
        )
        return points


@dataclass(frozen=True, kw_only=True)
class _Onward(Pursuit):
    """A pursuit from given points."""

    points: Tensor

    def _first(self, target: Target, images: Tensor, draws: Draws) -> Tensor:
        return self.points


@dataclass(frozen=True, kw_only=True)
class Relay(Attack):
    """One search after another, each at its own view and from the best point so far.

    A view that stalls hands over to one that sees further: what the members gave way to, the scores may finish. The
    best point is the one where the last view of the list, the yardstick, is highest; of equal ones the latest, so that
    a flat yardstick does not hold the others back.

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: of each leg.
        views: one leg each, in this order.
        restarts: rounds of all legs; the first round starts at the image, later ones go on from the best point.
    """

    norm: Norm
    eps: float | str
    steps: int
    views: tuple[View, ...]
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("norm", self.norm, NORMS)
        parse_eps(self.eps)
        if not self.views or self.steps < 1 or self.restarts < 1:
            raise InputError("a relay needs at least one view, one step and one round.")

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        best, rows = images.clone(), torch.arange(len(images), device=images.device)
        worth = target.look(self.views[-1], best, labels).losses
        for view in self.views * self.restarts:
            if not len(rows):
                break
            part, given, own = target.narrow(rows), images[rows], labels[rows]
            found, _, _ = self._leg(view, best[rows])._climb(part, given, own, None, draws.take(rows))
            losses = part.look(self.views[-1], found, own).losses
            broken = part.scores(found).argmax(dim=1) != own
            better = broken | (losses >= worth[rows])
            best[rows] = torch.where(per_image(better, found), found, best[rows])
            worth[rows] = torch.where(better, losses, worth[rows])
            if self.keep == "best" and self.early_exit:
                rows = rows[~broken]
        return best

    def _leg(self, view: View, points: Tensor) -> _Onward:
        eps = parse_eps(self.eps)
        return _Onward(
            norm=self.norm,
            eps=eps,
            steps=self.steps,
            step_size=eps / 4,
            schedule="cosine",
            view=view,
            place="several",
            points=points,
            early_exit=self.early_exit and self.keep == "best",
        )


@dataclass(frozen=True, kw_only=True)
class InDouble(Attack):
    """Another attack, searching on a copy of the model in float64: gradients that float32 rounds to zero come back.

    The verdict stays that of the model as it is.

    Attributes:
        norm, eps: of the ball, the attack's own.
        attack: one with a ball.
    """

    norm: Norm
    eps: float | str
    attack: Attack

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        part = target.narrow(torch.arange(len(images)))
        part.model = copy.deepcopy(target.judge).double()
        points = self.attack.search(part, images.double(), labels, draws)
        return NORMS[self.norm].project(points.to(images.dtype), images, parse_eps(self.eps))


@dataclass(frozen=True, kw_only=True)
class OwnTransfer(Transfer):
    """`Transfer` from a source that contains the model: what is asked of the source is asked of the model."""

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        crafted = self.attack._run(self.source, images, labels, draws)
        target.count(crafted.forwards, crafted.backwards)
        return crafted.images


@dataclass(frozen=True, kw_only=True)
class Within(Attack):
    """What an attack without a ball finds, where it lies in the ball; elsewhere its projection, for what it is worth.

    Attributes:
        norm, eps: of the ball.
        attack: such as HopSkipJump.
    """

    norm: Norm
    eps: float | str
    attack: Attack

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        points = self.attack.search(target, images, labels, draws)
        return NORMS[self.norm].project(points, images, parse_eps(self.eps))


def gradient_lengths(model: nn.Module, images: Tensor) -> Tensor:
    """(batch,) Euclidean length of the gradient of the margin between the two best scores; 0 where there is none."""
    points = images.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        scores = full_precision(model(points))
        losses = score_loss(scores, scores.detach().argmax(dim=1), "margin")
        gradient = gradient_of(losses, points)
    return l2_norm(gradient.double())
