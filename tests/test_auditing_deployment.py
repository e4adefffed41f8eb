"""What is judged: fresh copies, one image at a time."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import sqlite3
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.overrides import BaseTorchFunctionMode

from ecnn.asking import Around, InFixedBatches, copy_model, settings
from ecnn.attacks.norms import NORMS, round_to_bytes
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import decoded_scores, has_code, members_of
from ecnn.auditing import Audit, Subject, audit
from ecnn.auditing.adaptive import InnerScores, features_of, whole_batch
from ecnn.auditing.alone import OneAtATime
from ecnn.auditing.confirming import compare_ends, confirm, means_differ
from ecnn.auditing.deployment import Deployment, FreshBuffers, FreshEachTime, Isolated, Settled, take_copy
from ecnn.auditing.diagnostics.binarization import find_features
from ecnn.auditing.diagnostics.probes import Probe
from ecnn.auditing.examination import examine, find_different
from ecnn.auditing.surroundings import PutBack, Surroundings
from ecnn.auditing.traits import find_traits
from ecnn.constructions import random_code
from ecnn.data import Split
from ecnn.model import ECNN
from ecnn.objectives import score_margin

EPS = 0.08
BUDGET = dataclasses.replace(
    toys.TINY, images=60, steps=20, probe_images=16, probe_steps=10, queries=40, eot=8, targets=1
)


class Remembering(toys.LinearOfThree):
    """Answers what it has answered to something near before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, images: Tensor) -> Tensor:
        rows = []
        for image, scores in zip(images, super().forward(images), strict=True):
            near = [kept for point, kept in self.seen if float((point - image.detach()).abs().max()) < 0.2]
            if not near:
                self.seen.append((image.detach().clone(), scores.detach().clone()))
            rows.append(near[0] if near else scores)
        return torch.stack(rows)


class Tiring(toys.LinearOfThree):
    """Rounds its input after some calls, so that attacks find nothing more."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def forward(self, images: Tensor) -> Tensor:
        self.left -= 1
        return super().forward(images if self.left >= 0 else images.round().detach())


class Refusing(Tiring):
    def forward(self, images: Tensor) -> Tensor:
        if self.left < 0:
            raise RuntimeError("too many questions")
        return super().forward(images)


class Counting(toys.LinearOfThree):
    """Counts its calls, which changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(images)


class Drawing(toys.LinearOfThree):
    """Adds noise from one of several sources."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        own = {
            "own numpy": np.random.default_rng(3),
            "own torch": torch.Generator().manual_seed(3),
            "own python": random.Random(3),
        }
        self.generator: Any = own.get(source)

    def forward(self, images: Tensor) -> Tensor:
        shape = (len(images), 3)
        if self.source == "torch":
            noise = torch.randn(shape)
        elif self.source == "own torch":
            noise = torch.randn(shape, generator=self.generator)
        elif self.source in ("python", "own python"):
            draw = random if self.source == "python" else self.generator
            noise = torch.tensor([[draw.gauss(0, 1) for _ in range(3)] for _ in images])
        elif self.source == "system":
            seed = int.from_bytes(os.urandom(4))
            noise = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()
        else:
            draw = np.random if self.source == "numpy" else self.generator
            noise = torch.from_numpy(draw.standard_normal(shape)).float()
        return super().forward(images) + 0.5 * noise


class Learning(toys.LinearOfThree):
    """Takes a step of training with every question: adaptation at test time, in its parameters."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.optimiser = torch.optim.SGD(self.parameters(), lr=1.0)

    def forward(self, images: Tensor) -> Tensor:
        if self.how == "in place":
            self.weight.data.mul_(0.9).add_(0.1)
        else:
            with torch.enable_grad():
                super().forward(images.detach()).pow(2).mean().backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()  # adds up what was left by the question before
        return super().forward(images)


class BatchNormed(nn.Module):
    """Normalises by the statistics of the batch, also when it is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(36, track_running_stats=False)
        self.net = toys.LinearOfThree()

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.net(0.5 + self.norm(images.flatten(1)) / 4)
        return scores


class Locked(toys.LinearOfThree):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Alone(toys.LinearOfThree):
    """Gives itself for a copy: what is done to the copy, such as a change to float64, is done to it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Alone:
        return self


class Strict(toys.LinearOfThree):
    """Takes images only as they lie in memory."""

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_contiguous():
            raise ValueError("images must be contiguous")
        return super().forward(images)


