"""Losses and entropies: closed forms, gradients, exactness for confident members, stationary points."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ecnn.errors import InputError
from ecnn.objectives import (
    OBJECTIVES,
    MemberObjective,
    ScoreObjective,
    cross_member_entropy,
    joint_loss,
    make_objective,
    member_cross_entropy,
    member_entropy,
    member_hinge,
    member_margin,
    member_targets,
    score_cross_entropy,
    score_margin,
    stationary_confidence,
    stationary_logit,
    stationary_weight,
    symbol_hinge,
)

LARGE = [-50.0, -30.0, -17.0, -1.0, -1e-3, 0.0, 0.5, 9.0, 20.0, 20.5, 50.0]


def column(values: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """(image, 1) one member per image."""
    return torch.tensor(values, dtype=dtype)[:, None]


def gradient(values: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(values.sum(), logits)[0]


def test_targets_are_the_codewords_of_the_labels() -> None:
    symbols = torch.tensor([[0, 1, 2], [2, 0, 1]])
    assert member_targets(symbols, torch.tensor([1, 0, 1])).tolist() == [[2, 0, 1], [0, 1, 2], [2, 0, 1]]


def test_losses_by_hand() -> None:
    logits = torch.tensor([[2.0, -0.5, 0.25]])
    targets = torch.tensor([[1, 1, 0]])
    assert member_hinge(logits, targets).tolist() == [pytest.approx((0 + 1.5 + 1.25) / 3)]
    assert member_hinge(logits, targets, margin=3.0).tolist() == [pytest.approx((1 + 3.5 + 3.25) / 3)]
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(0.5)) + math.log1p(math.exp(0.25))) / 3
    assert member_cross_entropy(logits, targets).tolist() == [pytest.approx(expected)]
    symbols = torch.tensor([[[1.0, 3.0, 2.5], [0.0, 4.0, -1.0]]])
    assert symbol_hinge(symbols, torch.tensor([[1, 0]])).tolist() == [pytest.approx((0.5 + 5) / 2)]
    assert symbol_hinge(symbols, torch.tensor([[1, 0]]), margin=0.0).tolist() == [pytest.approx(2.0)]


def test_losses_equal_torchs() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 5, dtype=torch.float64), torch.randint(2, (6, 5))
    torch.testing.assert_close(
        member_cross_entropy(logits, targets),
        F.binary_cross_entropy_with_logits(logits, targets.double(), reduction="none").mean(dim=1),
    )
    symbols, targets = torch.randn(6, 5, 4, dtype=torch.float64), torch.randint(4, (6, 5))
    expected = F.cross_entropy(symbols.flatten(0, 1), targets.flatten(), reduction="none").reshape(6, 5)
    torch.testing.assert_close(member_cross_entropy(symbols, targets), expected.mean(dim=1))
    scores, labels = torch.randn(6, 10, dtype=torch.float64), torch.randint(10, (6,))
    torch.testing.assert_close(
        score_cross_entropy(scores, labels), F.cross_entropy(scores, labels, reduction="none")
    )


def test_two_symbols_are_one_logit() -> None:
    """softmax over (0, z) is sigmoid(z), so both kinds of members have the same loss and entropy."""
    torch.manual_seed(0)
    logits, targets = 5 * torch.randn(6, 5, dtype=torch.float64), torch.randint(2, (6, 5))
    symbols = torch.stack([torch.zeros_like(logits), logits], dim=2)
    torch.testing.assert_close(member_cross_entropy(symbols, targets), member_cross_entropy(logits, targets))
    torch.testing.assert_close(symbol_hinge(symbols, targets), member_hinge(logits, targets))
    torch.testing.assert_close(member_entropy(symbols), member_entropy(logits))


def test_entropy_bounds_and_units() -> None:
    assert member_entropy(torch.zeros(1, 3)).item() == pytest.approx(math.log(2))
    assert member_entropy(torch.zeros(1, 3), entropy_unit="normalised").item() == pytest.approx(1)
    assert member_entropy(torch.full((1, 3, 4), 7.0)).item() == pytest.approx(math.log(4))
    assert member_entropy(torch.full((1, 3, 4), 7.0), entropy_unit="normalised").item() == pytest.approx(1)
    probabilities = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    expected = -(probabilities * probabilities.log()).sum().item()
    assert member_entropy(probabilities.log()[None, None]).item() == pytest.approx(expected)


def test_closed_gradients_of_binary_members() -> None:
    logits = column(LARGE).requires_grad_()
    s = torch.sigmoid(logits)
    small = torch.sigmoid(-logits)  # 1 - s without rounding
    torch.testing.assert_close(
        gradient(member_entropy(logits), logits), -logits * s * small, rtol=1e-9, atol=0
    )
    ones = torch.ones_like(logits, dtype=torch.int64)
    torch.testing.assert_close(
        gradient(member_cross_entropy(logits, ones), logits), -small, rtol=1e-6, atol=0
    )
    torch.testing.assert_close(gradient(member_cross_entropy(logits, 0 * ones), logits), s, rtol=1e-6, atol=0)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(3, 4, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(2, (3, 4))
    symbols = (3 * torch.randn(3, 4, 3, dtype=torch.float64)).requires_grad_()
    right = torch.randint(3, (3, 4))
    features = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    heads = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    for function, inputs in (
        (lambda z: member_cross_entropy(z, targets), (logits,)),
        (lambda z: member_hinge(z, targets), (logits,)),
        (member_entropy, (logits,)),
        (lambda z: member_cross_entropy(z, right), (symbols,)),
        (lambda z: symbol_hinge(z, right), (symbols,)),
        (member_entropy, (symbols,)),
        (cross_member_entropy, (features, weight)),
        (cross_member_entropy, (features, heads)),
        (lambda z: score_cross_entropy(z, targets[:, 0]), (logits,)),
        (lambda z: score_margin(z, targets[:, 0]), (logits,)),
    ):
        assert torch.autograd.gradcheck(function, inputs)


def binary_reference(z: float) -> dict[str, float]:
    """Cross entropy against symbol 1 and entropy in float64, in forms that lose nothing."""
    size = abs(z)
    odds = math.exp(-size)
    own = math.log1p(odds)
    return {"loss": own if z >= 0 else own + size, "entropy": own + size * odds / (1 + odds)}


def test_float32_is_exact_for_confident_binary_members() -> None:
    logits = column(LARGE, torch.float32).requires_grad_()
    ones = torch.ones_like(logits, dtype=torch.int64)
    references = [binary_reference(value) for value in logits.flatten().tolist()]
    loss, entropy = member_cross_entropy(logits, ones), member_entropy(logits)
    assert loss.tolist() == pytest.approx([r["loss"] for r in references], rel=1e-5, abs=0)
    assert entropy.tolist() == pytest.approx([r["entropy"] for r in references], rel=1e-5, abs=0)
    doubles = logits.detach().double().requires_grad_()
    for function in (member_entropy, lambda z: member_cross_entropy(z, ones)):
        slope, exact = gradient(function(logits), logits), gradient(function(doubles), doubles)
        assert slope.isfinite().all()
        large = logits.detach().abs() >= 0.5  # below, two nearly equal terms leave an absolute error of 1e-8
        torch.testing.assert_close(slope[large].double(), exact[large], rtol=1e-5, atol=0)
        torch.testing.assert_close(slope.double(), exact, rtol=0, atol=1e-7)


@pytest.mark.parametrize("level", [0.0, 50.0, -50.0])
@pytest.mark.parametrize("lead", [0.0, 1.0, 17.0, 50.0])
def test_float32_is_exact_for_confident_symbols_members(level: float, lead: float) -> None:
    symbols = torch.tensor([[[level + lead, level, level]]], requires_grad=True)
    odds = 2 * math.exp(-lead)
    entropy = math.log1p(odds) + lead * odds / (1 + odds)
    for target, loss in ((0, math.log1p(odds)), (1, math.log1p(odds) + lead)):
        targets = torch.tensor([[target]])
        assert member_cross_entropy(symbols, targets).item() == pytest.approx(loss, rel=1e-5, abs=0)
        slope = gradient(member_cross_entropy(symbols, targets), symbols)[0, 0]
        others = [math.exp(-lead) / (1 + odds)] * 2
        expected = [1 / (1 + odds), *others]
        expected[target] = -sum(p for index, p in enumerate(expected) if index != target)
        assert slope.tolist() == pytest.approx(expected, rel=1e-5, abs=0)
    assert member_entropy(symbols).item() == pytest.approx(entropy, rel=1e-5, abs=0)
    assert gradient(member_entropy(symbols), symbols).isfinite().all()


def test_the_true_score_keeps_its_gradient_where_the_usual_form_loses_it() -> None:
    scores = torch.tensor([[20.0, 0.0, 0.0]], requires_grad=True)
    labels = torch.tensor([0])
    assert gradient(F.cross_entropy(scores, labels), scores)[0, 0] == 0
    slope = gradient(score_cross_entropy(scores, labels), scores)[0]
    assert slope[0].item() == pytest.approx(-2 * math.exp(-20), rel=1e-5, abs=0)
    assert slope.sum().item() == pytest.approx(0, abs=1e-14)


def test_half_precision_is_raised() -> None:
    logits = torch.randn(4, 3).bfloat16()
    targets = torch.randint(2, (4, 3))
    assert member_cross_entropy(logits, targets).dtype == torch.float32
    assert member_entropy(logits).dtype == torch.float32
    torch.testing.assert_close(member_entropy(logits), member_entropy(logits.float()))


def test_score_margin() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.5], [3.0, 1.0, 2.5], [2.0, 2.0, 0.0]])
    assert score_margin(scores, torch.tensor([0, 1, 1])).tolist() == [0.5, -2.0, 0.0]


def test_member_margin() -> None:
    logits, targets = torch.tensor([[2.0, -0.5, 0.25]]), torch.tensor([[1, 1, 0]])
    assert member_margin(logits, targets).tolist() == [[2.0, -0.5, -0.25]]
    symbols = torch.tensor([[[1.0, 3.0, 2.5], [0.0, 4.0, -1.0]]])
    assert member_margin(symbols, torch.tensor([[1, 0]])).tolist() == [[0.5, -4.0]]


@pytest.mark.parametrize("symbols", [None, 3])
def test_entropy_across_members_is_the_mean_over_ordered_pairs(symbols: int | None) -> None:
    torch.manual_seed(0)
    features = torch.randn(4, 5, 6, dtype=torch.float64)
    shape = () if symbols is None else (symbols,)
    weight, bias = torch.randn(5, 6, *shape).double(), torch.randn(5, *shape).double()
    pairs = []
    for head in range(5):
        for other in range(5):
            if head != other:
                logits = features[:, other] @ weight[head] + bias[head]
                pairs.append(member_entropy(logits[:, None]))
    expected = torch.stack(pairs).mean(dim=0)
    torch.testing.assert_close(cross_member_entropy(features, weight, bias), expected)
    unit = math.log(symbols or 2)
    torch.testing.assert_close(
        cross_member_entropy(features, weight, bias, entropy_unit="normalised"), expected / unit
    )


def test_with_one_head_for_all_there_is_nothing_across_members() -> None:
    """Erratum 11: eq:div1 becomes eq:div2, each member's own entropy."""
    torch.manual_seed(0)
    features, head = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(
        cross_member_entropy(features, head.expand(5, 6)), member_entropy(features @ head)
    )


