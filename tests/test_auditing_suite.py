"""The adaptive suite: each attack breaks what the plain one cannot, obeys the contract, and claims nothing unproven."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import TINY, coded_model

from ecnn.attacks import APGD, PGD, Attack, AutoAttack, Cost, HopSkipJump, Race, Transfer
from ecnn.attacks.views import SCORES, Aim, Averaged, Look, View, WeakestBit
from ecnn.auditing import adaptive, audit, surrogates
from ecnn.auditing.alone import OneAtATime
from ecnn.auditing.bpda import Passing, can_pass_through, straight_through
from ecnn.auditing.budgets import BUDGETS, Budget
from ecnn.auditing.subject import Subject
from ecnn.auditing.suite import Maker, estimate_cost, suite, without_repeats
from ecnn.auditing.surrogates import (
    Examples,
    Surrogates,
    all_features,
    class_means,
    own_state,
    rebuild_student,
    train_head,
    train_student,
)
from ecnn.auditing.traits import find_traits
from ecnn.auditing.trials import Found
from ecnn.baselines import EMPIR, Ensemble
from ecnn.codes import CodeMatrix
from ecnn.constructions import random_code
from ecnn.data import load_data
from ecnn.model import ECNN

pytestmark = pytest.mark.usefixtures("one_thread")
EPS = 0.1
BALL: dict[str, Any] = {"norm": "linf", "eps": EPS}
WALK: dict[str, Any] = {**BALL, "steps": 20, "step_size": EPS / 4, "schedule": "cosine"}


class Sees(nn.Module):
    """One number per class, linear in the pixels: the ground on which the hand-built models stand.

    In a ball of 0.1 around the images of `firm_images` every other class can be reached.
    """

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.layer = nn.Linear(64, outputs, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(outputs, 64, generator=generator))

    def logits(self, images: Tensor) -> Tensor:
        said: Tensor = self.layer(images.flatten(1) - 0.5)
        return said

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(images)


def firm_images(model: nn.Module, count: int = 12) -> tuple[Tensor, Tensor]:
    """Images with the classes that the model gives them, and to twenty random points of the ball around each."""
    generator = torch.Generator().manual_seed(2)
    images = 0.2 + 0.6 * torch.rand(300, 1, 8, 8, generator=generator)
    with torch.no_grad():
        labels = model(images).argmax(dim=1)
        for _ in range(20):
            noise = (2 * torch.rand(images.shape, generator=generator) - 1) * EPS
            stays = model((images + noise).clamp(0, 1)).argmax(dim=1) == labels
            images, labels = images[stays], labels[stays]
    assert len(images) >= count
    return images[:count], labels[:count]


def broken(attack: Attack, model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images broken, as fresh passes say, after a look at the ball."""
    found = attack.run(model, images, labels, seed=0)
    assert (found.images - images).abs().max() <= EPS + 1e-6
    with torch.no_grad():
        fresh = model(found.images).argmax(dim=1) != labels
    assert torch.equal(found.success, fresh)
    return float(fresh.double().mean())


def see(view: View, model: nn.Module, images: Tensor, labels: Tensor, goals: Tensor | None = None) -> Look:
    return view.look(model, images, Aim(labels, goals))


def blind_attacks() -> list[Attack]:
    """What looks at scores alone, as a usual evaluation does."""
    return [
        PGD(loss="cross_entropy", **WALK),
        APGD(loss="cross_entropy", steps=20, **BALL),
        APGD(loss="margin", steps=20, **BALL),
    ]


class Saturated(Sees):
    """Members linear in the pixels behind a tanh so steep that float32 has no gradient left."""

    def __init__(self) -> None:
        super().__init__(7)
        self.code = random_code(4, 7, seed=0)

    def member_logits(self, images: Tensor) -> Tensor:
        return 60 * self.logits(images)

    def decode(self, member_logits: Tensor) -> Tensor:
        return torch.tanh(member_logits) @ torch.from_numpy(self.code.signed.T.astype("float32"))

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.member_logits(images))


CODED: dict[str, Attack] = {
    "linear": APGD(on="linear", loss="margin", steps=20, **BALL),
    "members": PGD(on="members", loss="margin", **WALK),
    "tempered": PGD(on="tempered", loss="margin", **WALK),
    "codewords": PGD(on="members", loss="margin", targets=3, **WALK),
    "cheapest-bits": PGD(on=adaptive.CheapestBits(), **WALK),
    "min-bit": PGD(on=WeakestBit(), targets=3, **WALK),
    "relay": adaptive.Relay(steps=10, views=(adaptive.CheapestBits(), "linear", "scores"), **BALL),
}


@pytest.mark.parametrize("name", CODED)
def test_members_speak_where_the_decoder_is_saturated(name: str) -> None:
    model = Saturated()
    images, labels = firm_images(model)
    assert isinstance(model, adaptive.Coded)
    assert max(broken(attack, model, images, labels) for attack in blind_attacks()) <= 0.6
    assert broken(CODED[name], model, images, labels) == 1


