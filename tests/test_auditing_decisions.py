"""Models that compare something with a threshold, and the attack that holds them to what they decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecnn import audit
from ecnn.attacks import APGD, NORMS, PGD
from ecnn.auditing.budgets import BUDGETS
from ecnn.auditing.decisions import Decisions
from ecnn.auditing.holding import Holding, ways_to_hold
from ecnn.auditing.search import search
from ecnn.auditing.subject import Subject
from ecnn.auditing.suite import suite
from ecnn.auditing.surrogates import Examples
from ecnn.data import Split

pytestmark = pytest.mark.usefixtures("one_thread")
EPS, PIXELS = 0.2, 16
IMAGES = torch.full((6, 1, 4, 4), 0.5)
LABELS = torch.zeros(6, dtype=torch.int64)
HOLD: dict[str, Any] = {"norm": "linf", "eps": EPS, "steps": 40}


class Checked(nn.Module):
    """Class 0, unless the pixels sum up to more than `needed`; always where the first one is above 0.6.

    Within 0.2 of `IMAGES` the sum is at most 15 * 0.7 + 0.6 = 11.1 where the check is passed.
    """

    def __init__(self, needed: float = 11.0) -> None:
        super().__init__()
        self.needed = needed

    def checks(self, images: Tensor) -> Tensor:
        return images[:, 0, 0, 0] > 0.6

    def inside(self, images: Tensor) -> Tensor:
        lead = images.flatten(1).sum(dim=1) - self.needed
        return torch.stack([-lead, lead], dim=1)

    def forward(self, images: Tensor) -> Tensor:
        return torch.where(self.checks(images)[:, None], torch.tensor([1.0, 0.0]), self.inside(images))


class InSecret(Checked):
    def checks(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.gt(images[:, 0, 0, 0].detach(), 0.6)


class TheOtherWay(Checked):
    def checks(self, images: Tensor) -> Tensor:
        return ~(torch.full((len(images),), 0.6) >= images[:, 0, 0, 0])


class ByFactor(Checked):
    def forward(self, images: Tensor) -> Tensor:
        is_odd = self.checks(images).float()[:, None]
        return is_odd * torch.tensor([1.0, 0.0]) + (1 - is_odd) * self.inside(images)


class OneByOne(Checked):
    def forward(self, images: Tensor) -> Tensor:
        return torch.cat(
            [
                self.inside(one[None]) if not self.checks(one[None]) else torch.tensor([[1.0, 0.0]])
                for one in images
            ]
        )


class ByCount(Checked):
    """Three or more pixels above 0.6 are too many; so much for the sum of 0.5 and 0.6."""

    def __init__(self) -> None:
        super().__init__(needed=9.5)

    def checks(self, images: Tensor) -> Tensor:
        return (images.flatten(1) > 0.6).sum(dim=1) > 2


class ByChoice(Checked):
    """Three experts, the third of which tells class 0; who is asked is a number."""

    def votes(self, images: Tensor) -> Tensor:
        first = images[:, 0, 0, 0]
        return torch.stack([torch.full_like(first, 0.6), first.new_zeros(len(first)), first], dim=1)

    def checks(self, images: Tensor) -> Tensor:
        return self.votes(images).argmax(dim=1) == 2

    def forward(self, images: Tensor) -> Tensor:
        inside = self.inside(images)
        said = torch.stack([inside, inside, torch.tensor([1.0, 0.0]).expand_as(inside)])
        return said[(-self.votes(images)).min(dim=1).indices, torch.arange(len(images))]


class ByChoiceCompared(ByChoice):
    def forward(self, images: Tensor) -> Tensor:
        return Checked.forward(self, images)


class ByChoiceAsBits(ByChoice):
    def checks(self, images: Tensor) -> Tensor:
        return (-self.votes(images)[:, ::2]).argmin(1, keepdim=True).bool().any(dim=1)

    def forward(self, images: Tensor) -> Tensor:
        return Checked.forward(self, images)


class OnLevels(Checked):
    """Whoever is not on a level, as no image here is, is told class 0: levels are 0.03, 0.13, 0.23 and so on."""

    def __init__(self) -> None:
        super().__init__(needed=9.9)

    def checks(self, images: Tensor) -> Tensor:
        levels = torch.arange(0.03, 1.0, 0.1)
        is_off = (images.flatten(1)[..., None] - levels).abs().amin(dim=2) > 1e-3
        return is_off.any(dim=1)


class OfBytes(Checked):
    """Images that no byte holds are told class 0; those that may pass need more than 16 * 0.69."""

    def __init__(self) -> None:
        super().__init__(needed=11.05)

    def checks(self, images: Tensor) -> Tensor:
        levels = images * 255
        return ((levels - levels.round()).abs() > 0.01).flatten(1).any(dim=1)


class Refusing(OfBytes):
    """The same as a service that takes no part of a batch when one image is amiss."""

    def forward(self, images: Tensor) -> Tensor:
        if self.checks(images).any():
            raise ValueError("no images of bytes")
        return self.inside(images)


@pytest.mark.parametrize("kind", [OfBytes, Refusing])
def test_what_bytes_cannot_hold_is_not_shown(kind: type[OfBytes]) -> None:
    images = (IMAGES * 255).round() / 255
    found = Holding(**HOLD).run(kind(), images, LABELS, seed=0)
    assert found.success.all()
    assert not kind().checks(found.images).any()
    assert (found.images - images).abs().max() <= EPS + 1e-6


def test_a_slope_of_its_own_leads_to_what_is_rounded() -> None:
    """Sixteen levels: half of the way between two of them bytes do not help, and rounding passes no gradient."""

    class Coarse(OfBytes):
        def checks(self, images: Tensor) -> Tensor:
            return ((images * 15 - (images * 15).round()).abs() > 0.02).flatten(1).any(dim=1)

    model = Coarse()
    model.needed = 10.0
    images = (IMAGES * 15).round() / 15
    found = Holding(**HOLD).run(model, images, LABELS, seed=0)
    assert found.success.all()
    assert not model.checks(found.images).any()


def test_an_audit_of_a_model_that_refuses_images() -> None:
    pixels = (255 * IMAGES).round().to(torch.uint8).repeat(40, 1, 1, 1)
    split = Split(pixels, torch.zeros(len(pixels), dtype=torch.int64))
    result = audit(Refusing(), split, norm="linf", eps=EPS, claim=1.0, limit=60, budget="quick")
    assert (result.verdict, result.accuracy) == ("not believable", 0.0)


def usual() -> list[Any]:
    walk: dict[str, Any] = {"norm": "linf", "eps": EPS, "steps": 40}
    return [
        PGD(step_size=EPS / 4, schedule="cosine", loss="cross_entropy", **walk),
        APGD(loss="margin", **walk),
    ]


SIDES = [
    Checked,
    InSecret,
    TheOtherWay,
    ByFactor,
    OneByOne,
    ByCount,
    ByChoice,
    ByChoiceCompared,
    ByChoiceAsBits,
]


@pytest.mark.parametrize("kind", SIDES)
def test_images_that_pass_a_check_are_attacked_on_their_side_of_it(kind: type[Checked]) -> None:
    model = kind()
    for attack in usual():
        assert not attack.run(model, IMAGES, LABELS, seed=0).success.any()
    found = Holding(**HOLD).run(model, IMAGES, LABELS, seed=0)
    assert found.success.all()
    assert not model.checks(found.images).any()
    assert (found.images - IMAGES).abs().max() <= EPS + 1e-6


def test_what_cannot_be_done_on_that_side_is_not_claimed() -> None:
    """The sum is at most 11.1 there."""
    found = Holding(**HOLD).run(Checked(needed=11.2), IMAGES, LABELS, seed=0)
    assert not found.success.any()
    assert torch.equal(found.images, IMAGES)


def test_images_that_fail_a_check_may_be_brought_to_pass_it() -> None:
    """0.5 is on no level; 0.63, the highest within reach, is on one, and 16 of these are above what is needed."""
    model = OnLevels()
    ways = ways_to_hold(model, IMAGES[:4])
    assert ways == {"decisions": (), "decision-0-true": ((0, True),), "decision-0-false": ((0, False),)}
    found = {
        name: Holding(forced=forced, **HOLD).run(model, IMAGES, LABELS, seed=0)
        for name, forced in ways.items()
    }
    assert {name: bool(made.success.all()) for name, made in found.items()} == {
        "decisions": False,
        "decision-0-true": False,
        "decision-0-false": True,
    }
    assert (found["decision-0-false"].images - 0.63).abs().max() <= 1e-3


def note(compare: Any, points: Tensor, **settings: Any) -> Decisions:
    decisions = Decisions(len(points), **{"num_classes": 10, "forced": {}, **settings})
    with decisions:
        compare(points.clone().requires_grad_(True))
    return decisions


def test_decisions_are_noted_in_the_order_of_their_use() -> None:
    points = torch.tensor([[0.2, 0.9], [0.4, 0.3]])
    fixed = torch.tensor([0.5, 0.5])

    def compare(values: Tensor) -> Tensor:
        is_bright, is_dark = values > 0.5, values.le(0.35)
        assert (fixed > 0.1).all()  # of no image
        assert is_dark.any()  # of all images: each decision by itself
        assert (values.sum(dim=1) < 1).any()
        return values * is_bright

    noted = note(compare, points)
    assert [part.tolist() for part in noted.said] == [
        [[True, False], [False, True]],
        [False, True],
        [[False, True], [False, False]],
    ]
    wanted = [[0.35, 0.15], [0.35, 0.05], [0.1, 0.3]]
    torch.testing.assert_close(torch.stack(noted.scales), torch.tensor(wanted))
    assert note(compare, points, forced={1: True}).said[1].tolist() == [True, True]


def held(compare: Any, clean: Tensor, moved: Tensor) -> tuple[Tensor, Any]:
    """What it costs at the moved points to decide as for the clean ones, and what the comparison comes to then."""
    with Decisions(len(clean), num_classes=10, forced={}, noted=note(compare, clean)) as decisions:
        said = compare(moved.requires_grad_(True))
    return decisions.cost, said


def test_what_it_costs_to_be_on_the_wrong_side() -> None:
    """In units of the distance that the image has from the threshold; a tenth of it is kept as slack."""
    clean, moved = torch.tensor([[0.3], [0.7]]), torch.tensor([[0.6], [0.6]])
    cost, said = held(lambda values: torch.where(values > 0.5, 1, 0), clean, moved)
    assert said.tolist() == [[0], [1]]
    torch.testing.assert_close(cost.detach(), torch.tensor([(0.1 + 0.02) / 0.2, 0.0]))
    (slope,) = torch.autograd.grad(cost.sum(), moved)
    torch.testing.assert_close(slope, torch.tensor([[5.0], [0.0]]))
    cost, _ = held(lambda values: torch.where(values == 0.3, 1, 0), clean, moved)
    assert cost[0] > 0
    assert cost[1] == 0


CLEAN = torch.tensor([[0.1, 0.2, 0.9, 0.8], [0.6, 0.7, 0.9, 0.3]])
MOVED = torch.tensor([[0.7, 0.8, 0.4, 0.6], [0.2, 0.3, 0.1, 0.2]])


@pytest.mark.parametrize(
    "decide",
    [
        lambda bright: bright.any(dim=1),
        lambda bright: bright.all(dim=1, keepdim=True)[:, 0],
        lambda bright: ~bright.any(1),
        lambda bright: bright.sum(dim=1) > 2,
        lambda bright: bright.sum(1) >= 2,
        lambda bright: bright.float().mean(dim=1) < 0.7,
        lambda bright: bright.int().sum(dim=1).float() <= 1,
        lambda bright: (bright[:, :2].all(dim=1) | bright[:, 2]) & ~bright[:, 3],
        lambda bright: torch.logical_and(
            bright.view(2, 2, 2).any(dim=2).all(dim=1), torch.tensor([True, True])
        ),
    ],
)
def test_a_decision_costs_what_the_cheapest_way_to_it_does(decide: Any) -> None:
    """All ways to set the pixels to bright or dark, by brute force."""
    scale = (CLEAN - 0.5).abs().mean(dim=1, keepdim=True)
    ahead = (MOVED - 0.5) / scale
    to_bright, to_dark = (0.1 - ahead).clamp_min(0), (0.1 + ahead).clamp_min(0)
    cost, said = held(lambda values: torch.where(decide(values > 0.5), 1, 0), CLEAN, MOVED.clone())
    wanted = decide(CLEAN > 0.5)
    assert said.tolist() == wanted.int().tolist()
    for row in range(2):
        costs = []
        for number in range(16):
            bits = torch.tensor([bool(number >> place & 1) for place in range(4)])
            if decide(torch.stack([bits, bits]))[row] == wanted[row]:
                costs.append(torch.where(bits, to_bright[row], to_dark[row]).sum())
        torch.testing.assert_close(cost[row].detach(), torch.stack(costs).min())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    "decide",
    [
        lambda which: which == 2,
        lambda which: which != 0,
        lambda which: which > 1,
        lambda which: which.int() <= 2,
        lambda which: which.bool(),
        lambda which: which + 0,
    ],
)
def test_a_choice_costs_what_its_cheapest_option_does(decide: Any, sign: float) -> None:
    """What an option lacks to be ahead of all others by a tenth of the clean image's lead, of those that will do."""
    first, second = (sign * CLEAN).topk(2, dim=1).values.T
    scale = (first - second)[:, None]
    others = torch.stack(
        [(sign * MOVED)[:, [i for i in range(4) if i != own]].amax(dim=1) for own in range(4)], 1
    )
    lacking = (0.1 + (others - sign * MOVED) / scale).clamp_min(0)

    def compare(values: Tensor) -> Tensor:
        return torch.where(decide(values.argmax(dim=1) if sign > 0 else values.argmin(1)) > 0, 1, 0)

    cost, said = held(compare, CLEAN, MOVED.clone())
    chosen = (sign * CLEAN).argmax(dim=1)
    assert said.tolist() == (decide(chosen) > 0).int().tolist()
    for row in range(2):
        will_do = decide(torch.arange(4)) == decide(chosen)[row]
        torch.testing.assert_close(cost[row].detach(), lacking[row][will_do].min())