def test_joint_loss_rewards_entropy() -> None:
    assert joint_loss(torch.tensor(2.0), torch.tensor(0.5), 0.1).item() == pytest.approx(1.95)


@pytest.mark.parametrize(
    ("unit", "logit", "confidence"), [("nats", 10.000454, 0.99995), ("normalised", 6.94, 0.99903)]
)
def test_stationary_point_for_the_papers_weight(unit: Any, logit: float, confidence: float) -> None:
    found = stationary_logit(0.1, entropy_unit=unit)
    assert found == pytest.approx(logit, abs=1e-6 if unit == "nats" else 5e-3)
    assert stationary_confidence(0.1, entropy_unit=unit) == pytest.approx(confidence, abs=1e-5)
    # Not only a solution of the equation: the loss itself has slope zero there and is larger on both sides.
    logits = column([found, found - 0.5, found + 0.5]).requires_grad_()
    ones = torch.ones_like(logits, dtype=torch.int64)
    loss = joint_loss(member_cross_entropy(logits, ones), member_entropy(logits, entropy_unit=unit), 0.1)
    assert abs(gradient(loss, logits)[0, 0].item()) < 1e-15
    assert loss[0] < loss[1]
    assert loss[0] < loss[2]


@given(st.floats(0.06, 20), st.sampled_from(["nats", "normalised"]), st.integers(2, 5))
def test_weight_and_confidence_are_inverses(weight: float, unit: Any, arity: int) -> None:
    confidence = stationary_confidence(weight, entropy_unit=unit, arity=arity)
    assert stationary_weight(confidence, entropy_unit=unit, arity=arity) == pytest.approx(weight, rel=1e-2)
    logit = stationary_logit(weight, entropy_unit=unit, arity=arity)
    symbols = torch.zeros(1, 1, arity, dtype=torch.float64)
    symbols[0, 0, 0] = logit
    symbols.requires_grad_()
    loss = joint_loss(
        member_cross_entropy(symbols, torch.tensor([[0]])), member_entropy(symbols, entropy_unit=unit), weight
    )
    assert gradient(loss, symbols).abs().max().item() < 1e-12


