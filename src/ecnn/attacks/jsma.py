"""The Jacobian-based saliency map attack: changes few features, each by as much as possible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ecnn.attacks.attempts import Attempts
from ecnn.attacks.base import Attack, Target, gradient_of
from ecnn.attacks.images import count_features, per_image
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import View, find_score_view
from ecnn.checks import check_choice, check_count, check_number
from ecnn.errors import InputError
from ecnn.objectives import predicted_classes

_CUDA_DROPS_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class JSMA(Attack):
    """The Jacobian-based saliency map attack (Papernot et al. 2016): greedy, feature by feature, toward a goal class.

    A feature is one value of the image, so a coloured pixel has three. Each move takes the feature, or the pair, with
    the highest saliency -alpha * beta among those with alpha > 0 > beta. Here alpha is the derivative of the goal's
    score and beta that of the sum of all other scores; with a negative theta both signs are reversed. The Jacobian is
    never built: alpha and beta are two gradients. A search ends when no feature is salient, or when
    `max_pixel_fraction` of the features (rounded down to whole moves) have been moved, where a feature moved twice
    counts twice. It also ends

    - with keep="last": when the image is classified as its goal, as in the original; the last iterate is returned.
    - with keep="best": the same, or with early_exit as soon as it is misclassified at all, as in the paper's text;
      the last misclassified iterate is returned.

    Attributes:
        max_pixel_fraction: largest share of the features that may be moved, the paper's gamma.
        pixels: how many features move together: a "pair", as in the original, or "one", as the paper's text says.
        goal: a "random" wrong class for each image, its "least" likely, its "next" likely, or "each" wrong class from
            the next likely down; then the success that moved the fewest features is kept, with early_exit the first.
        theta: how far a feature moves, from -1 to 1 and not 0; it is cut to [0, 1].
        on: the view whose scores are differentiated: "scores", "linear", "tempered" or another `ScoreView`. The model's
            own scores decide success.
        max_pairs: how many pairs are compared at once; it bounds the memory and changes no result.

    Departs: the original removes a feature at its bound only after a move without effect; here it is left out from the
        start. The paper prints x_{p,q} where the update is at (p*, q*).
    """

    max_pixel_fraction: float
    pixels: Literal["pair", "one"] = "pair"
    goal: Literal["random", "least", "next", "each"] = "random"
    theta: float = 1.0
    on: str | View = "scores"
    max_pairs: int = 2**22

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("pixels", self.pixels, ("pair", "one"))
        check_choice("goal", self.goal, ("random", "least", "next", "each"))
        check_number("max_pixel_fraction", self.max_pixel_fraction, most=1)
        check_number("theta", self.theta, least=-1, most=1)
        if self.theta == 0:
            raise InputError("theta must be a number from -1 to 1 other than 0: a move of 0 moves nothing.")
        check_count("max_pairs", self.max_pairs)
        find_score_view(self.on)
        if self.keep == "last" and self.goal == "each":
            raise InputError('keep="last" returns one iterate, so it takes one goal, not goal="each".')

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        goals = self._goals(target.scores(images), labels, draws)
        if self.keep == "last":
            return self._walk(target, images, labels, goals[:, 0])[0]
        attempts = Attempts(target, images, early_exit=self.early_exit)
        for rank, part, rows in attempts.each(range(goals.shape[1])):
            _, points, broken = self._walk(part, images[rows], labels[rows], goals[rows, rank])
            moved = (points != images[rows]).flatten(1).sum(dim=1)
            attempts.keep(points, broken, -moved)
        return attempts.points

    def _goals(self, scores: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        """(batch, goal) the classes to move to, in order."""
        if self.goal == "random":
            others = draws.fold(0).integers(scores.shape[1] - 1, 1)
            return others + (others >= labels[:, None])
        ranked = scores.scatter(1, labels[:, None], -math.inf).argsort(dim=1, descending=True, stable=True)
        return {"least": ranked[:, -2:-1], "next": ranked[:, :1], "each": ranked[:, :-1]}[self.goal]

    def _walk(
        self, target: Target, images: Tensor, labels: Tensor, goals: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The last iterates, the last misclassified ones (or the images), and (batch,) whether there was any."""
        points, kept = images.clone(), images.clone()
        broken = torch.zeros_like(labels, dtype=torch.bool)
        rows, moves = torch.arange(len(images), device=images.device), self._moves(images)
        for move in range(moves + 1):
            current = points[rows]
            if move == moves:
                predictions = predicted_classes(target.scores(current))
            else:
                predictions, toward, away = self._slopes(target, current, goals[rows])
            wrong = predictions != labels[rows]
            kept[rows] = torch.where(per_image(wrong, current), current, kept[rows])
            broken[rows] = broken[rows] | wrong
            if move == moves:
                break
            done = predictions == goals[rows]
            if self._drops_rows:
                done = done | wrong
            moved, stuck = self._move(current, toward, away)
            points[rows] = torch.where(per_image(done, current), current, moved)
            # An image that is done does not change until it is dropped, so more passes change no result.
            if not images.is_cuda or move % _CUDA_DROPS_EVERY == _CUDA_DROPS_EVERY - 1:
                left = torch.nonzero(~(done | stuck)).squeeze(1)
                if len(left) < len(rows):
                    target, rows = target.narrow(left), rows[left]
                if not len(rows):
                    break
        return points, kept, broken

    def _moves(self, images: Tensor) -> int:
        return count_features(images, self.max_pixel_fraction) // (2 if self.pixels == "pair" else 1)

    def _slopes(self, target: Target, points: Tensor, goals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch,) the model's classes; (batch, feature) slopes by which a move raises the goal and lowers the rest."""
        points = points.detach().requires_grad_(True)
        with torch.enable_grad(), target.autocast():
            scores, own = find_score_view(self.on).read(target.model, points)
            beta = gradient_of(scores.scatter(1, goals[:, None], 0.0), points, again=True)
            alpha = gradient_of(scores.gather(1, goals[:, None]), points)
        target.count(1, 2)
        if own is None:
            own = target.scores(points.detach())
        sign = math.copysign(1.0, self.theta)
        return predicted_classes(own), sign * alpha.flatten(1), -sign * beta.flatten(1)

    def _move(self, points: Tensor, toward: Tensor, away: Tensor) -> tuple[Tensor, Tensor]:
        """The points with their most salient features moved, and (batch,) whether no feature was salient."""
        features = points.flatten(1)
        room = features < 1 if self.theta > 0 else features > 0
        toward, away = toward.masked_fill(~room, -math.inf), away.masked_fill(~room, -math.inf)
        if self.pixels == "pair":
            chosen, saliency = best_pair(toward, away, self.max_pairs)
        else:
            chosen, saliency = best_one(toward, away)
        stuck = saliency <= 0
        moved = features.scatter(1, chosen, (features.gather(1, chosen) + self.theta).clamp(0, 1))
        return torch.where(per_image(stuck, points), points, moved.view_as(points)), stuck


