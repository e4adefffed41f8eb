"""Doubts are answered in turns until nothing moves, and how much may have been missed is said."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn

from ecnn import files
from ecnn.auditing import CHECKS, Audit, Subject, audit, diagnose, load_audit
from ecnn.auditing.power import Power, read_power
from ecnn.auditing.remarks import luck_of
from ecnn.auditing.responses import RESPONSES, Responses, enlarged, settle, take_turns
from ecnn.auditing.stages import base_name
from ecnn.auditing.surrogates import Examples
from ecnn.auditing.verdicts import judge
from ecnn.data import Split

EPS = 0.04
LEVELS = 5  # so coarse that only pixels near the middle between two levels can be moved
BUDGET = dataclasses.replace(
    toys.TINY, images=300, steps=15, probe_images=32, probe_steps=15, queries=150, eot=8, turns=2
)


class Rounded(toys.LinearOfThree):
    """Reads pixels rounded to a few levels: no gradient, and what stands can be computed."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((images * (LEVELS - 1)).round() / (LEVELS - 1))


class Noisy(toys.LinearOfThree):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images + 0.1 * torch.randn_like(images))


def make_split(count: int = 300) -> Split:
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(256, (count, 1, 6, 6), generator=generator, dtype=torch.uint8)
    return Split(images, Rounded()(images.float() / 255).argmax(dim=1))


def robust_share(split: Split) -> float:
    """Share of images that stand in `Rounded`: each pixel has one or two levels within reach."""
    images, labels = split[:]
    flat, steps = images.flatten(1).double(), LEVELS - 1
    low, high = (((flat + side * EPS).clamp(0, 1) * steps).round() / steps - 0.5 for side in (-1, 1))
    weight = Rounded().weight.detach().double()
    stands = torch.ones(len(flat), dtype=torch.bool)
    for other in range(len(weight)):
        slopes = weight[labels] - weight[other]
        least = torch.where(slopes > 0, low, high) * slopes
        stands &= (least.sum(dim=1) > 0) | (labels == other)
    return float(stands.double().mean())


@pytest.fixture(scope="module")
def split() -> Split:
    return make_split()


@pytest.fixture(scope="module", autouse=True)
def _short_lessons() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["ecnn.auditing.surrogates"], "_STUDENT_STEPS", 20)
        yield


@pytest.fixture(scope="module")
def responses(split: Split) -> Responses:
    return make_responses(toys.LinearOfThree(), split)


@pytest.fixture(scope="module")
def rounded(split: Split) -> Audit:
    return audit(Rounded(), split, norm="linf", eps=EPS, claim=robust_share(split), budget=BUDGET)


def test_a_model_that_hides_its_gradient_and_is_honest_is_believed(rounded: Audit, split: Split) -> None:
    truth = robust_share(split)
    assert 0.1 < truth < 0.9
    alarms = {finding.name: finding for finding in rounded.findings if finding.level == "alarm"}
    assert "zero_gradients" in alarms
    assert alarms["zero_gradients"].evidence["converged"]["alone"] <= 1
    assert rounded.accuracy == pytest.approx(truth, abs=0.01)
    assert rounded.accuracy >= truth
    assert rounded.verdict == "believable", rounded.markdown()
    assert "have converged" in rounded.reason
    assert any(stage.name == "straight-through-x2" for stage in rounded.stages)


class Centring(toys.LinearOfThree):
    """Before it classifies, it moves the image by a gradient of its own, which changes no answer by much."""

    def forward(self, images: Tensor) -> Tensor:
        with torch.enable_grad():
            moved = images.detach().clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad((moved - 0.5).square().sum(), moved)
        return super().forward(images - 0.01 * gradient)


def test_an_honest_model_that_takes_gradients_is_believed_once_attacks_converge(split: Split) -> None:
    images, _ = split[:]
    own = Split((255 * images).round().to(torch.uint8), Centring()(images).argmax(dim=1))
    found = audit(Centring(), own, norm="linf", eps=0.03, budget=BUDGET)
    alarm = next(finding for finding in found.findings if finding.name == "autoattack_dynamic")
    assert alarm.level == "alarm"
    assert alarm.evidence["converged"]["alone"] <= 1
    assert 0.1 < found.accuracy < 0.9
    assert found.verdict == "trustworthy", found.markdown()


