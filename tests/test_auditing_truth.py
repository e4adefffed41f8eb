"""The audit against truth from both sides: never below what is proven, and where the exact answer is known, at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from verifier import (
    CASES,
    Layer,
    box_around,
    certified_margin,
    crown_bounds,
    find_truth,
    interval_bounds,
    layers_of,
    margins_of,
    random_network,
    run,
    small_digits,
    trained,
    verify,
)

from ecnn.auditing import audit

# The oracle itself ---------------------------------------------------------------------------------------------------


def points_of(box: Any, count: int, seed: int) -> np.ndarray:
    """Points of the box, half of them corners."""
    rng = np.random.default_rng(seed)
    inside = rng.uniform(box.low, box.high, (count // 2, len(box.low)))
    corners = np.where(rng.random((count // 2, len(box.low))) < 0.5, box.low, box.high)
    return np.concatenate([inside, corners])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("find_bounds", [interval_bounds, crown_bounds])
def test_bounds_hold_and_are_not_idle(find_bounds: Any, seed: int) -> None:
    """No point of the box is outside of the bounds of any unit of any layer, and they are finite and not silly."""
    layers = layers_of(random_network([5, 8, 8, 4], seed))
    rng = np.random.default_rng(seed)
    box = box_around(rng.random(5), 0.1)
    bounds = find_bounds(layers, box)
    seen: list[list[np.ndarray]] = [[] for _ in layers]
    for point in points_of(box, 2000, seed):
        values = point
        for depth, layer in enumerate(layers):
            before = layer.weight @ values + layer.bias
            seen[depth].append(before)
            values = np.maximum(before, 0)
    for own, values_seen in zip(bounds, map(np.array, seen), strict=True):
        assert (values_seen.min(axis=0) >= own.low - 1e-12).all()
        assert (values_seen.max(axis=0) <= own.high + 1e-12).all()
        spread = values_seen.max(axis=0) - values_seen.min(axis=0)
        assert ((own.high - own.low) <= 20 * spread + 1e-9).mean() > 0.9


def test_crown_is_tighter_than_intervals_on_average() -> None:
    gains = []
    for seed in range(20):
        layers = layers_of(random_network([6, 10, 10, 4], seed))
        image = np.random.default_rng(seed).random(6)
        label = int(run(layers, image).argmax())
        by_intervals, by_crown = (
            certified_margin(layers, image, label, 0.05, method) for method in ("intervals", "crown")
        )
        gains.append(by_crown - by_intervals)
    assert np.mean(gains) > 0.05
    assert np.mean(np.array(gains) > 0) > 0.9


@pytest.mark.parametrize("eps", [0.1, 0.2])
def test_a_linear_network_has_a_closed_form(eps: float) -> None:
    """Margin minus the worst move within the ball and [0, 1]; both bounds and the exact answer are at it."""
    rng = np.random.default_rng(0)
    decided = []
    for _ in range(30):
        layer, image = Layer(rng.normal(size=(4, 7)), rng.normal(size=4)), rng.random(7)
        label = int(run([layer], image).argmax())
        low, high = np.maximum(image - eps, 0), np.minimum(image + eps, 1)
        apart = np.delete(layer.weight[label] - layer.weight, label, axis=0)
        moves = np.where(apart > 0, low - image, high - image)
        worst = float((margins_of([layer], image, label) + (apart * moves).sum(axis=1)).min())
        for method in ("intervals", "crown"):
            assert certified_margin([layer], image, label, eps, method) == pytest.approx(worst, abs=1e-9)
        assert verify([layer], image, label, eps).robust is (worst > 0)
        decided.append(worst > 0)
    assert 3 < sum(decided) < 27


def smallest_on_grid(layers: list[Layer], box: Any, label: int, steps: int) -> float:
    axes = [np.linspace(low, high, steps) for low, high in zip(box.low, box.high, strict=True)]
    values = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, len(axes))
    for layer in layers[:-1]:
        values = np.maximum(values @ layer.weight.T + layer.bias, 0)
    scores = values @ layers[-1].weight.T + layers[-1].bias
    return float(np.delete(scores[:, [label]] - scores, label, axis=1).min())


def test_the_exact_answer_agrees_with_a_grid() -> None:
    """Two pixels and 301 x 301 points; a network cannot fall below zero between them by more than its slope allows."""
    answers = []
    for seed in range(40):
        layers = layers_of(random_network([2, 8, 8, 3], seed))
        image = np.random.default_rng(seed).uniform(0.1, 0.9, 2)
        label = int(run(layers, image).argmax())
        box = box_around(image, 0.1)
        smallest = smallest_on_grid(layers, box, label, 301)
        slope = np.prod([np.abs(layer.weight).sum(axis=1).max() for layer in layers]) * 2
        answer = verify(layers, image, label, 0.1)
        answers.append(answer.robust)
        if smallest < -1e-6:
            assert answer.robust is False
        elif smallest > slope * 0.2 / 300 / 2:
            assert answer.robust is True
        if answer.point is not None:
            assert (answer.point >= box.low).all()
            assert (answer.point <= box.high).all()
            assert margins_of(layers, answer.point, label).min() < 0
    assert answers.count(True) > 5
    assert answers.count(False) > 5
    assert None not in answers


def test_branching_decides_what_bounds_leave_open() -> None:
    """Between what CROWN proves and what sampling breaks there are networks that only branching settles."""
    settled = 0
    for seed in range(30):
        layers = layers_of(random_network([6, 10, 10, 3], seed))
        image = np.random.default_rng(seed).random(6)
        label = int(run(layers, image).argmax())
        answer = verify(layers, image, label, 0.1)
        if certified_margin(layers, image, label, 0.1, "crown") > 1e-5:
            assert answer.robust is True
            assert answer.programs == 0
        sampled = min(
            float(margins_of(layers, point, label).min())
            for point in points_of(box_around(image, 0.1), 300, seed)
        )
        if sampled < -1e-5:
            assert answer.robust is False
        settled += answer.robust is True and answer.programs > 0
    assert settled >= 3


# The audit -----------------------------------------------------------------------------------------------------------


def right_now(model: nn.Module, images: Tensor, labels: Tensor) -> np.ndarray:
    with torch.no_grad():
        right: np.ndarray = (model(images).argmax(dim=1) == labels).numpy()
    return right


@pytest.mark.slow
@pytest.mark.usefixtures("short_lessons")
@pytest.mark.parametrize("name", CASES)
def test_audit_between_proof_and_truth(name: str, record_property: Any) -> None:
    """Certified <= exact <= audited, image by image, and the audit finds all that is to be found."""
    model, eps = trained(name)
    test, count = small_digits()[1], 40
    images, labels = test[:count]
    truth = find_truth(model, images, labels, eps)
    result = audit(model, test, norm="linf", eps=eps, limit=count, budget="quick")
    stands = np.array(result.broken_by) == -1
    assert not (truth.by_intervals & ~truth.by_crown).any()
    assert not (truth.by_crown & ~truth.robust).any()
    assert not (truth.robust & truth.broken).any()
    assert np.array_equal(truth.right, right_now(model, images, labels))
    assert not (truth.robust & ~stands).any()  # what is proven cannot be broken
    exact, audited = truth.robust.mean(), stands.mean()
    assert result.accuracy == pytest.approx(audited)
    record_property("certified by intervals", float(truth.by_intervals.mean()))
    record_property("certified by CROWN", float(truth.by_crown.mean()))
    record_property("exact", float(exact))
    record_property("audited", float(audited))
    assert 0.1 < exact < 0.95
    assert exact <= audited <= exact + (~truth.robust & ~truth.broken).mean() + 1e-9


@pytest.mark.slow
@pytest.mark.usefixtures("short_lessons")
def test_exact_claims_are_believed_and_higher_ones_are_not(tmp_path: Path) -> None:
    """The second question reads the records that the first one left."""
    model, eps = trained("adversarially trained")
    test, count = small_digits()[1], 360  # enough to rule out a truth five points lower
    exact = float(find_truth(model, *test[:count], eps).robust.mean())
    verdicts = [
        audit(
            model, test, norm="linf", eps=eps, claim=claim, limit=count, budget="quick", run_dir=tmp_path
        ).verdict
        for claim in (exact, exact + 0.2)
    ]
    assert verdicts == ["believable", "not believable"]