def best_one(toward: Tensor, away: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, 1) the feature with the highest saliency toward * away, both positive, and (batch,) its saliency.

    The saliency is 0 if no feature has both positive.

    Args:
        toward, away: (batch, feature), -inf for features that may not be moved.
    """
    saliency, chosen = _saliency(toward.double(), away.double()).max(dim=1, keepdim=True)
    return chosen, saliency.squeeze(1)


def best_pair(toward: Tensor, away: Tensor, max_pairs: int) -> tuple[Tensor, Tensor]:
    """(batch, 2) the pair p < q with the highest saliency, and (batch,) its saliency; 0 if there is no such pair.

    The saliency is (toward_p + toward_q) (away_p + away_q), both sums positive. The result is exact; of equal pairs the
    first in order wins. 3,072 features have 4.7 million pairs, so `worth_pairing` first excludes features that cannot
    change the result. The table of the remaining pairs is computed some rows at a time.

    Args:
        toward, away: (batch, feature), -inf for features that may not be moved.
        max_pairs: how many pairs are in memory at once; at least one row of the table per image.
    """
    worth = worth_pairing(toward, away)
    width = int(worth.sum(dim=1).max()) if len(worth) else 0
    columns = (~worth).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    toward, away = (
        # Sums of float32 numbers are (nearly) exact in float64: rounding makes no ties.
        values.masked_fill(~worth, -math.inf).gather(1, columns).double()
        for values in (toward, away)
    )
    best = torch.zeros(len(worth), dtype=torch.float64, device=worth.device)
    pairs = torch.zeros(len(worth), 2, dtype=torch.int64, device=worth.device)
    height = max(1, max_pairs // max(1, len(worth) * width))
    for first in range(0, width - 1, height):
        rows, partners = slice(first, min(first + height, width - 1)), slice(first + 1, None)
        saliency = _saliency(
            toward[:, rows, None] + toward[:, None, partners], away[:, rows, None] + away[:, None, partners]
        ).triu()  # columns start one feature after the rows, so p < q is the upper triangle with its diagonal
        value, place = saliency.flatten(1).max(dim=1)
        here = torch.stack([place // saliency.shape[2] + first, place % saliency.shape[2] + first + 1], dim=1)
        better = value > best
        pairs = torch.where(better[:, None], columns.gather(1, here), pairs)
        best = torch.where(better, value, best)
    return pairs, best


def _saliency(toward: Tensor, away: Tensor) -> Tensor:
    return torch.where((toward > 0) & (away > 0), toward * away, 0.0)


def worth_pairing(toward: Tensor, away: Tensor) -> Tensor:
    """(batch, feature) False for a feature if two others have both slopes at least as high; ties go by index.

    The best pair does not need such a feature: one of the two others is not its partner, and swapping the feature for
    it lowers neither sum. Of n features with independent slopes about 2 log n remain; all n remain only if the order by
    one slope is the reverse of that by the other.
    """
    by_away = away.argsort(dim=1, descending=True, stable=True)
    order = by_away.gather(1, toward.gather(1, by_away).argsort(dim=1, descending=True, stable=True))
    # In this order only earlier features can have both slopes as high, and do if their `away` is as high.
    falling = away.gather(1, order)
    highest = _before(falling.cummax(dim=1).values)
    second = _before(torch.minimum(highest, falling).cummax(dim=1).values)
    return torch.zeros_like(order, dtype=torch.bool).scatter(1, order, falling > second)


def _before(values: Tensor) -> Tensor:
    """Each entry's predecessor; -inf for the first."""
    return torch.cat([torch.full_like(values[:, :1], -math.inf), values[:, :-1]], dim=1)