class CommonLevel(Sees):
    """Two symbols per member and a sigmoid decoder: their common level moves faster than what tells them apart."""

    def __init__(self) -> None:
        super().__init__(8)
        self.code = random_code(4, 7, seed=0)

    def member_logits(self, images: Tensor) -> Tensor:
        said = self.logits(images)
        level = -4 * (images.flatten(1) - 0.5).sum(dim=1)[:, None].abs() - 1
        return torch.stack([level - said[:, :7], level + said[:, :7]], dim=2)

    def decode(self, member_logits: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(torch.from_numpy(self.code.symbols.astype("int64")), 2).float()
        return torch.einsum("bnk,cnk->bc", torch.sigmoid(member_logits), one_hot)

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.member_logits(images))


@pytest.mark.parametrize("name", ["linear", "members", "cheapest-bits", "min-bit"])
def test_a_common_level_satisfies_only_attacks_on_scores(name: str) -> None:
    """Lowering the level closes the score margin without ever changing its sign (FACTS on the q=2 model)."""
    model = CommonLevel()
    images, labels = firm_images(model)
    assert broken(PGD(loss="margin", **WALK), model, images, labels) <= 0.5
    assert broken(CODED[name], model, images, labels) >= 0.9


def test_cheapest_bits_counts_half_of_the_difference() -> None:
    """By hand: classes 000000 and 111100 differ in four members, of which three must change sides."""

    class Says(nn.Module):
        code = CodeMatrix([[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])

        def member_logits(self, images: Tensor) -> Tensor:
            return images.flatten(1)

    # Symbol 0 is right for class 0: margins are minus the logits.
    logits = torch.tensor([[-1.0, -2.0, -3.0, -50.0, -9.0, -9.0]]).view(1, 1, 1, 6)
    labels = torch.tensor([0])
    look = see(adaptive.CheapestBits(), Says(), logits, labels)
    assert float(look.losses) == -(1 + 2 + 3)
    towards = see(adaptive.CheapestBits(), Says(), logits, labels, torch.tensor([2]))
    assert float(towards.losses) == -(2 + 3 + 9)
    assert look.scores is None
    # Three members have changed sides: they are pushed on, but no further than the mean size of all six.
    turned = torch.tensor([[1.0, 2.0, 90.0, -50.0, -9.0, -9.0]]).view(1, 1, 1, 6)
    mean = (1 + 2 + 90 + 50 + 9 + 9) / 6
    look = see(adaptive.CheapestBits(), Says(), turned, labels)
    assert float(look.losses) == pytest.approx(1 + 2 + mean)


def test_the_weakest_bit_is_the_one_furthest_from_the_goal() -> None:
    class Says(nn.Module):
        code = CodeMatrix([[0, 0, 1], [1, 1, 0], [1, 0, 0]])

        def member_logits(self, images: Tensor) -> Tensor:
            return images.flatten(1)

    logits = torch.tensor([[2.0, -3.0, 1.0]]).view(1, 1, 1, 3)
    labels = torch.tensor([0])
    for goals, weakest in ((torch.tensor([1]), -3), (torch.tensor([2]), -1), (None, -1)):
        assert float(see(WeakestBit(), Says(), logits, labels, goals).losses) == 2 * weakest


class Vote(Sees):
    """Three members that each know all classes; their hard majority has no gradient."""

    def __init__(self) -> None:
        super().__init__(12)

    def member_scores(self, images: Tensor) -> Tensor:
        return self.logits(images).view(-1, 3, 4)

    def forward(self, images: Tensor) -> Tensor:
        votes = nn.functional.one_hot(self.member_scores(images).argmax(dim=2), 4).float().sum(dim=1)
        return votes - 0.1 * torch.arange(4)


@pytest.mark.parametrize("view", [adaptive.MeanMembers(), adaptive.WorstMembers()])
def test_a_vote_falls_with_its_members(view: View) -> None:
    model = Vote()
    images, labels = firm_images(model)
    assert isinstance(model, adaptive.Voting)
    assert max(broken(attack, model, images, labels) for attack in blind_attacks()) <= 0.3
    assert broken(PGD(on=view, **WALK), model, images, labels) >= 0.9
    assert broken(PGD(on=view, targets=3, **WALK), model, images, labels) >= 0.9


class Steep(Sees):
    """Probabilities of a softmax with a temperature at which float32 knows only 0 and 1."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.softmax(100 * self.logits(images), dim=1)


STEEP: dict[str, Attack] = {
    "inner-scores": PGD(on=adaptive.InnerScores(num_classes=4), **WALK),
    "float64": adaptive.InDouble(attack=APGD(loss="margin", steps=20, **BALL), **BALL),
    "student": Transfer(source=Sees(), attack=APGD(loss="cross_entropy", steps=20, keep="last", **BALL)),
}


@pytest.mark.parametrize("name", STEEP)
def test_a_softmax_hides_nothing(name: str) -> None:
    model = Steep()
    images, labels = firm_images(model)
    assert max(broken(attack, model, images, labels) for attack in blind_attacks()) <= 0.6
    assert broken(STEEP[name], model, images, labels) >= 0.9


def test_logarithms_undo_a_softmax() -> None:
    """The margin of log p is that of the logits; the margin of p has all but vanished."""

    class Warm(Sees):
        def forward(self, images: Tensor) -> Tensor:
            return torch.softmax(8 * self.logits(images), dim=1)

    model = Warm()
    images, labels = firm_images(model)
    points = images.clone().requires_grad_(True)
    look = see(adaptive.LogScores(), model, points, labels)
    expected = see(SCORES, Sees(), points, labels).losses * 8
    assert torch.allclose(look.losses, expected, rtol=1e-3)
    assert broken(PGD(on=adaptive.LogScores(), **WALK), model, images, labels) == 1


def test_cross_entropy_on_scaled_scores_is_free_of_their_scale() -> None:
    class Loud(Sees):
        def forward(self, images: Tensor) -> Tensor:
            return 1e6 * self.logits(images)

    images, labels = firm_images(Sees())
    view = adaptive.ScaledCrossEntropy()
    losses = [see(view, model, images, labels).losses for model in (Sees(), Loud())]
    assert torch.allclose(losses[0], losses[1], rtol=1e-4)
    plain = broken(PGD(loss="cross_entropy", **WALK), Loud(), images, labels)
    assert plain <= 0.6
    assert broken(PGD(on=view, **WALK), Loud(), images, labels) == 1


class _Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.zeros_like(gradients[0])


def _round(images: Tensor) -> Tensor:
    return (16 * images).round() / 16


def _cast(images: Tensor) -> Tensor:
    return (32 * images).to(torch.uint8).float() / 32


def _thermometer(images: Tensor) -> Tensor:
    levels = torch.linspace(0.05, 0.95, 10)
    return (images[..., None] > levels).float().mean(dim=-1)


def _one_hot(images: Tensor) -> Tensor:
    return nn.functional.one_hot((15 * images).long(), 16).float() @ (torch.arange(16) / 15.0)


def _choose(images: Tensor) -> Tensor:
    return torch.where(images > 0.5, torch.ones_like(images), torch.zeros_like(images))


def _forget(images: Tensor) -> Tensor:
    with torch.no_grad():
        return images * 1.0


def _data(images: Tensor) -> Tensor:
    return images.data * 1.0


def _hook(images: Tensor) -> Tensor:
    kept = images * 1.0
    if kept.requires_grad:
        kept.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    return kept


HIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "round": _round,
    "cast": _cast,
    "thermometer": _thermometer,
    "one-hot": _one_hot,
    "where": _choose,
    "detach": lambda images: images.detach(),
    "no_grad": _forget,
    "data": _data,
    "hook": _hook,
    "function": _Silent.apply,
}


class Hiding(Sees):
    """Something before the first layer that has no derivative, or a false one."""

    def __init__(self, hide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hide = hide

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.hide(images)) + 0 * images.sum()


@pytest.mark.parametrize("how", HIDING)
def test_gradients_pass_through_what_hides_them(how: str) -> None:
    model = Hiding(HIDING[how])
    images, labels = firm_images(model)
    assert max(broken(attack, model, images, labels) for attack in blind_attacks()) <= 0.75
    assert can_pass_through(model, images[:3])
    view = Passing(view="scores")
    assert broken(PGD(on=view, **WALK), model, images, labels) >= 0.9


def test_passing_through_changes_no_value_and_leaves_torch_alone() -> None:
    images = torch.rand(3, 1, 8, 8)
    for how in HIDING:
        model = Hiding(HIDING[how])
        with straight_through():
            passed = model(images.clone().requires_grad_(True))
        assert torch.allclose(passed, model(images), atol=1e-5)
    assert HIDING["function"](images).equal(images)
    assert "apply" not in torch.autograd.function._SingleLevelFunction.__dict__
    assert torch.is_grad_enabled()
    assert images.round().max() <= 1


def test_an_honest_model_hides_nothing() -> None:
    images = torch.rand(4, 1, 8, 8)
    assert not can_pass_through(Sees(), images)
    traits = find_traits(Sees(), images, 4)
    assert not traits.is_random
    assert not traits.gives_probabilities
    assert not traits.hides_scores
    assert traits.blind == 0


def test_what_cannot_be_passed_is_left_alone() -> None:
    class Refuses(Sees):
        def forward(self, images: Tensor) -> Tensor:
            if images.round().requires_grad:
                raise RuntimeError("no gradients here")
            return self.logits(images.round())

    class Strays(Sees):
        def forward(self, images: Tensor) -> Tensor:
            rounded = images.detach().round()
            return self.logits(rounded) + (1 if rounded.requires_grad else 0)

    assert not can_pass_through(Refuses(), torch.rand(2, 1, 8, 8))
    assert not can_pass_through(Strays(), torch.rand(2, 1, 8, 8))


class Decides(Sees):
    """Features linear in the pixels, then a decision that gives one class all: no score, no gradient."""

    def features(self, images: Tensor) -> Tensor:
        return self.logits(images)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.one_hot(self.features(images).argmax(dim=1), 4).float()


def examples_of(model: nn.Module, count: int = 200) -> Examples:
    generator = torch.Generator().manual_seed(9)
    images = torch.rand(count, 1, 8, 8, generator=generator)
    with torch.no_grad():
        return Examples(images, model(images).argmax(dim=1), are_true=False)


def test_features_are_attacked_where_nothing_after_them_speaks() -> None:
    model = Decides()
    images, labels = firm_images(model)
    assert max(broken(attack, model, images, labels) for attack in blind_attacks()) <= 0.6
    examples = examples_of(model)
    view = adaptive.FeatureDistance(
        means=class_means(all_features(model, examples.images), examples.labels, 4)
    )
    assert broken(PGD(on=view, targets=3, **WALK), model, images, labels) >= 0.9
    craft = APGD(loss="cross_entropy", steps=20, keep="last", **BALL)
    head = train_head(model, all_features(model, examples.images), examples.labels, 4)
    with torch.no_grad():
        assert (head(images).argmax(1) == labels).double().mean() >= 0.8  # a surrogate worth its name
    assert broken(adaptive.OwnTransfer(source=head, attack=craft), model, images, labels) >= 0.9
    walk = HopSkipJump(norm="linf", steps=8, samples=40)
    assert broken(adaptive.Within(attack=walk, **BALL), model, images, labels) >= 0.9


class Lies(Decides):
    """The decision of one network over the smooth scores of another: exact gradients that say nothing of it."""

    def forward(self, images: Tensor) -> Tensor:
        elsewhere = torch.sin(40 * images.flatten(1)[:, :4])
        return super().forward(images) * 12 + elsewhere


def test_answers_alone_are_asked_whatever_the_gradient_says() -> None:
    model = Lies()
    images, labels = firm_images(model)
    assert max(broken(attack, model, images, labels) for attack in blind_attacks()) <= 0.3
    subject = make_subject(model, "linf", EPS, dataclasses.replace(TINY, answers=400))
    attacks = suite(subject, num_classes=4, is_random=False, examples=examples_of(model))
    assert list(attacks)[-1] == "rays"  # after every gradient: what it alone breaks speaks against them
    assert broken(attacks["rays"], model, images, labels) >= 0.9
    known: Any = vars(attacks["rays"])["neighbours"]
    assert (known.moves.flatten(1).abs().amax(dim=1) <= EPS + 1e-6).all()
    assert (known.moves != 0).flatten(1).any(dim=1).double().mean() >= 0.5


def test_what_falls_at_once_costs_no_search_and_no_surrogate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sees()
    images, labels = firm_images(model)

    def refuse(*given: Any, **settings: Any) -> Any:
        raise AssertionError("nothing stands that this could help with")

    for name in ("suite.search", "surrogates.train_student", "surrogates.train_head"):
        monkeypatch.setattr(f"ecnn.auditing.{name}", refuse)
    found = audit(model, (images, labels), norm="linf", eps=0.5, limit=len(images), budget=TINY)
    assert found.accuracy == 0
    assert {stage.name for stage in found.stages} <= {"pgd-ce", "apgd-ce", "apgd-margin", "scaled-ce"}
    with pytest.raises(AssertionError, match="nothing stands"):
        audit(model, (images, labels), norm="linf", eps=1e-4, limit=len(images), budget=TINY)


class Equalising(nn.Module):
    """Equalises the histogram of an image in NumPy, which tells apart pixels that were equal as soon as they differ."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.net = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))

    def equalised(self, images: Tensor) -> Tensor:
        done = []
        for image in images.detach().numpy():
            counts, edges = np.histogram(image, 32, (0, 1))
            done.append(np.interp(image, edges[1:], np.cumsum(counts) / image.size))
        return torch.from_numpy(np.stack(done)).float()

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.net(self.equalised(images))
        return scores


def test_short_steps_from_the_image_follow_derivatives_that_hold_only_near_it() -> None:
    """A random start tells equal pixels of the background apart, and there the identity's gradients lead nowhere."""
    data = load_data("digits")
    torch.manual_seed(0)
    model, (images, labels) = Equalising(), data.train[:]
    equalised, optimizer = model.equalised(images), torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(15):
        for rows in torch.split(torch.randperm(len(labels), device="cpu"), 64):
            optimizer.zero_grad()
            torch.autograd.backward(
                torch.nn.functional.cross_entropy(model.net(equalised[rows]), labels[rows])
            )
            optimizer.step()
    images, labels = data.test[:60]
    subject = make_subject(model.eval(), "linf", EPS, BUDGETS["quick"])
    maker = Maker(subject, 10, find_traits(model, images[:8], 10))
    attacks = maker.on_scores()
    near = attacks["straight-through-near"]
    assert isinstance(near, PGD)
    assert near.start == "image"
    assert 2 * EPS < near.steps * float(near.step_size) < 3 * EPS  # every point of the ball can be reached
    left = {
        name: int((~attacks[name].run(model, images, labels).success).sum())
        for name in ("straight-through", "straight-through-near")
    }
    assert left["straight-through-near"] <= 3
    assert left["straight-through"] >= 8


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_in_l1_hidden_derivatives_are_also_followed_by_steps_of_any_number_of_pixels(norm: Any) -> None:
    model, (images, _) = Equalising().eval(), load_data("digits").test[:8]
    attacks = Maker(make_subject(model, norm, EPS, TINY), 10, find_traits(model, images, 10)).on_scores()
    climb: Any = attacks.get("straight-through-climb")
    assert isinstance(climb, APGD) == (norm == "l1")
    assert climb is None or isinstance(climb.on, Passing)


def test_walks_with_short_steps_are_made_only_where_derivatives_are_hidden() -> None:
    model, (images, _) = Sees(), firm_images(Sees())
    maker = Maker(make_subject(model, "linf", EPS, TINY), 4, find_traits(model, images[:8], 4))
    assert not [name for name in maker.on_scores() if name.endswith("near")]


def test_one_attack_is_not_made_by_two_names() -> None:
    straight = PGD(on=Passing(view="scores"), **WALK)
    found = {
        "found-scores-straight": PGD(on=Passing(view="scores"), **WALK),
        "found-scores-leaky": PGD(on=Passing(view="scores", leaks=True), **WALK),
        "found-features": PGD(on=adaptive.FeatureDistance(means=torch.zeros(4, 2)), **WALK),
    }
    left = without_repeats(found, {"pgd-ce": PGD(**WALK), "straight-through": straight})
    assert list(left) == ["found-scores-leaky", "found-features"]


class Trembles(Decides):
    """The same decision of an image with noise: no gradient, and no two passes alike."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images + 0.02 * torch.randn_like(images))


def test_answers_alone_of_a_random_model() -> None:
    """By the class of the mean over passes, and so far beyond the border that other passes are wrong too."""
    model, (images, labels) = Trembles(), firm_images(Decides())
    subject = make_subject(model, "linf", EPS, dataclasses.replace(TINY, answers=400))
    attacks = suite(subject, num_classes=4, is_random=True)
    torch.manual_seed(0)
    found = attacks["rays"].run(model, images, labels)
    assert (found.images - images).abs().max() <= EPS + 1e-6
    with torch.no_grad():
        right = [model(found.images).argmax(dim=1) == labels for _ in range(20)]
        at_first = [model(images).argmax(dim=1) == labels for _ in range(20)]
    assert torch.stack(at_first).double().mean() >= 0.9
    assert torch.stack(right).double().mean() <= 0.1


def test_the_long_search_takes_a_share_of_many_images() -> None:
    cases: list[tuple[str, int, str, float]] = [
        ("standard", 1000, "rays-sample", 0.4),
        ("standard", 500, "rays-sample", 0.4),
        ("standard", 300, "rays-long", 1.0),
        ("thorough", 10_000, "rays-sample", 0.2),
    ]
    for name, count, long, share in cases:
        images = torch.zeros(count, 0)
        subject = Subject(
            model=Sees(), images=images, labels=images, norm="l2", eps=0.1, budget=BUDGETS[name]
        )
        attacks: Any = suite(subject, num_classes=4, is_random=False)
        assert list(attacks)[-1] == long
        assert attacks[long].share == share
        assert attacks[long].queries == 10 * attacks["rays"].queries == BUDGETS[name].answers
        assert attacks["rays"].share == 1.0
    alone = make_subject(OneAtATime(Sees(), torch.zeros(0, 1, 8, 8)), "l2", 0.1, BUDGETS["standard"])
    assert list(suite(alone, num_classes=4, is_random=False))[-1] == "rays"  # the long one would take hours
    subject = make_subject(Sees(), "l2", 0.1, BUDGETS["quick"])
    assert suite(subject, num_classes=4, is_random=False)["rays"].cost(4).forwards == 1002
    assert list(suite(subject, num_classes=4, is_random=False))[-1] == "rays"


def test_neighbours_survive_a_model_that_raises_and_are_kept(tmp_path: Path) -> None:
    class Breaks(Decides):
        asked = 0

        def forward(self, images: Tensor) -> Tensor:
            self.asked += 1
            if self.asked > 3:
                raise RuntimeError("enough")
            return super().forward(images)

    subject = make_subject(Breaks(), "linf", EPS, TINY)
    made = Surrogates(subject, examples_of(Decides()), 4, None, True)
    assert not made.neighbours().moves.any()
    subject = make_subject(Decides(), "linf", EPS, TINY)
    first, again = (
        Surrogates(subject, examples_of(Decides()), 4, tmp_path, True).neighbours() for _ in range(2)
    )
    assert torch.equal(first.moves, again.moves)
    assert (tmp_path / "neighbours.safetensors").exists()


@pytest.mark.slow
def test_a_student_learns_from_answers_alone() -> None:
    model = Decides()
    images, labels = firm_images(model)
    craft = APGD(loss="cross_entropy", steps=20, keep="last", **BALL)
    for dense in (False, True):
        student = train_student(model, examples_of(model), 4, EPS, seed=0, dense=dense)
        assert broken(Transfer(source=student, attack=craft), model, images, labels) >= 0.75
        again = rebuild_student(own_state(student))
        assert torch.equal(again(images), student(images))


def test_a_student_of_large_images_is_shown_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten images, four noisy and four mixed copies of each, and in three rounds 20 points: no more is held or asked."""
    model = Decides()
    examples, asked = examples_of(model), list[int]()
    monkeypatch.setattr(surrogates, "_STUDENT_STEPS", 2)
    monkeypatch.setattr(surrogates, "_STUDENT_NUMBERS", 160 * examples.images[0].numel())
    model.register_forward_pre_hook(lambda module, given: asked.append(len(given[0])))
    train_student(model, examples, 4, EPS, seed=0)
    assert len(examples.images) > 10
    assert sum(asked) == 10 * 9 + 3 * 20


def test_class_means_are_means_and_absent_classes_are_never_aimed_at() -> None:
    model = Decides()
    examples = examples_of(model)
    some = Examples(examples.images, examples.labels.clamp(max=2), are_true=False)
    features = model.features(some.images).detach()
    means = class_means(features, some.labels, 4)
    assert torch.allclose(means[1], features[some.labels == 1].mean(dim=0), atol=1e-5)
    assert torch.isnan(means[3]).all()
    points = some.images[:5].clone().requires_grad_(True)
    for goals in (None, torch.full((5,), 3)):
        look = see(adaptive.FeatureDistance(means=means), model, points, some.labels[:5], goals)
        (gradient,) = torch.autograd.grad(look.losses.sum(), points)
        assert torch.isfinite(look.losses).all()
        assert torch.isfinite(gradient).all()


def test_views_with_other_tensors_are_never_equal() -> None:
    """Recorded passes are found by their view: those of other means must not be replayed."""
    assert adaptive.FeatureDistance(means=torch.zeros(2, 3)) != adaptive.FeatureDistance(
        means=torch.ones(2, 3)
    )
    assert adaptive.InnerScores(num_classes=3) != adaptive.InnerScores(num_classes=4)
    assert adaptive.InnerScores(num_classes=3) == adaptive.InnerScores(num_classes=3)
    assert Passing(view="scores") != Passing(view="linear")


def test_features_are_found_by_name_or_by_listening() -> None:
    images = torch.rand(3, 2, 6, 6)
    coded = ECNN(random_code(5, 7, seed=0), 2, width=4, depth=8).eval()
    features, scores = adaptive.features_of(coded, images)
    assert features.shape == (3, 8)
    assert scores is not None
    assert torch.equal(scores, coded(images))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(72, 9), nn.ReLU(), nn.Linear(9, 5))
    features, scores = adaptive.features_of(plain, images)
    assert torch.equal(features, plain[:3](images))
    assert all(not module._forward_hooks for model in (coded, plain) for module in model.modules())