def frozen() -> Any:
    """TorchScript without parameters and modes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch would rather compile
        scripted: Any = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).eval())
        return torch.jit.freeze(scripted)


def make_split(model: nn.Module, count: int = 60) -> Split:
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(256, (count, 1, 6, 6), generator=generator, dtype=torch.uint8)
    return Split(images, model(images.float() / 255).argmax(dim=1))


SPLIT = make_split(toys.LinearOfThree())


def make_subject(model: nn.Module) -> Subject:
    images, labels = SPLIT[:]
    return Subject(model=model, images=images, labels=labels, norm="linf", eps=EPS, budget=BUDGET)


def run_audit(model: nn.Module, split: Split = SPLIT, **settings: Any) -> Audit:
    return audit(model, split, norm="linf", eps=EPS, budget=BUDGET, **settings)


@pytest.fixture(scope="module")
def honest() -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["ecnn.auditing.auditor"], "diagnose", lambda subject, progress=None: [])
        toys.shorten_lessons(patch)
        return run_audit(toys.LinearOfThree()).accuracy


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ecnn.auditing.auditor"], "diagnose", lambda subject, progress=None: [])
    toys.shorten_lessons(monkeypatch)


@pytest.mark.parametrize(
    ("model", "forgets", "names"),
    [
        (toys.LinearOfThree(), False, {}),
        (Counting(), False, {}),
        (Remembering(), True, {"stateful": "stateful"}),
        (Tiring(20), True, {"stateful": "stateful"}),
        (Refusing(20), True, {"stateful": "stateful"}),
        (Drawing("torch"), False, {}),
        (Drawing("numpy"), False, {}),
        (Drawing("python"), False, {}),
        (Drawing("own numpy"), True, {"stateful": "own_generator"}),
        (Drawing("own torch"), True, {"stateful": "own_generator"}),
        (Drawing("own python"), True, {"stateful": "own_generator"}),
        (Drawing("system"), False, {"seeds": "unseeded"}),
        (Learning("in place"), True, {"stateful": "stateful"}),
        (Locked(), False, {"copies": "not_copied"}),
        (Alone(), False, {"copies": "not_copied"}),
        (Strict(), False, {}),
        (frozen(), False, {}),
    ],
    ids=lambda value: getattr(value, "source", type(value).__name__),
)
def test_state_and_sources_of_randomness_are_recognised(
    model: nn.Module, forgets: bool, names: dict[str, str]
) -> None:
    deployment, findings = examine(take_copy(model), make_subject(model))
    assert {finding.name: finding.kind for finding in findings} == names
    assert (deployment.forgets, deployment.company) == (forgets, None)
    assert not any(finding.is_open for finding in findings)


@pytest.mark.parametrize("model", [Remembering(), Tiring(20), Tiring(90)], ids=["near", "soon", "late"])
def test_a_model_that_remembers_is_judged_by_fresh_copies(model: nn.Module, honest: float) -> None:
    found = run_audit(model, claim=0.95)
    (finding,) = [finding for finding in found.findings if finding.name == "stateful"]
    assert (finding.level, finding.is_open) == ("alarm", False)
    assert found.accuracy <= honest
    assert found.verdict == "not believable"
    assert found.model["kind"].endswith(type(model).__name__)
    assert getattr(model, "seen", []) == []  # the caller's object was never asked


class Following(Remembering):
    """Answers about what is near an earlier image as before, a little moved, and with the true gradient."""

    def forward(self, images: Tensor) -> Tensor:
        true, rows = toys.LinearOfThree.forward(self, images), []
        for image, scores in zip(images, true, strict=True):
            near = [kept for point, kept in self.seen if float((point - image.detach()).abs().max()) < 0.2]
            if not near:
                self.seen.append((image.detach().clone(), scores.detach().clone()))
            rows.append(near[0] + 0.05 * (scores - near[0]) if near else scores)
        return torch.stack(rows)


class Dice(toys.LinearOfThree):
    """Gives its second choice now and then, but never for an image of whole grey levels."""

    share = 0.3

    def forward(self, images: Tensor) -> Tensor:
        scores, levels = super().forward(images), 255 * images
        is_off = ((levels - levels.round()).abs().flatten(1).amax(dim=1) > 1e-2) & (
            torch.rand(len(images)) < self.share
        )
        top = scores.topk(2, dim=1)
        return torch.where(is_off[:, None], scores.scatter(1, top.indices, top.values.flip(1)), scores)


class Hiding(nn.Module):
    """Another model behind a number that is added to all of its scores, or a further class that has none."""

    def __init__(self, model: nn.Module, how: str) -> None:
        super().__init__()
        self.model, self.how = model, how

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.model(images)
        if self.how == "offset":
            return scores + 1e6
        if self.how == "mask":
            return torch.cat([scores, torch.full((len(scores), 1), -1e9)], dim=1)
        return scores


@pytest.mark.parametrize("how", ["plain", "offset", "mask"])
def test_no_constant_in_the_scores_hides_what_a_model_remembers(how: str, honest: float) -> None:
    found = run_audit(Hiding(Following(), how), claim=0.95)
    assert [finding.name for finding in found.findings if finding.level == "alarm"] == ["stateful"]
    assert found.verdict == "not believable"
    assert found.accuracy <= honest + 0.02
    assert found.power is not None


@pytest.mark.parametrize("how", ["plain", "offset", "mask"])
def test_no_constant_in_the_scores_hides_that_a_model_is_random(how: str) -> None:
    found = run_audit(Hiding(Drawing("torch"), how))
    assert found.is_random


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_that_is_random_only_near_images_is_judged_by_means_over_passes(
    seed: int, honest: float
) -> None:
    """It is no memory and no dependence on the batch, by which one draw would decide."""
    found = run_audit(Dice(), seed=seed)
    assert found.is_random
    assert not {finding.name for finding in found.findings} & {"stateful", "batch_dependent"}
    assert found.power is not None
    second = Dice.share * (1 - honest)  # where an image falls, its class may be the second choice
    assert honest * (1 - Dice.share) - 0.08 <= found.accuracy <= honest * (1 - Dice.share) + second + 0.08


def test_where_attacks_end_a_used_object_and_a_fresh_copy_are_compared() -> None:
    rows = torch.arange(len(SPLIT))
    for model, late in ((toys.LinearOfThree(), None), (Following(), "stateful"), (Dice(), "random")):
        deployment = take_copy(model)
        subject = dataclasses.replace(make_subject(deployment.fresh()), eps=0.19)
        assert compare_ends(deployment, subject, rows) == late
        assert compare_ends(dataclasses.replace(deployment, trouble="why"), subject, rows) is None
        if late == "stateful":
            forgetting = dataclasses.replace(deployment, forgets=True)
            subject = dataclasses.replace(subject, model=forgetting.fresh())
            assert compare_ends(forgetting, subject, rows) is None


class Routed(toys.LinearOfThree):
    """Linear for whoever asks about few images at once; batches meet steps, which small moves seldom change.

    Args:
        source: of some noise: "torch", "system" or "".
        only_off: whether batches of images of whole grey levels are answered like single images.
    """

    def __init__(self, source: str, *, only_off: bool = False) -> None:
        super().__init__()
        self.source, self.only_off = source, only_off

    def forward(self, images: Tensor) -> Tensor:
        levels = 255 * images
        is_off = float(((levels - levels.round()).abs().flatten(1).amax(dim=1) > 1e-2).double().mean()) > 0.3
        firm = len(images) >= 4 and (is_off or not self.only_off)
        scores = super().forward(images.round().detach() if firm else images)
        if self.source == "torch":
            return scores + 0.02 * torch.randn_like(scores)
        noise = (
            np.random.default_rng().standard_normal(scores.shape) if self.source else np.zeros(scores.shape)
        )
        return scores + 0.02 * torch.from_numpy(noise).float()


@pytest.mark.parametrize(
    "model",
    [Routed("torch"), Routed("system"), Routed("", only_off=True), Routed("torch", only_off=True)],
    ids=["torch", "system", "off levels", "torch off levels"],
)
def test_that_the_batch_decides_is_seen_in_random_models_and_off_the_images(
    model: Routed, honest: float
) -> None:
    found = run_audit(model, claim=0.95)
    assert "batch_dependent" in [finding.name for finding in found.findings if finding.level == "alarm"]
    assert found.is_random == bool(model.source)
    assert found.accuracy <= honest + 0.1
    assert found.verdict == "not believable"


class NoisyTiring(Tiring):
    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        return scores + 0.02 * torch.randn_like(scores)


@pytest.mark.parametrize("is_random", [False, True])
def test_images_left_are_attacked_as_they_are_judged(is_random: bool) -> None:
    """What breaks alone and on fresh copies, and not as it was attacked, was hidden by memory or by the batch."""
    kind, source = (NoisyTiring, "torch") if is_random else (Tiring, "")
    images, labels = SPLIT[:]
    firm = toys.LinearOfThree()(images.round()).argmax(dim=1) == labels
    rows = torch.nonzero(firm).squeeze(1)
    assert len(rows) > 20

    def late(used: nn.Module, new: nn.Module, **how: Any) -> str | None:
        deployment = dataclasses.replace(take_copy(new), **how)
        return compare_ends(deployment, dataclasses.replace(make_subject(used), is_random=is_random), rows)

    assert late(kind(0), kind(10**6)) == "stateful"
    assert late(kind(0), kind(0)) is None
    tired = kind(0)
    assert late(tired, tired, trouble="it cannot be copied") is None  # there is no fresh copy to compare with
    routed = Routed(source)
    assert late(routed, routed) == "batch_dependent"
    assert late(routed, routed, trouble="it cannot be copied") == "batch_dependent"
    plain = kind(10**6)  # falls to every attack: those before were only too short
    assert late(plain, plain) is None


def test_means_over_passes_differ_only_beyond_chance() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(shift: float = 0.0, *, share: float | None = None) -> Tensor:
        noise = torch.randn(16, 400, 3, generator=generator)
        if share is None:
            return torch.tensor([4.0, 1.0, 0.0]) + noise + shift * torch.tensor([1.0, 0.0, 0.0])
        first = torch.rand(16, 400, generator=generator) < share
        return torch.stack([first, ~first], dim=2).float()

    assert means_differ(draw(), draw()).sum() == 0
    assert means_differ(draw(), draw(4.0)).all()
    assert means_differ(draw(share=0.3), draw(share=0.3)).sum() == 0
    assert means_differ(draw(share=0.05), draw(share=0.95)).double().mean() > 0.95
    same = draw()
    assert not means_differ(same, same).any()
    fixed = same[:1].expand(16, -1, -1)
    assert not means_differ(fixed, fixed + 0.001).any()  # no chance, but too little to matter
    assert means_differ(fixed, fixed + torch.tensor([2.0, 0.0, 0.0])).all()
    for odd in (torch.nan, torch.inf):
        broken = draw()
        broken[:, :7, 2] = odd
        found = means_differ(draw(), broken)
        assert found[:7].all()
        assert not found[7:].any()


class NearBorders(toys.LinearOfThree):
    """Draws between the two best classes where they are close, by torch's numbers, and has no scores but 0 and 1."""

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        top = scores.topk(2, dim=1)
        is_close = (top.values[:, 0] - top.values[:, 1] < 0.15) & (torch.rand(len(images)) < 0.5)
        chosen = torch.where(is_close, top.indices[:, 1], top.indices[:, 0])
        return torch.eye(3)[chosen]


