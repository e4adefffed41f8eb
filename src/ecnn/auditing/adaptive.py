"""Adaptive attacks: views of a model's inner parts, and attacks that chain or wrap other attacks.

Tramer et al. (2020) broke thirteen defences, two of them ensembles and one a code, by attacking the part of the model
that decides instead of its scores. A view reads such a part. Any attack takes a view as `on=`.
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
    """A model whose members predict the symbols of a codeword, such as an ECNN: attacks on members take any of them."""

    code: CodeMatrix

    def member_logits(self, images: Tensor) -> Tensor:
        """(batch, member) logits, or (batch, member, symbol)."""


@runtime_checkable
class Voting(Protocol):
    """An ensemble in which every member scores all classes."""

    def member_scores(self, images: Tensor) -> Tensor:
        """(batch, member, class) scores."""


@dataclass(frozen=True, kw_only=True)
class CheapestBits(View):
    """Minus the total logit margin of the members that still have to flip before another codeword is nearer.

    A decoder prefers a codeword at Hamming distance d once more than half of the d differing members have flipped. So
    for each other class only the d // 2 + 1 differing members with the smallest margins count, and the loss is that
    of the class with the smallest total: members that are hard to flip are left alone. Soft decoders weigh members by
    their logits, so a member that has flipped is pushed further, until its margin is minus the image's mean absolute
    margin.
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
    """The mean of the members' scores, taken before any vote or softmax over the members."""

    name: str = "mean of members"

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        anything: Any = model
        return full_precision(anything.member_scores(images)).mean(dim=1), None


@dataclass(frozen=True, kw_only=True)
class WorstMembers(View):
    """Margins of the members, with the largest weights on members that are right by the smallest margin.

    A member that is already wrong, or right by a wide margin, gets little weight, as in the reweighing of MORA (Yu et
    al. 2022): the members closest to an error decide the vote.

    Departs: MORA derives its weights from the ensemble's own loss and its softmax. These weights depend on the
        members' margins alone, each on its own scale, so that a voting rule without a gradient can be attacked too.
    """

    name: str = "worst members"

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        anything: Any = model
        scores = full_precision(anything.member_scores(images))
        return Look(weigh_members(scores, aim), None)


def weigh_members(scores: Tensor, aim: Aim) -> Tensor:
    """(batch,) loss of member scores (batch, member, class): `WorstMembers` says how it weights their margins."""
    batch, members = scores.shape[:2]
    flat = scores.flatten(0, 1)
    own_goals = None if aim.goals is None else aim.goals.repeat_interleave(members)
    leads = score_loss(flat, aim.labels.repeat_interleave(members), "margin", goals=own_goals)
    scale = flat.detach().std(dim=1).clamp_min(1e-12)
    leads = (leads / scale).view(batch, members)
    standing = torch.where(leads.detach() < 0, leads.detach(), -1e4)
    weights = torch.softmax(standing, dim=1)
    # If every member is already wrong, all of them get the same weight.
    weights = torch.where((leads.detach() < 0).any(dim=1, keepdim=True), weights, 1 / members)
    return (weights * leads).sum(dim=1) + leads.clamp(max=0).mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class LogScores(ScoreView):
    """Logarithms of scores that are probabilities: the logits, up to rounding and a constant per image."""

    name: str = "log scores"

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        scores = full_precision(model(images))
        return scores.clamp_min(torch.finfo(scores.dtype).tiny).log(), scores.detach()


@dataclass(frozen=True, kw_only=True)
class ScaledCrossEntropy(View):
    """Cross-entropy of the scores after division by their largest deviation from the mean, image by image.

    The softmax of scores on this scale cannot round to 0 or 1, so its gradient does not vanish.
    """

    name: str = "scaled cross-entropy"

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        scores = bounded(model(images))
        spread = (scores - scores.mean(dim=1, keepdim=True)).detach().abs().amax(dim=1, keepdim=True)
        scaled = scores / spread.clamp_min(torch.finfo(scores.dtype).tiny)
        return Look(score_loss(scaled, aim.labels, "cross_entropy", goals=aim.goals), scores.detach())


@dataclass(frozen=True, kw_only=True)
class MeanProbability(UntargetedView):
    """Minus the softmax probability of the label.

    Averaged over passes, it is a smooth stand-in for the share of right passes, by which a random model is judged.
    """

    name: str = "mean probability"

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        probabilities = torch.softmax(bounded(model(images)), dim=1)
        return Look(-probabilities.gather(1, aim.labels[:, None]).squeeze(1), None)