class Shy(nn.Module):
    """Scores that only move once a member has given way: neither view alone finds the way.

    The member sees the first pixel and is content there; the scores see the second, but only where the first is high.
    """

    code = CodeMatrix([[0, 1], [1, 0]])

    def member_logits(self, images: Tensor) -> Tensor:
        first = images.flatten(1)[:, 0]
        return torch.stack([first - 2, 2 - first], dim=1)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        gate = ((flat[:, 0] - 0.55) * 20).clamp(0, 1)
        lead = 0.5 - gate * (flat[:, 1] - 0.5) * 10
        return torch.stack([lead, torch.zeros_like(lead)], dim=1)


def test_a_relay_goes_on_from_the_best_point() -> None:
    images = torch.full((4, 1, 1, 2), 0.5)
    labels = torch.zeros(4, dtype=torch.int64)
    for view in ("members", "scores"):
        assert broken(PGD(on=view, start="image", **WALK), Shy(), images, labels) == 0
    assert broken(adaptive.Relay(steps=20, views=("members", "scores"), **BALL), Shy(), images, labels) == 1
    assert broken(adaptive.Relay(steps=20, views=("scores", "members"), **BALL), Shy(), images, labels) == 0
    assert (
        broken(
            adaptive.Relay(steps=20, views=("scores", "members"), restarts=2, **BALL), Shy(), images, labels
        )
        == 1
    )


