"""A classifier smoothed by noise, and Cohen's certificate for it (Cohen et al. 2019; Lecuyer et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor, nn

from ecnn.asking import full_precision, in_usual_state, read_model, undisturbed
from ecnn.attacks.randomness import forked_generators
from ecnn.checks import check_count, check_kind, check_number
from ecnn.objectives import predicted_classes

_AT_ONCE = 1024  # images that go through the model at a time
ABSTAIN = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class SmoothedCertificate:
    """What is proven of a smoothed classifier, image by image.

    Attributes:
        classes: (batch,) the class of most noisy copies; `ABSTAIN` where no class is proven to get more than half.
        radii: (batch,) the Euclidean distance within which the class cannot change; 0 where it abstained.
        shares: (batch,) a lower bound of the share of noisy copies that get the class.
        confidence: with which each radius and each bound holds.
    """

    classes: Tensor
    radii: Tensor
    shares: Tensor
    confidence: float


class Smoothed(nn.Module):
    """A classifier that lets the model's answers to many noisy copies of an image vote (randomised smoothing).

    Its scores are shares of the votes of one pass, so that passes differ. Gradients are those of the mean softmax
    (Salman et al. 2019). `certify` proves a radius for the limit of infinitely many votes.

    Args:
        model: pixels to scores; noisy pixels are not cut to [0, 1], as in the paper.
        sigma: standard deviation of the noise, on the [0, 1] scale.
        samples: votes of one pass.
    """

    def __init__(self, model: nn.Module, sigma: float, *, samples: int = 100) -> None:
        super().__init__()
        check_kind("model", model, nn.Module, "a torch module")
        check_number("sigma", sigma, above=True)
        check_count("samples", samples)
        self.model, self.sigma, self.samples = model, float(sigma), int(samples)

    def forward(self, images: Tensor) -> Tensor:
        votes: list[Tensor] = []
        for part in _parts(self.samples, max(1, _AT_ONCE // max(1, len(images)))):
            copies = images.repeat(part, 1, 1, 1)
            scores = full_precision(self.model(copies + self.sigma * torch.randn_like(copies)))
            votes.append(self._count(scores).view(part, len(images), -1).sum(dim=0))
        return torch.stack(votes).sum(dim=0) / self.samples

    def _count(self, scores: Tensor) -> Tensor:
        """(row, class) one vote per row, as a one-hot vector with the gradient of the softmax."""
        hard = torch.nn.functional.one_hot(scores.argmax(dim=1), scores.shape[1]).to(scores.dtype)
        if not torch.is_grad_enabled():
            return hard
        soft = scores.softmax(dim=1)
        return soft + (hard - soft).detach()

    @torch.no_grad()
    def votes(self, images: Tensor, samples: int, seed: int) -> Tensor:
        """(batch, class) how many of `samples` noisy copies get each class; NaN scores are no vote."""
        total: list[Tensor] = []
        with undisturbed(self), forked_generators(images.device, seed):
            for part in _parts(samples, max(1, _AT_ONCE // max(1, len(images)))):
                copies = images.repeat(part, 1, 1, 1)
                scores = read_model(self.model, copies + self.sigma * torch.randn_like(copies))
                classes = predicted_classes(scores)
                marks = torch.nn.functional.one_hot(classes.clamp_min(0), scores.shape[1])
                marks = marks * (classes >= 0)[:, None]
                total.append(marks.view(part, len(images), -1).sum(dim=0))
        return torch.stack(total).sum(dim=0)

    @in_usual_state
    def predict(
        self, images: Tensor, *, samples: int = 1000, confidence: float = 0.999, seed: int = 0
    ) -> Tensor:
        """(batch,) the class that most noisy copies get, or `ABSTAIN` where its lead may be chance.

        Args:
            samples: votes for each image.
            confidence: of the test that the leading class is ahead of the second one.
            seed: of the noise.
        """
        best = self.votes(images, samples, seed).topk(2, dim=1)
        classes = best.indices[:, 0].clone()
        for row, (first, second) in enumerate(best.values.tolist()):
            # A two-sided binomial test: the chance that a fair coin, tossed for each of these votes, gives such a lead.
            if 2 * _tail(first, first + second, 0.5) > 1 - confidence:
                classes[row] = ABSTAIN
        return classes

    @in_usual_state
    def certify(
        self,
        images: Tensor,
        *,
        samples: int = 10_000,
        guess_samples: int = 100,
        confidence: float = 0.999,
        seed: int = 0,
    ) -> SmoothedCertificate:
        """The class of each image and the Euclidean radius within which it cannot change (Cohen et al. 2019).

        A few votes choose the class. Other votes bound its share from below by Clopper and Pearson's interval. If that
        bound p is above 1/2, the radius is sigma times the normal quantile of p.

        Args:
            samples: votes that bound the share.
            guess_samples: votes that choose the class.
            confidence: with which each radius holds.
            seed: of the noise.
        """
        check_count("samples", samples)
        check_count("guess_samples", guess_samples)
        guesses = self.votes(images, guess_samples, 2 * seed).argmax(dim=1)
        counts = self.votes(images, samples, 2 * seed + 1).gather(1, guesses[:, None]).squeeze(1)
        bounds = [share_bound(int(count), samples, confidence) for count in counts.tolist()]
        shares = torch.tensor(bounds, dtype=torch.float64, device="cpu")
        proven = shares > 0.5
        radii = [self.sigma * NormalDist().inv_cdf(share) if share > 0.5 else 0.0 for share in bounds]
        return SmoothedCertificate(
            classes=torch.where(proven.to(guesses.device), guesses, ABSTAIN),
            radii=torch.tensor(radii, dtype=torch.float64, device="cpu"),
            shares=shares,
            confidence=confidence,
        )

    def share_at(self, share: float, distance: float) -> float:
        """A lower bound of a class's share of the votes at that Euclidean distance, given one at the image itself."""
        if share <= 0:
            return 0.0
        if share >= 1:
            return 1.0
        return NormalDist().cdf(NormalDist().inv_cdf(share) - distance / self.sigma)

    def win_chance(self, share: float) -> float:
        """The probability that a class with this expected share of votes gets more than half of them in one pass."""
        return _tail(self.samples // 2 + 1, self.samples, share)


@cache
def share_bound(successes: int, n: int, confidence: float) -> float:
    """Lower bound of a binomial share, by Clopper and Pearson's one-sided interval: exact for every n, conservative."""
    check_count("successes", successes, least=0, most=n)
    low, high = 0.0, successes / n
    for _ in range(40):  # bisection: the tail probability grows with the share
        middle = (low + high) / 2
        low, high = (low, middle) if _tail(successes, n, middle) > 1 - confidence else (middle, high)
    return low


def _tail(successes: int, n: int, share: float) -> float:
    """The probability of at least so many successes in n binomial trials."""
    if successes <= 0 or share >= 1:
        return 1.0
    if successes > n or share <= 0:
        return 0.0
    if successes <= n * share:  # the opposite tail is the small one, with fewer terms
        return 1 - _tail(n - successes + 1, n, 1 - share)
    ways = math.lgamma(n + 1) - math.lgamma(successes + 1) - math.lgamma(n - successes + 1)
    term = math.exp(ways + successes * math.log(share) + (n - successes) * math.log1p(-share))
    total, odds = 0.0, share / (1 - share)
    for count in range(successes, n + 1):
        total += term
        term *= odds * (n - count) / (count + 1)
        if term < 1e-17 * total:
            break
    return min(1.0, total)


def _parts(total: int, most: int) -> list[int]:
    return [most] * (total // most) + ([total % most] if total % most else [])
