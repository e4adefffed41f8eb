"""RaySearch: an attack from the model's classes alone, in any norm: it searches the direction of the nearest border."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from ecnn.attacks.base import Attack, BallAttack, Cost, Target
from ecnn.attacks.images import add_up, at_once, per_image
from ecnn.attacks.norms import NORMS, l2_norm
from ecnn.attacks.randomness import Draws
from ecnn.attacks.ray_directions import (
    LARGE,
    Neighbours,
    Step,
    as_counted,
    first_patterns,
    largest_entry,
    layout,
    next_blocks,
    probe_noise,
    stretch,
    tours,
    unit,
)
from ecnn.checks import check_counts, check_kind, check_number
from ecnn.errors import InputError
from ecnn.objectives import predicted_classes

_STREAM = 31
#: Points queried around the border for one estimate of its normal, and how many of them in one pass.
_PROBES, _PROBES_AT_ONCE = 64, 32
#: Most values in one tensor, which limits how many images are searched together; the second if `at_most` is set lower.
_MOST_NUMBERS, _MOST_NUMBERS_IF_BOUNDED = 2**25, 2**23
#: The least gain of a new direction, as a share of the radius; the increment grows fourfold with every further radius.
_LEAST_GAIN, _GAIN_GROWTH = 1e-3, 4.0
_HALVINGS = 2
_ENTRIES = 7  # how many radii a race tries
#: If a tour of all blocks shortens the radius by less than this share, the search starts again elsewhere.
_STALLED = 0.01
#: An image is given up after this many further starts if its best radius is still above this many eps.
_PATIENCE, _FAR = 4, 1.5
_PROBE_LENGTHS = (0.1, 0.3, 0.03)  # lengths of the probes, as shares of the move's length, used in turn
_TURNED = 0.15  # share of the pixels whose move a probe reverses in a box
_KICK = 0.2  # share of the pixels that are changed when a new start begins at the best direction
_DEEP = 0.5  # keep="last" searches this share of the radius, so that it ends far beyond the border


@dataclass(frozen=True, kw_only=True)
class RaySearch(BallAttack):
    """An attack from the model's classes alone, in any norm: it searches a direction in which the border is near.

    Of two directions the better one has the smaller radius at which the class changes (RayS, Chen & Gu 2020). The first
    directions come from the given starts, from neighbours' adversarial moves, from images of other classes and from
    random patterns. The best one is changed block by block, from large blocks to single pixels, and rotated towards the
    border's normal, estimated from points around it (HopSkipJump, Chen, Jordan & Wainwright 2020). A search that stalls
    starts again elsewhere. It ends early if the best radius is above 1.5 eps after several starts. Scores are never
    read, so misleading scores or gradients have no effect.

    keep="last" searches half of the radius and then follows the direction found to the full radius, as far beyond the
    border as it can. Use it for models that are random near the border.

    Attributes:
        norm: of the ball, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255".
        queries: about how many points are queried for each image, without those of the starts.
        starts: attacks whose end points give the first directions.
        neighbours: images with known adversarial moves, or None.
        share: share of the images that are searched, chosen at random; the others are returned unchanged.
        max_batch: largest number of points in one forward pass; it bounds the memory and changes no result.

    Departs: RayS uses signs only and tries one block at a time, without the border's normal. Here sixteen directions
        are tried together, and the sum of the changes that help is tried too.
    """

    queries: int
    starts: tuple[Attack, ...] = ()
    neighbours: Neighbours | None = None
    share: float = 1.0
    max_batch: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "queries", "max_batch")
        check_number("share", self.share, most=1)
        for start in self.starts:
            check_kind("starts", start, Attack, "attacks such as PGD")
        if self.precision != "float32":
            raise InputError(
                f'RaySearch follows the border of the class, which {self.precision} moves: use precision="float32".'
            )

    def cost(self, num_classes: int) -> Cost:
        asked = Cost(self.queries, 0)
        for start in self.starts:
            asked = asked + start.cost(num_classes)
        return Cost(2 + round(self.share * asked.forwards), round(self.share * asked.backwards))

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        points = images.clone()
        if self.radius == 0:
            return points
        draws = draws.fold(_STREAM)
        rows = torch.nonzero(draws.fold(0).uniform(1).squeeze(1) < self.share).squeeze(1)
        is_bounded = at_once(self.max_batch) < self.max_batch
        numbers = _MOST_NUMBERS_IF_BOUNDED if is_bounded else _MOST_NUMBERS
        most = max(1, numbers // (_PROBES_AT_ONCE * images[0].numel()))
        for part in torch.split(rows, most):
            points[part] = self._search(target.narrow(part), images[part], labels[part], draws.take(part))
        return points

    def _search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        whole = _begin(images, labels, draws)
        field = _Field(self, target)
        for directions in self._first_directions(target, images, labels, draws.fold(1)):
            field.enter(whole, directions)
        rows, rays = torch.arange(len(images), device=images.device), whole
        for number, step in enumerate(tours(images.shape[1:])):
            going = torch.nonzero(rays.may_fall(field.eps) & (rays.asked < self.queries)).squeeze(1)
            if len(going) < len(rows):
                whole.put(rows, rays)
                rows, rays, field = rows[going], rays.take(going), field.narrow(going)
            if not len(rows):
                break
            field.advance(rays, step, Draws(rays.keys).fold(2 + number))
        fell = per_image(whole.broken, images)
        moves = torch.where(fell, (whole.points - images) / _DEEP, whole.best_directions)
        ends = field.at(whole, moves, torch.full_like(whole.radii, self.radius))
        return ends if self.keep == "last" else torch.where(fell, whole.points, ends)

    def _first_directions(
        self, target: Target, images: Tensor, labels: Tensor, draws: Draws
    ) -> Iterator[Tensor]:
        """Yields the first directions, as several tensors (batch, direction, channel, height, width)."""
        if self.starts:
            ends = [
                start.search(target, images, labels, draws.fold(k)) for k, start in enumerate(self.starts)
            ]
            moves = torch.stack([end - images for end in ends], dim=1)
            yield torch.cat([moves, stretch(self.norm, moves)], dim=1)
        if self.neighbours is not None:
            yield self.neighbours.directions(self.norm, images, labels, None)
        yield first_patterns(self.norm, images, draws.fold(len(self.starts)))


@dataclass(kw_only=True)
class _Rays:
    """State of the search: tensors whose first dimension is the image.

    Attributes:
        keys: (batch,) keys of the images' random numbers.
        directions: the direction that is being improved.
        radii: (batch,) radius at which it is misclassified; inf while no direction is.
        best_directions, best_radii: the best direction of all starts, and its radius.
        earlier: (batch,) `radii` at the end of the last tour of the blocks.
        facing: the border's normal, as a running mean of the estimates so far.
        points: misclassified points in the ball; the images where none was found.
        asked: (batch,) queries so far.
        stalls: (batch,) how often another start was needed.
        broken: (batch,) whether a misclassified point in the ball was found.
    """

    images: Tensor
    labels: Tensor
    keys: Tensor
    directions: Tensor
    radii: Tensor
    best_directions: Tensor
    best_radii: Tensor
    earlier: Tensor
    facing: Tensor
    points: Tensor
    asked: Tensor
    stalls: Tensor
    broken: Tensor

    def may_fall(self, eps: float) -> Tensor:
        """(batch,) whether the search goes on: not broken, and not still beyond 1.5 eps after several starts."""
        is_far = torch.isfinite(self.best_radii) & (self.best_radii > _FAR * eps)
        return ~self.broken & ~(is_far & (self.stalls >= _PATIENCE))

    def take(self, rows: Tensor) -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def put(self, rows: Tensor, part: Self) -> None:
        if part is not self:
            for field in fields(self):
                getattr(self, field.name)[rows] = getattr(part, field.name)


def _begin(images: Tensor, labels: Tensor, draws: Draws) -> _Rays:
    never = torch.full_like(images.flatten(1)[:, 0], math.inf)
    return _Rays(
        images=images.clone(),
        labels=labels.clone(),
        keys=draws.keys.clone(),
        directions=torch.zeros_like(images),
        radii=never.clone(),
        best_directions=torch.zeros_like(images),
        best_radii=never.clone(),
        earlier=never.clone(),
        facing=torch.zeros_like(images),
        points=images.clone(),
        asked=torch.zeros_like(labels),
        stalls=torch.zeros_like(labels),
        broken=torch.zeros_like(labels, dtype=torch.bool),
    )


class _Field:
    """The search's queries and moves, for the images that are left."""

    def __init__(self, attack: RaySearch, target: Target) -> None:
        self.attack, self.target = attack, target
        self.norm, self.eps = attack.norm, attack.radius * (_DEEP if attack.keep == "last" else 1)

    def narrow(self, rows: Tensor) -> _Field:
        """The same for the images at these positions."""
        return _Field(self.attack, self.target.narrow(rows))

    def ask(self, rays: _Rays, directions: Tensor, radii: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, n) whether the points at the radii (batch,) along the directions are misclassified, and these points.

        Only the points in the mask `asked` (batch, n) are queried. The others are False, and zero as points.
        """
        rows, columns = torch.nonzero(asked, as_tuple=True)
        images = rays.images[rows]
        points = NORMS[self.norm].nearest_within(images + directions[rows, columns], images, radii[rows])
        wrong, where = torch.zeros_like(asked), torch.zeros_like(directions)
        wrong[rows, columns] = self.wrong(points, rays.labels[rows])
        where[rows, columns] = points
        self.count(rays, asked.sum(dim=1))
        return wrong, where

    def at(self, rays: _Rays, directions: Tensor, radii: Tensor) -> Tensor:
        """The points at the radii (batch,) along the directions, one for each image."""
        return NORMS[self.norm].nearest_within(rays.images + directions, rays.images, radii)

    def count(self, rays: _Rays, numbers: Tensor) -> None:
        rays.asked += numbers
        self.target.count(numbers)

    def wrong(self, points: Tensor, labels: Tensor) -> Tensor:
        """(n,) whether each point is misclassified; False for points for which the model raises an error.

        These points may lie far from any image, and a model may reject such inputs. That must not end the search.
        """
        if not len(points):
            return torch.zeros_like(labels, dtype=torch.bool)
        with torch.no_grad():
            parts = zip(
                *(torch.split(part, at_once(self.attack.max_batch)) for part in (points, labels)), strict=True
            )
            return torch.cat([self._wrong_or_refused(*part) for part in parts])

    def _wrong_or_refused(self, points: Tensor, labels: Tensor) -> Tensor:
        try:
            return predicted_classes(self.target.model(points)) != labels
        except torch.cuda.OutOfMemoryError:  # handled by `Attack.run`, with fewer images at a time
            raise
        except Exception:  # whatever a model throws
            if len(points) == 1:
                return torch.zeros_like(labels, dtype=torch.bool)
        halves = zip(points.tensor_split(2), labels.tensor_split(2), strict=True)
        return torch.cat([self._wrong_or_refused(*half) for half in halves])

    def advance(self, rays: _Rays, step: Step, draws: Draws) -> None:
        """One step of the search. An image without a misclassified direction, or whose search stalls, starts again."""
        lost = torch.isinf(rays.radii)
        if step.kind == "tour":
            lost = lost | ~(rays.radii < (1 - _STALLED) * rays.earlier)
        rows = torch.nonzero(lost).squeeze(1)
        if len(rows):
            part = rays.take(rows)
            self.narrow(rows).enter_again(part, draws.take(rows), step.tour)
            rays.put(rows, part)
        if step.kind == "tour":
            rays.earlier = rays.radii.clone()
            return
        rows = torch.nonzero(~lost).squeeze(1)
        if not len(rows):
            return
        part, field, own = rays, self, draws
        if len(rows) < len(lost):
            part, field, own = rays.take(rows), self.narrow(rows), draws.take(rows)
        if step.kind == "faces":
            field.turn(part, own, step.number)
        else:
            field.change_blocks(part, own, step)
        rays.put(rows, part)

    def enter(self, rays: _Rays, directions: Tensor) -> None:
        """Adopts the best of the directions (batch, n, ...) for images where it beats the current direction."""
        rows = torch.nonzero(~rays.broken).squeeze(1)
        if not len(rows):
            return
        part, field, directions = rays.take(rows), self.narrow(rows), directions[rows]
        everyone = torch.ones(directions.shape[:2], dtype=torch.bool, device=directions.device)
        field._fell(part, *field.ask(part, directions, torch.full_like(part.radii, self.eps), everyone))
        ends = (part.images[:, None] + directions).clamp(0, 1) - part.images[:, None]
        reach = NORMS[self.norm].length(ends.flatten(0, 1)).view(everyone.shape).amax(dim=1)
        limits = torch.minimum(part.radii, reach.clamp_min(self.eps))
        radii = [self.eps + (limits - self.eps) * 0.5**k for k in range(_ENTRIES)]
        field.race(part, directions, radii, everyone & ~part.broken[:, None])
        rays.put(rows, part)

    def enter_again(self, rays: _Rays, draws: Draws, tour: int) -> None:
        """Another start: new patterns, the best direction with some pixels changed, or other neighbours, by `tour`."""
        rays.radii = torch.full_like(rays.radii, math.inf)
        rays.facing = torch.zeros_like(rays.facing)
        rays.stalls = rays.stalls + 1
        neighbours = self.attack.neighbours
        if neighbours is not None and tour % 2 == 0:
            self.enter(rays, neighbours.directions(self.norm, rays.images, rays.labels, draws))
            return
        patterns = first_patterns(self.norm, rays.images, draws)
        if tour % 4 == 1:
            known = per_image(torch.isfinite(rays.best_radii), rays.images)
            best = rays.best_directions[:, None]
            picked = draws.fold(7).uniform(*patterns.shape[1:], dtype=patterns.dtype) < _KICK
            kicked = torch.where(picked, patterns.sign() * largest_entry(best), best)
            patterns = torch.where(known[:, None], kicked, patterns)
        self.enter(rays, patterns)

    def race(self, rays: _Rays, directions: Tensor, radii: list[Tensor], running: Tensor) -> None:
        """Adopts the direction that stays misclassified down to the smallest radius.

        The radii are tried in order. A direction that is not misclassified at one of them drops out.

        Args:
            directions: (batch, n, ...).
            radii: decreasing radii, (batch,) each.
            running: (batch, n) mask of the directions that take part.
        """
        ahead, radius = rays.directions, rays.radii
        failed = torch.full_like(radius, self.eps)
        for tried in radii:
            if not bool(running.any()):
                break
            wrong, points = self.ask(rays, directions, tried, running)
            through, takes_part = wrong.any(dim=1), running.any(dim=1)
            first = directions[torch.arange(len(wrong), device=wrong.device), wrong.int().argmax(dim=1)]
            ahead = torch.where(per_image(through, ahead), first, ahead)
            radius = torch.where(through, tried, radius)
            failed = torch.where(takes_part & ~through, tried, failed)
            self._fell(rays, wrong & (tried <= self.eps)[:, None], points)
            running = wrong & ~rays.broken[:, None]
        self._refine(rays, ahead, radius, failed)

    def _refine(self, rays: _Rays, directions: Tensor, radii: Tensor, low: Tensor) -> None:
        """Adopts a race's directions where they are better, after bisection for the radius where the class changes.

        Args:
            radii: (batch,) at which the directions are misclassified.
            low: (batch,) at which they are not.
        """
        better = (radii < rays.radii) | (
            (radii == rays.radii) & (directions != rays.directions).flatten(1).any(dim=1)
        )
        high = radii
        for _ in range(_HALVINGS):
            wide = better & ~rays.broken & (high - low > 4 * self._least_gain(rays) * high)
            if not bool(wide.any()):
                break
            middle = torch.where(wide, (low + high) / 2, high)
            wrong, _ = self.ask(rays, directions[:, None], middle, wide[:, None])
            high = torch.where(wrong[:, 0], middle, high)
            low = torch.where(wide & ~wrong[:, 0], middle, low)
        rays.directions = torch.where(per_image(better, directions), directions, rays.directions)
        rays.radii = torch.where(better, high, rays.radii)
        best = rays.radii < rays.best_radii
        rays.best_directions = torch.where(per_image(best, directions), rays.directions, rays.best_directions)
        rays.best_radii = torch.where(best, rays.radii, rays.best_radii)

    def _least_gain(self, rays: _Rays) -> float:
        return min(_LEAST_GAIN, max(_LEAST_GAIN / 10, 0.3 / rays.images[0].numel()))

    def _fell(self, rays: _Rays, wrong: Tensor, points: Tensor) -> None:
        """Keeps the first of the points (batch, n, ...) that are misclassified, for images that were not broken before.

        Args:
            wrong: (batch, n) whether the points are misclassified.
            points: within the ball.
        """
        found = wrong.any(dim=1) & ~rays.broken
        first = points[torch.arange(len(wrong), device=wrong.device), wrong.int().argmax(dim=1)]
        rays.points = torch.where(per_image(found, first), first, rays.points)
        rays.broken = rays.broken | found

    def improve(self, rays: _Rays, directions: Tensor, *, together: bool = False) -> None:
        """Adopts the best of the directions (batch, n, ...) for images where it is misclassified at a smaller radius.

        Args:
            together: also tries the sum of all changes that help by themselves.
        """
        gain = self._least_gain(rays)
        steps = [gain * (_GAIN_GROWTH ** (k + 1) - 1) / (_GAIN_GROWTH - 1) for k in range(_ENTRIES)]
        radii = [(rays.radii * (1 - min(step, 1.0))).clamp_min(self.eps) for step in steps]
        everyone = torch.ones(directions.shape[:2], dtype=torch.bool, device=directions.device)
        if together:
            wrong, points = self.ask(rays, directions, radii[0], everyone)
            self._fell(rays, wrong & (radii[0] <= self.eps)[:, None], points)
            weights = wrong.to(directions.dtype).view(*wrong.shape, *[1] * (directions.ndim - 2))
            changes = (directions - rays.directions[:, None]) * weights
            union = rays.directions + add_up(changes)
            several = wrong.sum(dim=1) > 1
            # The sum comes first, so that it wins over its parts in a tie.
            directions = torch.cat([union[:, None], directions], dim=1)
            one = wrong.clone()
            one[:, 1:] &= ~wrong.cumsum(dim=1)[:, :-1].bool()
            # The first radius is known for each single change already: the race starts at the second one.
            best = torch.where(wrong.any(dim=1), radii[0], rays.radii)
            first = (directions[:, 1:] * one.to(directions.dtype).view_as(weights)).sum(dim=1)
            rays.directions = torch.where(per_image(wrong.any(dim=1), first), first, rays.directions)
            rays.radii = best
            running = torch.cat([several[:, None], wrong], dim=1) & ~rays.broken[:, None]
            self.race(rays, directions, radii[1:], running)
        else:
            # On a plateau, as in a model that rounds its input, no radius is smaller: also move at the same radius.
            self.race(rays, directions, [rays.radii, *radii], everyone)

    def turn(self, rays: _Rays, draws: Draws, number: int) -> None:
        """Estimates the border's normal and rotates the direction towards it, if that helps."""
        points = self.at(rays, rays.directions, rays.radii)
        facing = unit(self._slope(rays, points, draws, number))
        rays.facing = rays.facing / 2 + facing
        base = unit(as_counted(self.norm, rays.directions, rays.radii))
        mixed = [base + weight * unit(rays.facing) for weight in (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)]
        mixed += [base + weight * facing for weight in (1.0, 4.0)]
        self.improve(rays, stretch(self.norm, torch.stack(mixed, dim=1)))

    def _slope(self, rays: _Rays, points: Tensor, draws: Draws, number: int) -> Tensor:
        """An estimate of the border's normal, towards the misclassified side, from the classes of points around."""
        signed, plain, balance = (
            torch.zeros_like(points),
            torch.zeros_like(points),
            torch.zeros_like(rays.radii),
        )
        labels = rays.labels.repeat_interleave(_PROBES_AT_ONCE)
        for group in range(_PROBES // _PROBES_AT_ONCE):
            asked = self._around(rays, points, draws.fold(group), number)
            wrong = self.wrong(asked.flatten(0, 1), labels).view(-1, _PROBES_AT_ONCE)
            self.count(rays, torch.full_like(rays.asked, _PROBES_AT_ONCE))
            signs = 2 * wrong.to(points.dtype) - 1
            moves = asked - points[:, None]
            signed = signed + add_up(moves * signs.view(*signs.shape, *[1] * (points.ndim - 1)))
            plain, balance = plain + add_up(moves), balance + signs.sum(dim=1)
        return signed - per_image(balance / _PROBES, points) * plain

    def _around(self, rays: _Rays, points: Tensor, draws: Draws, number: int) -> Tensor:
        """(batch, probe, ...) points around each point: with noise added, or in a box with some pixels' moves reversed.

        The border may pass through a corner of the box, and a model that rounds its pixels reacts to large moves only.
        """
        images, count = rays.images[:, None], _PROBES_AT_ONCE
        length = _PROBE_LENGTHS[number % len(_PROBE_LENGTHS)]
        if NORMS[self.norm].is_box and number % 2:
            turned = draws.uniform(count, *points.shape[1:], dtype=points.dtype) < _TURNED
            opposite = (images - (points[:, None] - images)).clamp(0, 1)
            return torch.where(turned, opposite, points[:, None])
        noise = probe_noise(points, count, draws, number).flatten(0, 1)
        lengths = (l2_norm(points - rays.images) * length).clamp_min(1e-6).repeat_interleave(count)
        moves = noise * per_image(lengths / l2_norm(noise).clamp_min(1e-30), noise)
        return (points[:, None] + moves.view(-1, count, *points.shape[1:])).clamp(0, 1)

    def change_blocks(self, rays: _Rays, draws: Draws, step: Step) -> None:
        """Tries the direction with the next blocks changed, each to a random sign or weight."""
        inside = next_blocks(rays.images, rays.keys, step)
        moves = rays.directions[:, None]
        numbers = draws.uniform(inside.shape[1], 2, dtype=moves.dtype)
        turns, weights = (numbers[:, :, k].view(*inside.shape[:2], *[1] * (moves.ndim - 2)) for k in range(2))
        signs = torch.where(turns < 0.5, -1.0, 1.0).to(moves.dtype)
        if NORMS[self.norm].is_box:
            changed = torch.where(moves == 0, signs, -moves.sign()) * LARGE
        elif NORMS[self.norm].is_sparse:
            changed = torch.where(weights < 1 / 3, 0.0, signs * 1.5 * largest_entry(moves))
        else:
            side = step.side / max(layout(rays.images.shape[1:])[1:])
            angles = math.pi / 4 * math.sqrt(min(1.0, side)) * weights.sqrt()
            count = inside.flatten(2).sum(dim=2).clamp_min(1).to(moves.dtype)
            lengths = l2_norm(rays.directions).view(-1, 1) / count.sqrt()
            changed = moves + signs * angles.tan() * lengths.view_as(signs)
        self.improve(rays, torch.where(inside, changed, moves), together=True)