def test_points_that_attacks_found_show_that_a_model_is_random() -> None:
    """On images and random points near them it never draws; one at the border is broken in every other pass."""
    model = NearBorders()
    images, labels = SPLIT[:]
    scores = toys.LinearOfThree()(images)
    leads = scores.topk(2, dim=1).values @ torch.tensor([1.0, -1.0])
    far = Split(SPLIT.images[leads > 2], labels[leads > 2])
    found = run_audit(model, far)
    assert found.is_random
    assert not {finding.name for finding in found.findings} & {"stateful", "batch_dependent"}


class Acquainted(toys.LinearOfThree):
    """Answers honestly about what it has never met, near or far; notes in a database, which cannot be copied."""

    def __init__(self, is_wary: bool) -> None:
        super().__init__()
        self.is_wary = is_wary
        self.met = sqlite3.connect(":memory:")
        self.met.execute("create table met (image text)")

    def forward(self, images: Tensor) -> Tensor:
        keys = [str((2 * image.mean(dim=(0, 1))).round().tolist()) for image in images]
        known = [self.met.execute("select 1 from met where image = ?", (key,)).fetchone() for key in keys]
        self.met.executemany("insert into met values (?)", [(key,) for key in keys])
        is_firm = torch.tensor([row is not None and self.is_wary for row in known])[:, None]
        return torch.where(is_firm, super().forward(images.round().detach()), super().forward(images))


def test_of_a_model_that_cannot_be_copied_the_first_contact_tells() -> None:
    found = run_audit(Acquainted(is_wary=True), claim=None)
    (finding,) = [finding for finding in found.findings if finding.name == "stateful"]
    assert (finding.kind, finding.is_open) == ("remembers", True)
    assert finding.evidence["differ"]
    assert found.verdict == "inconclusive"
    honest = run_audit(Acquainted(is_wary=False), claim=0.3)
    assert not [finding for finding in honest.findings if finding.name == "stateful"]


class Patient(toys.LinearOfThree):
    """Counts its questions where no audit can restore the count, and becomes firm after many."""

    def __init__(self, count: Callable[[int], int], most: int) -> None:
        super().__init__()
        self.count, self.most = count, most

    def __deepcopy__(self, memo: Any) -> Patient:
        made = Patient(self.count, self.most)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, images: Tensor) -> Tensor:
        is_firm = self.count(len(images)) > self.most
        return super().forward(images.round().detach() if is_firm else images)


