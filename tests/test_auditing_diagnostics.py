"""Diagnostics: each sounds on a model made for it, none on honest ones, and figures equal closed forms."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn
from toys import Wrapped

import ecnn
from ecnn.attacks import PGD
from ecnn.auditing.budgets import BUDGETS, Budget
from ecnn.auditing.deployment import FreshEachTime
from ecnn.auditing.diagnostics import CHECKS, count_questions, diagnose, read_evidence
from ecnn.auditing.diagnostics.binarization import find_features, plant
from ecnn.auditing.diagnostics.probes import Walk, probe_of
from ecnn.auditing.diagnostics.statistics import exceeds, tail_probability
from ecnn.auditing.findings import Finding
from ecnn.auditing.subject import Subject
from ecnn.codes import load_code
from ecnn.evaluation.outcomes import COLUMNS, Outcomes
from ecnn.evaluation.results import Evaluation

BUDGET: Budget = replace(BUDGETS["quick"], probe_images=24, probe_steps=15, queries=60, eot=4)
EPS = 0.15


@cache
def digits(split: str) -> tuple[Tensor, Tensor]:
    images, labels = getattr(ecnn.load_data("digits"), split)[:]
    return images, labels


def make_subject(model: nn.Module, *, eps: float = EPS, norm: Any = "linf", images: int = 24) -> Subject:
    pictures, labels = digits("test")
    return Subject(
        model=model.eval(),
        images=pictures[:images],
        labels=labels[:images],
        norm=norm,
        eps=eps,
        budget=BUDGET,
    )


def check(name: str, model: nn.Module, **options: Any) -> Finding:
    finding = CHECKS[name](make_subject(model, **options))
    assert "error" not in finding.evidence, finding.claim
    return finding


# ---- models


@cache
def network(adversarial: bool = False) -> nn.Module:
    """A small network on digits, plain or adversarially trained; the same every time."""
    images, labels = digits("train")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 10)
        )
    generator = torch.Generator().manual_seed(0)
    attack = PGD(norm="linf", eps=EPS, steps=4, step_size=EPS / 2, loss="cross_entropy", keep="last")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(8):
        for rows in torch.split(torch.randperm(len(images), generator=generator), 64):
            points = images[rows]
            if adversarial:
                points = attack(model, points, labels[rows], generator=generator)
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(points), labels[rows]))
            optimizer.step()
    model.zero_grad(set_to_none=True)
    return model.eval()


class Linear(nn.Module):
    """Least squares on digits: every worst case in a ball is known."""

    def __init__(self) -> None:
        super().__init__()
        images, labels = digits("train")
        inputs = torch.cat([images.flatten(1), torch.ones(len(images), 1)], dim=1).double()
        targets = F.one_hot(labels, 10).double()
        solved = torch.linalg.solve(
            inputs.T @ inputs + torch.eye(65, dtype=torch.float64), inputs.T @ targets
        )
        self.register_buffer("weight", solved[:64].T.float())
        self.register_buffer("bias", solved[64].float())

    weight: Tensor
    bias: Tensor

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) @ self.weight.T + self.bias

    def exact_margins(self, images: Tensor, labels: Tensor, eps: float) -> Tensor:
        """(image,) the smallest margin in the Linf ball cut to [0, 1]."""
        pixels = images.flatten(1).double()
        low, high = (pixels - eps).clamp(min=0), (pixels + eps).clamp(max=1)
        weight, bias = self.weight.double(), self.bias.double()
        gaps = weight[labels][:, None] - weight[None]
        ends = torch.minimum(gaps * low[:, None], gaps * high[:, None]).sum(dim=2)
        margins = ends + (bias[labels][:, None] - bias[None])
        return margins.scatter(1, labels[:, None], math.inf).amin(dim=1)


class Changed(Wrapped):
    """Around the trained network, if no other is given."""

    def __init__(self, inner: nn.Module | None = None, **changes: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inner or network(), **changes)


class Backward(torch.autograd.Function):
    """The image itself, with another gradient."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return images.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None


def with_gradient(change: Callable[[Tensor], Tensor]) -> nn.Module:
    function: Any = Backward
    return Changed(before=lambda images: function.apply(images, change))


def refuse(gradient: Tensor) -> Tensor:
    raise NotImplementedError("no derivative")


