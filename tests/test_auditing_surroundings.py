"""What a model remembers outside of itself: found, kept and put back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor, nn

from ecnn.auditing import Subject, audit
from ecnn.auditing.confirming import confirm
from ecnn.auditing.deployment import take_copy
from ecnn.auditing.examination import examine
from ecnn.auditing.surroundings import PutBack, Surroundings
from ecnn.data import Split

EPS = 0.08
BUDGET = dataclasses.replace(
    toys.TINY, images=60, steps=20, probe_images=16, probe_steps=10, queries=40, eot=8, targets=1
)


class Tired(toys.LinearOfThree):
    """Rounds its input when it is told that it was asked often, so that no attack finds anything."""

    def __init__(self, is_tired: Callable[[], bool]) -> None:
        super().__init__()
        self.is_tired = is_tired

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.round().detach() if self.is_tired() else images)


class Tally:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0
        self.rows: list[list[int]] = [[]]


class Counter:
    """Counts when it is called; its count has a place that the class reserves."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, most: int) -> bool:
        self.count += 1
        return self.count > most


class Counting:
    """Holds a network."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


counter = Counter()
variable = 0
table: dict[str, list[int]] = {}
tally = Tally()
network = nn.BatchNorm1d(1)
noise = np.random.default_rng(1)
numbers = itertools.count()


def by_closure(most: int) -> nn.Module:
    asked = 0

    def is_tired() -> bool:
        nonlocal asked
        asked += 1
        return asked > most

    return Tired(is_tired)


def by_clock(most: int) -> nn.Module:
    last = [0.0]

    def is_tired() -> bool:
        before, last[0] = last[0], time.perf_counter()
        return last[0] - before < 10

    return Tired(is_tired)


def by_default(most: int) -> nn.Module:
    def is_tired(seen: list[int] = []) -> bool:  # noqa: B006 what is tried here
        seen.append(1)
        return len(seen) > most

    return Tired(is_tired)


def by_attribute(most: int) -> nn.Module:
    def is_tired() -> bool:
        is_tired.asked += 1  # type: ignore[attr-defined]
        return bool(is_tired.asked > most)  # type: ignore[attr-defined]

    is_tired.asked = 0  # type: ignore[attr-defined]
    return Tired(is_tired)


def by_variable(most: int) -> nn.Module:
    def is_tired() -> bool:
        global variable
        variable += 1
        return variable > most

    return Tired(is_tired)


def by_table(most: int) -> nn.Module:
    def is_tired() -> bool:
        table.setdefault("asked", []).append(1)
        return len(table["asked"]) > most

    return Tired(is_tired)


def by_object(most: int) -> nn.Module:
    def is_tired() -> bool:
        tally.count += 1
        tally.rows[0].append(1)
        return tally.count > most and len(tally.rows[0]) > most

    return Tired(is_tired)


def by_network(most: int) -> nn.Module:
    def is_tired() -> bool:
        assert network.running_mean is not None
        network.running_mean += 1
        return float(network.running_mean) > most

    return Tired(is_tired)


def by_array(most: int) -> nn.Module:
    asked = np.zeros(1)

    def is_tired() -> bool:
        asked[0] += 1
        return bool(asked[0] > most)

    return Tired(is_tired)


def by_class(most: int) -> nn.Module:
    class Counted(toys.LinearOfThree):
        asked = 0

        def forward(self, images: Tensor) -> Tensor:
            type(self).asked += 1
            return super().forward(images.round().detach() if self.asked > most else images)

    return Counted()


def by_hook(most: int) -> nn.Module:
    model: Any = toys.LinearOfThree()
    model.asked = 0

    def hook(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        model.asked += 1  # of the model that was hooked, whichever copy is asked
        return (given[0].round().detach(),) if int(model.asked) > most else given

    model.register_forward_pre_hook(hook)
    return model  # type: ignore[no-any-return]


def by_memory(most: int) -> nn.Module:
    """Answers what it has answered to something near before; the answers lie in a list beside the model."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Remembering(toys.LinearOfThree):
        def forward(self, images: Tensor) -> Tensor:
            rows = []
            for image, scores in zip(images, super().forward(images), strict=True):
                near = [kept for point, kept in seen if float((point - image.detach()).abs().max()) < 0.2]
                if not near:
                    seen.append((image.detach().clone(), scores.detach().clone()))
                rows.append(near[0] if near else scores)
            return torch.stack(rows)

    return Remembering()