def in_a_file(folder: Path) -> Callable[[int], int]:
    path = folder / "count"
    path.write_text("0")

    def count(more: int) -> int:
        path.write_text(str(int(path.read_text()) + more))
        return int(path.read_text())

    return count


def in_a_generator(folder: Path) -> Callable[[int], int]:
    def counting() -> Any:
        number = 0
        while True:
            number += (yield number) or 0

    counter = counting()
    next(counter)
    sent: Callable[[int], int] = counter.send
    return sent


@pytest.mark.parametrize("keep", [in_a_file, in_a_generator])
def test_answers_at_the_end_show_a_memory_that_cannot_be_restored(
    keep: Callable[[Path], Callable[[int], int]], tmp_path: Path
) -> None:
    """It comes after the questions that look for it, and then all copies change together."""
    found = run_audit(Patient(keep(tmp_path), 4000), claim=None)
    (finding,) = [finding for finding in found.findings if finding.name == "stateful"]
    assert (finding.kind, finding.is_open) == ("outside", True)
    assert finding.evidence["differ"] > 8
    assert found.verdict == "inconclusive"
    honest = run_audit(Patient(keep(tmp_path), 10**9), claim=None)
    assert not [finding for finding in honest.findings if finding.name == "stateful"]


class Unseeded(toys.LinearOfThree):
    """Adds noise that the operating system draws, which no seed repeats."""

    def forward(self, images: Tensor) -> Tensor:
        noise = np.random.default_rng(int.from_bytes(os.urandom(8), "big")).normal(size=(len(images), 3))
        return super().forward(images) + 0.02 * torch.from_numpy(noise).float()


def test_a_model_that_no_seed_repeats_is_not_taken_for_one_that_remembers() -> None:
    found = run_audit(Unseeded(), claim=None)
    assert found.is_random
    assert not [finding for finding in found.findings if finding.name == "stateful"]


class Rounding(toys.LinearOfThree):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.round().detach())


class Tuned(nn.Module):
    """Finds the layer that replaces another one by its id, which a copy of the layer does not have."""

    def __init__(self, base: nn.Module, tuned: nn.Module) -> None:
        super().__init__()
        self.base, self.tuned = base, tuned
        self.places = {id(base): "tuned"}
        self.questions = 0

    def forward(self, images: Tensor) -> Tensor:
        self.questions += 1
        scores: Tensor = getattr(self, self.places.get(id(self.base), "base"))(images)
        return scores


def test_a_model_whose_copies_answer_otherwise_is_judged_itself(honest: float) -> None:
    model = Tuned(Rounding(), toys.LinearOfThree())
    found = run_audit(model, claim=None)
    (finding,) = [finding for finding in found.findings if finding.kind == "not_copied"]
    assert "its copies give other answers" in finding.claim
    assert found.accuracy == honest
    same = Tuned(toys.LinearOfThree(), toys.LinearOfThree())
    asked = run_audit(same, claim=None)
    assert not [finding for finding in asked.findings if finding.kind == "not_copied"]
    assert same.questions == 0  # it was asked, and what it remembered of that is gone
    assert asked.accuracy == honest


class Adapting(toys.LinearOfThree):
    """Follows the mean of what it is asked, in a buffer: adaptation at test time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1, 6, 6), 0.5))
        self.register_buffer("questions", torch.zeros((), dtype=torch.int64))
        self.mean: Tensor
        self.questions: Tensor

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * images.mean(dim=0))
            self.questions += 1
        return super().forward(images - self.mean + 0.5)


def test_a_model_that_adapts_its_buffers_is_judged_by_fresh_ones() -> None:
    model = Adapting()
    subject = make_subject(model)
    deployment, findings = examine(take_copy(model), subject)
    assert [finding.name for finding in findings] == ["stateful", "batch_dependent"]
    assert deployment.forgets
    assert deployment.in_buffers
    assert deployment.is_vectorised
    asked = deployment.fresh()
    points = subject.images.clone().requires_grad_(True)
    expected = toys.LinearOfThree()((points + 0.5) / 2)  # the mean of one image is halfway to it
    for _ in range(3):
        assert torch.allclose(asked(points), expected, atol=1e-5)
        assert torch.allclose(asked(points[:1]), expected[:1], atol=1e-5)
    slopes, wanted = (torch.autograd.grad(said[:, 0].sum(), points)[0] for said in (asked(points), expected))
    assert torch.allclose(slopes, 2 * wanted, atol=1e-5)  # what the model adds up it does not differentiate
    assert not int(model.questions)
    assert not any(int(value.sum()) for name, value in asked.named_buffers() if name.endswith("questions"))


class WritesImages(toys.LinearOfThree):
    """Normalises what it is given where it lies."""

    def forward(self, images: Tensor) -> Tensor:
        return images.sub_(0.5).flatten(1) @ self.weight.T


class WritesTheSame(toys.LinearOfThree):
    """Clamps images where they lie, which changes none of them."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.clamp_(0, 1))


class WritesScores(toys.LinearOfThree):
    """Gives the same tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.said = torch.zeros(0, 3)

    def forward(self, images: Tensor) -> Tensor:
        self.said.resize_(len(images), 3).copy_(super().forward(images).detach())
        return self.said


class TakesTen(toys.LinearOfThree):
    """Answers about ten images, as a network does that was exported for batches of that size."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.reshape(10, *images.shape[1:]))


class TakesOne(toys.LinearOfThree):
    def forward(self, images: Tensor) -> Tensor:
        if len(images) != 1:
            raise ValueError("one image, please")
        return super().forward(images)


class SaysYesOrNo(toys.LinearOfThree):
    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        return scores == scores.amax(dim=1, keepdim=True)