class OnGrid(nn.Module):
    """Differentiable only where pixels are those of a file: a single step sees the gradient, iterates do not."""

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.detach() * 255
        on_grid = ((pixels - pixels.round()).abs() < 1e-3).flatten(1).all(dim=1).view(-1, 1, 1, 1)
        scores: Tensor = network()(torch.where(on_grid, images, images.detach()))
        return scores


class Wavy(nn.Module):
    """Two classes in waves shorter than a step; the second one rarer."""

    def __init__(self, blind: bool = False) -> None:
        super().__init__()
        self.blind = blind

    def forward(self, images: Tensor) -> Tensor:
        total = images.flatten(1).sum(dim=1) * 200
        lead = torch.sin(total.detach() if self.blind else total) + 0.5 + 0 * total
        return torch.stack([lead, -lead], dim=1)


class Levelled(nn.Module):
    """q-ary members whose two logits share a level that the image controls: a decoder that attacks can saturate."""

    code_symbols: Tensor

    def __init__(self, level: float) -> None:
        super().__init__()
        images, labels = digits("train")
        self.code = load_code("10x30")
        self.register_buffer("code_symbols", torch.from_numpy(self.code.symbols.astype("int64")))
        inputs = torch.cat([images.flatten(1), torch.ones(len(images), 1)], dim=1).double()
        bits = (2 * self.code_symbols[labels] - 1).double()
        solved = torch.linalg.solve(inputs.T @ inputs + torch.eye(65, dtype=torch.float64), inputs.T @ bits)
        self.solved, self.mean = solved.float(), images.flatten(1).mean(dim=0)
        self.slope = level * torch.randn(64, generator=torch.Generator().manual_seed(0)).sign()

    def member_logits(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        lead = pixels @ self.solved[:64].to(pixels) + self.solved[64].to(pixels)
        level = ((pixels - self.mean.to(pixels)) @ self.slope.to(pixels))[:, None]
        return torch.stack([level - lead / 2, level + lead / 2], dim=2)

    def decode(self, member_logits: Tensor) -> Tensor:
        one_hot = F.one_hot(self.code_symbols, 2).to(member_logits.dtype)
        return torch.einsum("bnk,cnk->bc", torch.sigmoid(member_logits), one_hot)

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.member_logits(images))


def rippled(images: Tensor) -> Tensor:
    """Nearly the images, with a slope that is another at every step."""
    return images + 0.1 * torch.sin(1000 * images)


def noisy(images: Tensor) -> Tensor:
    return images + 0.25 * torch.randn_like(images)


# ---- statistics


@pytest.mark.parametrize(
    ("count", "n", "rate"), [(0, 5, 0.1), (1, 1, 0.05), (5, 32, 0.02), (10, 24, 0.5), (7, 7, 0.3)]
)
def test_tail_probability_equals_exact_sum(count: int, n: int, rate: float) -> None:
    share = Fraction(rate)
    exact = sum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(count, n + 1))
    assert tail_probability(count, n, rate) == pytest.approx(float(exact), rel=1e-9)


def test_few_images_never_alarm() -> None:
    assert not exceeds(1, 1, 0.02)
    assert not exceeds(0, 0, 0.02)
    assert exceeds(3, 3, 0.02)


# ---- honest models


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("kind", ["linear", "plain", "adversarial", "members"])
def test_no_alarm_on_honest_models(kind: str, norm: Any) -> None:
    models: dict[str, Callable[[], nn.Module]] = {
        "linear": Linear,
        "plain": network,
        "adversarial": lambda: network(adversarial=True),
        "members": lambda: Levelled(0.0),
    }
    model = models[kind]()
    findings = diagnose(make_subject(model, norm=norm, eps=EPS if norm == "linf" else 0.6))
    assert [finding.name for finding in findings] == list(CHECKS)
    assert [finding.claim for finding in findings if finding.level == "alarm"] == []
    assert all("error" not in finding.evidence for finding in findings)


