"""Black-box attacks: from the model's classes alone (HopSkipJump), by random points, or crafted on another model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ecnn.asking import undisturbed
from ecnn.attacks.attempts import Attempts
from ecnn.attacks.base import Attack, Attacked, BallAttack, Cost, Target
from ecnn.attacks.images import add_up, at_once, per_image
from ecnn.attacks.norms import NORMS, Norm, l2_norm
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import score_loss
from ecnn.checks import check_choice, check_count, check_counts
from ecnn.errors import InputError
from ecnn.objectives import predicted_classes

_BLEND_HALVINGS = 10
#: Bisection steps per bit of the number of pixel values, by norm.
_HALVINGS_PER_BIT: dict[str, float] = {"linf": 2.0, "l2": 1.5}
_JUMP_HALVINGS = 25
#: Directions drawn together, a fixed number, so that the size of an evaluation batch changes no result.
_GROUP = 64


@dataclass(frozen=True, kw_only=True)
class HopSkipJump(Attack):
    """HopSkipJump (Chen, Jordan & Wainwright 2020): the nearest misclassified image, from the model's classes alone.

    It starts at a noise image, blended with the image as far as it stays misclassified. Each step t goes back to the
    border by bisection, estimates the border's normal from the classes of B_0 sqrt(t) points around, and jumps along
    it by the distance over sqrt(t), halved until the point is misclassified. Scores are never read, so a decoder that
    masks its gradients has no effect. Every point counts as one forward pass of its image.

    There is no radius: compare the distance of the returned points with eps. The nearest point found is kept, so more
    steps never end further away. With early_exit images that are misclassified at first are left out, but no search
    ends early. If no noise is misclassified, the clean image is returned.

    Attributes:
        norm: of the distance, "linf" or "l2".
        steps: of the walk along the border; 0 returns the point where the noise meets it.
        samples: points queried in the first step, the paper's B_0.
        init_tries: how many noise images are tried before an image is given up.
        max_batch: largest number of points in one forward pass; it bounds the memory and changes no result.

    Departs: the point kept is the border point moved outward by a tiny amount (the square root of the float precision),
        if it is misclassified there: exactly on the border the final pass may round differently. Points queried around
        the border are never nearer than float precision can resolve; for small images each bisection has ten steps.
    """

    norms: ClassVar[tuple[str, ...]] = tuple(_HALVINGS_PER_BIT)  # those that it is published for
    norm: Norm
    steps: int
    samples: int = 100
    init_tries: int = 100
    max_batch: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("norm", self.norm, self.norms)
        check_count("steps", self.steps, least=0)
        check_count("samples", self.samples, least=2)
        check_counts(self, "init_tries", "max_batch")
        if self.precision != "float32":
            raise InputError(
                f'HopSkipJump follows the border of the class, which {self.precision} moves: use precision="float32".'
            )

    def cost(self, num_classes: int) -> Cost:
        asked = sum(int(self.samples * step**0.5) + 50 for step in range(1, self.steps + 1))
        return Cost(self.init_tries + asked, 0)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        found = images.clone()
        border = _Border(self.norm, self.max_batch, target, images, labels)
        rows = torch.nonzero(~border.wrong(images)).squeeze(1)
        border = border.narrow(rows)
        noise, noisy = self._noise(border, draws.take(rows).fold(0))
        rows, border = rows[noisy], border.narrow(noisy)
        if len(rows):
            points = border.bisect(noise[noisy], _BLEND_HALVINGS, straight=True)
            found[rows] = self._walk(border, points, draws.take(rows).fold(1))
        return found

    def _noise(self, border: _Border, draws: Draws) -> tuple[Tensor, Tensor]:
        """A misclassified noise image for each image, and the positions (n,) of the images for which one was found."""
        noise = border.images.clone()
        rows = torch.arange(len(noise), device=noise.device)
        left, part = rows, border
        for attempt in range(self.init_tries):
            if not len(left):
                break
            tried = draws.take(left).fold(attempt).uniform(*noise.shape[1:], dtype=noise.dtype)
            wrong = part.wrong(tried)
            noise[left[wrong]] = tried[wrong]
            stays = torch.nonzero(~wrong).squeeze(1)
            left, part = left[stays], part.narrow(stays)
        return noise, rows[~torch.isin(rows, left)]

    def _walk(self, border: _Border, points: Tensor, draws: Draws) -> Tensor:
        """The nearest misclassified points found on a walk along the border, from misclassified points."""
        features = math.prod(points.shape[1:])
        halvings = max(_BLEND_HALVINGS, math.ceil(_HALVINGS_PER_BIT[self.norm] * math.log2(features)))
        finest = 16 * math.sqrt(features) * torch.finfo(points.dtype).eps
        kept = points
        for step in range(1, self.steps + 1):
            radii = (border.distances(points) / features).clamp_min(finest)
            points = border.bisect(points, halvings)
            kept = border.nearer(kept, points)
            slope = border.slope(points, radii, int(self.samples * math.sqrt(step)), draws.fold(step))
            lengths = border.distances(points) / math.sqrt(step)
            points = border.jump(points, NORMS[self.norm].steepest(slope), lengths)
        return border.nearer(kept, border.bisect(points, halvings))


class _Border:
    """The decision border of each image's class, probed by queries for classes only."""

    def __init__(self, norm: Norm, max_batch: int, target: Target, images: Tensor, labels: Tensor) -> None:
        self.norm, self.max_batch = norm, max_batch
        self.target, self.images, self.labels = target, images, labels

    def narrow(self, rows: Tensor) -> _Border:
        """The same for the images at these positions."""
        return _Border(
            self.norm, self.max_batch, self.target.narrow(rows), self.images[rows], self.labels[rows]
        )

    def distances(self, points: Tensor) -> Tensor:
        """(batch,) distances of the points from the images, in the norm."""
        return NORMS[self.norm].length(points - self.images)

    def wrong(self, points: Tensor) -> Tensor:
        """(batch,) whether each point is misclassified; one query per image."""
        self.target.count(1)
        return self._ask(points, self.labels)

    def _ask(self, points: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            answers = [
                predicted_classes(self.target.model(part))
                for part in torch.split(points, at_once(self.max_batch))
            ]
        return torch.cat(answers) != labels

    def bisect(self, points: Tensor, halvings: int, *, straight: bool = False) -> Tensor:
        """Misclassified points nearer to the images, by bisection from misclassified points.

        In L2, or if `straight`, it follows the line to the image; in Linf it clips the points to a shrinking box.
        """
        low = torch.zeros(len(points), dtype=points.dtype, device=points.device)
        high, nearest = torch.ones_like(low), points
        distances = self.distances(points)
        for _ in range(halvings):
            middle = (low + high) / 2
            if straight or not NORMS[self.norm].is_box:
                tried = torch.lerp(self.images, points, per_image(middle, points))
            else:
                reach = per_image(middle * distances, points)
                tried = torch.minimum(torch.maximum(points, self.images - reach), self.images + reach)
            wrong = self.wrong(tried)
            low, high = torch.where(wrong, low, middle), torch.where(wrong, middle, high)
            nearest = torch.where(per_image(wrong, points), tried, nearest)
        return nearest

    def nearer(self, kept: Tensor, points: Tensor) -> Tensor:
        """For each image the nearer of `kept` and the point moved outward by a tiny amount, if misclassified there."""
        hair = math.sqrt(torch.finfo(points.dtype).eps)
        outer = (points + hair * (points - self.images)).clamp(0, 1)
        wins = self.wrong(outer) & (self.distances(outer) < self.distances(kept))
        return torch.where(per_image(wins, points), outer, kept)

    def slope(self, points: Tensor, radii: Tensor, count: int, draws: Draws) -> Tensor:
        """An estimate of the border's normal, towards the misclassified side, of any length.

        It uses the classes of `count` points at distance `radii` (batch,) around each point.
        """
        self.target.count(count)
        rows = torch.arange(len(points), device=points.device)
        slopes = [
            self._slope(points[part], radii[part], self.labels[part], count, draws.take(part))
            for part in torch.split(rows, max(1, at_once(self.max_batch) // _GROUP))
        ]
        return torch.cat(slopes)

    def _slope(self, points: Tensor, radii: Tensor, labels: Tensor, count: int, draws: Draws) -> Tensor:
        signed, plain, balance = torch.zeros_like(points), torch.zeros_like(points), torch.zeros_like(radii)
        centres, reach = points[:, None], per_image(radii, points[:, None])
        for group, first in enumerate(range(0, count, _GROUP)):
            size = min(_GROUP, count - first)
            normals = draws.fold(group).normal(size, *points.shape[1:], dtype=points.dtype).flatten(0, 1)
            units = normals / per_image(l2_norm(normals).clamp_min(1e-30), normals)
            asked = (centres + reach * units.view(-1, size, *points.shape[1:])).clamp(0, 1)
            wrong = self._ask(asked.flatten(0, 1), labels.repeat_interleave(size))
            signs = (2 * wrong.to(points.dtype) - 1).view(-1, size)
            moves = (asked - centres) / reach  # as queried: after rounding and cutting to [0, 1]
            signed = signed + add_up(moves * signs.view(-1, size, *[1] * (points.ndim - 1)))
            plain, balance = plain + add_up(moves), balance + signs.sum(dim=1)
        mean = balance / count
        # Subtracting the mean sign lowers the variance; if all signs agree it would leave nothing.
        return signed - per_image(torch.where(mean.abs() < 1, mean, 0.0), points) * plain

    def jump(self, points: Tensor, directions: Tensor, lengths: Tensor) -> Tensor:
        """Points moved along the directions by the lengths (batch,), halved until they are misclassified.

        If none is misclassified, the given point is returned.
        """
        found, rows, part = points.clone(), torch.arange(len(points), device=points.device), self
        for _ in range(_JUMP_HALVINGS):
            tried = (points[rows] + per_image(lengths[rows], points) * directions[rows]).clamp(0, 1)
            wrong = part.wrong(tried)
            found[rows] = torch.where(per_image(wrong, tried), tried, points[rows])
            stays = torch.nonzero(~wrong).squeeze(1)
            if not len(stays):
                break
            rows, part, lengths = rows[stays], part.narrow(stays), lengths / 2
        return found


@dataclass(frozen=True, kw_only=True)
class RandomNoise(BallAttack):
    """The best of several random points of the ball: a baseline that any attack must beat.

    The best is a misclassified point if there is one, and otherwise the point of the highest margin loss; with
    early_exit it is the first misclassified one. keep="last" returns the best point even if it is not misclassified.

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        samples: points tried for each image.
        kind: "uniform" in the ball, or its "corners": every pixel moved by eps up or down (Linf only).
    """

    samples: int
    kind: Literal["uniform", "corners"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("samples", self.samples)
        check_choice("kind", self.kind, ("uniform", "corners"))
        if self.kind == "corners" and not NORMS[self.norm].is_box:
            raise InputError(
                f'kind="corners" moves every pixel by eps, which leaves the ball in {self.norm!r}: use kind="uniform".'
            )

    def cost(self, num_classes: int) -> Cost:
        return Cost(2 + self.samples, 0)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        attempts = Attempts(target, images, early_exit=self._drops_rows)
        for sample, part, rows in attempts.each(range(self.samples)):
            points = self._draw(images[rows], draws.take(rows).fold(sample))
            scores = part.scores(points)
            broken = predicted_classes(scores) != labels[rows]
            attempts.keep(points, broken, score_loss(scores, labels[rows], "margin").nan_to_num(nan=0.0))
        return attempts.points

    def _draw(self, images: Tensor, draws: Draws) -> Tensor:
        eps, norm = self.radius, NORMS[self.norm]
        if self.kind == "uniform":
            return norm.random(images, eps, draws)
        signs = 2.0 * draws.integers(2, *images.shape[1:]).to(images.dtype) - 1
        return norm.project(images + eps * signs, images, eps)


@dataclass(frozen=True, kw_only=True)
class Transfer(Attack):
    """Runs another attack on a source model and tests the resulting images on the attacked model.

    The tested image is the one that the other attack returns for the source: with its keep="best" an image that the
    source misclassifies, or the clean image if none was found; with keep="last" the last iterate. An image that the
    source only just misclassifies seldom transfers, so let the attack go on: early_exit=False, or keep="last". The
    attacked model makes the two verdicts only, and `run` counts only these; `craft` counts the passes of the source.

    Attributes:
        source: the model to craft on, on the device of the images; it runs in eval mode.
        attack: the attack on the source.
    """

    source: nn.Module
    attack: Attack

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.source, nn.Module):
            raise InputError(
                f"source must be a torch module from images to scores, not {type(self.source).__name__}."
            )
        if not isinstance(self.attack, Attack):
            raise InputError(f"attack must be an Attack such as PGD, not {type(self.attack).__name__}.")

    def cost(self, num_classes: int) -> Cost:
        """The cost of the attack on the source, which takes the time; the attacked model makes two verdicts only."""
        return self.attack.cost(num_classes)

    def craft(
        self, images: Tensor, labels: Tensor, *, seed: int = 0, index: Tensor | None = None
    ) -> Attacked:
        """The images to be tested, with the source's predictions and the passes that it made."""
        return self.attack.run(self.source, images, labels, seed=seed, index=index)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        with undisturbed(self.source):
            return self.attack._run(self.source, images, labels, draws).images


@dataclass(frozen=True, kw_only=True)
class Unchanged(Attack):
    """Returns the images unchanged: for tables of images that were attacked elsewhere."""

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        return images
