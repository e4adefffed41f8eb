"""The passes, gradients and recorded PGD runs (walks) that the diagnostics need, computed once and shared."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ecnn.asking import copy_in_double, full_precision, undisturbed, without_tf32
from ecnn.attacks.base import Attack, Target
from ecnn.attacks.gradient import PGD
from ecnn.attacks.images import at_once, per_image
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import Draws, forked_generators
from ecnn.attacks.views import SCORES, Aim, Look, Loss, View, score_loss
from ecnn.auditing.averaging import MeanOfPasses
from ecnn.auditing.diagnostics.statistics import STOOD_TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, note
from ecnn.auditing.subject import Subject
from ecnn.comparing import scores_apart
from ecnn.objectives import predicted_classes, score_margin

#: Images per batch; it bounds the memory and changes no result.
_GROUP = 128
#: The steps of a walk add up to this many radii, so that it can cross the ball and come back (Madry et al. 2018).
_REACH = 2.5
_STREAM = 29
#: Two passes of a deterministic model in float32 differ by less, in any order of summation (as in AutoAttack's flag).
DIFFERENCE = 1e-4

#: (positions of some images) -> the view that a walk attacks; a view with settings per image picks them by position.
ViewOf = Callable[[Tensor], View]


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Every step of one run of PGD; columns are images. On the CPU except for `last`.

    Attributes:
        losses: (step + 1, image) the attacked loss, at the start and after each step.
        margins: (step + 1, image) of the scores, positive while the image is classified as its label.
        spreads: (step + 1, image) best score minus the mean of all, the scale of the scores at that point.
        wrong: (step + 1, image) whether the point is misclassified.
        blind: (image,) share of the steps whose gradient was zero or denormal.
        broken: (image,) misclassified at some step, and again in a second pass at the first such point.
        last: (image, channel, height, width) the points after the last step.
    """

    losses: Tensor
    margins: Tensor
    spreads: Tensor
    wrong: Tensor
    blind: Tensor
    broken: Tensor
    last: Tensor


