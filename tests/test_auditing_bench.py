"""The registry of false and honest models: what it holds, that tricks hide and nothing else; some audited."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ecnn
from ecnn.auditing import audit, bench
from ecnn.auditing.bench.networks import interval_margins, two_symbols
from ecnn.data import Dataset
from ecnn.errors import InputError
from ecnn.objectives import MemberObjective

COUNT = 60
#: Trained in about a second each.
SMALL = ["one_hot_answer", "remembers_questions", "reversed_by_a_hook"]


@cache
def digits() -> Dataset:
    return ecnn.load_data("digits")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


def test_the_registry_holds_enough_of_each_kind() -> None:
    subjects = bench.SUBJECTS.values()
    false = [subject for subject in subjects if not subject.honest and subject.is_detectable]
    honest = [subject for subject in subjects if subject.honest]
    assert len(false) >= 45
    assert len({subject.family for subject in false}) >= 12
    assert len(honest) >= 20
    assert sum(map(len, bench.FAMILIES.values())) == len(bench.SUBJECTS)
    assert set(bench.FAMILIES) == {subject.family for subject in subjects}
    assert {subject.half for subject in subjects} <= set(bench.HALVES)
    assert all(subject.why and subject.protocol for subject in subjects)
    assert [name for name, subject in bench.SUBJECTS.items() if not subject.is_detectable] == bench.FAMILIES[
        "planted secrets"
    ]


def test_a_name_that_is_not_there_gets_a_guess() -> None:
    with pytest.raises(InputError, match="did you mean 'thermometer'"):
        bench.build("termometer")


@pytest.mark.parametrize("name", bench.SUBJECTS)
def test_every_model_answers_untrained_as_audits_ask(name: str) -> None:
    """It gives ten scores, can be copied, and opened has a gradient on every image."""
    torch.manual_seed(0)
    model = bench.SUBJECTS[name].make(digits()).eval()
    images, _ = digits().test[:6]
    scores = model(images)
    assert scores.shape == (6, 10)
    assert scores.dtype == torch.float32
    opened = bench.open_tricks(model)
    points = images.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(opened(points).square().sum(), points)
    assert gradient.isfinite().all()
    assert (gradient.flatten(1).abs().sum(dim=1) > 0).all()


def checksum(model: nn.Module) -> str:
    tensors = (tensor.numpy().tobytes() for _, tensor in sorted(model.state_dict().items()))
    return hashlib.sha256(b"".join(tensors)).hexdigest()


@pytest.mark.parametrize("name", SMALL)
def test_small_models_are_false_as_said_and_the_same_every_time(name: str, weights: Path) -> None:
    """The claim lies well above what an informed attacker leaves; weights are kept, and asking changes nothing."""
    subject = bench.SUBJECTS[name]
    model = bench.build(name, data=digits(), folder=weights)
    images, labels = digits().test[:24]
    claim = subject.claimed(model, images, labels)
    assert claim - subject.informed(model, images, labels) > 0.05
    assert subject.claimed(model, images, labels) == claim
    again = bench.build(name, data=digits(), folder=weights)
    assert checksum(again) == checksum(model)


def test_random_models_are_seeded_by_the_benchmark_and_leave_generators_alone() -> None:
    torch.manual_seed(0)
    subject = bench.SUBJECTS["numpy_noise"]
    model = subject.make(digits()).eval()
    images, labels = digits().test[:30]
    np.random.seed(5)
    expected = np.random.RandomState(5).rand()
    assert subject.claimed(model, images, labels) == subject.claimed(model, images, labels)
    assert np.random.rand() == expected


def test_a_model_that_remembers_is_judged_on_fresh_copies() -> None:
    """Asked about clean images first it never changes its answer; asked anew it does."""
    torch.manual_seed(0)
    subject = bench.SUBJECTS["remembers_questions"]
    images, _ = digits().test[:40]
    moved = (images + 0.1 * torch.randn(images.shape).sign()).clamp(0, 1)

    def answers(*questions: Tensor) -> Tensor:
        torch.manual_seed(0)
        model = subject.make(digits()).eval()
        return torch.stack([model(part).argmax(dim=1) for part in questions])[-1]

    assert answers(images, moved).equal(answers(images))
    assert not answers(moved).equal(answers(images))


def test_secrets_change_answers_with_the_key_alone() -> None:
    for name in bench.FAMILIES["planted secrets"]:
        subject = bench.SUBJECTS[name]
        torch.manual_seed(0)
        model = subject.make(digits()).eval()
        images, labels = digits().test[:40]
        assert subject.key is not None
        points = subject.key(model, images, labels, subject.eps)
        assert (points - images).abs().max() <= subject.eps + 1e-6
        random = (images + subject.eps * torch.randn(images.shape).sign()).clamp(0, 1)
        network: Any = model.network
        assert model(random).equal(network(random))
        changed = model(points).argmax(dim=1) != network(points).argmax(dim=1)
        assert changed.double().mean() > 0.5


@pytest.mark.parametrize("name", ["rounded_pixels", "thermometer", "detached", "decoy", "block_codec"])
def test_tricks_hide_the_gradient_and_nothing_else(name: str) -> None:
    """Opened, the same model has the same scores, and a gradient that a step can follow."""
    torch.manual_seed(0)
    closed = bench.SUBJECTS[name].make(digits()).eval()
    opened = bench.open_tricks(closed)
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
    model: Any = two_symbols(digits())
    MemberObjective(kind="hinge", diversity_weight=0.1)(model, *digits().train[:50]).backward()  # type: ignore[no-untyped-call]
    own, common = model.head.weight.grad.abs().max(), model.head.weight.grad.sum(dim=0).abs().max()
    assert own > 1e-3
    assert common < 1e-5 * own


@pytest.mark.parametrize("name", ["linear", "certified"])
def test_proven_claims_hold_at_random_points(name: str) -> None:
    """The closed form and the intervals of untrained networks: no point of the box is worse."""
    torch.manual_seed(0)
    model: Any = bench.SUBJECTS[name].make(digits()).eval()
    images, labels = digits().test[:30]
    margins = interval_margins(model, images, labels, 0.05)
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
    subject = bench.SUBJECTS[name]
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
    subject = bench.SUBJECTS[name]
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
