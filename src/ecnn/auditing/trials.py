"""Short trials on images that the usual attacks left: which views break some of them, and which decisions to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.attacks import PGD, Draws
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import forked_generators
from ecnn.attacks.views import Averaged, View
from ecnn.auditing.adaptive import ScaledCrossEntropy
from ecnn.auditing.decisions import Forced
from ecnn.auditing.holding import Holding, ways_to_hold
from ecnn.auditing.subject import Subject

#: Most images for the usual attacks, and most of the images left by them that views are tried on.
_TRIED, _ASKED = 128, 48
_EXAMPLES, _NOISY_AT_ONCE = 256, 32
STEPS = 15
#: Steps of the first trial of every view, on half of the images; and how many views get a second trial.
_FEW_STEPS, _KEPT = 8, 10
_MOST = 4  # views to attack in earnest
TRIAL_PASSES = 4
_HOLDING_STEPS, _MOST_WAYS = 30, 2  # steps of the trial of each way to hold decisions; how many ways to take


@dataclass(frozen=True, eq=False, kw_only=True)
class Scene:
    """The images and points that the search works on.

    Attributes:
        subject: what is audited.
        num_classes: of the model.
        is_random: whether two passes of the model differ.
        images, labels: some of the images that the usual attacks left, and their classes.
        points: clean, noisy and attacked images in random order, on which layers and bridges are fitted.
        asked: how many images the usual attacks were made on.
    """

    subject: Subject
    num_classes: int
    is_random: bool
    images: Tensor
    labels: Tensor
    points: Tensor
    asked: int

    @property
    def model(self) -> nn.Module:
        return self.subject.model


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """The result of the search.

    Attributes:
        views: by name, best first, the views that broke images which the usual attacks had left.
        broken: by name, how many images each view or way broke that those before it had left.
        ways: by name, best first, which decisions of the model to force while the others are held (see `Holding`).
        standing: how many images the views were tried on.
        asked: how many images the usual attacks had been made on to find these.
    """

    views: dict[str, View]
    broken: dict[str, int]
    ways: dict[str, Forced]
    standing: int
    asked: int

    @property
    def share(self) -> float:
        """Share of the images tried that views and ways broke together."""
        return sum(self.broken.values()) / max(1, self.standing)


def set_scene(subject: Subject, examples: Tensor, num_classes: int, *, is_random: bool) -> Scene:
    """Makes the usual attacks on the first images of the subject, and collects the images that they leave."""
    tried = _number_tried(subject)
    images, labels = subject.images[:tried], subject.labels[:tried]
    views: tuple[str | View, ...] = ("scores", ScaledCrossEntropy())
    usual = [walk(subject, view, STEPS, ends=True) for view in views]
    ends = [or_else(partial(_made, subject, attack), images) for attack in usual]
    right = [_right(subject, part, labels, is_random=is_random) for part in (images, *ends)]
    standing = torch.stack(right).all(dim=0)
    rows = standing.nonzero().flatten()[: min(_ASKED, tried // 2)]
    return Scene(
        subject=subject,
        num_classes=num_classes,
        is_random=is_random,
        images=images[rows],
        labels=labels[rows],
        points=_mixed([examples[:_EXAMPLES], images], ends, subject),
        asked=len(images),
    )


def _mixed(clean: list[Tensor], ends: list[Tensor], subject: Subject) -> Tensor:
    """The clean images, a random point of the ball around each, and the last points of attacks, in random order.

    To save memory each image is written directly to its final place, and random points are drawn a few at a time.
    """
    norm, count = NORMS[subject.norm], sum(map(len, clean))
    total = 2 * count + sum(map(len, ends))
    points = clean[0].new_empty(total, *clean[0].shape[1:])
    order = torch.randperm(total, generator=torch.Generator().manual_seed(subject.seed), device="cpu")
    places = order.argsort().to(points.device)
    given, noisy = torch.cat([places[:count], places[2 * count :]]), places[count : 2 * count]
    for part, own in zip(
        (*clean, *ends), torch.split(given, [len(part) for part in (*clean, *ends)]), strict=True
    ):
        points[own] = part
    draws = Draws.of(subject.seed, torch.arange(count, device=points.device))
    for rows in torch.split(torch.arange(count, device=points.device), _NOISY_AT_ONCE):
        points[noisy[rows]] = norm.random(points[given[rows]], subject.eps, draws.take(rows))
    return points


def _number_tried(subject: Subject) -> int:
    return min(_TRIED, 2 * subject.budget.probe_images)


def _made(subject: Subject, attack: PGD) -> Tensor:
    """The points that an attack on the first images of the subject returns."""
    tried = _number_tried(subject)
    images, labels = subject.images[:tried], subject.labels[:tried]
    return attack.run(subject.model, images, labels, seed=subject.seed).images


def walk(subject: Subject, view: str | View, steps: int, *, passes: int = 1, ends: bool = False) -> PGD:
    """PGD on a view for a few steps, from the clean image; with `ends` it returns its last points, broken or not."""
    return PGD(
        norm=subject.norm,
        eps=subject.eps,
        steps=steps,
        step_size=subject.eps / 4,
        schedule="cosine",
        start="image",
        on=Averaged(view=view, passes=passes) if passes > 1 else view,
        keep="last" if ends else "best",
    )


def _fallen(scene: Scene, view: View, steps: int, images: int) -> Tensor:
    """(image,) which of the scene's first images PGD on a view breaks in so many steps."""
    own, labels = scene.images[:images], scene.labels[:images]
    passes = (TRIAL_PASSES if steps == STEPS else TRIAL_PASSES // 2) if scene.is_random else 1
    attack = walk(scene.subject, view, steps, passes=passes, ends=scene.is_random)
    made = attack.run(scene.model, own, labels, seed=scene.subject.seed)
    return ~_right(scene.subject, made.images, labels, is_random=True) if scene.is_random else made.success


def _right(subject: Subject, images: Tensor, labels: Tensor, *, is_random: bool) -> Tensor:
    """(batch,) whether more than half of the passes give the label; a deterministic model gets one pass."""
    passes = 2 * TRIAL_PASSES if is_random else 1
    with torch.no_grad(), forked_generators(images.device, subject.seed):
        pieces = torch.split(images, at_once(max(1, len(images))))
        answers = (
            torch.cat([full_precision(subject.model(part)).argmax(dim=1) for part in pieces])
            for _ in range(passes)
        )
        right = [classes == labels for classes in answers]
    return torch.stack(right).double().mean(dim=0) > 0.5


def try_views(scene: Scene, views: Mapping[str, View]) -> Found:
    """Tries views and ways to hold decisions, and takes each time the best one for the images that are left.

    Every view is tried for a few steps on half of the images, and the best of them for more steps on all images.
    """
    promising = _try_each(scene, views, _FEW_STEPS, -(-len(scene.labels) // 2))
    best = sorted(promising, key=lambda name: -int(promising[name].sum()))[:_KEPT]
    fallen = _try_each(scene, {name: views[name] for name in best}, STEPS, len(scene.labels))
    left = torch.ones(len(scene.labels), dtype=torch.bool, device=scene.labels.device)
    broken = _take_best(fallen, left, _MOST)
    ways = or_else(lambda: ways_to_hold(scene.model, scene.images[:4]), {}) if not scene.is_random else {}
    held = _take_best(_try_holding(scene, ways), left, _MOST_WAYS)
    return Found(
        views={name: views[name] for name in broken},
        broken=broken | held,
        ways={name: ways[name] for name in held},
        standing=len(scene.labels),
        asked=scene.asked,
    )


def _take_best(fallen: dict[str, Tensor], left: Tensor, most: int) -> dict[str, int]:
    """A greedy choice: by name, how many images each one breaks that those taken before it left.

    Args:
        fallen: by name, (image,) which images it breaks.
        left: (image,) which images are not broken yet; changed in place.
        most: how many to take.
    """
    broken: dict[str, int] = {}
    while len(broken) < min(most, len(fallen)):
        counts = {name: int((rows & left).sum()) for name, rows in fallen.items()}
        name = max(counts, key=lambda one: counts[one])
        if not counts[name]:
            break
        broken[name] = counts[name]
        left &= ~fallen[name]
    return broken


def _try_holding(scene: Scene, ways: Mapping[str, Forced]) -> dict[str, Tensor]:
    """By name, (image,) which images `Holding` breaks in this way; ways that raise an error are left out."""
    fallen: dict[str, Tensor] = {}
    subject = scene.subject
    for name, forced in ways.items():
        attack = Holding(norm=subject.norm, eps=subject.eps, steps=_HOLDING_STEPS, forced=forced)
        with suppress(Exception):  # a way that leads nowhere may raise anything
            fallen[name] = attack.run(scene.model, scene.images, scene.labels, seed=subject.seed).success
    return fallen


def _try_each(scene: Scene, views: Mapping[str, View], steps: int, images: int) -> dict[str, Tensor]:
    """By name, (image,) which of the first images each view breaks; views that raise an error are left out."""
    fallen: dict[str, Tensor] = {}
    for name, view in views.items():
        # A layer that only some images reach, or a view that disturbs the model, may raise anything.
        with suppress(Exception):
            fallen[name] = _fallen(scene, view, steps, images)
    return fallen


def or_else(ask: Callable[[], Any], otherwise: Any) -> Any:
    """The result of `ask()`, or `otherwise` if it raises: a model may raise anything if used in an unexpected way."""
    try:
        return ask()
    except Exception:
        return otherwise
