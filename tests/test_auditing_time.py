"""An audit that is given minutes: it ends, says how far it came, and the next one goes on there."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn

from ecnn.attacks import PGD
from ecnn.attacks.deadlines import NO_TIME, OutOfTimeError, time_is_over, until
from ecnn.auditing import Audit, audit
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("one_thread", "short_lessons")
BALL: dict[str, Any] = {"norm": "linf", "eps": 0.04}
TINY = dataclasses.replace(
    toys.TINY, images=60, steps=10, probe_images=8, probe_steps=5, queries=20, eot=4, turns=1
)


class Clock:
    """Stands still but while a model answers: a second for every pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    auditing = (f"ecnn.auditing.{name}" for name in ("auditor", "examination", "first_answers"))
    for name in ("ecnn.attacks.deadlines", *auditing):
        monkeypatch.setattr(sys.modules[name], "time", SimpleNamespace(monotonic=made.monotonic))
    return made


class Timed(nn.Module):
    """A small network; `clock` is no part of its state."""

    def __init__(self, clock: Clock, noise: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3, 36, generator=generator))
        self.noise = noise
        object.__setattr__(self, "clock", clock)

    def __deepcopy__(self, memo: Any) -> Timed:
        made = Timed(self.clock, self.noise)  # type: ignore[arg-type]
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, images: Tensor) -> Tensor:
        self.clock.now += 1  # type: ignore[operator,union-attr]
        scores = torch.tanh((images.flatten(1) - 0.5) @ self.weight.T)
        return scores + self.noise * torch.randn_like(scores) if self.noise else scores


@pytest.fixture(scope="module")
def split() -> Split:
    images = torch.randint(256, (60, 1, 6, 6), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    return Split(images, Timed(Clock())(images.float() / 255).argmax(dim=1))


def names(found: Audit) -> list[str]:
    return [stage.name for stage in found.stages]


def of_time(found: Audit) -> Any:
    """The finding that says how far it came; None where it came to its end."""
    return next((finding for finding in found.findings if finding.name == "out_of_time"), None)


def test_no_time_at_all_leaves_the_clean_images(clock: Clock, split: Split) -> None:
    found = audit(Timed(clock), split, **BALL, claim=1.0, budget=TINY, minutes=0)
    assert (found.accuracy, found.clean_accuracy, found.plain_accuracy) == (1.0, 1.0, 1.0)
    assert found.verdict == "inconclusive"
    assert names(found) == []
    evidence = of_time(found).evidence
    assert (evidence["attacks"], evidence["checks"], evidence["standing"]) == (0, 0, 60)
    assert of_time(found).is_open
    assert "| plain attack alone | not made |" in found.markdown()


def test_what_was_found_in_time_counts_and_the_next_audit_goes_on(
    clock: Clock, split: Split, tmp_path: Path
) -> None:
    """Interrupted at several moments; in the end all is as in an audit that was never interrupted."""
    whole = audit(Timed(clock), split, **BALL, budget=TINY, run_dir=tmp_path / "whole")
    assert of_time(whole) is None
    assert 0 < whole.accuracy < whole.clean_accuracy
    accuracies = []
    for seconds in (25, 60, 400):
        started = clock.now
        found = audit(
            Timed(clock), split, **BALL, budget=TINY, run_dir=tmp_path / "cut", minutes=seconds / 60
        )
        assert clock.now - started < seconds + 700  # to judge what was found takes passes of its own
        assert of_time(found) is not None
        assert names(found) == names(whole)[: len(names(found))]
        accuracies.append(found.accuracy)
    assert sorted(accuracies, reverse=True) == accuracies
    assert accuracies[-1] < 1
    last = audit(Timed(clock), split, **BALL, budget=TINY, run_dir=tmp_path / "cut")
    assert of_time(last) is None
    assert names(last) == names(whole)
    assert (last.accuracy, last.broken_by, last.verdict) == (whole.accuracy, whole.broken_by, whole.verdict)
    assert [finding.name for finding in last.findings] == [finding.name for finding in whole.findings]


def test_a_refuted_claim_needs_no_more_time(clock: Clock, split: Split) -> None:
    found = audit(Timed(clock), split, norm="linf", eps=0.3, claim=0.9, budget=TINY, minutes=4)
    assert found.verdict == "not believable"


def test_a_random_model_ends_too(clock: Clock, split: Split) -> None:
    found = audit(Timed(clock, noise=0.02), split, **BALL, claim=1.0, budget=TINY, minutes=5)
    assert found.is_random
    assert of_time(found) is not None
    assert found.verdict != "believable"


def test_time_that_suffices_changes_nothing(clock: Clock, split: Split) -> None:
    found = audit(Timed(clock), split, **BALL, budget=TINY, minutes=1e6)
    whole = audit(Timed(clock), split, **BALL, budget=TINY)
    assert (found.accuracy, found.broken_by, names(found)) == (whole.accuracy, whole.broken_by, names(whole))


@pytest.mark.parametrize("minutes", [-1, float("nan"), float("inf"), "ten", True])
def test_minutes_that_are_none_are_refused(minutes: Any, clock: Clock, split: Split) -> None:
    with pytest.raises(InputError, match="minutes"):
        audit(Timed(clock), split, **BALL, budget=TINY, minutes=minutes)


def test_a_search_ends_in_the_middle_and_an_evaluation_says_so(clock: Clock, split: Split) -> None:
    """By itself an attack raises; an evaluation that keeps going names it, and tries no other."""
    attack = PGD(norm="linf", eps=0.1, steps=50, step_size=0.01)
    model, (images, labels) = Timed(clock), split[:4]
    with until(clock.now + 10):
        with pytest.raises(OutOfTimeError):
            attack(model, images, labels)
        assert time_is_over()
        with until(clock.now + 100):  # an inner end is no later than the outer one
            assert time_is_over()
        found = evaluate(model, split, {"one": attack, "other": attack}, limit=8, keep_going=True)
    assert not time_is_over()
    assert found.failures == {"one": NO_TIME, "other": NO_TIME}
    assert found.outcomes == {}


class Locked(Timed):
    """It cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Timed:
        raise TypeError("locked")


@pytest.mark.parametrize("kind", [Timed, Locked])
def test_questions_before_the_attacks_leave_time_for_attacks(
    kind: type[Timed], clock: Clock, split: Split
) -> None:
    """A pass takes a second: all questions that look for memory alone would take longer than the whole audit may."""
    found = audit(kind(clock), split, **BALL, budget=TINY, minutes=2.5)
    assert names(found)[:1] == ["pgd-ce"]
    assert of_time(found).is_open
