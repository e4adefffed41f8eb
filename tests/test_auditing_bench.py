"""The registry of false and honest models: what it holds, that tricks hide and nothing else; some audited."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import benchmark
from torch import Tensor, nn

import ecnn
from ecnn.auditing import BUDGETS, audit, bench
from ecnn.auditing.bench import table
from ecnn.auditing.bench.claims import Subjects
from ecnn.auditing.bench.informed import share_right
from ecnn.auditing.bench.networks import dense, interval_margins, two_symbols
from ecnn.data import Dataset
from ecnn.errors import InputError
from ecnn.objectives import MemberObjective

COUNT = 60
#: Trained in about a second each.
SMALL = ["one_hot_answer", "remembers_questions"]


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


def test_the_docs_show_one_model_of_each_family() -> None:
    page = (Path(__file__).parents[1] / "docs" / "auditing.md").read_text()
    shown = dict(re.findall(r"^- \*\*(.*?)\*\* \(`(\w+)`\): ", page, re.M))
    assert list(shown) == [family for family in bench.FAMILIES if family != "honest"]
    assert [name for family, name in shown.items() if name not in bench.FAMILIES[family]] == []


def test_a_name_that_is_not_there_gets_a_guess() -> None:
    with pytest.raises(InputError, match="did you mean 'thermometer'"):
        bench.build("termometer")


def test_a_trick_stands_for_its_model_before_or_after_a_network() -> None:
    subjects = Subjects("second")

    @subjects.false("shuffled", bench.training(epochs=1), bench.BY_PGD, before=dense)
    class FirstImage(nn.Module):
        """The first image is added.

        This is not said.
        """

        def __init__(self, data: Dataset) -> None:
            super().__init__()
            self.image = data.train[:1][0]

    @subjects.false("shuffled", bench.training(epochs=1), bench.BY_PGD, after=dense)
    class Turned(nn.Module):
        """Scores are turned round."""

    first, turned = subjects
    assert (first.name, first.why, first.half) == ("first_image", "the first image is added", "second")
    assert (turned.name, turned.why) == ("turned", "scores are turned round")
    before, after = first.make(digits()), turned.make(digits())
    assert isinstance(before, nn.Sequential)
    assert isinstance(after, nn.Sequential)
    assert [type(part) for part in before] == [FirstImage, nn.Sequential]
    assert [type(part) for part in after] == [nn.Sequential, Turned]


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


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", bench.SUBJECTS)
def test_every_model_is_as_said(name: str, weights: Path) -> None:
    """Useful without an attack; a false claim lies 5 points above what an informed attacker leaves, a true one not."""
    subject = bench.SUBJECTS[name]
    started = time.process_time()
    model = bench.build(name, data=digits(), folder=weights)
    assert time.process_time() - started < 120
    images, labels = digits().test[:100]
    excess = subject.claimed(model, images, labels) - subject.informed(model, images, labels)
    assert (excess <= 0.05) if subject.honest else (excess > 0.05)
    assert share_right(bench.build(name, data=digits(), folder=weights), images, labels).mean() > 0.75


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


def not_trained(model: nn.Module, data: Dataset) -> None:
    pass


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> bench.Subject:
    """A model of one's own, in the registry: linear, untrained, said to be always right."""

    def make(data: Dataset) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    subject = bench.false(
        "mine", "mine", "it is only said so", make, not_trained, (lambda *_: 1.0, "nothing")
    )
    monkeypatch.setitem(bench.SUBJECTS, "mine", subject)
    return subject