@pytest.mark.parametrize(
    ("extreme", "each"),
    [
        (lambda values: values.amax(dim=1) > 0.5, lambda values: (values > 0.5).any(dim=1)),
        (lambda values: values.max(1).values <= 0.5, lambda values: (values <= 0.5).all(dim=1)),
        (lambda values: values.view(2, 2, 2).amin((1, 2)) < 0.25, lambda values: (values < 0.25).any(dim=1)),
        (
            lambda values: torch.min(values, 1, True)[0] >= 0.25,
            lambda values: (values >= 0.25).all(1, keepdim=True),
        ),
    ],
)
def test_an_extreme_is_compared_as_each_value(extreme: Any, each: Any) -> None:
    """Its own slope is that of one value, and a detector by the largest of many would be met one pixel at a time."""
    (cost, said), (expected, wanted) = (
        held(lambda values, decide=decide: torch.where(decide(values), 1, 0), CLEAN, MOVED.clone())
        for decide in (extreme, each)
    )
    torch.testing.assert_close(cost, expected)
    assert cost.sum() > 0
    assert torch.equal(said, wanted)


def test_the_largest_of_decisions_is_that_of_what_is_held() -> None:
    """What is decided may be a number by then, and an argument may have a name."""
    for decide in (
        lambda values: (values[:, :2] > 0.5).float().amax(dim=1),
        lambda values: torch.max(values * 0, (values > 0.5).float())[:, 0],
        lambda values: torch.max(input=(values[:, :2] > 0.5).int(), dim=1).values,
    ):
        _, said = held(decide, CLEAN, MOVED.clone())
        assert said.tolist() == [0, 1]
    assert note(lambda values: torch.max(input=values, dim=1), CLEAN).said == []


