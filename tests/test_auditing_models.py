"""The audit flags models that only look robust, and no honest one: a small part of benchmarks/audit.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from conftest import benchmark
from torch import nn

import ecnn
from ecnn.auditing import audit
from ecnn.data import Dataset
from ecnn.objectives import MemberObjective

COUNT = 60


def models() -> Any:
    return benchmark("audit_models")


@cache
def digits() -> Dataset:
    return ecnn.load_data("digits")


def test_there_are_enough_of_each_kind_and_half_are_held_out() -> None:
    subjects = models().SUBJECTS.values()
    false, honest = ([s for s in subjects if s.honest is kind] for kind in (False, True))
    assert len(false) >= 14
    assert len(honest) >= 8
    for part in (false, honest):
        held_out = [subject for subject in part if models().group(subject) == "held-out"]
        assert len(held_out) == len(part) // 2
    assert all(subject.why and subject.protocol for subject in subjects)


@pytest.mark.parametrize("name", ["rounded_pixels", "thermometer", "detached", "decoy", "block_codec"])
def test_tricks_hide_the_gradient_and_nothing_else(name: str) -> None:
    """Opened, the same model has the same scores, and a gradient that a step can follow."""
    torch.manual_seed(0)
    closed = models().SUBJECTS[name].make(digits()).eval()
    opened = models().open_tricks(closed)
    images, labels = digits().test[:20]
    gradients = []
    for model in (closed, opened):
        points = images.clone().requires_grad_(True)
        scores = model(points)
        loss = nn.functional.cross_entropy(scores, labels)
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, points, allow_unused=True)
        else:
            gradient = torch.zeros_like(points)
        gradients.append(torch.zeros_like(points) if gradient is None else gradient)
        assert torch.allclose(scores, closed(images), atol=1e-6)
    cosine = nn.functional.cosine_similarity(gradients[0].flatten(1), gradients[1].flatten(1))
    assert gradients[1].flatten(1).norm(dim=1).min() > 0
    assert float(cosine.mean()) < 0.3


def test_training_by_margin_leaves_the_common_level_free() -> None:
    """What the head adds to both symbols of a member has no gradient, so that q2_hinge keeps what it was given."""
    torch.manual_seed(0)
    model: Any = models().two_symbols(digits())
    MemberObjective(kind="hinge", diversity_weight=0.1)(model, *digits().train[:50]).backward()  # type: ignore[no-untyped-call]
    own, common = model.head.weight.grad.abs().max(), model.head.weight.grad.sum(dim=0).abs().max()
    assert own > 1e-3
    assert common < 1e-5 * own


@pytest.mark.parametrize("name", ["linear", "certified"])
def test_proven_claims_hold_at_random_points(name: str) -> None:
    """The closed form and the intervals of untrained networks: no point of the box is worse."""
    torch.manual_seed(0)
    model = models().SUBJECTS[name].make(digits()).eval()
    images, labels = digits().test[:30]
    margins = models().interval_margins(model, images, labels, 0.05)
    low, high = (images - 0.05).clamp(min=0), (images + 0.05).clamp(max=1)
    smallest = torch.full_like(margins, torch.inf)
    for seed in range(200):
        draws = torch.rand(images.shape, generator=torch.Generator().manual_seed(seed))
        points = torch.where(draws.round() > 0 if seed % 2 else draws < 0.5, low, high)
        scores = model(points)
        smallest = torch.minimum(smallest, scores.gather(1, labels[:, None]) - scores)
    assert (smallest >= margins - 1e-5).all()
    if name == "linear":  # and some corner attains it
        apart = model[1].weight[labels][:, None] - model[1].weight
        corners = torch.where(apart > 0, low.flatten(1)[:, None], high.flatten(1)[:, None])
        exact = (apart * corners).sum(2) + (model[1].bias[labels][:, None] - model[1].bias)
        assert torch.allclose(margins, exact, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q2_hinge", "rounded_pixels", "scaled_logits", "decoy"])
def test_false_claims_are_flagged(name: str) -> None:
    subject = models().SUBJECTS[name]
    model = subject.build(digits())
    claim = subject.claimed(model, *digits().test[:COUNT])
    torch.manual_seed(0)
    result = audit(
        model, digits().test, norm="linf", eps=subject.eps, claim=claim, limit=COUNT, budget="quick"
    )
    assert claim - result.accuracy > 0.05
    assert result.verdict == "not believable"
    assert result.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["linear", "certified", pytest.param("adversarial_dense", marks=pytest.mark.full)]
)
def test_honest_claims_are_believed(name: str) -> None:
    """tests/test_auditing_truth.py has a smaller network that was trained adversarially."""
    subject = models().SUBJECTS[name]
    model = subject.build(digits())
    claim = subject.claimed(model, *digits().test[:COUNT])
    # So few images cannot tell the claim itself from one five points lower.
    result = audit(
        model, digits().test, norm="linf", eps=subject.eps, claim=claim - 0.1, limit=COUNT, budget="quick"
    )
    assert result.verdict == "believable"
    assert result.exit_code == 0
    if subject.protocol != "AutoAttack":  # proven: no attack can go below
        assert result.accuracy >= claim
    else:
        assert result.accuracy <= claim + 0.005