# ---- false models


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("finite_scores", lambda: Changed(after=lambda scores: scores / 0 * 0)),
        ("differentiable", lambda: Changed(before=lambda images: images.detach())),
        ("differentiable", lambda: with_gradient(refuse)),
        ("zero_gradients", lambda: Changed(before=lambda images: (3 * images).round() / 3)),
        ("zero_gradients", lambda: Changed(after=lambda scores: scores.round())),
        ("zero_gradients", lambda: Changed(after=lambda scores: 1000 * scores)),
        ("zero_gradients", lambda: with_gradient(lambda gradient: 1e-30 * (1e-30 * gradient))),
        ("gradient_direction", lambda: with_gradient(torch.neg)),
        ("unstable_loss", lambda: Changed(before=rippled)),
        ("loss_path", lambda: with_gradient(torch.neg)),
        ("one_step", OnGrid),
        ("noise", lambda: with_gradient(torch.neg)),
        ("black_box", lambda: with_gradient(torch.neg)),
        ("radius", lambda: with_gradient(torch.zeros_like)),
        ("unbounded", lambda: with_gradient(torch.zeros_like)),
        ("binarization", lambda: with_gradient(torch.neg)),
        ("saturation", lambda: Levelled(1.0)),
    ],
)
def test_alarm_on_the_model_made_for_it(name: str, build: Callable[[], nn.Module]) -> None:
    eps = 0.1 if name == "saturation" else 0.2
    finding = check(name, build(), eps=eps)
    assert finding.level == "alarm", (finding.claim, finding.evidence)
    assert finding.advice


def test_random_models_fall_to_averages() -> None:
    """Averaging gradients breaks what single noisy ones leave; noise too small to matter is a note."""
    budget = replace(BUDGET, probe_images=48, eot=8)
    for scale, level in ((0.2, "alarm"), (0.002, "note")):

        def blur(images: Tensor, scale: float = scale) -> Tensor:
            return images + scale * torch.randn_like(images)

        finding = CHECKS["randomness"](replace(make_subject(Changed(before=blur), images=48), budget=budget))
        assert finding.level == level, finding.evidence
    assert check("randomness", network()).evidence == {"largest_difference": 0.0, "flipped_predictions": 0}


def test_how_far_two_passes_lie_apart_is_told_of_a_model_that_is_known_to_be_random() -> None:
    """Other checks of it average over passes, and these means are the same each time."""

    def blur(images: Tensor) -> Tensor:
        return images + 0.05 * torch.randn_like(images)

    subject = replace(make_subject(Changed(before=blur), images=16), is_random=True)
    finding = CHECKS["randomness"](subject)
    assert finding.evidence["largest_difference"] > 1e-3
    assert "differ by up to" in finding.claim


def test_dropout_at_test_time_is_attacked_beside_the_same_images() -> None:
    """What an image draws depends on its place in the batch: broken images must not leave it before the verdict."""
    dropped = Changed(before=lambda images: F.dropout(images, 0.3, training=True))
    subject = replace(make_subject(dropped, images=96), budget=replace(BUDGET, probe_images=96))
    for name in ("radius", "unbounded"):
        assert CHECKS[name](subject).level == "ok"
    assert CHECKS["unbounded"](subject).evidence["left"] == 0


def wavy_subject(blind: bool) -> Subject:
    model = Wavy(blind).eval()
    images = digits("test")[0][:48]
    labels = model(images).argmax(dim=1)
    right = labels == 0
    return Subject(
        model=model, images=images[right][:24], labels=labels[right][:24], norm="linf", eps=EPS, budget=BUDGET
    )


def test_waves_end_right_again() -> None:
    finding = CHECKS["last_iterate"](wavy_subject(blind=False))
    assert (finding.level, finding.evidence["answered"]) == ("alarm", True)
    assert finding.evidence["accuracy_last_iterate"] > finding.evidence["accuracy_best_iterate"]


def test_blind_waves_fall_to_restarts() -> None:
    finding = CHECKS["restarts"](wavy_subject(blind=True))
    assert finding.level == "alarm"


def test_probabilities_are_noted() -> None:
    assert check("probabilities", Changed(after=lambda scores: scores.softmax(dim=1))).level == "note"
    assert check("probabilities", network()).level == "ok"