def test_stationary_edges() -> None:
    assert stationary_logit(0.0) == math.inf
    assert stationary_confidence(0.0) == 1.0
    assert stationary_logit(1e-6) == pytest.approx(1e6)
    for weight in (-0.1, math.nan, math.inf):
        with pytest.raises(InputError, match="diversity_weight"):
            stationary_logit(weight)
    for confidence in (0.5, 1.0, math.nan):
        with pytest.raises(InputError, match=r"above 0\.5 and below 1"):
            stationary_weight(confidence)
    with pytest.raises(InputError, match="entropy_unit"):
        stationary_logit(0.1, entropy_unit="bits")  # type: ignore[arg-type]


def test_with_hinge_the_optimum_is_the_margin() -> None:
    logits = torch.linspace(-3, 3, 6001, dtype=torch.float64)[:, None]
    loss = joint_loss(member_hinge(logits, torch.ones(6001, 1).long()), member_entropy(logits), 0.1)
    assert logits[loss.argmin()].item() == pytest.approx(1.0, abs=1e-9)


def fake_model(member_logits: Tensor, symbols: Tensor) -> Any:
    return SimpleNamespace(
        member_logits=lambda images: member_logits, code_symbols=symbols, share_head=True, head=None
    )


def test_member_objective_is_the_mean_joint_loss() -> None:
    torch.manual_seed(0)
    logits, symbols = torch.randn(6, 4), torch.randint(2, (3, 4))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    model, images = fake_model(logits, symbols), torch.zeros(6, 1, 2, 2)
    targets = symbols[labels]
    objective = MemberObjective("cross_entropy", diversity_weight=0.3, entropy_unit="nats")
    expected = (member_cross_entropy(logits, targets) - 0.3 * member_entropy(logits)).mean()
    torch.testing.assert_close(objective(model, images, labels), expected)
    # The authors' program: 5 * hinge - 0.5 * entropy / ln q.
    objective = MemberObjective("hinge", diversity_weight=0.1, scale=5.0)
    expected = (5 * member_hinge(logits, targets) - 0.5 * member_entropy(logits) / math.log(2)).mean()
    torch.testing.assert_close(objective(model, images, labels), expected)
    three = torch.randn(6, 4, 2)
    objective = MemberObjective("hinge", margin=2.0)
    torch.testing.assert_close(
        objective(fake_model(three, symbols), images, labels), symbol_hinge(three, targets, margin=2.0).mean()
    )


