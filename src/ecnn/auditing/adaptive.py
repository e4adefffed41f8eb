"""Attacks made for the model that they attack: more views to look at it, and searches that need a loop of their own.

Tramer et al. (2020) broke thirteen defences, two of them ensembles and one a code, by attacking the part that matters
in place of the scores. A view here is such a part; any attack takes it as `on=`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ecnn.asking import Around, copy_in_double, full_precision, undisturbed
from ecnn.attacks import NORMS, PGD, Attack, Draws, Transfer
from ecnn.attacks.base import BallAttack, Cost, Target, raw_gradient
from ecnn.attacks.images import copies_at_once, per_image
from ecnn.attacks.norms import l2_norm
from ecnn.attacks.views import (
    Aim,
    Look,
    ScoreView,
    UntargetedView,
    View,
    WrappedView,
    decoded_scores,
    find_view,
    members_of,
    score_loss,
)
from ecnn.auditing.averaging import MeanOfPasses
from ecnn.checks import check_count, check_counts
from ecnn.codes import CodeMatrix
from ecnn.errors import InputError
from ecnn.objectives import bounded, member_margin, member_targets, predicted_classes


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


@dataclass(frozen=True, kw_only=True)
class CheapestBits(View):
    """How few members still stand between the image and another codeword, in units of their own logits.

    A codeword at Hamming distance d is reached for a decoder when half of the d members have changed sides. So of the
    members in which two codewords differ only the half that is nearest to changing counts, and of the other classes
    the one that needs least: members that would be hard to turn are left alone. A member that has changed sides is
    pushed on until it is as wrong as an average member is sure, since soft decoders weigh.
    """

    name: str = "cheapest bits"

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        logits, symbols = members_of(model, images)
        own = member_targets(symbols, aim.labels)
        margins = member_margin(logits, own)
        differs = symbols[None] != own[:, None]  # (batch, class, member)
        others = torch.where(differs, margins[:, None], math.inf).sort(dim=2).values
        needed = differs.sum(dim=2) // 2 + 1
        counted = torch.arange(others.shape[2], device=others.device) < needed[:, :, None]
        lowest = -margins.detach().abs().mean(dim=1)[:, None, None]
        pushed = torch.where(counted & torch.isfinite(others), torch.maximum(others, lowest), 0.0)
        remaining = pushed.sum(dim=2)
        if aim.goals is None:
            losses = -remaining.scatter(1, aim.labels[:, None], math.inf).amin(dim=1)
        else:
            losses = -remaining.gather(1, aim.goals[:, None]).squeeze(1)
        return Look(losses, decoded_scores(model, logits))


@dataclass(frozen=True, kw_only=True)
class MeanMembers(ScoreView):
    """The mean of all members' scores before any softmax, whoever is outvoted."""

    name: str = "mean of members"

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        anything: Any = model
        return full_precision(anything.member_scores(images)).mean(dim=1), None


@dataclass(frozen=True, kw_only=True)
class WorstMembers(View):
    """Margins of the members, weighted by how little each needs to change sides.

    A member that is already wrong, or far from being so, gets little weight, as in the reweighing of MORA (Yu et al.
    2022): the vote falls with the members that are about to.

    Departs: MORA derives its weights from the ensemble's own loss and its softmax; these depend on the members' leads
        alone, each on its own scale, so that a rule of voting without a gradient can be attacked too.
    """

    name: str = "worst members"

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        anything: Any = model
        scores = full_precision(anything.member_scores(images))
        return Look(weigh_members(scores, aim), None)


def weigh_members(scores: Tensor, aim: Aim) -> Tensor:
    """(batch,) the margins of members (batch, member, class), weighted by how little each needs to change sides."""
    batch, members = scores.shape[:2]
    flat = scores.flatten(0, 1)
    own_goals = None if aim.goals is None else aim.goals.repeat_interleave(members)
    leads = score_loss(flat, aim.labels.repeat_interleave(members), "margin", goals=own_goals)
    scale = flat.detach().std(dim=1).clamp_min(1e-12)
    leads = (leads / scale).view(batch, members)
    standing = torch.where(leads.detach() < 0, leads.detach(), -1e4)
    weights = torch.softmax(standing, dim=1)
    # Where every member is wrong already, all of them are pushed on.
    weights = torch.where((leads.detach() < 0).any(dim=1, keepdim=True), weights, 1 / members)
    return (weights * leads).sum(dim=1) + leads.clamp(max=0).mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class LogScores(ScoreView):
    """The logarithms of scores that are probabilities: the logits, up to rounding and a constant of each image."""

    name: str = "log scores"

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        scores = full_precision(model(images))
        return scores.clamp_min(torch.finfo(scores.dtype).tiny).log(), scores.detach()