def test_a_choice_among_the_classes_is_an_answer_and_no_decision() -> None:
    for name in ("argmax", "max"):
        noted = note(lambda values, name=name: getattr(torch, name)(values, 1), CLEAN, num_classes=4)
        assert (noted.said, noted.scales) == ([], [])


def test_what_cannot_be_otherwise_is_out_of_reach() -> None:
    cost, _ = held(lambda values: torch.where((values > 0.5).sum(dim=1) > 9, 1, 0), CLEAN, MOVED.clone())
    assert cost.tolist() == [0, 0]
    forced = note(lambda values: torch.where((values > 0.5).sum(dim=1) > 9, 1, 0), CLEAN, forced={0: True})
    with Decisions(2, num_classes=10, forced={0: True}, noted=forced) as decisions:
        torch.where((MOVED.clone().requires_grad_(True) > 0.5).sum(dim=1) > 9, 1, 0)
    assert (decisions.cost >= 100).all()


def test_a_count_that_is_used_as_a_number_is_that_of_what_is_held() -> None:
    _, said = held(lambda values: 10 * (values > 0.5).sum(dim=1), CLEAN, MOVED.clone())
    assert said.tolist() == [20, 30]


class Straying(Checked):
    """Compares a second time once the image has been moved, by way of a number that nobody can hold."""

    def forward(self, images: Tensor) -> Tensor:
        if float(images.detach().numpy().max()) > 0.51:
            images = images * (images > 0.1) * (images < 0.9).all()
        return super().forward(images)


