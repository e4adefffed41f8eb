"""What is proven holds: no attack breaks it, it agrees with exact answers, and what is not known is not proven."""

from __future__ import annotations

import math
import threading
from statistics import NormalDist
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from toys import SMALL, TINY, Counting, Linear
from verifier import certified_margin, layers_of, small_digits, trained, verify

from ecnn.attacks import APGD, Square
from ecnn.auditing import Smoothed, audit, certificates, certify, load_audit, relaxations
from ecnn.auditing.auditor import _contradictions
from ecnn.auditing.certificates import _ball, _prove
from ecnn.auditing.relaxations import interval_bounds, least_margins, lipschitz_bound, tighten
from ecnn.auditing.smoothing import ABSTAIN, share_bound
from ecnn.auditing.traced import UnknownStepError
from ecnn.auditing.tracing import trace
from ecnn.backbones import ResNet
from ecnn.constructions import random_code
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.model import ECNN


class Residual(nn.Module):
    """A sum of a path and its input, written as many write it: in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, maps: Tensor) -> Tensor:
        out = self.conv(maps)
        out += maps
        result: Tensor = self.relu(out)
        return result


def network(kind: str, seed: int, side: int = 6, classes: int = 4) -> nn.Module:
    """A small random network of that kind, from (1, side, side) images, in eval mode."""
    torch.manual_seed(seed)
    layers: dict[str, list[nn.Module]] = {
        "dense": [nn.Flatten(), nn.Linear(side * side, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU()],
        "leaky": [nn.Flatten(), nn.Linear(side * side, 12), nn.LeakyReLU(0.1), nn.Linear(12, 8), nn.ELU()],
        "smooth": [nn.Flatten(), nn.Linear(side * side, 12), nn.Tanh(), nn.Linear(12, 8), nn.Sigmoid()],
        "clamped": [nn.Flatten(), nn.Linear(side * side, 12), nn.Hardtanh(), nn.Linear(12, 8), nn.ReLU6()],
        "conv": [
            nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(3, 4, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        ],
        "pools": [
            nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=1, padding=1), nn.AvgPool2d(2),
            nn.Flatten(),
        ],
        "residual": [nn.Conv2d(1, 3, 3, padding=1), Residual(3), Residual(3), nn.Flatten()],
    }  # fmt: skip
    body = nn.Sequential(*layers[kind])
    for module in body.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1, 2)
            module.running_mean = torch.randn(3)
            module.running_var = torch.rand(3) + 0.1
    body.eval()
    width = body(torch.zeros(1, 1, side, side)).shape[1]
    return nn.Sequential(body, nn.Linear(width, classes)).eval()


#: Of the small trained networks, the one that is asked here.
NAME = "two hidden layers"
KINDS = ["dense", "leaky", "smooth", "clamped", "conv", "pools", "residual"]


@settings(max_examples=10, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
    ball=st.sampled_from([("linf", 0.02), ("linf", 0.005), ("l2", 0.08), ("l1", 0.2)]),
)
def test_nothing_that_an_attack_breaks_is_certified(kind: str, seed: int, ball: tuple[Any, float]) -> None:
    norm, eps = ball
    model = network(kind, seed)
    images = torch.rand(16, 1, 6, 6)
    labels = model(images).argmax(dim=1)
    labels[:4] = (labels[:4] + 1) % 4  # wrong when clean
    found = certify(model, images, labels, norm=norm, eps=eps)
    if found is None:
        return
    proven = torch.tensor(found.proven) > 0
    assert not proven[:4].any()
    attack = APGD(norm=norm, eps=eps, steps=15, loss="margin", targets=3)
    assert not (attack.run(model, images, labels).success & proven).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.05), ("l2", 0.2), ("l1", 0.5)])
def test_bounds_of_every_step_hold(kind: str, norm: Any, eps: float) -> None:
    """Points of the ball, run in float32 through the model, stay within the bounds of the scores and margins."""
    model, images = network(kind, 3), torch.rand(5, 1, 6, 6)
    labels = model(images).argmax(dim=1)
    program = trace(model, images)
    ball = _ball(images, norm, eps)
    bounds = interval_bounds(program, ball)
    by_intervals = (bounds[-1].high - bounds[-1].low).mean()
    loose = least_margins(program, ball, bounds, labels)
    tighten(program, ball, bounds)
    tight = least_margins(program, ball, bounds, labels)
    assert bounds[-1].low.shape == (5, 1, 4)
    assert (bounds[-1].high - bounds[-1].low).mean() <= by_intervals
    assert tight.mean() >= loose.mean() - 1e-6
    smallest = torch.full((5,), torch.inf)
    for turn in range(60):
        moves = torch.randn_like(images).sign() * eps if norm == "linf" else torch.randn_like(images)
        if norm == "l2":
            moves = moves * eps / moves.flatten(1).norm(dim=1)[:, None, None, None]
        if norm == "l1":
            moves = torch.zeros_like(images).flatten(1).scatter(1, torch.randint(0, 36, (5, 1)), eps)
            moves = moves.view_as(images) * (-1) ** turn
        with torch.no_grad():
            scores = model((images + moves).clamp(0, 1))
        assert (scores >= bounds[-1].low[:, 0]).all()
        assert (scores <= bounds[-1].high[:, 0]).all()
        own = scores.gather(1, labels[:, None])
        others = scores.scatter(1, labels[:, None], -torch.inf)
        smallest = torch.minimum(smallest, (own - others).amin(dim=1).float())
        smallest = torch.minimum(smallest, (own[:, 0] - others.amax(dim=1)))
    assert (smallest >= tight).all()
    assert (smallest >= loose).all()


def test_it_agrees_with_an_independent_verifier() -> None:
    """Proven by CROWN there: proven here, but for rounding; broken by the exact answer: never proven."""
    model, eps = trained(NAME)
    images, labels = small_digits()[1][:60]
    found = certify(model, images, labels, norm="linf", eps=eps)
    assert found is not None
    layers = layers_of(model)
    margins = np.array(
        [
            certified_margin(layers, image, label, eps, "crown")
            for image, label in zip(images.flatten(1).double().numpy(), labels.tolist(), strict=True)
        ]
    )
    proven = np.array(found.proven) > 0
    clear = np.abs(margins) > 1e-2
    assert (proven == (margins > 0))[clear].all()
    assert 0.2 < found.accuracy < 0.9
    assert found.accuracy == proven.mean()
    assert sum(found.methods.values()) == proven.sum()
    exact = [
        verify(layers, image, label, eps).robust
        for image, label in zip(images[:6].flatten(1).double().numpy(), labels[:6].tolist(), strict=True)
    ]
    assert not any(own and answer is False for own, answer in zip(proven, exact, strict=False))


def test_a_linear_model_is_certified_up_to_its_border() -> None:
    model, image = Linear(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), torch.tensor([0.6, 0.4]).view(1, 1, 1, 2)
    label = torch.tensor([0])
    for norm, border in (("linf", 0.1), ("l2", 0.1 * math.sqrt(2)), ("l1", 0.2)):
        inside = certify(model, image, label, norm=norm, eps=border - 1e-3)  # type: ignore[arg-type]
        assert inside is not None
        assert inside.accuracy == 1
        assert certify(model, image, label, norm=norm, eps=border + 1e-4) is None  # type: ignore[arg-type]


def test_many_classes_are_bounded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.ReLU(), nn.Linear(8, 40)).double()
    images = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    labels, program = model(images).argmax(dim=1), trace(model, images[:1])
    ball = _ball(images, "linf", 0.01)
    bounds = interval_bounds(program, ball)
    whole = least_margins(program, ball, bounds, labels)
    monkeypatch.setattr(relaxations, "_VALUES_AT_ONCE", 4 * 3 * 768)
    with Counting() as counted:
        parts = least_margins(program, ball, bounds, labels)
    assert torch.allclose(parts, whole, rtol=0, atol=1e-12)
    assert counted.largest <= 4 * 3 * 768 < 39 * 3 * 768


def test_one_image_of_many_classes_is_asked_about_those_that_intervals_leave_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 40)).double()
    images = torch.rand(6, 3, 4, 4, dtype=torch.float64)
    labels, program = model(images).argmax(dim=1), trace(model, images[:1])
    ball = _ball(images, "linf", 0.01)
    whole = least_margins(program, ball, interval_bounds(program, ball), labels)
    asked, real = list[int](), relaxations.least_of

    def count(*given: Any) -> Tensor:
        asked.append(given[-1].shape[1])
        return real(*given)

    monkeypatch.setattr(relaxations, "least_of", count)
    for row in range(6):
        alone = _ball(images[row : row + 1], "linf", 0.01)
        margin = least_margins(program, alone, interval_bounds(program, alone), labels[row : row + 1])
        assert float(margin) > 0 or float(margin) >= float(whole[row]) - 1e-12
    assert 0 < sum(asked) < 6 * 39 / 2


@pytest.mark.parametrize(("eps", "bounded"), [(0.5, 4), (1e-5, 12)])
def test_many_classes_of_large_images_are_given_up_when_nothing_is_proven_of_a_few(
    eps: float, bounded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 5))
    images = torch.rand(12, 3, 4, 4)
    labels, seen, real = model(images).argmax(dim=1), list[int](), certificates._bound

    def count(*given: Any) -> None:
        seen.append(len(given[5]))
        real(*given)

    monkeypatch.setattr(certificates, "_bound", count)
    monkeypatch.setattr(certificates, "_HEAVY", 1)
    monkeypatch.setattr(certificates, "_MOST_WORK", 0)
    certify(model, images, labels, norm="linf", eps=eps)
    assert sum(seen) == bounded


def test_own_networks_are_known() -> None:
    """Residual units, batch norm, members and the tanh decoder: bounds of tiny balls prove most of it."""
    torch.manual_seed(0)
    images = torch.rand(4, 3, 8, 8)
    for model in (ResNet(10, 3, **SMALL), ECNN(random_code(10, 8, seed=0), 3, **SMALL)):
        labels = model.eval()(images).argmax(dim=1)
        found = certify(model, images, labels, norm="linf", eps=1e-5)
        assert found is not None
        assert found.accuracy >= 0.75


class Strange(nn.Module):
    """A linear model that does one more thing, by name."""

    def __init__(self, thing: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.thing, self.head, self.calls = thing, nn.Linear(36, 4), 0
        self.norm = nn.BatchNorm1d(36, track_running_stats=False)

    def forward(self, images: Tensor) -> Tensor:
        flat, self.calls = images.flatten(1), self.calls + 1
        if self.thing == "branches":
            flat = flat * 2 if flat.sum() > 0 else flat
        elif self.thing == "numpy":
            flat = torch.from_numpy(flat.detach().cpu().numpy().round())
        elif self.thing == "rounds":
            flat = (flat * 8).round() / 8
        elif self.thing == "multiplies":
            flat = flat * flat
        elif self.thing == "draws":
            flat = flat + torch.rand_like(flat)
        elif self.thing == "python noise":
            flat = flat + float(np.random.default_rng().random())
        elif self.thing == "counts":
            flat = flat + self.calls
        elif self.thing == "batch":
            flat = self.norm(flat)
        elif self.thing == "half":
            flat = flat.half().float()
        elif self.thing == "twin":
            view = flat.view(-1, 36)
            view.add_(1)
        scores: Tensor = self.head(flat)
        return scores


class Elsewhere(nn.Module):
    """Computes in a thread, which ends where something goes wrong; the model would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 3))
        self.went_wrong = False

    def forward(self, images: Tensor) -> Tensor:
        said: list[Tensor] = []

        def work() -> None:
            try:
                said.append(torch.stack([image.flatten() @ self.weight for image in images]))
            except Exception:
                self.went_wrong = True

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        return said[0] if said else torch.zeros(len(images), 3)