def test_the_figure_is_beside_the_verdict(rounded: Audit, tmp_path: Any) -> None:
    assert rounded.power is not None
    assert rounded.missed == rounded.power.missed
    assert 0 < (rounded.missed or 0) < 0.05
    assert f"may have missed up to {100 * (rounded.missed or 0):.1f} % of the images" in rounded.reason
    assert rounded.markdown().count("The attacks may have missed up to") == 1
    path = rounded.save(tmp_path / "audit.json")
    assert load_audit(path) == rounded
    older = rounded.to_dict()
    del older["power"]
    files.write_json(path, older)
    assert load_audit(path).power is None


def make_power(**changes: Any) -> Power:
    usual: dict[str, Any] = {
        "images": 200, "standing": 150.0, "broken": 40, "retried": 40, "found_again": 30, "alone": 0,
        "effort": 1, "doubling": 0.0,
    }  # fmt: skip
    return Power(**{**usual, **changes})


def test_what_is_proven_was_not_missed() -> None:
    whole, some = make_power(proven=150), make_power(proven=149, found_again=2)
    assert whole.missed == 0.0
    assert whole.sentence() == "The attacks missed no image: all that they left are proven robust."
    assert (make_power(found_again=2).missed or 0) > 1 / 200
    assert some.missed == 1 / 200
    assert make_power(proven=150, retried=0, found_again=0).missed == 0.0
    assert make_power(proven=149, retried=0, found_again=0).missed is None
    assert read_power(some.to_dict()) == some
    old = {name: value for name, value in some.to_dict().items() if name != "proven"}
    assert read_power(old) == make_power(found_again=2)


@pytest.mark.parametrize(
    ("name", "base"), [("rays-long-x4", "rays-long"), ("rays", "rays"), ("my-xylophone", "my-xylophone")]
)
def test_the_name_of_an_attack_without_its_effort(name: str, base: str) -> None:
    assert base_name(name) == base


def test_capture_and_recapture() -> None:
    assert make_power(standing=0.0).missed == 0
    assert make_power(retried=0, found_again=0).missed is None
    assert make_power(found_again=0).missed is None
    # All of 40 were found again: at least 93.7 % would be. Then three images at most were found by neither, and the
    # doubling that broke none says the same.
    assert make_power(found_again=40).missed == pytest.approx(3 / 200, abs=0.001)
    # Twenty broken without gradients, at most 28; at least 62.5 % are found, so that 0.6 of 28 are not.
    known = make_power(alone=20)
    assert known.missed == pytest.approx(28 * 0.375 / 0.625 / 200, rel=0.06)
    assert not known.agrees
    assert make_power(alone=4).agrees
    assert make_power(alone=20, found_again=36).agrees
    assert not make_power(alone=20, found_again=35).agrees
    assert make_power(alone=20, retried=16, found_again=14).agrees
    assert not make_power(alone=20, retried=16, found_again=13).agrees
    few = make_power(alone=20, retried=3, found_again=1)
    assert few.agrees
    assert few.missed is not None
    assert few.missed > 0.05
    assert not make_power(alone=20, retried=0, found_again=0).agrees
    figures = [make_power(found_again=again).missed for again in (40, 30, 20, 10, 2)]
    assert figures == sorted(figures, key=lambda figure: figure or 0)
    assert make_power(found_again=1, standing=5.0).missed == 5 / 200
    assert make_power(doubling=20.0).missed == pytest.approx(28 / 200, abs=0.01)
    assert not make_power(doubling=2.0).has_flattened
    assert not make_power(doubling=None).has_flattened
    assert read_power(make_power().to_dict()) == make_power()


def make_subject(model: nn.Module, split: Split, **changes: Any) -> Subject:
    images, labels = split[:60]
    given = {"norm": "linf", "eps": EPS, "budget": BUDGET, **changes}
    return Subject(model=model, images=images, labels=labels, **given)


def make_responses(model: nn.Module, split: Split, *, is_random: bool = False) -> Responses:
    subject = make_subject(model, split)
    examples = Examples(*split[60:160], True)
    return Responses(subject, 3, is_random, examples, None, True)