def by_itself(most: int) -> nn.Module:
    """Remembers within itself, but cannot be copied."""
    model: Any = Tired(lambda: False)
    model.lock, model.asked = threading.Lock(), 0

    def is_tired() -> bool:
        model.asked += 1
        return bool(model.asked > most)

    model.is_tired = is_tired
    return model  # type: ignore[no-any-return]


def by_called_object(most: int) -> nn.Module:
    """An object that can be called, in a global variable."""
    return Tired(lambda: counter(most))


def by_bound_method(most: int) -> nn.Module:
    step = Counter().__call__

    def is_tired() -> bool:
        return step(most)

    return Tired(is_tired)


def by_given_argument(most: int) -> nn.Module:
    def count(seen: list[int], *, most: int) -> bool:
        seen.append(1)
        return len(seen) > most

    ask = functools.partial(count, [], most=most)

    def is_tired() -> bool:
        return ask()

    return Tired(is_tired)


def by_network_in_an_object(most: int) -> nn.Module:
    held = types.SimpleNamespace(step=Counting(nn.BatchNorm1d(1)))

    def is_tired() -> bool:
        held.step.inner.running_mean += 1
        return float(held.step.inner.running_mean) > most

    return Tired(is_tired)


def by_iterator(most: int) -> nn.Module:
    answers = iter([False] * most + [True] * 10_000)

    def is_tired() -> bool:
        return next(answers)

    return Tired(is_tired)