def test_a_model_that_computes_in_another_thread_is_not_traced_and_not_disturbed() -> None:
    model = Elsewhere().eval()
    with pytest.raises(UnknownStepError, match="in another thread"):
        trace(model, torch.rand(1, 1, 4, 4))
    assert not model.went_wrong


@pytest.mark.parametrize(
    "thing",
    ["branches", "numpy", "rounds", "multiplies", "draws", "python noise", "counts", "batch", "half", "twin"],
)
def test_what_is_not_known_is_not_certified(thing: str) -> None:
    model, images = Strange(thing).eval(), torch.rand(6, 1, 6, 6)
    with pytest.raises(UnknownStepError):
        trace(model, images)
    images = torch.rand(6, 1, 6, 6)
    model, labels = Strange(thing).eval(), torch.zeros(6, dtype=torch.int64)
    assert certify(model, images, labels, norm="linf", eps=1e-6) is None
    images = torch.rand(6, 1, 6, 6)
    assert certify(
        Strange("nothing").eval(), images, Strange("nothing")(images).argmax(1), norm="linf", eps=1e-6
    )


class InBatch(nn.Module):
    """Linear for one image; from two on, all get the class of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Strange("nothing").head

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(images.flatten(1))
        return scores if len(images) == 1 else scores[:1].expand_as(scores) * 2


def test_a_model_that_answers_otherwise_in_a_batch_is_not_certified() -> None:
    images = torch.rand(6, 1, 6, 6)
    model = InBatch().eval()
    assert certify(model, images, model(images).argmax(dim=1), norm="linf", eps=1e-6) is None


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1)])
def test_probabilities_keep_the_order_of_scores(last: nn.Module) -> None:
    plain, images = network("dense", 1), torch.rand(12, 1, 6, 6)
    labels = plain(images).argmax(dim=1)
    found = [
        certify(model, images, labels, norm="linf", eps=0.002)
        for model in (plain, nn.Sequential(plain, last).eval())
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].accuracy >= found[1].accuracy > 0


def test_a_lipschitz_bound_is_the_length_of_a_linear_map() -> None:
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(36, 4)).eval(), torch.rand(20, 1, 6, 6)
    program = trace(model, images)
    weight = next(model.parameters()).detach()
    assert lipschitz_bound(program) == pytest.approx(float(torch.linalg.matrix_norm(weight, ord=2)), rel=1e-5)
    deep = network("residual", 0)
    moves = torch.randn(200, 1, 6, 6) * 0.01
    with torch.no_grad():
        change = (deep(images[:1] + moves) - deep(images[:1])).norm(dim=1)
    assert (change <= lipschitz_bound(trace(deep, images)) * moves.flatten(1).norm(dim=1) + 1e-5).all()
    labels = model(images).argmax(dim=1)
    proven = _prove(program, images, labels, labels >= 0, "l2", 0.01, model(images).detach())
    assert proven["Lipschitz bound"].sum() > 0
    assert not (proven["Lipschitz bound"] & ~proven["linear bounds"]).any()  # which are exact here


# Smoothing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("successes", "n"), [(1, 10), (7, 10), (10, 10), (60, 100), (9990, 10_000)])
def test_the_bound_of_a_share_is_clopper_and_pearsons(successes: int, n: int) -> None:
    for confidence in (0.9, 0.999):
        wanted = stats.beta.ppf(1 - confidence, successes, n - successes + 1)
        assert share_bound(successes, n, confidence) == pytest.approx(wanted, rel=1e-6)
    assert share_bound(0, n, 0.9) == 0


class HalfSpace(nn.Module):
    """Class 1 beyond a plane at the grey image, class 0 before it: smoothing moves no border."""

    def forward(self, images: Tensor) -> Tensor:
        height = (images - 0.5).flatten(1).sum(dim=1) / images[0].numel() ** 0.5
        return torch.stack([-height, height], dim=1)


def test_cohens_radius_is_the_distance_to_a_plane() -> None:
    """For a half space the certificate is tight: with many votes it comes near to the distance and never passes it."""
    images = 0.5 + torch.tensor([-0.1, -0.05, 0.08]).view(3, 1, 1, 1) * torch.ones(3, 1, 4, 4)
    found = Smoothed(HalfSpace(), 0.25).certify(images, samples=20_000)
    distances = torch.tensor([0.4, 0.2, 0.32], dtype=torch.float64)
    assert found.classes.tolist() == [0, 0, 1]
    assert (found.radii <= distances).all()
    assert (found.radii > 0.9 * distances).all()
    on_the_border = Smoothed(HalfSpace(), 0.25).certify(torch.full((1, 1, 4, 4), 0.5), samples=100)
    assert on_the_border.classes.tolist() == [ABSTAIN]
    assert on_the_border.radii.tolist() == [0]
    assert Smoothed(HalfSpace(), 0.25).predict(images).tolist() == [0, 0, 1]
    assert Smoothed(HalfSpace(), 0.25).predict(torch.full((1, 1, 4, 4), 0.5), samples=100).tolist() == [
        ABSTAIN
    ]


def test_a_smoothed_model_is_certified_by_what_a_pass_can_lose() -> None:
    smoothed = Smoothed(HalfSpace(), 0.25, samples=101)
    images = 0.5 + torch.tensor([-0.1, 0.1, 0.001]).view(3, 1, 1, 1) * torch.ones(3, 1, 4, 4)
    labels = torch.tensor([0, 1, 1])
    found = certify(smoothed, images, labels, norm="l2", eps=0.2)
    assert found is not None
    assert found.methods == {"smoothing": 2}
    share = NormalDist().cdf((0.4 - 0.2) / 0.25)
    exact = stats.binom.sf(50, 101, share)
    assert found.proven[2] == 0
    for own in found.proven[:2]:
        assert 0.97 * exact < own <= exact
    assert found.confidence == 0.999
    assert "99.9 %" in found.how
    wide = certify(
        smoothed, images, labels, norm="linf", eps=0.2 / 4
    )  # the ball of 16 pixels lies in that of 0.2
    assert wide is not None
    assert wide.proven == pytest.approx(found.proven, abs=1e-5)
    assert certify(smoothed, images, labels, norm="l2", eps=0.5) is None


def test_gradients_of_votes_are_those_of_the_mean_softmax() -> None:
    smoothed = Smoothed(HalfSpace(), 0.25, samples=7)
    images = torch.full((2, 1, 4, 4), 0.45, requires_grad=True)
    scores = smoothed(images)
    assert torch.allclose((scores * 7).round(), scores * 7, atol=1e-5)
    assert scores.sum(dim=1).tolist() == pytest.approx([1, 1])
    scores[:, 1].sum().backward()
    assert images.grad is not None
    assert (images.grad > 0).all()


def test_wrong_smoothing_is_refused() -> None:
    with pytest.raises(InputError, match="sigma"):
        Smoothed(HalfSpace(), 0)
    with pytest.raises(InputError, match="samples"):
        Smoothed(HalfSpace(), 0.1, samples=0)


# In an audit ---------------------------------------------------------------------------------------------------------


def test_an_audit_brackets_the_truth(tmp_path: Any) -> None:
    model, eps = trained(NAME)
    split = small_digits()[1]
    found = audit(model, split, norm="linf", eps=eps, limit=40, budget=TINY, run_dir=tmp_path)
    assert found.certified is not None
    assert 0.3 < found.certified.accuracy <= found.accuracy
    broken = np.array(found.broken_by) != -1
    assert not (broken & (np.array(found.certified.proven) > 0)).any()
    assert load_audit(tmp_path).certified == found.certified
    assert "| certified: no attack can leave less | " in (tmp_path / "audit.md").read_text()
    assert "linear bounds (" in found.markdown()


def test_an_audit_of_a_smoothed_model_has_its_certificate() -> None:
    smoothed = Smoothed(HalfSpace(), 0.25, samples=11)
    levels = torch.tensor([100, 110, 150, 155] * 2, dtype=torch.uint8).view(-1, 1, 1, 1)
    split = Split(levels.expand(-1, 1, 4, 4).contiguous(), (levels.flatten() > 127).long())
    found = audit(smoothed, split, norm="l2", eps=0.1, limit=8, budget=TINY)
    assert found.is_random
    assert found.certified is not None
    assert found.certified.accuracy > 0.5
    assert found.certified.accuracy <= found.accuracy + 0.15
    assert not [finding for finding in found.findings if finding.name == "certificate_contradicted"]


def test_a_contradiction_is_an_alarm() -> None:
    """A certificate that an attack refutes, made up here, is said loudly."""
    from ecnn.auditing import BUDGETS, Certificate, Subject
    from ecnn.auditing.stages import Staged

    nothing = torch.zeros(2, dtype=torch.int64)
    subject = Subject(
        model=HalfSpace(), images=nothing, labels=nothing, norm="l2", eps=0.1, budget=BUDGETS["quick"]
    )
    certified = Certificate(accuracy=1.0, interval=(0.3, 1.0), proven=(1.0, 1.0), methods={"intervals": 2})
    right = np.array([1.0, 0.0])
    staged = Staged(
        stages=(),
        broken_by=right,
        right=right,
        right_when_clean=right,
        right_when_plain=right,
        evaluation=cast("Any", None),
    )
    (found,) = _contradictions(subject, staged, certified)
    assert found.name == "certificate_contradicted"
    assert found.is_open
    assert found.evidence["images"] == 1
    assert not _contradictions(subject, staged, None)


def test_square_does_not_break_what_is_proven_of_digits() -> None:
    model, eps = trained(NAME)
    images, labels = small_digits()[1][:60]
    found = certify(model, images, labels, norm="linf", eps=eps)
    assert found is not None
    broken = Square(norm="linf", eps=eps, queries=200).run(model, images, labels).success
    assert not (broken & (torch.tensor(found.proven) > 0)).any()
