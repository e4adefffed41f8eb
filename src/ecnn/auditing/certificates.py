"""Certificates: images that provably no point of the ball can break. Accuracy: certified <= true <= audited."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import in_usual_state, read_model, undisturbed, without_tf32
from ecnn.attacks.base import check_labels
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import NORMS, Norm
from ecnn.auditing.programs import Program
from ecnn.auditing.relaxations import (
    Ball,
    Bounds,
    interval_bounds,
    least_margins,
    lipschitz_bound,
    tighten,
)
from ecnn.auditing.smoothing import Smoothed
from ecnn.auditing.traced import UnknownStepError
from ecnn.auditing.tracing import trace
from ecnn.checks import check_choice, parse_eps
from ecnn.evaluation.intervals import Interval, wilson_interval
from ecnn.objectives import predicted_classes

INTERVALS, LINEAR, LIPSCHITZ, SMOOTHING = "intervals", "linear bounds", "Lipschitz bound", "smoothing"
_VALUES_AT_ONCE = 2**23  # float64 values in the largest step of one batch
_MOST_WORK = 2**32  # multiplications for linear bounds of every layer, for all images together
_LARGE = 2**16  # values of all steps for one image, above which `_is_promising` decides
_PROBED = 4  # images on which it is tried whether a large network is worth the work
_HOPELESS = 100.0  # score intervals so many times wider than the scores differ are too loose to start from
_HEAVY = 2**26  # classes times values of the largest step, above which linear bounds take seconds per image
_TOGETHER = 16  # images whose layers are bounded at a time
_SQRT2 = 1.4142135623730952


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The accuracy that is proven on the audited images.

    Attributes:
        accuracy: the mean of `proven`; the true accuracy under attack is not below it.
        interval: Wilson's 95 % interval of `accuracy`.
        proven: (image,) 1 if the image is proven, 0 otherwise; for a smoothed classifier, a lower bound of the share of
            correct passes at the worst point of the ball.
        methods: how many images each method proved that the cheaper ones before it had not.
        confidence: with which each image's proof holds; 1 except for a smoothed classifier, whose votes are a sample.
    """

    accuracy: float
    interval: Interval
    proven: tuple[float, ...]
    methods: dict[str, int]
    confidence: float = 1.0

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.accuracy:.1%} [{low:.1%}, {high:.1%}]".replace("%", " %")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "interval": list(self.interval), "proven": list(self.proven)}

    @property
    def how(self) -> str:
        """The methods and their counts in words, such as "intervals (12), linear bounds (3)"."""
        parts = [f"{name} ({count})" for name, count in self.methods.items() if count]
        sure = "" if self.confidence == 1 else f", each with {100 * self.confidence:g} % confidence"
        return ", ".join(parts) + sure


def read_certificate(values: Any) -> Certificate | None:
    """The certificate from the values of `Certificate.to_dict`; None stays None."""
    if values is None:
        return None
    low, high = values["interval"]
    return Certificate(**{**values, "interval": (float(low), float(high)), "proven": tuple(values["proven"])})


@in_usual_state
def certify(
    model: nn.Module, images: Tensor, labels: Tensor, *, norm: Norm, eps: float | str, seed: int = 0
) -> Certificate | None:
    """The certified accuracy on these images; None if no image is proven, or an operation of the model has no bounds.

    A plain network (convolutions, dense layers, batch norm in eval mode, pooling, ReLU and its like, residual sums) is
    bounded by intervals, by linear bounds (CROWN) and, in L2, by its Lipschitz constant. The bounds hold for the model
    as it computes in float32. A `Smoothed` classifier is certified by its votes, in L2. The work is limited: a large
    network is given up after a few images if its bounds are too loose.

    Args:
        images: (batch, channel, height, width) in [0, 1], on the model's device.
        labels: (batch,) the true classes.
        norm, eps: of the ball.
        seed: of the noise of a smoothed classifier.
    """
    check_choice("norm", norm, NORMS)
    eps = parse_eps(eps, most=NORMS[norm].longest)
    with undisturbed(model), without_tf32():
        if isinstance(model, Smoothed):
            return _certify_smoothed(model, images, labels, norm, eps, seed)
        scores = torch.cat([read_model(model, part) for part in torch.split(images, at_once(256))])
        check_labels(labels, scores.shape[1])
        right = predicted_classes(scores) == labels
        if not bool(right.any()):
            return None
        try:
            program = trace(model, images[right][:1])
            _compare(program, images[:_PROBED], scores[:_PROBED])
        except UnknownStepError:
            return None
        with torch.no_grad():
            methods = _prove(program, images, labels, right, norm, eps, scores)
    proven = np.any(list(methods.values()), axis=0)
    if not proven.any():
        return None
    return _summary(proven.astype(float), _new_ones(methods))