PLACES: list[Callable[[int], nn.Module]] = [
    by_called_object,
    by_bound_method,
    by_given_argument,
    by_network_in_an_object,
    by_iterator,
    by_closure,
    by_clock,
    by_default,
    by_attribute,
    by_variable,
    by_table,
    by_object,
    by_network,
    by_array,
    by_class,
    by_hook,
    by_memory,
    by_itself,
]


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests left in this module."""
    global variable, tally, network, counter
    variable, tally, network, counter = 0, Tally(), nn.BatchNorm1d(1), Counter()
    table.clear()
    monkeypatch.setattr(sys.modules["ecnn.auditing.auditor"], "diagnose", lambda subject, progress=None: [])
    toys.shorten_lessons(monkeypatch)


def make_subject(model: nn.Module) -> Subject:
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(256, (60, 1, 6, 6), generator=generator, dtype=torch.uint8)
    images, labels = Split(images, toys.LinearOfThree()(images.float() / 255).argmax(dim=1))[:]
    return Subject(model=model, images=images, labels=labels, norm="linf", eps=EPS, budget=BUDGET)


def split_of(subject: Subject) -> Split:
    return Split((subject.images * 255).round().to(torch.uint8), subject.labels)


@pytest.mark.parametrize("most", [1, 40])
@pytest.mark.parametrize("build", PLACES)
def test_what_lies_beside_a_model_is_put_back_for_every_question(
    build: Callable[[int], nn.Module], most: int
) -> None:
    model = build(most)
    subject = make_subject(model)
    taken = take_copy(model)
    taken.fresh()(subject.images)  # what an audit asks before it looks
    taken.fresh()(subject.images[:2])
    deployment, findings = examine(taken, subject)
    (finding,) = [finding for finding in findings if finding.name == "stateful"]
    assert (finding.kind, finding.level, finding.is_open) == ("put_back", "alarm", False)
    assert finding.evidence["kept_in"]
    assert deployment.puts_back
    asked, expected = deployment.fresh(), toys.LinearOfThree()(subject.images)
    for _ in range(60):
        assert torch.equal(asked(subject.images), expected)
    points = subject.images.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(asked(points)[:, 0].sum(), points)
    assert slope.flatten(1).any(dim=1).all()


def test_a_model_that_tires_beside_itself_is_not_believed() -> None:
    subject = make_subject(by_closure(3))
    honest = audit(toys.LinearOfThree(), split_of(subject), norm="linf", eps=EPS, budget=BUDGET)
    found = audit(subject.model, split_of(subject), norm="linf", eps=EPS, budget=BUDGET, claim=0.95)
    assert found.accuracy <= honest.accuracy
    assert found.verdict == "not believable"
    assert torch.equal(
        subject.model(subject.images), toys.LinearOfThree()(subject.images)
    )  # as if never asked


def test_what_only_attacks_have_changed_is_put_back_too() -> None:
    """A model that tires after hundreds of questions, when its examination is over."""
    model = by_closure(300)
    subject = make_subject(model)
    deployment, findings = examine(take_copy(model), subject)
    assert not findings
    used = deployment.fresh()
    for _ in range(300):
        used(subject.images[:2])
    subject = dataclasses.replace(subject, model=used)
    rows = torch.arange(4)
    assert confirm(deployment, subject, subject.images[:4], rows, are_bytes=False).late == "outside"
    found = audit(by_closure(300), split_of(subject), norm="linf", eps=EPS, budget=BUDGET, claim=0.95)
    assert found.verdict == "not believable"
    assert [finding.kind for finding in found.findings if finding.name == "stateful"] == ["put_back"]


def test_what_changes_no_answer_is_left_alone() -> None:
    """A log of questions that somebody keeps is theirs."""
    log: list[int] = []

    def is_tired() -> bool:
        log.append(1)
        return False

    model = Tired(is_tired)
    deployment, findings = examine(take_copy(model), make_subject(model))
    assert not findings
    assert not deployment.puts_back
    assert len(log) > 20


def test_generators_beside_a_model_stay_random() -> None:
    class Noisy(toys.LinearOfThree):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) + torch.from_numpy(noise.standard_normal((len(images), 3))).float()

    model = Noisy()
    deployment, (finding,) = examine(take_copy(model), make_subject(model))
    assert (finding.name, finding.kind) == ("seeds", "unseeded")
    assert not deployment.puts_back


def test_what_lies_in_a_file_stays_an_open_alarm(tmp_path: Path) -> None:
    path = tmp_path / "asked"
    path.write_text("")

    def is_tired() -> bool:
        path.write_text(path.read_text() + ".")
        return len(path.read_text()) > 20

    model = Tired(is_tired)
    _, (finding,) = examine(take_copy(model), make_subject(model))
    assert (finding.name, finding.kind, finding.is_open) == ("stateful", "outside", True)


def test_everybody_who_holds_it_sees_it_as_it_was() -> None:
    """An object in two places stays one object, and its old values come back within it."""
    shared, pair = [1, 2], ([3], Tally())

    def first() -> int:
        return len(shared) + len(pair[0])

    def second() -> int:
        shared.append(next(numbers))
        pair[0].append(4)
        pair[1].rows[0].append(5)
        return len(shared)

    model = toys.LinearOfThree()
    model.first, model.second = first, second  # type: ignore[assignment]
    kept = Surroundings(model)
    before = next(numbers)
    second()
    changed = kept.changed()
    assert len(changed.names) == 3
    with changed.as_they_were():
        assert (shared, pair[0], pair[1].rows) == ([1, 2], [3], [[]])
        assert next(numbers) == before
        second()
    assert (shared, pair[0], pair[1].rows) == ([1, 2, before + 1], [3, 4], [[5]])
    kept.put_back()
    assert (shared, pair[0], first()) == ([1, 2], [3], 3)
    assert not kept.changed()


def test_what_a_graph_holds_is_not_changed_under_it() -> None:
    scale = torch.ones(1)

    class Growing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            said = images.flatten(1).exp() * scale
            scale.data = scale + 1
            return said

    model = Growing()
    asked = PutBack(model, Surroundings(model))
    images = torch.rand(2, 1, 2, 2, requires_grad=True)
    said = asked(images)
    asked(images)
    (slope,) = torch.autograd.grad(said.sum(), images)
    torch.testing.assert_close(slope, images.exp().detach())
    assert float(scale) == 1


def test_a_question_that_fails_leaves_nothing_behind() -> None:
    asked: list[int] = []

    class Failing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            asked.append(1)
            raise ValueError("no")

    model = Failing()
    with pytest.raises(ValueError, match="no"):
        PutBack(model, Surroundings(model))(torch.rand(1, 1, 2, 2))
    assert asked == []


def test_what_cannot_be_put_back_is_an_open_alarm_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(surroundings: Surroundings) -> None:
        raise ValueError("a count only grows")

    monkeypatch.setattr(Surroundings, "put_back", refuse)
    model = by_closure(40)
    _, (finding,) = examine(take_copy(model), make_subject(model))
    assert (finding.name, finding.kind, finding.is_open) == ("stateful", "outside", True)