class Counter:
    """Stages that break what they are told to."""

    def __init__(self, breaks: list[float], searched: float = 1) -> None:
        self.breaks, self.made, self.searched = breaks, list[list[str]](), searched
        self.attacks: dict[str, Any] = {}

    def make(self, attacks: dict[str, Any], *, seed: int) -> float:
        self.made.append(list(attacks))
        return self.breaks[len(self.made) - 1]

    def standing(self) -> float:
        return 10.0

    def proven(self) -> dict[str, float]:
        return {"scaled-ce": 3, "relay-x2": 2, "rays": self.searched}

    def useful(self, attacks: dict[str, Any]) -> set[str]:
        return {"scaled-ce-x2", "square-x2"}


@pytest.mark.parametrize(
    ("breaks", "doubts", "turns", "last"),
    [
        ([0, 9], ["differentiable"], 1, 0),
        ([5, 0], ["steps"], 2, 0),
        ([5, 4], ["noise"], 2, 4),
        ([0], [], 1, 0),
        ([-2.5], [], 1, 0),  # as of a random model, of which more images' worth may stand than before
    ],
)
def test_turns_go_on_until_nothing_moves(
    breaks: list[float], doubts: list[str], turns: int, last: float, responses: Responses
) -> None:
    stages: Any = Counter(breaks)
    found = take_turns(responses, stages, doubts)
    assert (found.effort, found.doubling) == (turns, last)
    names = [name for made in stages.made for name in made]
    assert all(name.endswith("-x2") for name in stages.made[0])
    # What broke nothing in the first turn is not made in the second.
    assert turns == 1 or set(stages.made[1]) == {"scaled-ce-x4", "square-x4"}
    assert (
        names == ["apgd-margin-x2"] if not doubts else {"scaled-ce-x2", "square-x2", "relay-x2"} <= set(names)
    )


def test_a_long_search_is_repeated_where_more_than_luck_spoke_for_it(responses: Responses) -> None:
    budget = dataclasses.replace(BUDGET, answers=2000)
    subject = dataclasses.replace(responses.subject, budget=budget)
    longer = Responses(subject, 3, False, responses.examples, None, True)
    for searched, is_made in ((1, False), (2, True)):
        stages: Any = Counter([0], searched)
        stages.attacks = {"rays": None, "rays-long": None}
        take_turns(longer, stages, ["noise"])
        assert ("rays-long-x2" in stages.made[0]) is is_made


def test_a_suite_without_a_long_search_is_answered_with_one(responses: Responses) -> None:
    """The quick budget has a short search alone, which was made again with as many queries."""
    assert BUDGET.answers <= 1000
    larger = dataclasses.replace(responses.subject, budget=dataclasses.replace(BUDGET, answers=1000))
    answers: Any = Responses(larger, 3, False, responses.examples, None, True)
    for effort in (2, 4):
        made = answers.attacks(["noise"], effort, made=["rays", "square"])
        assert {name: made[name].queries for name in made if "rays" in name} == {
            f"rays-long-x{effort}": 1000 * effort
        }