def test_a_model_that_compares_something_else_is_left_alone() -> None:
    found = Holding(**HOLD).run(Straying(), IMAGES, LABELS, seed=0)
    assert torch.equal(found.images, IMAGES)


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_other_balls(norm: Any) -> None:
    """Three of the pixels at 0.6 and the rest free: what the sum needs is within the radius, barely."""
    eps = {"l2": 0.8, "l1": 3.1}[norm]
    found = Holding(norm=norm, eps=eps, steps=100).run(Checked(), IMAGES, LABELS, seed=0)
    lengths = NORMS[norm].length(found.images - IMAGES)
    assert found.success.all()
    assert lengths.max() <= eps + 1e-4


def test_rows_are_independent() -> None:
    generator = torch.Generator().manual_seed(0)
    images = IMAGES + 0.05 * torch.rand(IMAGES.shape, generator=generator)
    attack = Holding(restarts=2, early_exit=False, **HOLD)
    index = torch.arange(6)
    together = attack.run(Checked(), images, LABELS, seed=3, index=index)
    for row in range(6):
        one = slice(row, row + 1)
        alone = attack.run(Checked(), images[one], LABELS[one], seed=3, index=index[one])
        torch.testing.assert_close(alone.images, together.images[one])


def subject_of(model: nn.Module, norm: Any = "linf") -> Subject:
    return Subject(model=model, images=IMAGES, labels=LABELS, norm=norm, eps=EPS, budget=BUDGETS["quick"])