class Coin(Sees):
    """The right gradient on average, and one that points anywhere in a single pass."""

    def forward(self, images: Tensor) -> Tensor:
        said = self.logits(images)
        swing = 1 + 12 * torch.randn(len(images), 1, device=images.device)
        return swing * said + (1 - swing) * said.detach() + 1e-3 * torch.randn_like(said)


def test_averaging_finds_the_direction_that_one_pass_hides() -> None:
    model = Coin()
    images, labels = firm_images(Sees())
    assert find_traits(model, images, 4).is_random
    single, averaged = (
        PGD(on=Averaged(view="scores", passes=passes), keep="last", **WALK) for passes in (1, 100)
    )
    torch.manual_seed(0)
    assert float(averaged.run(model, images, labels).success.double().mean()) >= 0.9
    assert float(single.run(model, images, labels).success.double().mean()) <= 0.7


def test_passes_are_counted() -> None:
    model, seen = Coin(), 0
    images, labels = firm_images(Sees(), 5)

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal seen
        seen += len(inputs[0])

    handle = model.register_forward_pre_hook(count)
    attack = PGD(on=Averaged(view="scores", passes=7), keep="last", **WALK)
    found = attack.run(model, images, labels)
    handle.remove()
    assert int(found.forwards.sum()) == seen
    assert (found.backwards == 20 * 7).all()