def test_hard_answers_are_noted_as_such() -> None:
    def decide(scores: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(scores.argmax(dim=1), scores.shape[1]).float()

    finding = check("probabilities", Changed(after=decide))
    assert finding.level == "note"
    assert "hard answers" in finding.claim
    assert "softmax" not in finding.advice


def test_own_labels_turn_wrong_images_right() -> None:
    """With two classes, moving away from a wrong prediction is moving to the truth."""

    class Halves(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            lead = 20 * (images.flatten(1).mean(dim=1) - 0.31)
            return torch.stack([lead, -lead], dim=1)

    images = digits("test")[0][:24]
    subject = Subject(
        model=Halves(), images=images, labels=torch.arange(24) % 2, norm="linf", eps=0.5, budget=BUDGET
    )
    finding = CHECKS["labels"](subject)
    assert finding.level == "note"
    assert finding.evidence["turned_right"] == finding.evidence["wrong_at_first"] > 0


# ---- walks made by hand


def walk_of(losses: Tensor, broken: Tensor) -> Walk:
    """Losses (step + 1, image); an image is wrong where its loss is positive."""
    return Walk(
        losses=losses,
        margins=-losses,
        spreads=torch.ones_like(losses),
        wrong=losses > 0,
        blind=torch.zeros(losses.shape[1]),
        broken=broken,
        last=digits("test")[0][: losses.shape[1]],
    )


def test_steps_alarm_only_if_more_steps_break_more() -> None:
    """Late successes alone are a note; twice the steps of real PGD then decide."""
    steps = torch.arange(BUDGET.probe_steps + 1.0)[:, None]
    for eps, level in ((0.5, "alarm"), (1e-6, "note")):
        subject = make_subject(Linear(), eps=eps)
        probe = probe_of(subject)
        late = probe.right & (torch.arange(24) < 12)
        losses = torch.where(late, steps - 13.5, steps - 100)
        probe.__dict__["margin_walk"] = walk_of(losses, late)
        finding = CHECKS["steps"](subject)
        assert (finding.level, finding.evidence["broken_in_second_half"]) == (level, int(late.sum()))


def test_incomplete_optimization_is_a_note() -> None:
    rising = torch.arange(BUDGET.probe_steps + 1.0)[:, None].expand(-1, 24) - 100
    flat = torch.cat([rising[:6], rising[5:6].expand(BUDGET.probe_steps - 5, -1)])
    for losses, level in ((rising, "note"), (flat, "ok")):
        subject = make_subject(Linear())
        probe_of(subject).__dict__["margin_walk"] = walk_of(losses, torch.zeros(24, dtype=torch.bool))
        assert CHECKS["incomplete_optimization"](subject).level == level


# ---- closed forms


def test_linear_radius_curve_is_exact() -> None:
    """With two classes there is one linear loss, whose top in the ball every walk reaches."""
    linear = Linear()
    images, labels = digits("test")
    images, labels = images[labels < 2][:24], labels[labels < 2][:24]
    model = Changed(after=lambda scores: scores[:, :2], inner=linear).eval()
    subject = Subject(model=model, images=images, labels=labels, norm="linf", eps=0.1, budget=BUDGET)
    evidence = CHECKS["radius"](subject).evidence
    linear.weight, linear.bias = linear.weight[:2], linear.bias[:2]
    expected = [
        (linear.exact_margins(images, labels, eps) > 0).double().mean() for eps in (0.05, 0.1, 0.2, 0.5)
    ]
    assert [point["eps"] for point in evidence["curve"]] == [0.05, 0.1, 0.2, 0.5]
    assert [point["accuracy"] for point in evidence["curve"]] == pytest.approx(
        [float(share) for share in expected]
    )
    assert 0 < expected[2] < expected[0]


def test_denormal_gradients_are_seen() -> None:
    """Signs of denormal numbers are right on a CPU, so that PGD copes and it stays a note."""
    finding = check("zero_gradients", with_gradient(lambda gradient: 1e-42 * gradient), eps=0.2)
    assert finding.level == "note"
    assert finding.evidence["margin"]["denormal"] == 1.0
    assert finding.evidence["margin"]["zero"] == 0.0


def test_linear_gradients_and_smoothness() -> None:
    model = Linear()
    subject = make_subject(model, eps=0.01)
    probe = probe_of(subject)
    best = probe.scores.scatter(1, subject.labels[:, None], -math.inf).argmax(dim=1)
    torch.testing.assert_close(probe.gradients("margin"), model.weight[best] - model.weight[subject.labels])
    figures = CHECKS["zero_gradients"](subject).evidence["margin"]
    assert figures["zero"] == figures["denormal"] == 0.0
    assert figures["agreement_with_float64"] == pytest.approx(1, abs=1e-5)
    assert CHECKS["unstable_loss"](subject).evidence["median_ratio"] == pytest.approx(10, rel=1e-3)


def test_zero_share_of_scaled_scores_is_where_float32_underflows() -> None:
    """Cross-entropy has an exactly zero gradient where every wrong class's exponential is 0: below exp(-104)."""
    model = Changed(after=lambda scores: 300 * scores, inner=Linear())
    subject = make_subject(model)
    scores = model(subject.images)
    right = scores.argmax(dim=1) == subject.labels
    margins = scores.topk(2, dim=1).values
    gone = (margins[:, 0] - margins[:, 1] > 104.0) & right
    figures = CHECKS["zero_gradients"](subject).evidence["cross_entropy"]
    assert 0 < int(gone.sum()) < int(right.sum())
    assert check("zero_gradients", Changed(after=lambda scores: 1000 * scores)).evidence["answered"]
    assert figures["zero"] == pytest.approx(int(gone.sum()) / int(right.sum()))


def test_member_gradients_of_linear_members() -> None:
    """The cosine of two members is that of their weights, with the sign of their bits."""
    model = Levelled(0.0)
    finding = check("member_gradients", model)
    probe = probe_of(make_subject(model))
    rows = torch.nonzero(probe.right).squeeze(1)[:16]
    chosen = torch.linspace(0, 29, 16).round().long()
    signs = (2 * model.code_symbols[probe.labels[rows]] - 1)[:, chosen].double()
    weights = F.normalize(model.solved[:64].T[chosen].double(), dim=1)
    cosines = signs[:, :, None] * signs[:, None] * (weights @ weights.T)
    expected = cosines[:, ~torch.eye(16, dtype=torch.bool)].mean()
    assert finding.evidence["mean_cosine"] == pytest.approx(float(expected), abs=1e-5)
    assert check("member_gradients", network()).evidence == {"members": 0}


def test_saturation_tells_bits_from_scores() -> None:
    """The score margin closes and the bits stay; an honest decoder loses both. Without members the spread tells."""
    evidence = check("saturation", Levelled(1.0), eps=0.1).evidence
    assert evidence["margin_after"] < 0.05 * evidence["margin_before"]
    assert evidence["member_margin_after"] > 0.5 * evidence["member_margin_before"]
    assert evidence["right_bits_after"] > evidence["right_bits_before"] - 0.05
    honest = check("saturation", Levelled(0.0), eps=0.1)
    assert (honest.level, honest.evidence["satisfied"]) == ("ok", 0)
    assert honest.evidence["right_bits_after"] < honest.evidence["right_bits_before"] - 0.1
    hidden = check("saturation", Changed(inner=Levelled(1.0)), eps=0.1)
    assert hidden.level == "alarm"
    assert hidden.evidence["relative_margin_after"] > 0.5 * hidden.evidence["relative_margin_before"]


def test_loss_path_keeps_the_curve() -> None:
    evidence = check("loss_path", Linear(), eps=0.02).evidence
    curve = evidence["curve_standing"]
    assert curve["step"] == list(range(BUDGET.probe_steps + 1))
    assert curve["lower"][-1] <= curve["median"][-1] <= curve["upper"][-1]
    assert curve["median"] == sorted(curve["median"])


# ---- the planted weakness


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("build", [network, Linear])
def test_planted_points_are_in_the_ball_and_inner_ones_are_not_called_wrong(
    build: Callable[[], nn.Module], norm: Any
) -> None:
    subject = make_subject(build(), norm=norm)
    probe = probe_of(subject)
    rows = torch.nonzero(probe.right).squeeze(1)
    features, place = find_features(probe, rows)
    assert place == ("scores" if build is Linear else "features")
    planted = plant(probe, rows, features)
    assert len(planted.rows) > 0.7 * len(rows)
    scores, _ = planted.view_of(planted.rows).read(subject.model, probe.images[planted.rows])
    assert bool((scores[:, 0] > scores[:, 1]).all())


def test_binarization_rates() -> None:
    good = check("binarization", network(adversarial=True)).evidence
    blind = check("binarization", with_gradient(torch.zeros_like)).evidence
    assert good["attack_success_rate"] == 1.0
    assert good["random_success_rate"] < 0.6
    assert blind["attack_success_rate"] <= blind["random_success_rate"]


def test_binarization_reads_the_scores_where_every_question_goes_to_a_new_copy() -> None:
    assert check("binarization", FreshEachTime(network()), images=6).evidence["on"] == "scores"


# ---- odd models


@pytest.mark.parametrize(
    "build",
    [
        lambda: Changed(after=lambda scores: scores * math.nan),
        lambda: Changed(after=lambda scores: scores * math.inf),
        lambda: Changed(after=lambda scores: torch.zeros_like(scores)),
        lambda: Changed(after=lambda scores: -scores),
        lambda: Changed(after=lambda scores: scores[:, :2]),
        lambda: with_gradient(refuse),
        lambda: with_gradient(lambda gradient: gradient * math.nan),
    ],
    ids=["nan", "inf", "constant", "all wrong", "two classes", "raises", "nan gradient"],
)
def test_odd_models_raise_nothing(build: Callable[[], nn.Module]) -> None:
    model = build().eval()
    images, labels = digits("test")
    kept = labels < 2 if model(images[:1]).shape[1] == 2 else torch.ones_like(labels, dtype=torch.bool)
    subject = Subject(
        model=model, images=images[kept][:6], labels=labels[kept][:6], norm="linf", eps=EPS, budget=BUDGET
    )
    findings = diagnose(subject)
    assert len(findings) == len(CHECKS)
    json.dumps([finding.to_dict() for finding in findings], allow_nan=False)


@pytest.mark.parametrize(("images", "eps"), [(0, EPS), (1, EPS), (24, 0.0), (24, 1.0)])
def test_no_alarm_where_there_is_nothing_to_see(images: int, eps: float) -> None:
    findings = diagnose(make_subject(network(), images=images, eps=eps))
    assert [finding.claim for finding in findings if finding.level == "alarm"] == []


def test_float64_models_are_honest_too() -> None:
    subject = make_subject(copy.deepcopy(network()).double())
    findings = diagnose(replace(subject, images=subject.images.double()))
    assert [
        finding.claim for finding in findings if finding.level == "alarm" or "error" in finding.evidence
    ] == []


def test_nothing_is_left_behind() -> None:
    """Mode, gradients, hooks and torch's generator are as before, and findings are the same when asked again."""
    model = Changed(before=noisy)
    subject = make_subject(model)
    model.train()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = diagnose(subject)
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    again = diagnose(replace(subject))
    assert [finding.to_dict() for finding in first] == [finding.to_dict() for finding in again]


def test_cost_is_that_of_a_few_attacks() -> None:
    """No more than 15 runs of PGD and one of Square over the probed images, whatever the model does."""
    calls: list[int] = []
    subject = make_subject(with_gradient(torch.neg))
    diagnose(subject, progress=lambda done, total, name: calls.append(done))
    forwards, backwards = (count / len(subject.images) for count in count_questions(subject))
    assert backwards < 15 * BUDGET.probe_steps
    assert forwards < 15 * (BUDGET.probe_steps + 2) + BUDGET.queries + 200
    assert calls == list(range(len(CHECKS) + 1))


@pytest.mark.parametrize(
    ("name", "kind", "make"),
    [
        ("finite_scores", "nan", lambda: Changed(after=lambda scores: scores * math.nan)),
        ("finite_scores", "infinite", lambda: Changed(after=lambda scores: scores * math.inf)),
        ("zero_gradients", "standing", lambda: Changed(before=lambda images: (3 * images).round() / 3)),
        ("zero_gradients", "hidden", lambda: Changed(after=lambda scores: 1000 * scores)),
        ("radius", "nothing_to_attack", lambda: Changed(after=lambda scores: scores * math.nan)),
        ("differentiable", "differentiable", lambda: Changed(before=lambda images: images.detach())),
    ],
)
def test_a_kind_says_which_of_its_findings_a_check_has(name: str, kind: str, make: Any) -> None:
    """Programs read the kind; sentences may change. A check that can find one thing only has its name for a kind."""
    assert check(name, make()).kind == kind


def test_a_check_that_could_not_be_made_says_so_by_its_kind() -> None:
    def fail(images: Tensor) -> Tensor:
        raise RuntimeError("no")

    assert CHECKS["steps"](make_subject(Changed(before=fail))).kind == "not_made"


# ---- outcomes laid side by side


def outcomes(name: str, robust: np.ndarray, gradients: int, **settings: Any) -> Outcomes:
    n = len(robust)
    columns: dict[str, Any] = {column: np.zeros(n, dtype=dtype) for column, dtype in COLUMNS.items()}
    columns |= {
        "index": np.arange(n),
        "prediction": np.where(robust, 0, 1),
        "backwards": np.full(n, gradients),
        "forwards": np.full(n, 5),
    }
    return Outcomes(name=name, about={"attack": settings}, **columns)


def evaluation_of(**parts: Outcomes) -> Evaluation:
    n = len(next(iter(parts.values())))
    return Evaluation(outcomes("clean", np.ones(n, dtype=bool), 0), parts)


def test_read_evidence_finds_who_broke_what() -> None:
    order = np.arange(200)
    evaluation = evaluation_of(
        entropy=outcomes("entropy", order >= 40, 9, kind="PGD", on="scores", loss="cross_entropy"),
        margin=outcomes("margin", order >= 80, 9, kind="PGD", on="scores", loss="margin"),
        square=outcomes("square", (order < 100) | (order >= 120), 0, kind="Square", on="scores"),
        members=outcomes("members", order >= 200, 9, kind="PGD", on={"name": "cheapest bits"}),
    )
    found = {finding.name: finding for finding in read_evidence(evaluation)}
    assert {name: finding.level for name, finding in found.items()} == {
        "attacks": "ok",
        "black_box_suite": "ok",
        "views": "alarm",
        "losses": "note",
    }
    assert found["views"].evidence["hidden_from_scores"] == 100
    assert found["losses"].evidence["hidden_from_cross_entropy"] == 40
    assert found["attacks"].evidence["attacks"][0] == {
        "attack": "members",
        "made_on": 200,
        "broken": 200,
        "broken_alone": 100,
    }
    without = Evaluation(
        evaluation.clean, {name: part for name, part in evaluation.outcomes.items() if name != "members"}
    )
    alarmed = {finding.name: finding for finding in read_evidence(without)}
    assert alarmed["black_box_suite"].level == "alarm"
    assert alarmed["black_box_suite"].evidence["broken_without_gradients_only"] == 20
    assert alarmed["views"].level == "ok"


def test_surrogates_and_functions_are_placed() -> None:
    order = np.arange(100)
    evaluation = evaluation_of(
        pgd=outcomes("pgd", order >= 0, 9, kind="PGD", on="scores", loss="margin"),
        averaged=outcomes("averaged", order >= 0, 9, on={"kind": "x.Averaged", "view": "scores"}),
        transfer=outcomes("transfer", order >= 50, 0, source={"kind": "x"}, attack={"on": "scores"}),
    )
    found = {finding.name: finding for finding in read_evidence(evaluation)}
    assert found["black_box_suite"].level == "ok"
    assert found["views"].evidence["broken_by_place"] == {"scores": 0, "surrogate": 50}
    assert found["views"].level == "alarm"


def test_attacks_of_a_cascade_and_attacks_around_another() -> None:
    """A stage is made on what stands and leaves the rest at no cost; where an attack looks, the one inside says."""
    order = np.arange(100)
    later = outcomes("later", (order < 20) | (order >= 60), 9, kind="InDouble", attack={"on": "linear"})
    later = replace(later, forwards=np.where(order < 20, 0, 5), backwards=np.where(order < 20, 0, 9))
    inside = {"kind": "PGD", "on": "scores", "loss": "cross_entropy"}
    first = outcomes("first", order >= 20, 9, kind="InDouble", attack=inside)
    found = {finding.name: finding for finding in read_evidence(evaluation_of(first=first, later=later))}
    assert found["views"].evidence["hidden_from_scores"] == 40
    assert found["views"].level == "alarm"
    assert found["losses"].evidence["cross_entropy"] == ["first"]
    assert found["attacks"].evidence["attacks"] == [
        {"attack": "later", "made_on": 80, "broken": 40, "broken_alone": 40},
        {"attack": "first", "made_on": 100, "broken": 20, "broken_alone": 20},
    ]


def test_no_attacks_no_findings_to_fear() -> None:
    clean = outcomes("clean", np.ones(3, dtype=bool), 0)
    assert all(finding.level == "ok" for finding in read_evidence(Evaluation(clean, {})))


# ---- the border, and the power of checks


class OverOtherScores(nn.Module):
    """The answer of one network, laid over the scores of another."""

    def __init__(self, height: float = 12.0) -> None:
        super().__init__()
        self.height, self.network, self.other = height, network(adversarial=True), network()

    def forward(self, images: Tensor) -> Tensor:
        answers = F.one_hot(self.network(images).argmax(dim=1), 10)
        scores: Tensor = self.height * answers + self.other(images.flip(3))
        return scores


def test_scores_that_do_not_explain_the_answers_keep_their_margin_at_the_border() -> None:
    lying = check("border", OverOtherScores(height=60.0))
    assert lying.level == "alarm"
    assert lying.evidence["kept_their_margin"] == lying.evidence["images"] > 15
    assert lying.evidence["margin_left"][1] > 0.8
    hard = check("border", Changed(after=lambda scores: F.one_hot(scores.argmax(dim=1), 10).float()))
    assert hard.level == "alarm"
    assert hard.evidence["margin_left"] == [1, 1, 1]


def test_scores_of_honest_networks_have_lost_their_margin_at_the_border() -> None:
    for model in (network(adversarial=True), Linear()):
        found = check("border", model, eps=0.02)
        assert found.level == "ok"
        assert found.evidence["margin_left"][2] < 1e-4
    rounded = check(
        "border", Changed(network(adversarial=True), before=lambda images: (3 * images).round() / 3)
    )
    assert rounded.level == "ok"
    assert 1e-4 < rounded.evidence["margin_left"][1] < 0.3
    constant = CHECKS["border"](make_subject(Changed(after=lambda scores: 0 * scores - torch.arange(10.0))))
    assert constant.kind == "nothing_to_attack"


def test_checks_look_at_what_stands() -> None:
    subject = replace(make_subject(network(), images=40), budget=replace(BUDGET, probe_images=16))
    stood = torch.arange(40) % 2 == 0
    looked = subject.standing_first(stood)
    assert looked.stood is not None
    assert looked.stood[:16].sum() == 12
    assert torch.equal(looked.images[:12], subject.images[stood][:12])
    assert torch.equal(looked.images[12:16], subject.images[~stood][:4])
    assert sorted(looked.labels.tolist()) == sorted(subject.labels.tolist())
    nothing_fell = subject.standing_first(torch.ones(40, dtype=torch.bool))
    assert torch.equal(nothing_fell.images, subject.images)


def test_fewer_images_that_stood_the_suite_sound_an_alarm() -> None:
    """Four of 24 images are too few among all of them, at 2 %, and too many among those that stood the suite."""
    subject = make_subject(network(adversarial=True), images=40)
    rows = torch.nonzero(network(adversarial=True)(subject.images).argmax(dim=1) == subject.labels).squeeze(
        1
    )[:24]
    assert len(rows) == 24
    subject = replace(subject, images=subject.images[rows], labels=subject.labels[rows])
    broken = torch.arange(24) < 4
    assert not probe_of(subject).breaks_too_much(broken, 0.02)
    assert probe_of(subject).breaks_too_much(torch.arange(24) < 5, 0.02)
    known = probe_of(subject.standing_first(torch.ones(24, dtype=torch.bool)))
    assert known.breaks_too_much(broken, 0.02)
    assert not known.breaks_too_much(torch.arange(24) < 3, 0.02)
    # Of a random model it is chance what stood.
    flickering = replace(subject, model=Changed(network(adversarial=True), before=noisy))
    assert not probe_of(flickering.standing_first(torch.ones(24, dtype=torch.bool))).stood.any()


@pytest.mark.parametrize("stands", [True, False])
def test_no_check_asks_about_no_image(stands: bool) -> None:
    """scikit-learn's models, among others, refuse a batch of nothing."""

    class Refusing(Linear):
        def forward(self, images: Tensor) -> Tensor:
            if not len(images):
                raise ValueError("a minimum of 1 image is required")
            scores = super().forward(images)
            return F.one_hot(scores.argmax(dim=1), 10) if stands else scores

    found = diagnose(make_subject(Refusing(), eps=0.001 if stands else 0.5))
    assert [finding.claim for finding in found if "error" in finding.evidence] == []