def test_the_search_finds_which_way_to_hold(tmp_path: Path) -> None:
    for model, way in ((Checked(), {"decisions": ()}), (OnLevels(), {"decision-0-false": ((0, False),)})):
        folder = tmp_path / type(model).__name__
        settings: dict[str, Any] = {"is_random": False, "folder": folder}
        found = search(subject_of(model), IMAGES, 2, **settings)
        assert found.ways == way
        assert not found.views
        assert sum(found.broken.values()) == found.standing
        again = search(subject_of(model), IMAGES, 2, **settings)
        assert (again.ways, again.broken) == (found.ways, found.broken)


def test_a_network_that_compares_nothing_is_not_held() -> None:
    dense = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 8), nn.ReLU(), nn.Linear(8, 2))
    assert ways_to_hold(dense, IMAGES[:4]) == {}
    examples = Examples(IMAGES, LABELS, are_true=True)
    names = suite(subject_of(dense), num_classes=2, is_random=False, examples=examples)
    assert not [name for name in names if "decision" in name]


class SentPast(Checked):
    """A layer that only images which pass the check come by: the others have no features there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(PIXELS, 2)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([-1.0, 1.0])[:, None].expand(2, PIXELS))
            self.layer.bias.copy_(torch.tensor([11.0, -11.0]))

    def forward(self, images: Tensor) -> Tensor:
        is_odd = self.checks(images)
        scores = torch.zeros(len(images), 2)
        scores[is_odd] = torch.tensor([1.0, 0.0])
        if not is_odd.all():
            scores[~is_odd] = self.layer(images[~is_odd].flatten(1))
        return scores


def test_an_audit_of_a_model_that_sends_some_images_past_its_layers() -> None:
    images = IMAGES.repeat(40, 1, 1, 1)
    images[::7, :, 0, 0] = 0.7
    split = Split((255 * images).round().to(torch.uint8), torch.zeros(len(images), dtype=torch.int64))
    result = audit(SentPast(), split, norm="linf", eps=EPS, claim=1.0, limit=60, budget="quick")
    assert result.verdict == "not believable"
    assert result.accuracy <= 0.2