# The contract, for everything a suite can hold.


def voting_model() -> Ensemble:
    torch.manual_seed(1)
    return Ensemble(5, 2, num_members=3, depth=8, width=4, activation="silu").double().eval()


MODELS = {"coded": coded_model, "voting": voting_model}


def make_subject(model: nn.Module, norm: Any, eps: float, budget: Budget) -> Subject:
    nothing = torch.zeros(0, dtype=torch.int64)
    return Subject(model=model, images=nothing, labels=nothing, norm=norm, eps=eps, budget=budget)


def whole_suite(model: nn.Module, *, surrogates: bool = True) -> dict[str, Attack]:
    generator = torch.Generator().manual_seed(4)
    images = torch.rand(20, 2, 6, 6, generator=generator, dtype=torch.float64)
    examples = Examples(images, model(images).argmax(dim=1), are_true=False)
    subject = make_subject(model, "linf", 0.1, TINY)
    attacks = suite(subject, num_classes=5, is_random=False, examples=examples if surrogates else None)
    attacks["hopskipjump"] = adaptive.Within(
        norm="linf", eps=0.1, attack=HopSkipJump(norm="linf", steps=2, samples=8)
    )
    attacks["float64"] = adaptive.InDouble(
        norm="linf", eps=0.1, attack=APGD(norm="linf", eps=0.1, steps=6, loss="margin")
    )
    return attacks