@dataclass(frozen=True, kw_only=True)
class MeanAround(WrappedView):
    """The mean loss of another view over noisy copies of each point, for gradients that jump from point to point.

    The noise is the same for every image and every call, in pairs of opposite sign. The point itself is one of the
    copies, and the scores are those of the point. Without gradients only the point itself is looked at.

    Attributes:
        pairs: how many pairs of noisy copies.
        deviation: standard deviation of the Gaussian noise, on the [0, 1] scale.
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
    """The linear and convolutional layers of a model with one output, or one output map, per class."""
    return [
        layer
        for layer in model.modules()
        if (isinstance(layer, nn.Linear) and layer.out_features == num_classes)
        or (isinstance(layer, nn.Conv2d) and layer.out_channels == num_classes)
    ]


@contextmanager
def overhearing(
    layers: list[nn.Module], heard: list[tuple[nn.Module, Any]], *, inputs: bool
) -> Iterator[None]:
    """Appends each layer with its output, or with `inputs` its input, to the list while the context is open."""

    def hear(module: nn.Module, told: tuple[Any, ...], said: Any) -> None:
        heard.append((module, told[0] if inputs else said))

    handles = [layer.register_forward_hook(hear) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def whole_batch(heard: list[tuple[nn.Module, Any]], batch: int) -> Tensor | None:
    """What the last layer in the list got or gave, one row per image, also where a batch went through it in parts.

    None if its last calls do not add up to the batch.
    """
    parts: list[Tensor] = []
    for layer, values in reversed(heard):
        if layer is not heard[-1][0]:
            continue
        if not isinstance(values, Tensor) or not values.ndim:
            return None
        parts.insert(0, values)
        if (rows := sum(len(part) for part in parts)) >= batch:
            return torch.cat(parts) if rows == batch else None
    return None


@dataclass(frozen=True, kw_only=True)
class InnerScores(ScoreView):
    """The output of the last layer to run that has one output per class.

    A softmax, a temperature, rounding or noise after that layer cannot hide its gradient.

    Attributes:
        num_classes: of the model.
    """

    name: str = "inner scores"
    num_classes: int

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(model, Around):  # `ask` may split the batch or use a copy: hooks must be set inside it
            both = model.ask(lambda asked, part: torch.cat(self.read(asked, part), dim=1), images)
            return both[:, : self.num_classes], both[:, self.num_classes :].detach()
        heard: list[tuple[nn.Module, Any]] = []
        with overhearing(last_layers(model, self.num_classes), heard, inputs=False):
            scores = full_precision(model(images))
        found = whole_batch(heard, len(images))
        if found is None:
            raise InputError(
                f"{type(model).__name__} ran no linear or convolutional layer with {self.num_classes} outputs."
            )
        inner = full_precision(found)
        return (inner if inner.ndim == 2 else inner.flatten(2).mean(dim=2)), scores.detach()


def features_of(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """(batch, feature) the model's features, and its scores without gradient, or None if the pass does not give them.

    Features are the output of `model.trunk`, averaged over positions; without a trunk `model.features(images)`; without
    that the input of the last linear layer to run.
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
    heard: list[tuple[nn.Module, Any]] = []
    with overhearing(layers, heard, inputs=not has_trunk):
        scores = full_precision(model(images))
    found = whole_batch(heard, len(images))
    if found is None:
        raise InputError(
            f"{type(model).__name__} has no trunk, no features(images) and no linear layer to read features from."
        )
    features = full_precision(found)
    if has_trunk and features.ndim == 4:
        features = features.mean(dim=(2, 3))
    return features.flatten(1), scores.detach()


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureDistance(View):
    """Distance of the features from the mean of the image's class, minus that from the nearest other class's mean.

    Everything after the features, such as a decoder that hides gradients, plays no part.

    Attributes:
        means: (class, feature) mean features of each class; NaN for a class without examples, which is never aimed at.
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
    """PGD on several views in turn; each search, called a leg, starts at the best point so far.

    Where PGD on one view stalls, PGD on the next can go on: an attack on the members may bring an image close enough
    for one on the scores to finish. A misclassified point replaces the best one. Otherwise the best point is the one
    with the highest loss in the last view, the yardstick. Of equal losses the latest wins, so that a flat yardstick
    does not discard the progress of the other legs.

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        steps: of each leg.
        views: one leg each, in this order: names of `VIEWS`, or views.
        restarts: how often all legs are run; the first round starts at the image, later ones at the best point.
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
    """Another attack that searches on a float64 copy of the model, for gradients that float32 rounds to zero.

    The original model judges the points.

    Attributes:
        norm, eps: of the ball, the same as the attack's.
        attack: an attack within a ball.
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
    """Another attack that searches on `MeanOfPasses`, the mean of several passes of a random model with fixed seeds.

    Attributes:
        norm, eps: of the ball, the same as the attack's.
        attack: an attack within a ball.
        passes: how many passes a mean is taken over.
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
    """`Transfer` from a source that contains the model: passes of the source count as passes of the model."""

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        with undisturbed(self.source):
            crafted = self.attack._run(self.source, images, labels, draws)
        target.count(crafted.forwards, crafted.backwards)
        return crafted.images


@dataclass(frozen=True, kw_only=True)
class Within(BallAttack):
    """An attack that knows no ball, restricted to one: points outside the ball are projected onto it.

    The projection may no longer be misclassified. Then the attack has failed.

    Attributes:
        norm, eps: of the ball.
        attack: an attack such as HopSkipJump.
    """

    attack: Attack

    def cost(self, num_classes: int) -> Cost:
        return self.attack.cost(num_classes)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        points = self.attack.search(target, images, labels, draws)
        return NORMS[self.norm].project(points, images, self.radius)


def gradient_lengths(model: nn.Module, images: Tensor) -> Tensor:
    """(batch,) Euclidean length of the gradient of the margin between the two best scores.

    It is 0 for all images if the model cannot be differentiated, and not finite if an entry of the gradient is not.
    """
    points = images.detach().clone().requires_grad_(True)
    try:
        with torch.enable_grad():
            scores = full_precision(model(points))
            losses = score_loss(scores, scores.detach().argmax(dim=1), "margin")
            gradient = raw_gradient(losses, points)
    except Exception:  # raised by autograd, or by a model that refuses to be differentiated
        gradient = torch.zeros_like(images)
    return l2_norm(gradient.double())