def test_score_objective() -> None:
    scores, labels = torch.randn(6, 3), torch.randint(3, (6,))
    loss = ScoreObjective()(lambda images: scores, torch.zeros(6), labels)
    torch.testing.assert_close(loss, F.cross_entropy(scores, labels))


def test_objectives_by_name() -> None:
    assert list(OBJECTIVES) == ["member_hinge", "member_cross_entropy", "cross_entropy"]
    assert make_objective("member_hinge", diversity_weight=0.1) == MemberObjective("hinge", 0.1)
    assert make_objective("member_cross_entropy") == MemberObjective("cross_entropy")
    assert make_objective("cross_entropy") == ScoreObjective()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("hinge", {}, "one of member_hinge, member_cross_entropy, cross_entropy"),
        ("member_hinge", {"gamma": 0.1}, "no option 'gamma'; it has diversity_weight"),
        ("member_hinge", {"kind": "cross_entropy"}, "no option 'kind'"),
        ("cross_entropy", {"margin": 1.0}, "it has none"),
        ("member_hinge", {"diversity_weight": -1.0}, "diversity_weight must be a number from 0 up"),
        ("member_hinge", {"diversity_weight": "0.1"}, "diversity_weight"),
        ("member_hinge", {"entropy_unit": "bits"}, "nats or normalised"),
        ("member_hinge", {"diversity": "all"}, "own or cross"),
    ],
)
def test_bad_objectives_are_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make_objective(name, **options)


def test_wrong_shapes_are_refused() -> None:
    targets = torch.zeros(2, 3, dtype=torch.int64)
    for function, logits in (
        (member_hinge, torch.zeros(2, 3, 2)),
        (symbol_hinge, torch.zeros(2, 3)),
        (member_cross_entropy, torch.zeros(2, 4)),
    ):
        with pytest.raises(InputError, match="expected member logits"):
            function(logits, targets)
    with pytest.raises(InputError, match="member logits"):
        member_entropy(torch.zeros(3))
    with pytest.raises(InputError, match="features must be"):
        cross_member_entropy(torch.zeros(2, 3, 4), torch.zeros(4, 3))
    with pytest.raises(InputError, match="at least 2 members"):
        cross_member_entropy(torch.zeros(2, 1, 4), torch.zeros(1, 4))
    with pytest.raises(InputError, match="which Linear lacks"):
        MemberObjective()(torch.nn.Linear(2, 2), torch.zeros(1), torch.zeros(1))  # type: ignore[arg-type]
