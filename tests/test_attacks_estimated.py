"""Gradients estimated from scores: unbiased on linear models, exact along good guesses, worst cases in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import Linear, TanhNet, half_spaces

from ecnn.attacks import NORMS, EstimatedPGD
from ecnn.attacks.base import Target
from ecnn.attacks.estimated import _Estimating
from ecnn.attacks.images import at_most
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import SCORES, Aim

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE, PIXELS = (3, 2, 2), 12
WALK: dict[str, Any] = {"steps": 40, "step_size": 0.02, "schedule": "cosine"}


def plane(seed: int = 0, pixels: int = PIXELS) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    return half_spaces(torch.randn(pixels, generator=generator, dtype=torch.float64))


def images_at_the_ends(batch: int = 4) -> Tensor:
    """With pixels at 0, at 1, near them and between."""
    values = torch.rand(batch, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values.flatten(1)[:, :4] = torch.tensor([0.0, 1.0, 0.004, 0.995], dtype=torch.float64)
    return values


def estimates(model: nn.Module, images: Tensor, times: int = 1, **options: Any) -> list[Tensor]:
    """What some steps in a row take for the gradient of the margin loss."""
    attack = EstimatedPGD(norm="linf", eps=0.1, **WALK, **options)
    labels = torch.zeros(len(images), dtype=torch.int64)
    target = Target(model, len(images), images.device)
    asked = _Estimating.of(target, attack, images, Draws.of(0, torch.arange(len(images))))
    return [asked.ascend(SCORES, images, Aim(labels))[1] for _ in range(times)]


@pytest.mark.parametrize("estimator", ["nes", "spsa"])
def test_on_average_it_is_the_gradient_also_at_the_ends_of_the_range(estimator: str) -> None:
    model, images, pairs = plane(), images_at_the_ends(1000), 40
    (found,) = estimates(model, images, pairs=pairs, estimator=estimator, deviation=0.01, memory=False)
    mean = found.mean(dim=0) * (pairs + PIXELS) / pairs  # without the factor that takes off noise
    true = model.normal().view(SHAPE)
    # The error of a pixel's mean has about the deviation |gradient| / sqrt(pairs), twice that where a pair is cut.
    error = true.norm() / (pairs * len(images)) ** 0.5
    assert (mean - true).abs().max() < 5 * 2 * error
    assert (mean - true).abs().mean() < 2 * error


@pytest.mark.parametrize("estimator", ["nes", "spsa"])
def test_a_prior_that_is_right_is_taken_over_and_one_that_is_wrong_does_no_harm(estimator: str) -> None:
    model, images = plane(), images_at_the_ends().clamp(0.1, 0.9)
    true = model.normal().view(SHAPE)
    options: dict[str, Any] = {"estimator": estimator, "memory": False}
    (exact,) = estimates(model, images, pairs=1, prior=model, **options)
    assert torch.allclose(exact, true.expand_as(exact), atol=1e-9)
    (opposite,) = estimates(model, images, pairs=1, prior=half_spaces(-model.weight[0].detach()), **options)
    assert torch.allclose(opposite, true.expand_as(exact), atol=1e-9)
    guess, many = plane(1), images_at_the_ends(1000).clamp(0.1, 0.9)
    (other,) = estimates(model, many, pairs=40, prior=guess, **options)
    along = nn.functional.normalize(guess.normal(), dim=0).view(SHAPE)
    known = (along * true).sum() * along  # what the wrong guess tells; of the rest 40 pairs of 52 are trusted
    mean = known + (other.mean(dim=0) - known) * (40 + PIXELS) / 40
    assert (mean - true).abs().max() < 5 * true.norm() / 40_000**0.5


def test_memory_adds_up_what_single_steps_cannot_see() -> None:
    """With 3 pairs for 192 pixels an estimate is nearly noise; 60 of them in a row are nearly the gradient."""
    model = plane(pixels=192)
    images = torch.full((3, 3, 8, 8), 0.5, dtype=torch.float64)
    true = model.normal()
    found = {
        memory: estimates(model, images, 60, pairs=3, memory=memory)[-1].flatten(1)
        for memory in (False, True)
    }
    likeness = {
        memory: nn.functional.cosine_similarity(values, true[None]) for memory, values in found.items()
    }
    assert likeness[False].max() < 0.4
    assert likeness[True].min() > 0.7


@pytest.mark.parametrize("estimator", ["nes", "spsa"])
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("l2", 0.2), ("l1", 0.5)])
def test_the_worst_point_of_a_linear_model_is_found(norm: Any, eps: float, estimator: Any) -> None:
    """In the middle of [0, 1] no ball is cut: the loss rises by eps times the dual norm of the gradient, no more."""
    model, images = plane(), images_at_the_ends().clamp(0.4, 0.6) * 0.1 + 0.45
    labels = torch.zeros(len(images), dtype=torch.int64)
    attack = EstimatedPGD(
        norm=norm, eps=eps, **{**WALK, "step_size": eps / 4}, pairs=20, estimator=estimator, keep="last"
    )
    found = attack.run(model, images, labels)
    rise = (found.images - images).flatten(1) @ model.normal()
    best = eps * NORMS[norm].dual(model.normal()[None])
    assert (rise <= best * (1 + 1e-9)).all()
    assert (rise >= 0.97 * best).all()
    assert (found.backwards == 0).all()


class Opaque(nn.Module):
    """Scores that left torch on the way: autograd knows nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.largest = TanhNet(0, pixels=PIXELS, hidden=16), 0

    def forward(self, images: Tensor) -> Tensor:
        self.largest = max(self.largest, len(images))
        with torch.no_grad():
            return torch.from_numpy(self.inner(images).numpy())


def test_it_needs_no_backward_pass_and_memory_is_bounded_by_the_batch() -> None:
    model, images = Opaque(), images_at_the_ends(6)
    labels = model(images).argmax(dim=1)
    attack = EstimatedPGD(norm="linf", eps=0.3, **{**WALK, "step_size": 0.1}, pairs=15)
    whole = attack.run(model, images, labels)
    assert whole.success.sum() >= 3
    assert model.largest > 6
    for most in (1, 4):
        model.largest = 0
        with at_most(most):
            parts = attack.run(model, images, labels)
        assert model.largest == most
        assert torch.allclose(parts.images, whole.images, atol=1e-12)
        assert torch.equal(parts.forwards, whole.forwards)
