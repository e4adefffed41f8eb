"""FAB: the nearest misclassified point, by projections onto linearised borders (Croce & Hein 2020b)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ecnn.attacks.attempts import Attempts, Rows, best_wrong_classes, iterate_rows, spread
from ecnn.attacks.base import BallAttack, Cost, Target
from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Aim, View, find_score_view
from ecnn.checks import check_counts, check_number
from ecnn.objectives import largest_score, predicted_classes, score_margin

_FINAL_STEPS = 3
_FINAL_OVERSHOOT = 1e-5  # rounding decides on which side a point exactly on the border is
_STREAM = 12


@dataclass(frozen=True, kw_only=True)
class FAB(BallAttack):
    """The fast adaptive boundary attack in its targeted form, FAB-T (Croce & Hein 2020b).

    It searches the misclassified point nearest to the image. Each step goes to the linearised border between the label
    and one wrong class, biased towards the image; from a misclassified point the search goes back towards the image. A
    point found beyond eps is projected onto the ball, where the final pass may still find it misclassified.

    Attributes:
        norm: of the distance to make small, a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255", within which a point counts as a success.
        steps: for each start and target; 100 in AutoAttack.
        targets: how many wrong classes are targets, one after the other, the best first; all if there are fewer.
        restarts: how many starts; the first is the image, the others are uniform points within eps / 2.
        bias: largest weight of the step from the image itself (the paper's alpha_max).
        overshoot: factor by which a step is longer than the way to the border (eta).
        retreat: after a misclassified point the search goes on at this fraction of the way from the image to it (beta).
        on: the view that is attacked: "scores", "linear", "tempered" or another `ScoreView`.

    Departs: the authors' program leaves out the paper's final search, three secant steps between the image and the
        best point. It is done here for points beyond eps, and with early_exit=False for all points.
    """

    steps: int
    targets: int = 9
    restarts: int = 1
    bias: float = 0.1
    overshoot: float = 1.05
    retreat: float = 0.9
    on: str | View = "scores"

    def __post_init__(self) -> None:
        super().__post_init__()
        find_score_view(self.on)
        check_counts(self, "steps", "targets", "restarts")
        check_number("bias", self.bias, most=1)
        check_number("overshoot", self.overshoot, least=1)
        check_number("retreat", self.retreat, most=1)

    def cost(self, num_classes: int) -> Cost:
        steps = self.steps * self.restarts * min(self.targets, num_classes - 1)
        return Cost(2 + 2 * steps, 2 * steps)

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        eps, norm = self.radius, NORMS[self.norm]
        if eps == 0:
            return images.clone()
        scores = target.scores(images)
        leads, goals = -score_margin(scores, labels), best_wrong_classes(scores, labels, self.targets)
        draws = draws.fold(_STREAM)
        attempts = Attempts(target, images, early_exit=self._drops_rows)
        settings = [
            (start, (draws.fold(start).fold(rank), goals[:, rank]))
            for start, rank in itertools.product(range(self.restarts), range(goals.shape[1]))
        ]
        for several, part, rows in attempts.several(settings):
            own = images[rows]
            own_draws, own_goals = spread([setting for _, setting in several], rows)
            assert own_goals is not None
            is_first = torch.tensor([not start for start, _ in several], device=own.device)
            is_first = is_first.repeat_interleave(len(rows) // len(several))
            points = torch.where(per_image(is_first, own), own, norm.random(own, eps / 2, own_draws))
            attempts.keep(
                *self._hunt(part, _start_hunt(own, labels[rows], own_goals, points), leads[rows], eps)
            )
        found = attempts.points
        near = per_image(norm.length(found - images) <= eps, images)
        return torch.where(near, found, norm.project(found, images, eps))

    def _hunt(self, target: Target, whole: _Hunt, leads: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """One search from the hunt's points towards its goals.

        Returns:
            The nearest misclassified points (the images where there is none), (batch,) whether they lie within eps, and
            (batch,) minus their distances (-inf where there is none).
        """
        view = find_score_view(self.on)
        for _, part, hunt in iterate_rows(target, whole, self.steps, early_exit=self._drops_rows):
            look, gradient = part.ascend(view, hunt.points, Aim(hunt.labels, hunt.goals))
            hunt.points = self._step(hunt, look.losses.to(gradient.dtype), gradient)
            back = hunt.note(part.scores(hunt.points), self.norm, eps)
            retreated = hunt.images + self.retreat * (hunt.points - hunt.images)
            hunt.points = torch.where(per_image(back, retreated), retreated, hunt.points)
        unsettled = whole.distances < math.inf
        if self._drops_rows:
            unsettled &= ~whole.broken
        rows = torch.nonzero(unsettled).squeeze(1)
        if len(rows):
            hunt = whole.take(rows)
            self._search_segment(target.narrow(rows), hunt, leads[rows], eps)
            whole.put(rows, hunt)
        return whole.found, whole.broken, -whole.distances

    def _step(self, hunt: _Hunt, leads: Tensor, gradient: Tensor) -> Tensor:
        """The next points: a mean of steps to the linearised border, from the points and (up to `bias`) the images."""
        norm = NORMS[self.norm]
        points, images, normals = (x.flatten(1) for x in (hunt.points, hunt.images, gradient))
        offsets = leads + (normals * (images - points)).sum(dim=1)
        move, image_move = norm.move_to_hyperplane(
            torch.cat([points, images]), normals.repeat(2, 1), torch.cat([leads, offsets])
        ).chunk(2)
        length, image_length = norm.length(move), norm.length(image_move)
        weight = (length / (length + image_length).clamp_min(1e-30)).clamp(max=self.bias)[:, None]
        ahead = (1 - weight) * (points + self.overshoot * move)
        ahead = ahead + weight * (images + self.overshoot * image_move)
        return ahead.clamp(0, 1).view_as(hunt.points)

    def _search_segment(self, target: Target, hunt: _Hunt, image_leads: Tensor, eps: float) -> None:
        """The final search: secant steps to where, between image and misclassified point, the lead crosses zero."""
        low, high = torch.zeros_like(hunt.distances), torch.ones_like(hunt.distances)
        low_leads, high_leads = image_leads.to(low.dtype), hunt.found_leads
        moves = hunt.found - hunt.images
        for _ in range(_FINAL_STEPS):
            crossing = (low_leads / (low_leads - high_leads).clamp(max=-1e-30)).clamp(0, 1)
            middle = (low + (high - low) * crossing + _FINAL_OVERSHOOT).clamp(max=1)
            hunt.points = hunt.images + per_image(middle, moves) * moves
            broken = hunt.note(target.scores(hunt.points), self.norm, eps)
            leads = hunt.leads
            low, high = torch.where(broken, low, middle), torch.where(broken, middle, high)
            # Halving the kept end's value stops the secants from approaching a curved border from one side only.
            low_leads = torch.where(broken, low_leads / 2, leads)
            high_leads = torch.where(broken, leads, high_leads / 2)


@dataclass(kw_only=True)
class _Hunt(Rows):
    """State of one search from one start; `broken` means that a misclassified point within eps was found.

    Attributes:
        points, leads: the iterate, and the lead (batch,) of the best wrong class over the label there.
        found, found_leads: the nearest misclassified point so far, and the lead there.
        distances: (batch,) distance of that point from the image; inf if there is none.
    """

    results: ClassVar[tuple[str, ...]] = ("broken", "found", "found_leads", "distances")
    images: Tensor
    labels: Tensor
    goals: Tensor
    points: Tensor
    leads: Tensor
    found: Tensor
    found_leads: Tensor
    distances: Tensor

    def note(self, scores: Tensor, norm: Norm, eps: float) -> Tensor:
        """(batch,) whether the points are misclassified. Also keeps the nearest misclassified points."""
        wrong = predicted_classes(scores) != self.labels
        # Scores without an answer are NaN here; such a point is misclassified, so its lead is set to the largest value.
        leads = -score_margin(scores, self.labels).to(self.leads.dtype)
        self.leads = leads.nan_to_num(nan=largest_score(leads.dtype))
        distances = NORMS[norm].length(self.points - self.images)
        nearer = wrong & (distances < self.distances)
        self.found = torch.where(per_image(nearer, self.found), self.points, self.found)
        self.found_leads = torch.where(nearer, self.leads, self.found_leads)
        self.distances = torch.where(nearer, distances, self.distances)
        self.broken = self.distances <= eps
        return wrong


def _start_hunt(images: Tensor, labels: Tensor, goals: Tensor, points: Tensor) -> _Hunt:
    blank = torch.zeros_like(images.flatten(1)[:, 0])
    return _Hunt(
        images=images,
        labels=labels,
        goals=goals,
        points=points,
        leads=blank,
        found=images,
        found_leads=blank,
        distances=torch.full_like(blank, math.inf),
        broken=torch.zeros_like(labels, dtype=torch.bool),
    )