def contract_batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    images = torch.rand(5, 2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = model(images).argmax(dim=1)
    labels[1] = (labels[1] + 1) % 5
    return images, labels


@pytest.mark.parametrize("kind", MODELS)
def test_the_contract_holds_for_the_whole_suite(kind: str) -> None:
    """In the ball, proven by a fresh pass, clean where it failed, each image by itself, and nothing left behind."""
    model = MODELS[kind]()
    attacks = whole_suite(model)
    images, labels = contract_batch(model)
    state = torch.get_rng_state()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for name, attack in attacks.items():
        given = images.clone()
        found = attack.run(model, images, labels, seed=1)
        assert torch.equal(images, given), name
        assert found.images.dtype == images.dtype, name
        assert (found.images - images).abs().max() <= 0.1 + 1e-7, name
        assert 0 <= found.images.min() <= found.images.max() <= 1, name
        fresh = model(found.images).argmax(1)
        assert torch.equal(found.success, fresh != labels), name
        assert torch.equal(found.images[~found.success], images[~found.success]), name
        assert torch.equal(found.images[1], images[1]), name
        for rows in (torch.tensor([3]), torch.tensor([4, 0, 2])):
            apart = attack.run(model, images[rows], labels[rows], seed=1, index=rows)
            assert torch.allclose(apart.images, found.images[rows], atol=1e-6, rtol=0), name
            assert torch.equal(apart.forwards, found.forwards[rows]), name
            assert torch.equal(apart.backwards, found.backwards[rows]), name
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(not module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_image_that_goes_through_the_model_is_counted() -> None:
    model = coded_model()
    attacks = whole_suite(model)
    images, labels = contract_batch(model)
    for name, attack in attacks.items():
        if name in ("float64", "student", "dense-student"):  # a copy of the model is asked, or another one
            continue
        seen = 0

        def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            nonlocal seen
            seen += len(inputs[0])

        handle = model.trunk.register_forward_pre_hook(count)
        found = attack.run(model, images, labels)
        handle.remove()
        assert int(found.forwards.sum()) == seen, name


def test_what_a_suite_holds() -> None:
    model = coded_model()
    names = list(whole_suite(model))
    assert names[0] == "pgd-ce"
    wanted = ["apgd-ce", "linear", "members", "tempered", "cheapest-bits", "codewords", "min-bit", "features"]
    assert [name for name in wanted if name not in names] == []
    assert [name for name in ("retrained-head", "relay", "square") if name not in names] == []
    assert "mean-members" not in names
    votes = list(whole_suite(voting_model()))
    assert [name for name in ("mean-members", "worst-members", "mean-targets") if name not in votes] == []
    assert "linear" not in votes
    plain = suite(make_subject(Sees(10), "l2", 1.0, BUDGETS["standard"]), num_classes=10, is_random=False)
    # All of AutoAttack with its own settings, in its order.
    members = AutoAttack(norm="l2", eps=1.0).members(10)
    assert {name: plain[name] for name in members} == members
    assert [name for name in plain if name in members] == list(members)
    random = suite(make_subject(Sees(10), "l2", 1.0, BUDGETS["quick"]), num_classes=10, is_random=True)
    assert "eot-margin" in random
    assert all(getattr(attack, "keep", "") == "last" for name, attack in random.items() if "eot" in name)


def test_a_view_that_asks_several_times_is_averaged_over_fewer_passes() -> None:
    subject = make_subject(Sees(10), "linf", 0.1, dataclasses.replace(BUDGETS["quick"], eot=20))
    maker = Maker(subject, 10, find_traits(subject.model, torch.rand(4, 1, 8, 8), 10))
    around = adaptive.MeanAround(view="scores", pairs=4, deviation=0.05)
    views = {"scores": SCORES, "around": around}
    found = Found(views=views, broken=dict.fromkeys(views, 1), ways={}, standing=9, asked=9)
    made: dict[str, Any] = dict(maker.where_found(found, is_random=True))
    looks = {name: attack.on.passes_per_look for name, attack in made.items()}
    assert looks == {"found-scores": 20, "found-around": 27}


@pytest.mark.parametrize("num_classes", [2, 3, 1000])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_any_number_of_classes(num_classes: int, norm: Any) -> None:
    model = Sees(num_classes)
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = model(images).argmax(dim=1)
    examples = Examples(images, labels, are_true=True)
    subject = make_subject(model, norm, 0.1, TINY)
    for attack in suite(subject, num_classes=num_classes, is_random=False, examples=examples).values():
        found = attack.run(model, images, labels)
        distance = (found.images - images).flatten(1).norm(dim=1, p=2 if norm == "l2" else float("inf"))
        assert distance.max() <= 0.1 + 1e-6


def test_the_fast_suite_costs_at_most_a_fifth_of_autoattack() -> None:
    """For an image that nothing breaks, whatever it has: a race stands in for AutoAttack, on scores and on members."""
    nothing = torch.zeros(0, dtype=torch.int64)
    whole = AutoAttack(**BALL).cost(10)
    for model, least in ((Sees(10), ["race"]), (coded_model(), ["race", "linear-targets"])):
        subject = Subject(model=model, images=nothing, labels=nothing, budget=BUDGETS["fast"], **BALL)
        attacks = suite(subject, num_classes=10, is_random=False)
        assert [name for name, attack in attacks.items() if isinstance(attack, Race)] == least
        assert not {"apgd-ce", "apgd-margin", "apgd-t", "fab-t"} & set(attacks)
        assert list(attacks)[:2] == ["pgd-ce", "race"]
        assert sum(attack.cost(10).forwards for attack in attacks.values()) * 4 < whole.forwards
        if least == ["race"]:
            assert estimate_cost(model, "fast", 1, 10, norm="linf").forwards * 5 < whole.forwards


def test_an_attribute_called_code_makes_no_member() -> None:
    class Odd(Sees):
        code = "morse"

        def member_logits(self, images: Tensor) -> Tensor:
            return images

        def member_scores(self, images: Tensor) -> Tensor:
            raise NotImplementedError

    images, _ = firm_images(Sees(), 4)
    traits = find_traits(Odd(), images, 4)
    assert not traits.has_members
    assert not traits.has_votes


def test_a_vote_of_networks_is_recognised() -> None:
    model = EMPIR(4, 1, depth=8, width=4).eval()
    traits = find_traits(model, torch.rand(4, 1, 8, 8), 4)
    assert traits.has_votes
    assert not traits.has_members


def test_costs_are_what_is_asked_at_most() -> None:
    class Wall(ECNN):
        """Says the same of everything, whatever its members say: no attack ends early."""

        def decode(self, member_logits: Tensor) -> Tensor:
            return 0 * super().decode(member_logits) - torch.arange(5)

    model = coded_model()
    model.__class__ = Wall
    images = torch.rand(3, 2, 6, 6, dtype=torch.float64)
    labels = torch.zeros(3, dtype=torch.int64)
    for name, attack in whole_suite(model, surrogates=False).items():
        if name == "hopskipjump":
            continue  # it gives up when no noise is misclassified
        found = attack.run(model, images, labels)
        stated = attack.cost(5)
        forwards, backwards = int(found.forwards.max()), int(found.backwards.max())
        assert forwards <= stated.forwards * 1.3 + 6, name
        assert forwards >= stated.forwards * 0.5, name
        assert backwards <= stated.backwards * 1.3, name


def test_estimates_grow_with_images_and_budget() -> None:
    model = coded_model()
    quick, standard = (estimate_cost(model, name, 100, 5, norm="linf") for name in ("quick", "standard"))
    assert 0 < quick.forwards < standard.forwards
    assert estimate_cost(model, "quick", 200, 5, norm="linf") == quick * 2
    assert estimate_cost(model, "quick", None, 5, norm="linf") == quick * (BUDGETS["quick"].images // 100)
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)