@dataclass(frozen=True, kw_only=True)
class ScaledCrossEntropy(View):
    """Cross-entropy of scores brought to spread 1, image by image: neither rounding to 1 nor to 0."""

    name: str = "scaled cross-entropy"

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        scores = bounded(model(images))
        spread = (scores - scores.mean(dim=1, keepdim=True)).detach().abs().amax(dim=1, keepdim=True)
        scaled = scores / spread.clamp_min(torch.finfo(scores.dtype).tiny)
        return Look(score_loss(scaled, aim.labels, "cross_entropy", goals=aim.goals), scores.detach())


@dataclass(frozen=True, kw_only=True)
class MeanProbability(UntargetedView):
    """Minus the probability of the label: averaged over passes it is what a random model is judged by."""

    name: str = "mean probability"

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        probabilities = torch.softmax(bounded(model(images)), dim=1)
        return Look(-probabilities.gather(1, aim.labels[:, None]).squeeze(1), None)


@dataclass(frozen=True, kw_only=True)
class MeanAround(WrappedView):
    """The mean of another view around each point: a gradient that jumps from place to place still leads somewhere.

    The noise is the same for every image and in every look, in pairs of opposite sign; the point itself is among those
    that are looked at, and the scores are those of the point.

    Attributes:
        pairs: of noisy points.
        deviation: of the noise, on the [0, 1] scale.
    """

    name: str = "mean around"
    pairs: int
    deviation: float

    @property
    def passes_per_look(self) -> int:
        return (1 + 2 * self.pairs) * super().passes_per_look

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        view = find_view(self.view)
        if not torch.is_grad_enabled():
            return view.look(model, images, aim)
        generator = torch.Generator().manual_seed(0)
        noise = self.deviation * torch.randn(
            self.pairs, *images.shape[1:], generator=generator, device="cpu"
        ).to(images)
        looks, most = [], copies_at_once(len(images), images[:1].numel())
        for shifts in torch.split(torch.cat([torch.zeros_like(noise[:1]), noise, -noise]), most):
            points = (images + shifts[:, None]).flatten(0, 1)
            goals = None if aim.goals is None else aim.goals.repeat(len(shifts))
            looks.append(
                view.look(model, points, Aim(aim.labels.repeat(len(shifts)), goals, aim.loss, aim.slack))
            )
        losses = torch.cat([look.losses for look in looks]).view(-1, len(images))
        scores = looks[0].scores
        return Look(losses.mean(dim=0), None if scores is None else scores[: len(images)])


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
    """While this lasts, the outputs of the layers, or their inputs, are appended to the list."""

    def hear(module: nn.Module, told: tuple[Any, ...], said: Any) -> None:
        heard.append(told[0] if inputs else said)

    handles = [layer.register_forward_hook(hear) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class InnerScores(ScoreView):
    """What the last layer with one output per class says, before whatever is made of it.

    A softmax, a temperature, a rounding or a noise behind that layer cannot hide its gradient.

    Attributes:
        num_classes: of the model.
    """

    name: str = "inner scores"
    num_classes: int

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(model, Around):  # who is asked may be a copy of it, in other batches
            both = model.ask(lambda asked, part: torch.cat(self.read(asked, part), dim=1), images)
            return both[:, : self.num_classes], both[:, self.num_classes :].detach()
        heard: list[Tensor] = []
        with _overhearing(last_layers(model, self.num_classes), heard, inputs=False):
            scores = full_precision(model(images))
        if not heard or len(heard[-1]) != len(images):
            raise InputError(
                f"{type(model).__name__} has no layer with {self.num_classes} outputs to look at."
            )
        inner = full_precision(heard[-1])
        return (inner if inner.ndim == 2 else inner.flatten(2).mean(dim=2)), scores.detach()


def features_of(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """(batch, feature) what the model sees before it decides, and its scores where the same pass gives them.

    That is what its `trunk` gives, averaged over the image; or `model.features(images)`; or else the input of the last
    linear layer to be run.
    """
    if isinstance(model, Around):
        return model.ask(lambda asked, part: features_of(asked, part)[0], images), None
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


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureDistance(View):
    """How much nearer the features are to another class's mean than to their own.

    What comes after the features, a decoder or whatever hides gradients there, plays no part.

    Attributes:
        means: (class, feature) mean features of each class; a class without examples has NaN and is never aimed at.
    """

    name: str = "features"
    means: Tensor

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        features, scores = features_of(model, images)
        means = self.means.to(features)
        known = torch.isfinite(means).all(dim=1)
        distances = torch.cdist(features[None], torch.where(known[:, None], means, 0.0)[None]).squeeze(0)
        own = distances.gather(1, aim.labels[:, None]).squeeze(1) * known[aim.labels]
        if aim.goals is None:
            nearest = (
                torch.where(known, distances, math.inf).scatter(1, aim.labels[:, None], math.inf).amin(dim=1)
            )
            other = torch.where(torch.isfinite(nearest), nearest, 0.0)
        else:
            other = distances.gather(1, aim.goals[:, None]).squeeze(1) * known[aim.goals]
        return Look(own - other, scores)


@dataclass(frozen=True, kw_only=True)
class Relay(BallAttack):
    """One search after another, each at its own view and from the best point so far.

    A view that stalls hands over to one that sees further: what the members gave way to, the scores may finish. The
    best point is the one where the last view of the list, the yardstick, is highest; of equal ones the latest, so that
    a flat yardstick does not hold the others back.

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: of each leg.
        views: one leg each, in this order: names of `VIEWS`, or views.
        restarts: rounds of all legs; the first round starts at the image, later ones go on from the best point.
    """

    steps: int
    views: tuple[str | View, ...]
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "steps", "restarts")
        check_count("the number of views", len(self.views))
        for view in self.views:
            find_view(view)

    def cost(self, num_classes: int) -> Cost:
        legs = len(self.views) * self.restarts
        return Cost(3 + legs * (self.steps + 3), legs * self.steps)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        best, rows = images.clone(), torch.arange(len(images), device=images.device)
        yardstick = find_view(self.views[-1])
        worth = target.look(yardstick, best, Aim(labels)).losses
        for view in self.views * self.restarts:
            if not len(rows):
                break
            part, given, own = target.narrow(rows), images[rows], labels[rows]
            found, _, _ = self._leg(view).climb(part, given, own, None, best[rows])
            losses = part.look(yardstick, found, Aim(own)).losses
            broken = predicted_classes(part.scores(found)) != own
            better = broken | (losses >= worth[rows])
            best[rows] = torch.where(per_image(better, found), found, best[rows])
            worth[rows] = torch.where(better, losses, worth[rows])
            if self._drops_rows:
                rows = rows[~broken]
        return best

    def _leg(self, view: str | View) -> PGD:
        eps = self.radius
        return PGD(
            norm=self.norm,
            eps=eps,
            steps=self.steps,
            step_size=eps / 4,
            schedule="cosine",
            on=view,
            early_exit=self._drops_rows,
        )


@dataclass(frozen=True, kw_only=True)
class InDouble(BallAttack):
    """Another attack, searching on a copy of the model in float64: gradients that float32 rounds to zero come back.

    The verdict stays that of the model as it is.

    Attributes:
        norm, eps: of the ball, the attack's own.
        attack: one with a ball.
    """

    attack: Attack

    def cost(self, num_classes: int) -> Cost:
        return self.attack.cost(num_classes)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        part = target.narrow(torch.arange(len(images), device="cpu"))
        part.model = copy_in_double(target.judge)
        points = self.attack.search(part, images.double(), labels, draws)
        return NORMS[self.norm].project(points.to(images.dtype), images, self.radius)


@dataclass(frozen=True, kw_only=True)
class OnMean(BallAttack):
    """Another attack, searching on the mean of several passes over a random model, drawn from the same seeds.

    Attributes:
        norm, eps: of the ball, the attack's own.
        attack: one with a ball.
        passes: how many.
        seed: of the passes.
    """

    attack: Attack
    passes: int
    seed: int = 0

    def cost(self, num_classes: int) -> Cost:
        return self.attack.cost(num_classes) * self.passes

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        part = target.narrow(torch.arange(len(images), device="cpu"))
        part.model = MeanOfPasses(target.model, self.passes, self.seed)
        before = target.forwards, target.backwards
        points = self.attack.search(part, images, labels, draws)
        asked = (
            after - earlier
            for after, earlier in zip((target.forwards, target.backwards), before, strict=True)
        )
        rows = torch.arange(len(images), device="cpu") if target._rows is None else target._rows
        target.count(*((self.passes - 1) * count[rows] for count in asked))
        return points


@dataclass(frozen=True, kw_only=True)
class OwnTransfer(Transfer):
    """`Transfer` from a source that contains the model: what is asked of the source is asked of the model."""

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        with undisturbed(self.source):
            crafted = self.attack._run(self.source, images, labels, draws)
        target.count(crafted.forwards, crafted.backwards)
        return crafted.images


@dataclass(frozen=True, kw_only=True)
class Within(BallAttack):
    """An attack without a ball, made to obey one: points outside the ball are projected onto it.

    The projection may no longer be misclassified; then the attack has failed.

    Attributes:
        norm, eps: of the ball.
        attack: such as HopSkipJump.
    """

    attack: Attack

    def cost(self, num_classes: int) -> Cost:
        return self.attack.cost(num_classes)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        points = self.attack.search(target, images, labels, draws)
        return NORMS[self.norm].project(points, images, self.radius)


def gradient_lengths(model: nn.Module, images: Tensor) -> Tensor:
    """(batch,) Euclidean length of the gradient of the margin between the two best scores.

    It is 0 where there is none, also because the model cannot be differentiated, and not finite where an entry is not.
    """
    points = images.detach().clone().requires_grad_(True)
    try:
        with torch.enable_grad():
            scores = full_precision(model(points))
            losses = score_loss(scores, scores.detach().argmax(dim=1), "margin")
            gradient = raw_gradient(losses, points)
    except Exception:  # autograd, or the model that does not want to be differentiated
        gradient = torch.zeros_like(images)
    return l2_norm(gradient.double())