class Switches(toys.LinearOfThree):
    """Turns torch to float64 by default, or whatever is switched here; with a lock it cannot be copied."""

    def __init__(
        self, switch: Callable[[], Any] = lambda: torch.set_default_dtype(torch.float64), lock: Any = None
    ) -> None:
        super().__init__()
        self.switch, self.lock = switch, lock

    def forward(self, images: Tensor) -> Tensor:
        self.switch()
        return super().forward(images) * torch.tensor(1.0)


@pytest.mark.parametrize(
    ("model", "name", "kind"),
    [
        (Switches(), "copies", "switches"),
        (WritesImages(), "copies", "writes"),
        (WritesTheSame(), "copies", "writes"),
        (WritesScores(), "copies", "writes"),
        (TakesOne(), "batch_dependent", "single"),
        (TakesTen(), "batch_dependent", "fixed"),
        (SaysYesOrNo(), None, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_models_that_cannot_be_asked_as_usual_are_judged_all_the_same(
    model: nn.Module, name: str | None, kind: str | None, honest: float
) -> None:
    images = SPLIT.images.clone()
    found = run_audit(model, claim=0.95)
    assert [finding.kind for finding in found.findings if finding.name == name] == ([kind] if name else [])
    assert found.clean_accuracy == 1
    assert found.accuracy <= honest + 0.1
    assert found.verdict == "not believable"
    assert torch.equal(SPLIT.images, images)
    assert torch.get_default_dtype() == torch.float32
    assert not [finding for finding in found.findings if "could not be made" in finding.claim]


@pytest.mark.parametrize("lock", [None, threading.Lock()], ids=["", "locked"])
@pytest.mark.parametrize(
    "switch",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_num_threads(2),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ],
    ids=["precision", "threads", "deterministic"],
)
def test_settings_of_torch_are_put_back(switch: Callable[[], Any], lock: Any) -> None:
    """Also what the questions before all others have changed, to a model that cannot be copied."""
    before = settings()
    found = run_audit(Switches(switch, lock), limit=4)
    assert settings() == before
    assert "switches" in [finding.kind for finding in found.findings]


def test_a_model_that_cannot_be_copied_does_not_write_into_the_images_of_others() -> None:
    model = WritesImages()
    model.lock = threading.Lock()  # type: ignore[assignment]
    images = SPLIT.images[:20].float() / 255
    kept = images.clone()
    found = audit(model, (images, SPLIT.labels[:20]), norm="linf", eps=EPS, budget=BUDGET, limit=4)
    assert torch.equal(images, kept)
    assert [finding.kind for finding in found.findings if finding.name == "copies"] == [
        "not_copied",
        "writes",
    ]


WAYS: dict[str, Callable[[nn.Module], Around]] = {
    "copies": FreshEachTime,
    "buffers": FreshBuffers,
    "images": Isolated,
    "settings": Settled,
    "surroundings": lambda model: PutBack(model, Surroundings(model)),
    "alone": lambda model: OneAtATime(model, torch.zeros(0, 3, 8, 8)),
    "vectorised": lambda model: OneAtATime(model, torch.zeros(0, 3, 8, 8), is_vectorised=True),
    "batches": lambda model: InFixedBatches(model, 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_attacks_look_for_in_a_model_is_there_however_it_is_asked(way: str) -> None:
    """A line in `forward` that makes no difference to any answer would otherwise take the members from sight."""
    model, images = toys.tiny_ecnn(), torch.rand(3, 3, 8, 8)
    asked = WAYS[way](model)
    assert has_code(asked)
    for one, other in zip(members_of(asked, images), members_of(model, images), strict=True):
        torch.testing.assert_close(one, other)
    logits = model.member_logits(images)
    torch.testing.assert_close(decoded_scores(asked, logits), model(images))
    for one, other in zip(
        InnerScores(num_classes=4).read(asked, images),
        InnerScores(num_classes=4).read(model, images),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(features_of(asked, images)[0], features_of(model, images)[0])
    assert find_traits(asked, images, 4) == find_traits(model, images, 4)
    copied: Any = copy_model(asked)
    assert copied.code is not model.code
    plain = WAYS[way](toys.LinearOfThree())
    assert not has_code(plain)
    assert not hasattr(plain, "member_scores")
    with pytest.raises(AttributeError, match="'nothing'"):
        plain.nothing  # noqa: B018


def test_questions_to_members_are_asked_like_all_others() -> None:
    """Of the members of a model that writes into images, in a copy of them."""

    class Writing(ECNN):
        def member_logits(self, images: Tensor) -> Tensor:
            return super().member_logits(images.clamp_(0.5, 1))

    model = Writing(random_code(4, 6, seed=0), 3, width=4, depth=8, feature_dim=8).eval()
    images = torch.rand(2, 3, 8, 8)
    kept = images.clone()
    said: Any = Isolated(model)
    assert torch.equal(said.member_logits(images), model.member_logits(kept.clone()))
    assert torch.equal(images, kept)


def test_a_question_that_fails_teaches_a_fresh_copy_nothing() -> None:
    class Raising(Learning):
        def forward(self, images: Tensor) -> Tensor:
            said = super().forward(images)
            if len(images) == 1:
                raise ValueError("one image")
            return said

    model, images = FreshEachTime(Raising("in place")), SPLIT[:4][0]
    with pytest.raises(ValueError, match="one image"):
        model(images[:1])
    assert torch.equal(next(model.parameters()), toys.LinearOfThree().weight)
    assert torch.equal(model(images), Learning("in place")(images))


def test_a_model_whose_batch_decides_is_asked_beside_the_same_images() -> None:
    model = BatchNormed()
    split = make_split(model)
    found = run_audit(model, split, claim=0.95)
    (finding,) = [finding for finding in found.findings if finding.name == "batch_dependent"]
    assert finding.evidence["company"] == 31
    assert finding.evidence["error_alone"].startswith("Expected more than 1 value")
    assert found.accuracy < 0.9 * found.clean_accuracy


def test_each_image_is_asked_about_by_itself() -> None:
    images = SPLIT[:5][0]
    model = BatchNormed()
    company = SPLIT[20:30][0]
    single = OneAtATime(model, company)
    expected = torch.cat([model(torch.cat([image[None], company]))[:1] for image in images])
    assert torch.equal(single(images), expected)
    assert torch.equal(single(images[2:3]), expected[2:3])
    assert OneAtATime(toys.LinearOfThree(), torch.zeros(0, 1, 6, 6))(images[:0]).shape == (0, 3)


class Counted(nn.Module):
    """Another model, which may read a number, draw, or seed torch first; counts its calls."""

    def __init__(self, inner: nn.Module, way: str = "") -> None:
        super().__init__()
        self.inner, self.way, self.calls = inner, way, 0

    def forward(self, images: Tensor) -> Any:
        self.calls += 1
        if self.way == "seeds":
            torch.manual_seed(0)
        if self.way in ("seeds", "draws"):
            images = images + 0.05 * torch.randn_like(images)
        if self.way == "has a range":  # as 8-bit numbers have that are made for a batch
            step = images.detach().max() / 255
            images = images + ((images / step).round() * step - images).detach()
        if self.way == "reads":
            images = images + (0.1 if float(images[0].detach().mean()) > 0.5 else 0.0)
        return self.inner(images)


@pytest.mark.parametrize(
    ("model", "company", "is_vectorised"),
    [
        (Counted(BatchNormed()), 10, True),
        (Counted(toys.LinearOfThree(), "seeds"), 0, True),
        (Counted(toys.LinearOfThree(), "has a range"), 0, True),
        (Counted(toys.LinearOfThree(), "draws"), 0, False),
        (Counted(toys.LinearOfThree(), "reads"), 0, False),
        (Locked(), 0, False),
    ],
)
def test_many_images_are_asked_about_by_themselves_in_one_pass(
    model: nn.Module, company: int, is_vectorised: bool
) -> None:
    images, beside = SPLIT[:40][0], SPLIT[40 : 40 + company][0]
    deployment = dataclasses.replace(take_copy(model), company=beside).sped_up(images, 0)
    assert deployment.is_vectorised == is_vectorised
    if not is_vectorised:
        return
    fast, slow = copies = [
        dataclasses.replace(deployment, is_vectorised=way).fresh() for way in (True, False)
    ]
    inner: list[Any] = [asked.model for asked in copies]
    points = images.clone().requires_grad_(True)
    expected, found = slow(points), fast(points)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(fast(images[:1]), expected[:1], atol=1e-5)
    counts = [asked.calls for asked in inner]
    assert counts[1] == len(images)
    assert counts[0] <= 1 + -(-len(images) // 20)
    with BaseTorchFunctionMode():  # what changes or hears torch's calls meets plain tensors
        assert torch.allclose(fast(images), expected, atol=1e-5)
    assert inner[0].calls == counts[0] + len(images)
    if expected.requires_grad:
        slopes, wanted = (torch.autograd.grad(said[:, 1].sum(), points)[0] for said in (found, expected))
        assert torch.allclose(slopes, wanted, atol=1e-5)


def test_a_model_whose_batch_decides_is_asked_in_one_pass_when_audited() -> None:
    model = BatchNormed()
    subject = dataclasses.replace(make_subject(model), images=SPLIT[:][0], labels=SPLIT.labels)
    deployment, findings = examine(take_copy(model), subject)
    assert [finding.name for finding in findings] == ["batch_dependent"]
    assert deployment.is_vectorised
    assert not examine(take_copy(toys.LinearOfThree()), subject)[0].is_vectorised


def test_fresh_copies_share_parameters_and_pass_gradients() -> None:
    model = FreshEachTime(Tiring(1))
    images = SPLIT[:4][0].requires_grad_(True)
    for _ in range(3):
        scores = model(images)
        assert torch.equal(scores, toys.LinearOfThree()(images))
    assert torch.autograd.grad(scores.sum(), images)[0].abs().sum() > 0
    assert model.model.left == 1


@pytest.mark.parametrize("how", ["in place", "by an optimiser"])
def test_fresh_copies_share_no_parameters_that_answers_change(how: str) -> None:
    pristine = Learning(how)
    model = FreshEachTime(pristine)
    images = SPLIT[:4][0]
    expected = [Learning(how)(images), Learning(how)(images[:2])]
    for _ in range(3):
        for part, wanted in zip((images, images[:2]), expected, strict=True):
            points = part.clone().requires_grad_(True)
            scores = model(points)
            assert torch.equal(scores, wanted)
            (slope,) = torch.autograd.grad(scores.sum(), points)
            before = Learning(how)
            before(part)  # what it has learnt from this question
            torch.testing.assert_close(slope.flatten(1), before.weight.sum(dim=0).expand(len(part), -1))
    assert torch.equal(pristine.weight, toys.LinearOfThree().weight)
    assert pristine.weight.grad is None


def test_points_that_break_no_deployed_copy_break_nothing() -> None:
    """Half of the points are clean images: whatever an attack says of them, they do not hold."""
    subject = make_subject(toys.LinearOfThree())
    points = subject.images.clone()
    points[::2] = 1 - points[::2]
    rows = torch.arange(len(points))
    found = confirm(take_copy(toys.LinearOfThree()), subject, points, rows, are_bytes=True)
    wrong = (toys.LinearOfThree()(points).argmax(dim=1) != subject.labels).numpy()
    assert 5 < wrong.sum() <= 30
    assert np.array_equal(found.holds, wrong)
    assert np.array_equal(found.full, wrong)
    assert found.late == "stateful"  # so many points that hold nowhere can only come from another object


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.0301), ("l2", 0.15), ("l1", 0.9)])
def test_rounded_points_are_bytes_in_the_ball(norm: Any, eps: float) -> None:
    subject = dataclasses.replace(make_subject(toys.LinearOfThree()), norm=norm, eps=eps)
    draws = Draws.of(1, torch.arange(len(subject.images)))
    points = NORMS[norm].random(subject.images, eps, draws)
    if norm == "linf":
        points = (subject.images + eps * (points > subject.images).float()).clamp(0, 1)
    rounded = round_to_bytes(points, subject.images, norm=subject.norm, eps=subject.eps)
    assert float((255 * rounded - (255 * rounded).round()).abs().max()) < 1e-4
    lengths = NORMS[norm].length((rounded - subject.images).flatten(1))
    assert float(lengths.max()) <= eps + 1e-5
    assert float((rounded - points).abs().max()) < 1 / 255 + 1e-6
    assert not torch.equal(rounded, subject.images)


def test_a_point_near_the_border_is_taken_farther_before_it_is_rounded() -> None:
    """Attacks stop just beyond the border, where rounding takes points back that a longer move keeps."""
    model = toys.LinearOfThree()
    subject = make_subject(model)
    images, labels = subject.images, subject.labels
    points, rows = just_broken(model)
    rounded = round_to_bytes(points, images[rows], norm=subject.norm, eps=subject.eps)
    healed = model(rounded).argmax(dim=1) == labels[rows]
    assert healed.sum() >= 3
    found = confirm(take_copy(model), subject, points, rows, are_bytes=True)
    assert found.rounded is not None
    assert found.rounded.all()


class Swayed(toys.LinearOfThree):
    """Gives slightly other scores to an image that comes alone."""

    def forward(self, images: Tensor) -> Tensor:
        shift = torch.tensor([0.04, 0.0, -0.04]) if len(images) == 1 else torch.zeros(3)
        return super().forward(images) + shift


def test_a_model_that_its_batch_sways_a_little_is_attacked_in_batches_and_judged_alone(honest: float) -> None:
    found = run_audit(Swayed(), claim=0.95)
    assert [finding.kind for finding in found.findings if finding.name == "batch_dependent"] == ["swayed"]
    assert found.verdict == "not believable"
    assert abs(found.accuracy - honest) <= 0.05


def test_of_a_swayed_model_a_point_farther_on_may_hold_in_place_of_one_at_the_border() -> None:
    subject, (points, rows) = make_subject(Swayed()), just_broken(toys.LinearOfThree())
    plain = take_copy(Swayed())
    swayed = dataclasses.replace(plain, is_swayed=True)
    before, after = (confirm(one, subject, points, rows, are_bytes=False) for one in (plain, swayed))
    assert before.holds.sum() <= len(points) - 3
    assert after.holds.all()
    assert after.full.all()
    assert before.full.all()
    assert not swayed.alone().is_swayed


def test_of_a_swayed_model_a_point_is_searched_for_where_none_farther_on_holds() -> None:
    """The points are corners of the balls, a few of whose pixels went the wrong way: there is nothing farther on."""
    model, (nearest, rows) = toys.LinearOfThree(), just_broken(toys.LinearOfThree())
    subject = make_subject(Swayed())
    images, labels = subject.images[rows], subject.labels[rows]
    points = images + EPS * (nearest - images).sign()
    slopes = torch.autograd.grad(score_margin(model(points.requires_grad_(True)), labels).sum(), points)[
        0
    ].flatten(1)
    points = points.detach().clamp(0, 1)
    for pixel in slopes.abs().argsort(dim=1).T:  # the least important first
        tried = points.flatten(1).scatter(1, pixel[:, None], images.flatten(1).gather(1, pixel[:, None]))
        still = score_margin(model(tried.view_as(points)), labels) < -1e-3
        points = torch.where(still.view(-1, 1, 1, 1), tried.view_as(points), points).detach()
    deployment = dataclasses.replace(take_copy(Swayed()), is_swayed=True)
    alone = torch.cat([Swayed()(point[None]) for point in points]).argmax(dim=1) != labels
    assert alone.sum() <= len(points) - 3
    found = confirm(deployment, subject, points, rows, are_bytes=False)
    assert found.holds.all()


def test_of_a_swayed_model_points_that_nothing_can_replace_show_that_the_batch_decides() -> None:
    """They were replaced by clean images, and the model was then said to remember what it was asked."""

    class OneSided(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            lead = images.flatten(1).mean(dim=1) - 0.6 + (0.02 if len(images) > 1 else 0.0)
            return torch.stack([-lead, lead], dim=1)

    images, labels = torch.full((40, 1, 4, 4), 0.5), torch.zeros(40, dtype=torch.long)
    model = OneSided()
    subject = Subject(model=model, images=images, labels=labels, norm="linf", eps=0.09, budget=BUDGET)
    for is_swayed in (False, True):
        deployment = dataclasses.replace(take_copy(model), is_swayed=is_swayed)
        found = confirm(deployment, subject, images + 0.09, torch.arange(40), are_bytes=False)
        assert found.full.all()
        assert not found.holds.any()
        assert found.late == "batch_dependent"


class InHalf(toys.LinearOfThree):
    """Rounds as a network in bfloat16 does, and otherwise if images come alone."""

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        return (scores * (1 + (len(images) == 1) * 2.0**-9)).bfloat16()


def test_rounding_in_half_precision_is_not_taken_for_dependence_on_the_batch() -> None:
    model, images = InHalf(), SPLIT[:8][0]
    alone = torch.cat([model(image[None]) for image in images]).float()
    together = model(images).float()
    assert not torch.equal(alone, together)
    assert not find_different(together, alone).any()
    assert find_different(together + 1e-4, alone).any()  # in float32 the same differences count
    votes = torch.tensor([[200.0, 56.0]])
    assert find_different(votes, votes + torch.tensor([[-1.0, 1.0]])).all()
    assert not [finding for finding in run_audit(model).findings if finding.name == "batch_dependent"]


def just_broken(model: toys.LinearOfThree) -> tuple[Tensor, Tensor]:
    """Points just beyond the border, whose images have others well inside of their balls; and which these are."""
    images, labels = SPLIT[:]
    scores = model(images).detach()
    lead, second = scores.topk(2, dim=1).values.diff().squeeze(1).neg(), scores.topk(2, dim=1).indices[:, 1]
    slopes = (model.weight[second] - model.weight[labels]).detach().view_as(images)
    shares = lead / (EPS * slopes.abs().flatten(1).sum(dim=1))
    rows = ((scores.argmax(dim=1) == labels) & (shares < 0.7)).nonzero().flatten()
    moves = 1.0001 * (shares * EPS).view(-1, 1, 1, 1) * slopes.sign()
    return (images + moves)[rows], rows


def test_rounding_is_told() -> None:
    found = run_audit(toys.LinearOfThree())
    (finding,) = [finding for finding in found.findings if finding.name == "rounding"]
    assert finding.evidence["broken"] == round(60 * (found.clean_accuracy - found.accuracy))
    assert finding.evidence["accuracy_when_rounded"] >= found.accuracy
    floating = Split(SPLIT.images.float() / 255, SPLIT.labels)
    assert not [
        finding
        for finding in run_audit(toys.LinearOfThree(), floating).findings
        if finding.name == "rounding"
    ]


class Keeping(Remembering):
    """Keeps what it was asked and what it said last, with the history of both; given the same object, says it again."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = ()
        self.shown: dict[str, list[Tensor]] = {}

    def forward(self, images: Tensor) -> Tensor:
        if not self.last or self.last[0] is not images:
            self.last = (images, super().forward(images))
            self.shown = {"halves": [images / 2]}
        scores: Tensor = self.last[1]
        return scores


def test_a_model_that_keeps_what_it_computed_last_is_copied_all_the_same() -> None:
    model = Keeping()
    said = model(SPLIT[:4][0].requires_grad_(True))
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(model)
    taken = take_copy(model)
    assert not taken.trouble
    kept: Any = taken.fresh()
    assert torch.equal(kept.last[1], said)
    assert kept.last[1].is_leaf
    assert kept.shown["halves"][0].is_leaf
    assert not model.last[1].is_leaf
    deployment, findings = examine(taken, make_subject(model))
    assert deployment.forgets  # which nothing but a copy can show
    assert [finding.name for finding in findings] == ["stateful"]


def test_a_pruned_network_is_copied_with_what_it_computes_anew() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    cut: Any = prune.l1_unstructured
    cut(model[1], "weight", amount=0.5)
    images = SPLIT[:4][0]
    model(images)
    fresh = take_copy(model).fresh()
    assert torch.equal(fresh(images), model(images))
    with torch.no_grad():
        next(parameter for name, parameter in model.named_parameters() if "orig" in name).zero_()
    assert not torch.equal(fresh(images), model(images))


class Repeating(nn.Module):
    """Says again what it said, without a computation, if it is given the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
        self.last: Any = ()

    def forward(self, images: Tensor) -> Any:
        if not self.last or self.last[0] is not images:
            self.last = (images, self.net(images))
        return self.last[1]


def test_layers_that_are_not_run_again_are_no_error() -> None:
    few = SPLIT[:4][0]
    assert not find_traits(Repeating(), few, 3).hides_scores


def test_a_model_that_cannot_be_copied_is_audited_all_the_same(honest: float) -> None:
    found = run_audit(Locked())
    assert found.accuracy == honest
    assert Deployment(pristine=Locked(), trouble="lock").fresh() is not None


class LockedCentring(Locked):
    """Subtracts the mean scores of the batch, and cannot be copied."""

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        return scores - scores.mean(dim=0) + 0.01 * len(images) * torch.tensor([1.0, 0.0, -1.0])


def test_a_model_that_cannot_be_copied_is_asked_about_one_image_at_a_time_too() -> None:
    model = LockedCentring()
    subject = make_subject(model)
    deployment, findings = examine(take_copy(model), subject)
    assert "batch_dependent" in [finding.name for finding in findings]
    scores = deployment.fresh()(subject.images[:8])
    assert torch.allclose(scores[:1], deployment.fresh()(subject.images[:1]))


class Widening(toys.LinearOfThree):
    """Turns itself to float64 when it is asked."""

    def forward(self, images: Tensor) -> Tensor:
        self.double()
        return super().forward(images.double())


def test_a_model_that_changes_its_precision_is_audited() -> None:
    split = make_split(toys.LinearOfThree(), 180)
    found, usual = (run_audit(model, split, limit=60) for model in (Widening(), toys.LinearOfThree()))
    assert abs(found.accuracy - usual.accuracy) <= 0.05


class InParts(nn.Module):
    """Classifies a batch in parts, in the order of the images or by which of two copies is in charge."""

    def __init__(self, network: nn.Module, *, in_order: bool = True) -> None:
        super().__init__()
        self.network, self.in_order = network, in_order

    def forward(self, images: Tensor) -> Tensor:
        if self.in_order:
            return torch.cat([self.network(part) for part in torch.split(images, 3)])
        is_first = images.flatten(1)[:, 0] > 0.5
        scores = torch.empty(len(images), 3)
        for chosen in (is_first, ~is_first):
            scores[chosen] = self.network(images[chosen])
        return scores


@pytest.mark.parametrize("count", [1, 3, 7, 12])
def test_layers_of_a_model_that_classifies_in_parts_are_read_whole(count: int) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    images = torch.rand(count, 1, 6, 6)
    for read in (features_of, InnerScores(num_classes=3).read):
        parts, whole = read(InParts(network), images), read(network, images)
        assert torch.allclose(parts[0], whole[0], atol=1e-6)
    layer, other = network[1], network[3]
    heard = [(layer, torch.zeros(2)), (other, torch.ones(4)), (layer, torch.ones(2))]
    for batch, rows in ((4, [0.0, 0.0, 1.0, 1.0]), (2, [1.0, 1.0])):
        joined = whole_batch(heard, batch)
        assert joined is not None
        assert joined.tolist() == rows
    for batch in (1, 3, 5):
        assert whole_batch(heard, batch) is None
    assert whole_batch([(layer, "text")], 1) is None
    assert whole_batch([], 1) is None


@pytest.mark.parametrize(("in_order", "place"), [(True, "features"), (False, "scores")])
def test_weaknesses_are_planted_in_features_only_where_these_are_in_order(in_order: bool, place: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    model = InParts(network, in_order=in_order)
    probe = Probe(make_subject(model))
    read, found = find_features(probe, torch.arange(12))
    assert found == place
    images = probe.images[:11]
    wanted = network[:3](images) if place == "features" else network(images)
    assert torch.allclose(read(model, images), wanted, atol=1e-6)