def _summary(proven: np.ndarray, methods: dict[str, int], confidence: float = 1.0) -> Certificate:
    accuracy = float(proven.mean())
    return Certificate(
        accuracy=accuracy,
        interval=wilson_interval(round(accuracy * len(proven)), len(proven)),
        proven=tuple(float(share) for share in proven),
        methods=methods,
        confidence=confidence,
    )


def _new_ones(methods: dict[str, np.ndarray]) -> dict[str, int]:
    """How many images each method is the first to prove; methods that prove none first are left out."""
    counts, before = {}, np.zeros(len(next(iter(methods.values()))), dtype=bool)
    for name, proven in methods.items():
        counts[name] = int((proven & ~before).sum())
        before = before | proven
    return {name: count for name, count in counts.items() if count}


def _compare(program: Program, images: Tensor, scores: Tensor) -> None:
    """Raises `UnknownStepError` unless the traced program agrees with the model's scores of these images as a batch."""
    bounds = interval_bounds(program, _ball(images, "linf", 0.0))[program.result]
    found = scores.double()
    if program.least_margin:  # the program ends before the softmax: only classes can be compared
        middle = (bounds.low + bounds.high).squeeze(1) / 2
        agrees = predicted_classes(middle) == predicted_classes(scores)
        lead = middle.topk(2, dim=1).values
        agrees = agrees | (lead[:, 0] - lead[:, 1] < program.least_margin)
    else:
        low, high = bounds.low.squeeze(1), bounds.high.squeeze(1)
        agrees = ((found >= low) & (found <= high)).all(dim=1)
    if not bool(agrees.all()):
        raise UnknownStepError("its scores of a batch are not those of its images")


def _ball(images: Tensor, norm: Norm, eps: float) -> Ball:
    return Ball(images=images.double().unsqueeze(1), norm=norm, eps=eps)