@pytest.mark.usefixtures("mine")
def test_a_tool_of_ones_own_that_returns_points_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that leaves the ball or raises: that is written down, and its row is not asked for again."""

    def moves(distance: float) -> Any:
        def run(question: bench.Question) -> Tensor:
            return (question.images + distance).clamp(0, 1)

        return run

    def raises(question: bench.Question) -> Tensor:
        raise RuntimeError("no")

    runs = {"stays": moves(0.0), "leaves": moves(0.3), "raises": raises}
    for name, run in runs.items():
        monkeypatch.setitem(bench.TOOLS, name, bench.Tool(name=name, what="a test", run=run))
    rows = {name: bench.examine(name, "mine", limit=40, folder=tmp_path, data=digits()) for name in runs}
    assert rows["stays"]["verdict"] == "flagged"  # an untrained network is not always right
    assert rows["stays"]["accuracy"] == rows["stays"]["verified"] < 0.6
    assert rows["leaves"]["verdict"] == rows["raises"]["verdict"] == "raised"
    assert "outside the ball" in rows["leaves"]["error"]
    assert rows["raises"]["error"] == "RuntimeError: no"
    subject = bench.SUBJECTS["mine"]
    assert table.kept_row("raises", subject, limit=40, folder=tmp_path) == rows["raises"]
    assert table.kept_row("raises", subject, limit=41, folder=tmp_path) is None
    (gathered,) = table.gather([subject], runs, limit=40, folder=tmp_path)
    assert gathered["truth"] <= rows["stays"]["accuracy"]
    assert gathered["false"]
    made = table.summarize([gathered], "raises")
    assert (made["false"], made["false_flagged"], made["false_raised"]) == (1, 0, 1)
    exact = {"network": "linear", "eps": 0.1, "images": 8, "right": 1, "by_intervals": 1, "by_crown": 1}
    page = benchmark("audit").markdown(
        {
            "environment": {"device": "a", "torch": "b"},
            "budgets": [],
            "limit": 40,
            "tools": dict.fromkeys(runs, "a test"),
            "rows": [gathered],
            "truths": [{**exact, "robust": 1, "audited": 1}],
        }
    )
    number = f"{100 * rows['stays']['accuracy']:.1f}"
    assert f"| **{number}** | - | - |" in page
    assert "| raises | 0 of 1 | 0 | 0 | 1 | - |" in page


def test_what_was_remembered_does_not_count_as_truth() -> None:
    """A tool that asks about clean images first sees a model that never changes its answers; fresh copies do."""
    torch.manual_seed(0)
    model = bench.SUBJECTS["remembers_questions"].make(digits()).eval()
    images = digits().test[:40][0]
    labels = bench.open_tricks(model)(images).argmax(dim=1)

    def run(question: bench.Question) -> Tensor:
        question.model(question.images)
        return (question.images + 0.1 * torch.randn(question.images.shape).sign()).clamp(0, 1)

    question = bench.Question(
        model=model, images=images, labels=labels, eps=0.1, claim=1.0, split=digits().test
    )
    answer = bench.Tool(name="random", what="a test", run=run).answer(question)
    assert answer.accuracy == 1.0
    assert answer.verified < 1.0


def test_the_table_counts_what_tools_said() -> None:
    """Four models of one tool by hand: secrets do not count, a crash is no flag, the excess is that over the truth."""

    def row(
        claim: float, truth: float, accuracy: float | None, verdict: str, detectable: bool = True
    ) -> table.Row:
        said = {"verdict": verdict, "seconds": 2.0, "verified": accuracy}
        said |= {} if accuracy is None else {"accuracy": accuracy}
        about = {"claim": claim, "truth": truth, "false": claim - truth > 0.05, "detectable": detectable}
        return {"name": "x", "honest": False, "protocol": "", "tools": {"tool": said}, **about}

    rows = [
        row(0.9, 0.2, 0.21, "flagged"),
        row(0.9, 0.2, 0.5, "inconclusive"),
        row(0.9, 0.2, None, "raised"),
        row(0.9, 0.9, 0.9, "believed"),
        row(0.9, 0.0, 0.9, "believed", detectable=False),
    ]
    made = table.summarize(rows, "tool")
    assert (made["false"], made["false_flagged"], made["false_inconclusive"], made["false_raised"]) == (
        3,
        1,
        1,
        1,
    )
    assert (made["true"], made["true_flagged"], made["true_believed"]) == (1, 0, 1)
    assert made["false_excess_median"] == pytest.approx(0.155)
    assert made["false_excess_above"] == 0.5
    assert made["seconds"] == 8.0
    assert "false claims flagged: 1 of 3 (33.3 %); asked: 95 %" in table.goals(rows, "tool")


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
@pytest.mark.usefixtures("short_lessons")
@pytest.mark.parametrize(
    "name",
    [
        "decoy",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("rounded_pixels", "q2_hinge", "scaled_logits")
        ),
    ],
)
def test_false_claims_are_flagged(name: str) -> None:
    """By less than a quick audit does: fewer steps and queries, shorter lessons, no attack again with more."""
    subject = bench.SUBJECTS[name]
    model = subject.build(digits())
    less = dataclasses.replace(
        BUDGETS["quick"], name="less", images=40, steps=15, turns=0, probe_images=8, probe_steps=5, queries=50
    )
    claim = subject.claimed(model, *digits().test[: less.images])
    torch.manual_seed(0)
    result = audit(model, digits().test, norm="linf", eps=subject.eps, claim=claim, budget=less)
    assert claim - result.accuracy > 0.05
    assert result.verdict == "not believable"
    assert result.exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["linear", *(pytest.param(name, marks=pytest.mark.full) for name in ("certified", "adversarial_dense"))],
)
def test_honest_claims_are_believed(name: str) -> None:
    """tests/test_auditing_truth.py has a smaller network that was trained adversarially."""
    subject = bench.SUBJECTS[name]
    model = subject.build(digits())
    claim = subject.claimed(model, *digits().test[:COUNT])
    result = audit(
        model, digits().test, norm="linf", eps=subject.eps, claim=claim, limit=COUNT, budget="quick"
    )
    assert result.verdict == "believable"
    assert result.exit_code == 0
    if subject.protocol != "AutoAttack":  # proven: no attack can go below
        assert result.accuracy >= claim
    else:
        assert result.accuracy <= claim + 0.005