class Probe:
    """The first images of a subject, the model's scores of them, and the walks that several checks use.

    All are computed on first use. `probe_of` keeps the probe as long as the subject exists.

    Attributes:
        model: the subject's model; if it is random, its mean over several passes (`MeanOfPasses`).
        raw: the probe of the subject's model itself; this probe if the model is not random.
    """

    def __init__(self, subject: Subject, *, averages: bool = True) -> None:
        self.norm, self.eps = subject.norm, float(subject.eps)
        self.budget, self.seed = subject.budget, subject.seed
        self.images = subject.images[: subject.budget.probe_images].detach()
        self.labels = subject.labels[: subject.budget.probe_images]
        self.rows = torch.arange(len(self.images), device=self.images.device)
        stood = (
            torch.zeros(len(self.images), dtype=torch.bool, device="cpu")
            if subject.stood is None
            else subject.stood
        )
        self._stood = stood[: len(self.images)].cpu()
        self._is_known_to_be_random = subject.is_random
        self._spent = [0, 0]  # passes and gradients of `broken_by`, whose attacks have counts of their own
        self._ask(subject.model)
        self.raw = self
        if averages and self.is_random:
            self.raw = Probe(subject, averages=False)
            self._ask(MeanOfPasses(subject.model, max(4, subject.budget.eot // 4), subject.seed))

    def _ask(self, model: nn.Module) -> None:
        self.model = model
        self.target = Target(model, len(self.images), self.images.device)

    @property
    def cost(self) -> tuple[int, int]:
        """(forward passes, gradients) used so far, each counted per image."""
        others = (0, 0) if self.raw is self else self.raw.cost
        each = self.model.passes if isinstance(self.model, MeanOfPasses) else 1
        return (
            each * (int(self.target.forwards.sum()) + self._spent[0]) + others[0],
            each * (int(self.target.backwards.sum()) + self._spent[1]) + others[1],
        )

    @cached_property
    def scores(self) -> Tensor:
        """(image, class) scores of the clean images."""
        return torch.cat([self.target.narrow(part).scores(self.images[part]) for part in self.groups()])

    @cached_property
    def right(self) -> Tensor:
        """(image,) whether the clean image is classified correctly; False where a score is NaN; on the CPU."""
        return (predicted_classes(self.scores) == self.labels).cpu()

    @cached_property
    def two_passes(self) -> tuple[float, int]:
        """How far two passes over an image, or over a point near it, lie apart at most, and how many classes differ.

        The distance is relative to the spread of the scores.
        """
        # Not `scores` and one pass more: every check starts from the same seed and would draw the same numbers again.
        draws = Draws.of(self.seed, self.rows).fold(_STREAM + 1)
        apart, flipped = self._two_passes(self.images)
        with suppress(Exception):  # a model may refuse random points
            other, more = self._two_passes(NORMS[self.norm].random(self.images, self.eps, draws))
            apart, flipped = max(apart, other), flipped + more
        return apart, flipped

    def _two_passes(self, points: Tensor) -> tuple[float, int]:
        apart, flipped = 0.0, 0
        for part in self.groups():
            first, again = (self.target.narrow(part).scores(points[part]) for _ in range(2))
            flipped += int((predicted_classes(first) != predicted_classes(again)).sum())
            apart = max(apart, float(scores_apart(first, again).amax())) if len(part) else apart
        return apart, flipped

    @property
    def is_random(self) -> bool:
        """Whether two passes differ by more than rounding, or are known to differ somewhere."""
        return self._is_known_to_be_random or self.two_passes[0] > DIFFERENCE

    @cached_property
    def gradient_error(self) -> str | None:
        """Why no gradient reaches the pixels, or None if one does."""
        if not len(self.images):
            return None
        points = self.images[:1].clone().requires_grad_(True)
        self.target.narrow(self.rows[:1]).count(1, 1)
        try:
            with torch.enable_grad():
                losses = score_loss(SCORES.read(self.model, points)[0], self.labels[:1], "margin")
                if not losses.requires_grad:
                    return "the scores are not a differentiable function of the pixels"
                (gradient,) = torch.autograd.grad(losses.sum(), points, allow_unused=True)
        except Exception as error:  # raised by autograd, or by a model that refuses to be differentiated
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return "no differentiable operation uses the pixels" if gradient is None else None

    @property
    def num_right(self) -> int:
        """How many images are classified correctly, so that an attack can break them."""
        return int(self.right.sum())

    @property
    def stood(self) -> Tensor:
        """(image,) right, and not broken by the suite; all False before the suite or for a random model; on the CPU."""
        return self.right & self._stood if self.raw is self else torch.zeros_like(self.right)

    def breaks_too_much(self, broken: Tensor, tolerance: float) -> bool:
        """Whether an attack breaks more than is tolerated, of all right images or of those that the suite left."""
        left, n = int((broken & self.stood).sum()), int(self.stood.sum())
        return exceeds(int(broken.sum()), self.num_right, tolerance) or exceeds(left, n, STOOD_TOLERANCE)

    @cached_property
    def margin_walk(self) -> Walk:
        """Plain PGD with the margin loss on the scores."""
        return self.walk(lambda rows: SCORES, self.rows)

    @cached_property
    def cross_entropy_walk(self) -> Walk:
        """Plain PGD with cross-entropy on the scores."""
        return self.walk(lambda rows: SCORES, self.rows, loss="cross_entropy")

    @property
    def standing(self) -> Tensor:
        """(image,) right, and not broken by PGD with the margin loss; on the CPU."""
        return self.right & ~self.margin_walk.broken

    @cached_property
    def double_model(self) -> nn.Module | None:
        """A float64 copy of the model, or None if it cannot be made or does not answer in float64."""
        try:
            double = copy_in_double(self.model)
            with torch.no_grad():
                answer = double(self.images[:1].double())
        except Exception:
            return None
        return double if answer.dtype == torch.float64 else None

    def groups(self, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """The positions, split into batches; None takes all images."""
        return torch.split(self.rows if rows is None else rows, at_once(_GROUP))

    def gradients(self, loss: Loss, *, double: bool = False) -> Tensor:
        """(image, pixel) gradient of the loss on the scores at the images; with `double` that of the float64 copy.

        It is zero if no gradient reaches the pixels.
        """
        if self.gradient_error is not None:
            return torch.zeros_like(self.images).flatten(1)
        parts = []
        for part in self.groups():
            target = self.target.narrow(part)
            images = self.images[part]
            if double:
                assert self.double_model is not None
                copied = Target(self.double_model, len(part), images.device)
                target, images = copied, images.double()
                self.target.narrow(part).count(1, 1)
            parts.append(target.ascend(SCORES, images, Aim(self.labels[part], loss=loss))[1].flatten(1))
        return torch.cat(parts)

    def walk(
        self,
        view_of: ViewOf,
        rows: Tensor,
        *,
        steps: int | None = None,
        start: Literal["uniform", "image"] = "uniform",
        labels: Tensor | None = None,
        loss: Loss = "margin",
    ) -> Walk:
        """Runs PGD with a constant step size on some images and records every step; broken images go on too."""
        labels = self.labels[rows] if labels is None else labels
        draws = Draws.of(self.seed, rows).fold(_STREAM)
        if not len(rows):
            return _empty_walk(self.images[:0])
        with forked_generators(self.images.device, self.seed):
            walks = []
            for part in torch.split(torch.arange(len(rows), device=rows.device), at_once(_GROUP)):
                here = rows[part]
                about = (view_of(here), loss, here, labels[part], draws.take(part))
                walks.append(self._walk(*about, steps, start == "image"))
        return _join_walks(walks)

    def _walk(
        self,
        view: View,
        loss: Loss,
        rows: Tensor,
        labels: Tensor,
        draws: Draws,
        steps: int | None,
        still: bool,
    ) -> Walk:
        images, target, norm = self.images[rows], self.target.narrow(rows), NORMS[self.norm]
        steps, aim = self.budget.probe_steps if steps is None else steps, Aim(labels, loss=loss)
        length = _REACH * self.eps / max(1, steps)
        points = images.clone() if still else norm.random(images, self.eps, draws)
        kept, ever = points, torch.zeros_like(labels, dtype=torch.bool)
        looks, blind = [], torch.zeros(len(rows), device=images.device)
        for step in range(steps + 1):
            if step < steps and self.gradient_error is None:
                look, gradient = target.ascend(view, points, aim)
                blind += unusable(gradient.flatten(1)).to(blind.dtype) / steps
            else:
                look, gradient = target.look(view, points, aim), torch.zeros_like(points)
                blind += step < steps and 1 / steps
            looks.append(_summarise(look, labels))
            now = looks[-1][3].bool()
            kept = torch.where(per_image(now & ~ever, points), points, kept)
            ever = ever | now
            last = points
            move = norm.step(gradient, points)
            points = norm.project(points + length * move, images, self.eps)
        again = target.look(view, kept, aim).scores
        assert again is not None
        broken = ever & (predicted_classes(again) != labels)
        losses, margins, spreads, wrong = torch.stack(looks, dim=1).cpu()
        return Walk(
            losses=losses,
            margins=margins,
            spreads=spreads,
            wrong=wrong.bool(),
            blind=blind.cpu(),
            broken=broken.cpu(),
            last=last,
        )

    def broken_by(self, attack: Attack, rows: Tensor, *, seed: int | None = None) -> Tensor:
        """(image,) whether the attack breaks the image, on the CPU; False outside `rows`, a mask on the CPU."""
        found = torch.zeros(len(self.images), dtype=torch.bool, device="cpu")
        if not bool(rows.any()):  # many models refuse an empty batch
            return found
        chosen = torch.nonzero(rows).squeeze(1)
        if (
            self.raw is not self
        ):  # an image's random numbers depend on its batch: attack all images, and drop none early
            attack, chosen = replace(attack, early_exit=False), self.rows.cpu()
        with forked_generators(self.images.device, self.seed):
            for part in torch.split(chosen, at_once(_GROUP)):
                here = part.to(self.images.device)
                attacked = attack.run(
                    self.model,
                    self.images[here],
                    self.labels[here],
                    seed=self.seed if seed is None else seed,
                    index=here,
                )
                found[part] = attacked.success.cpu()
                self._spent[0] += int(attacked.forwards.sum())
                self._spent[1] += int(attacked.backwards.sum())
        return found & rows & self.right

    def pgd(self, eps: float, **options: Any) -> PGD:
        """PGD with the step sizes of the walks and the margin loss, at a radius `eps`; options are those of `PGD`."""
        steps = options.pop("steps", self.budget.probe_steps)
        return PGD(norm=self.norm, eps=eps, steps=steps, step_size=_REACH * eps / max(1, steps), **options)


_PROBES: WeakKeyDictionary[Subject, Probe] = WeakKeyDictionary()


def probe_of(subject: Subject) -> Probe:
    """The probe of a subject, the same for all checks: they share its results, so the model must not change between."""
    if subject not in _PROBES:
        _PROBES[subject] = Probe(subject)
    return _PROBES[subject]


def diagnostic(
    name: str, source: str
) -> Callable[[Callable[[Probe], Finding]], Callable[[Subject], Finding]]:
    """Decorator: turns a function of a probe into a check of a subject, with this name and source in its finding.

    If the model raises an error, the finding is a note that reports it, and the other checks go on.
    """

    def decorate(function: Callable[[Probe], Finding]) -> Callable[[Subject], Finding]:
        @wraps(function)
        def check(subject: Subject) -> Finding:
            with (
                undisturbed(subject.model),
                without_tf32(),
                forked_generators(subject.images.device, subject.seed),
            ):
                try:
                    found = function(probe_of(subject))
                except (
                    Exception
                ) as error:  # an error of the audited model is evidence, not a failure of the audit
                    found = _could_not_ask(name, error)
            return replace(found, name=name, source=source, evidence=plain(found.evidence))

        return check

    return decorate


def _could_not_ask(name: str, error: Exception) -> Finding:
    text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return note(
        f"The check {name!r} could not be made with this model ({text}).",
        {"error": text},
        "Make the model run on these images, forward and backward.",
        kind="not_made",
    )


def unusable(gradients: Tensor) -> Tensor:
    """(image,) whether a gradient (image, pixel) is useless: all entries zero or denormal, or an entry NaN."""
    return ~(gradients.abs().amax(dim=1) >= torch.finfo(gradients.dtype).tiny)


def share(mask: Tensor, of: Tensor | int) -> float | None:
    """Share of the images that is marked; None if there are no images."""
    n = of if isinstance(of, int) else int(of.sum())
    return int(mask.sum()) / n if n else None


def percent(count: int, n: int) -> str:
    """ "12 of 32 images (38 %)"."""
    return f"{count} of {n} images ({100 * count / n:.0f} %)" if n else "0 of 0 images"


def plain(value: Any) -> Any:
    """The value as plain JSON: tensors as lists, and None for floats that are not finite."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _summarise(look: Look, labels: Tensor) -> Tensor:
    """(4, image) loss, margin, spread and whether misclassified, at one step; float64, on the device."""
    assert look.scores is not None
    scores = full_precision(look.scores).double()
    spread = scores.amax(dim=1) - scores.mean(dim=1)
    wrong = predicted_classes(scores) != labels
    return torch.stack([look.losses.double(), score_margin(scores, labels), spread, wrong.double()])


def _join_walks(walks: list[Walk]) -> Walk:
    across = {name: torch.cat([getattr(walk, name) for walk in walks], dim=1) for name in _BY_STEP}
    along = {name: torch.cat([getattr(walk, name) for walk in walks]) for name in ("blind", "broken", "last")}
    return Walk(**across, **along)


def _empty_walk(images: Tensor) -> Walk:
    nothing = torch.zeros(1, 0, device="cpu")
    return Walk(
        losses=nothing,
        margins=nothing,
        spreads=nothing,
        wrong=nothing.bool(),
        blind=nothing[0],
        broken=nothing[0].bool(),
        last=images,
    )


_BY_STEP = ("losses", "margins", "spreads", "wrong")