def _prove(
    program: Program, images: Tensor, labels: Tensor, right: Tensor, norm: Norm, eps: float, scores: Tensor
) -> dict[str, np.ndarray]:
    """By method, the cheapest first: (image,) whether it proves the image."""
    never = torch.full((len(images),), -torch.inf, dtype=torch.float64, device="cpu")
    margins = {INTERVALS: never, LINEAR: never.clone()}
    rows = torch.nonzero(right).squeeze(1)
    values = [program.units(number) for number in range(program.result + 1)]
    if sum(values) <= _LARGE or _is_promising(program, images[rows[:_PROBED]], norm, eps):
        is_heavy = program.shapes[program.result][1] * max(values) > _HEAVY
        most = at_once(max(1, _VALUES_AT_ONCE // max(values)))
        for part in torch.split(rows, min(most, _PROBED) if is_heavy else most):
            _bound(program, images, labels, norm, eps, part, margins)
            if is_heavy and bool((margins[LINEAR][rows.cpu()][:_PROBED] <= program.least_margin).all()):
                break  # nothing proven of the first few; the others would take as long
        _bound_all_layers(program, images, labels, norm, eps, right, margins[LINEAR])
    proven = {name: (found > program.least_margin).numpy() for name, found in margins.items()}
    if norm == "l2":
        proven[LIPSCHITZ] = _by_lipschitz(program, images, labels, right, eps, scores).numpy()
    return proven


def _is_promising(program: Program, images: Tensor, norm: Norm, eps: float) -> bool:
    """Whether for some image the score intervals are less than `_HOPELESS` times as wide as its scores differ."""
    around, at = (interval_bounds(program, _ball(images, norm, size))[program.result] for size in (eps, 0.0))
    width = (around.high - around.low).flatten(1).amax(dim=1)
    apart = (at.high.flatten(1).amax(dim=1) - at.low.flatten(1).amin(dim=1)).abs()
    return bool((width < _HOPELESS * apart).any())


def _bound(
    program: Program,
    images: Tensor,
    labels: Tensor,
    norm: Norm,
    eps: float,
    rows: Tensor,
    margins: dict[str, Tensor],
) -> None:
    """Writes lower bounds of the margins in `rows`: from intervals, and from linear bounds that start from these."""
    ball = _ball(images[rows], norm, eps)
    bounds = interval_bounds(program, ball)
    scores, own = bounds[program.result], labels[rows][:, None]
    least = scores.low.squeeze(1).gather(1, own).squeeze(1)
    most = scores.high.squeeze(1).scatter(1, own, -torch.inf).amax(dim=1)
    margins[INTERVALS][rows.cpu()] = (least - most).cpu()
    margins[LINEAR][rows.cpu()] = _margins(program, ball, bounds, labels[rows]).cpu()


def _margins(program: Program, ball: Ball, bounds: list[Bounds], labels: Tensor) -> Tensor:
    """(batch,) `least_margins`, for a few images at a time to limit the memory."""
    classes, largest = program.shapes[program.result][1], max(map(program.units, range(program.result + 1)))
    width = at_once(max(1, _VALUES_AT_ONCE // (classes * largest)))
    return torch.cat(
        [
            least_margins(program, ball.take(part), _take(bounds, part), labels[part])
            for part in torch.split(torch.arange(len(labels), device=labels.device), width)
        ]
    )


def _take(bounds: Iterable[Bounds], rows: Tensor) -> list[Bounds]:
    return [Bounds(own.low[rows], own.high[rows]) for own in bounds]


def _bound_all_layers(
    program: Program, images: Tensor, labels: Tensor, norm: Norm, eps: float, right: Tensor, margins: Tensor
) -> None:
    """Raises `margins` by linear bounds of every layer, for unproven images, those with the largest margins first.

    If there are more images than the allowed work covers, it also stops at the first batch in which nothing is proven.
    """
    units = sum(program.units(number) for number in range(1, program.result + 1))
    affordable = int(_MOST_WORK // max(1, units * program.work))
    open_rows = torch.nonzero(right.cpu() & (margins <= program.least_margin)).squeeze(1)
    order = open_rows[margins[open_rows].argsort(descending=True)][:affordable]
    sizes = [min(_PROBED, len(order)), *[_TOGETHER] * (len(order) // _TOGETHER + 1)]
    for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        part = order[start : start + size]
        if not len(part):
            return
        rows = part.to(images.device)
        ball = _ball(images[rows], norm, eps)
        bounds = interval_bounds(program, ball)
        tighten(program, ball, bounds)
        found = _margins(program, ball, bounds, labels[rows]).cpu()
        margins[part] = torch.maximum(margins[part], found)
        if len(order) < len(open_rows) and not bool((found > program.least_margin).any()):
            return


def _by_lipschitz(
    program: Program, images: Tensor, labels: Tensor, right: Tensor, eps: float, scores: Tensor
) -> Tensor:
    """(image,) whether the margin is larger than the change that any L2 move of length eps can cause."""
    slope = lipschitz_bound(program)
    proven = torch.zeros(len(images), dtype=torch.bool, device="cpu")
    apart = scores.double().amax(dim=1) - scores.double().amin(dim=1)
    worth = right if program.least_margin else right & (apart > _SQRT2 * slope * eps)
    rows = torch.nonzero(worth).squeeze(1)
    for part in torch.split(rows, at_once(256)) if len(rows) else ():
        ball = _ball(images[part], "l2", eps)
        still = interval_bounds(program, _ball(images[part], "linf", 0.0))[program.result]
        low, high, own = still.low.squeeze(1), still.high.squeeze(1), labels[part][:, None]
        lead = low.gather(1, own).squeeze(1) - high.scatter(1, own, -torch.inf).amax(dim=1)
        # The width is the rounding error at the image. It may be larger elsewhere in the ball, hence the factor 4.
        rounding = 4 * (high - low).amax(dim=1)
        enough = lead - rounding > _SQRT2 * slope * ball.radius + program.least_margin
        proven[part.cpu()] = enough.cpu()
    return proven


def _certify_smoothed(
    model: Smoothed, images: Tensor, labels: Tensor, norm: Norm, eps: float, seed: int
) -> Certificate | None:
    """Cohen's certificate in the smallest L2 ball around the given one; for L1 it has the same radius."""
    if norm not in ("l2", "l1"):
        pixels = images[0].numel()
        eps = eps * float(np.sqrt(pixels))  # the L2 ball that contains the Linf ball
    radius = eps + NORMS["l2"].rounding(images[0].numel())
    shares: list[float] = []
    options: dict[str, Any] = {}
    for number, (part, own) in enumerate(zip(torch.split(images, 64), torch.split(labels, 64), strict=True)):
        found = model.certify(part, seed=seed + number, **options)
        options["confidence"] = found.confidence
        is_own = (found.classes == own).cpu()
        for share, counts in zip(found.shares.tolist(), is_own.tolist(), strict=True):
            far = model.share_at(share, radius) if counts else 0.0
            shares.append(model.win_chance(far) if far > 0.5 else 0.0)
    proven = np.array(shares)
    if not proven.any():
        return None
    return _summary(proven, {SMOOTHING: int((proven > 0).sum())}, confidence=found.confidence)