def test_effort_is_doubled_and_every_check_has_a_response(split: Split, responses: Responses) -> None:
    twice = enlarged(BUDGET, 2)
    assert (twice.steps, twice.queries, twice.eot) == (2 * BUDGET.steps, 2 * BUDGET.queries, 2 * BUDGET.eot)
    assert (
        enlarged(BUDGET, 8).eot == 2 * BUDGET.eot
    )  # each step makes all passes: eight times both would be 64
    assert (twice.answers, twice.searched > 10**6) == (2 * BUDGET.answers, True)  # on all that stand
    assert set(RESPONSES) <= set(CHECKS) | {"black_box_suite", "nan_gradients", "attacks_not_made", "luck"}
    unknown = responses.attacks(["a check of tomorrow"], 2)
    assert "square-x2" in unknown
    assert {"rays-x2", "rays-long-x2"} & set(unknown) == {"rays-x2"}
    again = responses.attacks(["noise"], 2, proven=["student"], made=["square", "student", "relay"])
    assert {"square-x2", "student-x2", "relay-x2"} & set(again) == {"student-x2", "relay-x2"}
    searched = responses.attacks(["noise"], 16, proven=["rays"])  # the long search begins like the short one
    assert {"rays-x16", "rays-long-x16"} & set(searched) == {"rays-long-x16"}
    averaged = make_responses(Noisy(), split, is_random=True).attacks(["loss_path"], 4)
    square: Any = averaged["square-x4"]
    assert square.passes == max(4, BUDGET.eot // 2)
    assert square.attack.queries == 2 * BUDGET.queries  # like the passes: twice at most


def test_what_no_attack_can_answer_stays_open(rounded: Audit) -> None:
    found = next(finding for finding in rounded.findings if finding.name == "zero_gradients")
    bare = dataclasses.replace(found, evidence={})
    assert not settle(bare, is_answered=True, facts={}).is_open
    assert settle(bare, is_answered=False, facts={}).is_open
    assert settle(dataclasses.replace(bare, name="stateful"), is_answered=True, facts={}).is_open


def test_noise_is_not_taken_for_masking(split: Split) -> None:
    """A linear model with noise has the gradient of a linear model."""
    findings = diagnose(make_subject(Noisy(), split, eps=0.03))
    assert next(finding for finding in findings if finding.name == "randomness").level != "ok"
    assert not [finding.name for finding in findings if finding.is_open]


class Scattered(toys.LinearOfThree):
    """Wrong at one of so many patterns of grey levels, which no gradient leads to."""

    def __init__(self, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.key = torch.randint(1, 2**20, (36,), generator=torch.Generator().manual_seed(4))

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        mixed = ((images.flatten(1) * 255).round().long() * self.key).sum(dim=1) * 2654435761 % 2**31
        return torch.where(((mixed // 64) % self.rate == 0)[:, None], scores.roll(1, 1), scores)


def test_what_falls_by_luck_is_looked_for_until_nothing_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attack meets some of the scattered points; nearly all images fall once thousands of points are tried."""
    auditor = sys.modules["ecnn.auditing.auditor"]
    monkeypatch.setattr(auditor, "diagnose", lambda subject, progress=None: [])
    images = torch.randint(256, (60, 1, 6, 6), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    split = Split(images, toys.LinearOfThree()(images.float() / 255).argmax(dim=1))
    changes: dict[str, Any] = {"steps": 20, "queries": 40, "targets": 1, "answers": 300, "turns": 3}
    budget = dataclasses.replace(toys.TINY, images=60, **changes)
    settings: dict[str, Any] = {"norm": "linf", "eps": 0.01, "budget": budget}
    found = audit(Scattered(300), split, **settings)
    (luck,) = [finding for finding in found.findings if finding.name == "luck"]
    assert luck.level == "alarm"
    assert found.accuracy <= 0.05
    monkeypatch.setattr(auditor, "luck_of", lambda power: [])
    assert audit(Scattered(300), split, **settings).accuracy >= 0.3


def test_luck_is_where_two_kinds_of_attacks_break_other_images() -> None:
    assert [finding.kind for finding in luck_of(make_power(alone=20))] == ["luck"]
    assert not luck_of(make_power(alone=4))
    assert not luck_of(make_power(alone=20, found_again=38))
    assert not luck_of(make_power(alone=20, standing=0.0))
    assert not luck_of(make_power(alone=20, retried=0, found_again=0))


@pytest.mark.parametrize(("asked", "accuracy", "images"), [(0.6, 0.58, 100), (0.8, 0.79, 30), (0.5, 0.5, 1)])
def test_more_images_are_asked_for_than_were_audited(asked: float, accuracy: float, images: int) -> None:
    verdict, reason = judge(accuracy, images, [], claim=asked)
    assert verdict == "inconclusive"
    wanted = int(reason.split(" less. ")[1].split(" ")[0].replace(",", ""))
    assert wanted > images
    assert judge(accuracy, wanted, [], claim=asked)[0] != "inconclusive"


def test_no_sign_outweighs_a_proof() -> None:
    alarms = ["out_of_time"]
    assert judge(0.9, 200, alarms, claim=0.8)[0] == "inconclusive"
    verdict, reason = judge(0.9, 200, alarms, claim=0.8, certified=0.8)
    assert verdict == "believable"
    assert "80.0 % of the images are proven robust" in reason
    assert judge(0.9, 200, alarms, claim=0.81, certified=0.8)[0] == "inconclusive"
    assert (
        judge(0.9, 200, alarms, certified=0.8)[0] == "inconclusive"
    )  # of the number itself nothing is proven
    assert judge(0.6, 200, [], claim=0.8, certified=0.5)[0] == "not believable"
