"""Attacks without gradients: closed-form distances, exact probabilities, counted questions, and the contract."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn
from toys import Constant, Counted, LabelsOnly, Linear, TanhNet, distance, half_spaces

from ecnn.attacks.base import Attack, Target
from ecnn.attacks.blackbox import HopSkipJump, RandomNoise, Transfer, _Border
from ecnn.attacks.gradient import PGD
from ecnn.attacks.jsma import JSMA
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import Draws
from ecnn.attacks.transformed import TransformedPGD

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (3, 4, 4)
FEATURES = math.prod(SHAPE)


class Net(TanhNet):
    """With a dropout that does nothing, so that the mode matters."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(seed, pixels=FEATURES, hidden=16)
        self.dropout = nn.Dropout(0.0)
        self.to(dtype)


def some_images(batch: int = 6, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.rand(batch, *SHAPE, generator=generator, dtype=torch.float64).to(dtype)


def classes(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(images).argmax(dim=1)
    return found


# ---- HopSkipJump


def plane_and_images(dtype: torch.dtype) -> tuple[Linear, Tensor]:
    """Images about 0.25 from the plane, in the middle of [0, 1], so that no bound is met on the way there."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    weight /= weight.norm()
    noise = torch.randn(6, *SHAPE, generator=generator, dtype=torch.float64)
    sides = torch.tensor([1.0, -1.0] * 3).double()[:, None, None, None]
    images = 0.5 + 0.05 * noise + 0.25 * sides * weight.view(SHAPE)
    return half_spaces(weight.to(dtype)), images.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("norm", "dual"), [("l2", 2), ("linf", 1)])
def test_the_distance_to_a_plane_is_found(norm: Any, dual: int, dtype: torch.dtype) -> None:
    """It is the height over the dual norm of the weights; 20 steps and 6,500 questions come within 5 %."""
    model, images = plane_and_images(dtype)
    with torch.no_grad():
        heights = model(images).amax(dim=1)
        nearest = heights / torch.linalg.vector_norm(model.weight[0], dual)
    attacked = HopSkipJump(norm=norm, steps=20).run(model, images, classes(model, images))
    ratio = distance(attacked.images, images, norm) / nearest
    assert attacked.success.all()
    assert ratio.min() >= 1 - 1e-6
    assert ratio.max() <= 1.05
    assert attacked.forwards.max() <= 6500
    assert attacked.backwards.max() == 0


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_only_classes_are_read(norm: Any) -> None:
    model, images = Net(), some_images()
    labels = classes(model, images)
    attack = HopSkipJump(norm=norm, steps=3, samples=20)
    known, hidden = attack.run(model, images, labels), attack.run(LabelsOnly(model), images, labels)
    assert torch.equal(known.images, hidden.images)
    assert torch.equal(known.forwards, hidden.forwards)
    assert known.success.all()


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_more_steps_never_end_further_away(norm: Any) -> None:
    model, images = Net(1), some_images(8)
    labels = classes(model, images)
    distances = [
        distance(HopSkipJump(norm=norm, steps=steps, samples=20)(model, images, labels), images, norm)
        for steps in (0, 1, 2, 3, 5, 8, 13)
    ]
    for fewer, more in itertools.pairwise(distances):
        assert (more <= fewer).all()
    assert (distances[-1] < 0.5 * distances[0]).any()


def test_questions_by_hand() -> None:
    """Bright images beyond a plane: the first noise is wrong, and the first jump lands."""
    weight = torch.full((FEATURES,), FEATURES**-0.5, dtype=torch.float64)
    model = Counted(half_spaces(weight, middle=0.8))
    images = 0.94 + 0.05 * some_images(3)
    labels = torch.zeros(3, dtype=torch.int64)
    bisections = 10  # ceil(1.5 log2 48) is 9, and the least is 10
    start = 1 + 1 + 1 + 10  # verdict, clean image, noise, blending
    for steps, asked in ((0, 0), (1, 100), (3, 100 + 141 + 173)):
        model.shown = 0
        attacked = HopSkipJump(norm="l2", steps=steps).run(model, images, labels)
        walk = asked + steps * (bisections + 1 + 1)  # bisection, whether to keep, jump
        total = start + walk + (bisections + 1) + 1
        assert attacked.forwards.tolist() == [total] * 3
        assert model.shown == 3 * total
    # In Linf the bisection is finer: ceil(2 log2 48) = 12.
    attacked = HopSkipJump(norm="linf", steps=1, samples=7).run(model, images, labels)
    assert attacked.forwards.tolist() == [start + 7 + (12 + 1 + 1) + (12 + 1) + 1] * 3


def test_every_question_is_counted_where_jumps_are_halved() -> None:
    model, images = Counted(Net(2)), some_images(9)
    labels = classes(model, images)
    model.shown = 0
    attacked = HopSkipJump(norm="linf", steps=6, samples=10).run(model, images, labels)
    assert int(attacked.forwards.sum()) == model.shown
    assert len(set(attacked.forwards.tolist())) > 1


@pytest.mark.parametrize("max_batch", [1, 70, 300])
def test_portions_bound_the_evaluation_and_change_nothing(max_batch: int) -> None:
    model, images = Counted(Net(3)), some_images(7)
    labels = classes(model, images)
    whole = HopSkipJump(norm="l2", steps=3, max_batch=10**6).run(model, images, labels)
    # The base asks for its verdicts on the whole batch.
    model.largest = 0
    parts = HopSkipJump(norm="l2", steps=3, max_batch=max_batch).run(model, images, labels)
    assert torch.equal(whole.images, parts.images)
    assert torch.equal(whole.forwards, parts.forwards)
    assert model.largest <= max(max_batch, len(images))


def test_an_image_that_no_noise_leaves_comes_back_clean() -> None:
    """Noise is brighter than 0.2 on average: that is the class of the bright image, and not of the dark one."""
    weight = torch.full((FEATURES,), FEATURES**-0.5, dtype=torch.float64)
    model = half_spaces(weight, middle=0.2)
    images = torch.stack([torch.full(SHAPE, 0.6), torch.full(SHAPE, 0.1)]).double()
    for options in ({}, {"early_exit": False}, {"keep": "last"}):
        attack = HopSkipJump(norm="l2", steps=5, init_tries=4, **options)
        attacked = attack.run(model, images, torch.tensor([0, 1]))
        assert attacked.success.tolist() == [False, True]
        assert torch.equal(attacked.images[0], images[0])
        assert attacked.forwards[0] == 1 + 1 + 4 + 1
        assert float(distance(attacked.images, images, "l2")[1]) == pytest.approx(
            0.1 * FEATURES**0.5, rel=0.1
        )


def test_what_is_wrong_already_costs_one_question() -> None:
    images = some_images(3)
    settings: tuple[Any, ...] = ("best", "last")
    for keep in settings:
        attack = HopSkipJump(norm="l2", steps=5, keep=keep, early_exit=False)
        attacked = attack.run(Constant(), images, torch.tensor([1, 2, 1]))
        assert torch.equal(attacked.images, images)
        assert attacked.success.all()
        assert attacked.forwards.tolist() == [3] * 3


def test_a_kept_point_does_not_depend_on_rounding() -> None:
    """On the border float32 decides by chance; what is returned is as wrong in float64, in batches of any size."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(3072, generator=generator)
    images = torch.rand(40, 3, 32, 32, generator=generator)
    model = half_spaces(weight)
    labels = classes(model, images)
    attacked = HopSkipJump(norm="l2", steps=1, samples=4).run(model, images, labels)
    assert attacked.success.sum() >= 30
    exact = classes(half_spaces(weight.double()), attacked.images.double())
    assert torch.equal(exact != labels, attacked.success)
    alone = torch.cat([classes(model, image) for image in torch.split(attacked.images, 1)])
    assert torch.equal(alone != labels, attacked.success)


def transcribe(
    model: nn.Module, image: Tensor, label: int, norm: str, steps: int, samples: int, draws: Draws
) -> Tensor:
    """The published algorithm for one image, point by point; draws are the image's."""

    def wrong(point: Tensor) -> bool:
        return int(classes(model, point[None])) != label

    def far(point: Tensor) -> float:
        return float(distance(point[None], image[None], norm))

    def bisect(point: Tensor, rounds: int, *, line: bool) -> Tensor:
        low, high, best, whole = 0.0, 1.0, point, far(point)
        for _ in range(rounds):
            middle = (low + high) / 2
            if line:
                tried = image + middle * (point - image)
            else:
                tried = image + (point - image).clamp(-middle * whole, middle * whole)
            if wrong(tried):
                high, best = middle, tried
            else:
                low = middle
        return best

    def keep(best: Tensor, point: Tensor) -> Tensor:
        outer = (image + (1 + 2**-26) * (point - image)).clamp(0, 1)  # 2^-26 is the root of float64's 2^-52
        return outer if wrong(outer) and far(outer) < far(best) else best

    rounds = {"l2": 10, "linf": 12}[norm]
    noises = (draws.fold(0).fold(attempt).uniform(*SHAPE, dtype=torch.float64)[0] for attempt in range(100))
    point = bisect(next(noise for noise in noises if wrong(noise)), 10, line=True)
    best = point
    for step in range(1, steps + 1):
        radius = far(point) / FEATURES
        border = bisect(point, rounds, line=norm == "l2")
        best = keep(best, border)
        count = math.floor(samples * math.sqrt(step))
        signs, moves = [], []
        for direction in draws.fold(1).fold(step).fold(0).normal(count, *SHAPE, dtype=torch.float64)[0]:
            asked = (border + radius * direction / direction.norm()).clamp(0, 1)
            signs.append(1.0 if wrong(asked) else -1.0)
            moves.append((asked - border) / radius)
        mean = sum(signs) / count
        weights = signs if abs(mean) == 1 else [sign - mean for sign in signs]
        slope = torch.stack([weight * move for weight, move in zip(weights, moves, strict=True)]).sum(0)
        slope = slope / slope.norm() if norm == "l2" else slope.sign()
        length = far(border) / math.sqrt(step)
        while not wrong((border + length * slope).clamp(0, 1)):
            length /= 2
        point = (border + length * slope).clamp(0, 1)
    return keep(best, bisect(point, rounds, line=norm == "l2"))


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_it_ends_where_the_published_algorithm_ends(norm: Any) -> None:
    model, images = Net(10), some_images(5)
    labels, index = classes(model, images), torch.tensor([3, 1, 4, 15, 9])
    for steps in (0, 1, 2, 4):
        attack = HopSkipJump(norm=norm, steps=steps, samples=25)
        crafted = attack(model, images, labels, seed=6, index=index)
        for row in range(5):
            draws = Draws.of(6, index[row : row + 1])
            expected = transcribe(model, images[row], int(labels[row]), norm, steps, 25, draws)
            assert torch.allclose(crafted[row], expected, rtol=0, atol=1e-9)


def border_of(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[_Border, Target]:
    target = Target(model, len(images), images.device)
    return _Border("l2", 100, target, images, labels), target


def test_the_slope_is_the_published_estimate() -> None:
    """The sum over directions of (sign - mean sign) times the direction, by loops; in full where all signs agree."""
    model, images = plane_and_images(torch.float64)
    labels, draws = classes(model, images), Draws.of(0, torch.arange(6))
    height = (images.flatten(1) - 0.5) @ model.weight[0].detach()
    points = images - (height[:, None] * model.weight[0].detach()).view_as(images)
    points[0] = images[0]  # deep inside: all signs are -1
    count, radii = 70, torch.full((6,), 0.05, dtype=torch.float64)
    border, target = border_of(model, images, labels)
    slope = border.slope(points, radii, count, draws)
    normals = torch.cat(
        [
            draws.fold(0).normal(64, *SHAPE, dtype=torch.float64),
            draws.fold(1).normal(6, *SHAPE, dtype=torch.float64),
        ],
        dim=1,
    )
    for row in range(6):
        moves = [normal / normal.norm() for normal in normals[row]]
        around = torch.stack([points[row] + 0.05 * move for move in moves])
        signs = [1.0 if wrong else -1.0 for wrong in classes(model, around) != labels[row]]
        mean = sum(signs) / count
        assert (abs(mean) == 1) == (row == 0)
        weights = signs if abs(mean) == 1 else [sign - mean for sign in signs]
        expected = torch.stack([weight * move for weight, move in zip(weights, moves, strict=True)]).sum(0)
        assert torch.allclose(slope[row], expected, rtol=0, atol=1e-10)
    assert target.forwards.tolist() == [count] * 6


class Slab(nn.Module):
    """Class 1 where the first pixel lies between two levels, else class 0."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.low, self.high = low, high

    def forward(self, images: Tensor) -> Tensor:
        pixel = images[:, 0, 0, 0]
        inside = ((pixel > self.low) & (pixel <= self.high)).to(images.dtype)
        return torch.stack([1 - inside, inside], dim=1)


def test_jumps_are_halved_until_they_land() -> None:
    images = torch.zeros(3, 1, 1, 2, dtype=torch.float64)
    points, directions = images.clone(), images.clone()
    points[:, 0, 0, 0] = 0.52
    directions[:, 0, 0, 0] = torch.tensor([1.0, -1.0, 1.0])
    border, target = border_of(Slab(0.5, 0.6), images, torch.zeros(3, dtype=torch.int64))
    landed = border.jump(points, directions, torch.tensor([0.4, 0.4, 0.05], dtype=torch.float64))
    # 0.92, 0.72, 0.62, 0.57; 0.12, 0.32, 0.42, 0.47, 0.495, 0.5075; 0.57 at once.
    assert landed[:, 0, 0, 0].tolist() == pytest.approx([0.57, 0.5075, 0.57])
    assert target.forwards.tolist() == [4, 6, 1]
    border, target = border_of(Slab(0.5, 0.52 + 1e-12), images, torch.zeros(3, dtype=torch.int64))
    stayed = border.jump(points, directions.abs(), torch.full((3,), 0.4, dtype=torch.float64))
    assert torch.equal(stayed, points)


# ---- RandomNoise


@pytest.mark.parametrize(("norm", "kind"), [("linf", "uniform"), ("linf", "corners"), ("l2", "uniform")])
@pytest.mark.parametrize("eps", [0.0, "8/255", 0.7])
def test_noise_stays_in_the_ball(norm: Any, kind: Any, eps: float | str) -> None:
    model, images = Net(), some_images(20)
    attack = RandomNoise(norm=norm, eps=eps, samples=3, kind=kind, keep="last")
    noisy = attack(model, images, classes(model, images))
    radius = 8 / 255 if eps == "8/255" else float(eps)
    assert distance(noisy, images, norm).max() <= radius + 1e-12
    assert 0 <= noisy.min() <= noisy.max() <= 1
    if radius == 0:
        assert torch.equal(noisy, images)
    elif kind == "corners":
        low, high = (images - radius).clamp(min=0), (images + radius).clamp(max=1)
        assert ((noisy == low) | (noisy == high)).all()
        assert 0.4 < ((noisy == high) & (low != high)).double().mean() < 0.6
    else:
        assert (distance(noisy, images, norm) > 0).all()


@pytest.mark.parametrize(("samples", "early_exit"), [(1, True), (3, True), (3, False)])
def test_corners_break_with_the_exact_probability(samples: int, early_exit: bool) -> None:
    """On a plane a corner's height is the image's plus eps times a signed sum of weights: all 2^8 are counted."""
    weight = torch.tensor([1.0, -0.8, 0.7, 0.6, -0.5, 0.4, 0.3, 0.2], dtype=torch.float64)
    model, height = half_spaces(weight), 0.03
    images = (0.5 + height * weight / (weight @ weight)).view(1, 2, 2, 2).repeat(4000, 1, 1, 1)
    sums = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=8)), dtype=torch.float64) @ weight
    once = float((height + 0.02 * sums < 0).double().mean())
    attack = RandomNoise(norm="linf", eps=0.02, samples=samples, kind="corners", early_exit=early_exit)
    attacked = attack.run(model, images, torch.zeros(4000, dtype=torch.int64))
    expected = 1 - (1 - once) ** samples
    assert 0.05 < once < 0.3
    deviation = math.sqrt(expected * (1 - expected) / 4000)
    assert float(attacked.success.double().mean()) == pytest.approx(expected, abs=4 * deviation)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_more_samples_never_break_fewer(norm: Any) -> None:
    model, images = Net(4), some_images(60)
    labels, eps = classes(model, images), 0.1 if norm == "linf" else 0.8
    broken = []
    for samples in (1, 2, 4, 8, 16):
        runs = [
            RandomNoise(norm=norm, eps=eps, samples=samples, early_exit=early_exit).run(model, images, labels)
            for early_exit in (True, False)
        ]
        assert torch.equal(runs[0].success, runs[1].success)
        assert runs[1].forwards.tolist() == [samples + 2] * 60
        assert (runs[0].forwards <= runs[1].forwards).all()
        broken.append(runs[0].success)
    for fewer, more in itertools.pairwise(broken):
        assert (more >= fewer).all()
    assert 0 < broken[0].sum() < broken[-1].sum() < 60


def test_the_best_sample_is_kept() -> None:
    """By hand: the highest margin loss of all samples, or with early exit the first that is wrong."""
    model, images = Net(4), some_images(40)
    labels = classes(model, images)
    draws = Draws.of(9, torch.arange(40))
    samples = [NORMS["linf"].random(images, 0.12, draws.fold(sample)) for sample in range(5)]
    with torch.no_grad():
        scores = torch.stack([model(points) for points in samples])
    own = scores.gather(2, labels.expand(5, -1)[:, :, None]).squeeze(2)
    losses = scores.scatter(2, labels.expand(5, -1)[:, :, None], -math.inf).amax(2) - own
    first_wrong = (losses > 0).double().argmax(dim=0)
    runs = {
        name: RandomNoise(norm="linf", eps=0.12, samples=5, **options).run(model, images, labels, seed=9)
        for name, options in (
            ("early", {}),
            ("whole", {"early_exit": False}),
            ("last", {"keep": "last"}),
        )
    }
    assert 0 < runs["whole"].success.sum() < 40
    for row in range(40):
        highest = samples[int(losses[:, row].argmax())][row]
        assert torch.equal(runs["last"].images[row], highest)
        if losses[:, row].max() > 0:
            assert torch.equal(runs["whole"].images[row], highest)
            assert torch.equal(runs["early"].images[row], samples[int(first_wrong[row])][row])
            assert int(runs["early"].forwards[row]) == 1 + int(first_wrong[row]) + 1 + 1
        else:
            assert torch.equal(runs["whole"].images[row], images[row])
            assert int(runs["early"].forwards[row]) == 1 + 5 + 1


class Tied(nn.Module):
    """Class 1 ties with class 0 (and loses) where the first pixel rose, with class 2 (and wins) elsewhere."""

    def forward(self, images: Tensor) -> Tensor:
        rose = (images[:, 0, 0, 0] > 0.5).to(images.dtype)
        return torch.stack([rose, torch.ones_like(rose), 1 - rose], dim=1)


def test_a_tie_counts_as_the_model_decides_it() -> None:
    images = torch.full((200, *SHAPE), 0.5)
    for early_exit in (True, False):
        attack = RandomNoise(norm="linf", eps=0.1, samples=5, early_exit=early_exit)
        success = attack.run(Tied(), images, torch.ones(200, dtype=torch.int64)).success
        assert float(success.double().mean()) > 0.9  # 31 of 32 draws of five rise at least once


# ---- Transfer


def inner_attacks() -> list[Attack]:
    return [
        PGD(norm="linf", eps=0.1, steps=4, step_size=0.04),
        PGD(norm="l2", eps=0.5, steps=3, step_size=0.2, keep="last", loss="cross_entropy"),
        JSMA(max_pixel_fraction=0.2),
        HopSkipJump(norm="l2", steps=1, samples=10),
        RandomNoise(norm="linf", eps=0.1, samples=3),
    ]


@pytest.mark.parametrize("attack", inner_attacks(), ids=lambda attack: type(attack).__name__)
def test_transfer_to_itself_is_the_attack(attack: Attack) -> None:
    model, images = Net(5), some_images(10)
    labels = classes(model, images)
    labels[3] = (labels[3] + 1) % 4
    index = torch.arange(10) + 77
    transfer = Transfer(source=model, attack=attack, keep=attack.keep, early_exit=attack.early_exit)
    direct = attack.run(model, images, labels, seed=2, index=index)
    moved = transfer.run(model, images, labels, seed=2, index=index)
    crafted = transfer.craft(images, labels, seed=2, index=index)
    for found in (moved, crafted):
        assert torch.equal(found.images, direct.images)
        assert torch.equal(found.success, direct.success)
    assert torch.equal(crafted.forwards, direct.forwards)
    assert torch.equal(crafted.backwards, direct.backwards)
    assert direct.success.any()


@pytest.mark.parametrize("attack", inner_attacks(), ids=lambda attack: type(attack).__name__)
def test_what_fools_the_source_is_handed_over_and_the_target_only_judges(attack: Attack) -> None:
    source, target, images = Net(5), Counted(Net(6)), some_images(30)
    labels = classes(source, images)
    known = classes(target, images) == labels
    assert 0 < known.sum() < 30
    crafted = attack.run(source, images, labels)
    target.shown = 0
    last = Transfer(source=source, attack=attack, keep="last").run(target, images, labels)
    assert torch.equal(last.images, crafted.images)
    assert target.shown == 2 * 30
    assert last.forwards.tolist() == [2] * 30
    assert last.backwards.tolist() == [0] * 30
    best = Transfer(source=source, attack=attack).run(target, images, labels)
    for row in range(30):
        fooled = int(classes(target, crafted.images[row : row + 1])) != int(labels[row])
        assert bool(best.success[row]) == (fooled or not known[row])
        handed = fooled and bool(known[row])
        assert torch.equal(best.images[row], crafted.images[row] if handed else images[row])


# Transformed images


def cos_of(degrees: Tensor) -> Tensor:
    return (degrees * math.pi / 180).cos()


def test_a_transformation_turns_moves_scales_and_lights_by_what_it_says() -> None:
    still: dict[str, Any] = {"degrees": 0.0, "scale": 0.0, "shift": 0.0, "brightness": 0.0}
    options: dict[str, Any] = {"norm": "linf", "eps": 0.1, "steps": 1, "step_size": 0.1, **still}
    images, draws = torch.rand(6, 3, 9, 9, dtype=torch.float64), Draws.of(0, torch.arange(6))
    same = TransformedPGD(**options).transform(images, draws)
    assert torch.allclose(same, images, atol=1e-9)
    drawn = 2 * draws.uniform(5, dtype=torch.float64) - 1
    lit = TransformedPGD(**{**options, "brightness": 0.5}).transform(images, draws)
    assert torch.allclose(lit, (images * (1 + 0.5 * drawn[:, 4]).view(-1, 1, 1, 1)).clamp(0, 1))
    ramp = torch.arange(9, dtype=torch.float64).expand(6, 3, 9, 9) / 20
    slid = TransformedPGD(**{**options, "shift": 1 / 9}).transform(ramp, draws)
    # By at most one of nine columns: a ramp rises by what it was moved.
    expected = ramp[0, 0, 4, 4] + drawn[:, 2] / 20
    assert torch.allclose(slid[:, 0, 4, 4], expected)
    # Turned and scaled about the middle, which stays, by angles of their own.
    turned = TransformedPGD(**{**options, "degrees": 40.0, "scale": 0.3}).transform(ramp, draws)
    slope = (cos_of(40 * drawn[:, 0]) / (1 + 0.3 * drawn[:, 1])) / 20
    assert torch.allclose(turned[:, 0, 4, 4], ramp[:, 0, 4, 4])
    assert torch.allclose(turned[:, 0, 4, 5] - turned[:, 0, 4, 4], slope)


def test_what_is_crafted_under_transformations_still_fools_when_transformed() -> None:
    """Weights of neighbouring pixels have nothing to do with each other: what plain PGD raises, a small turn undoes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).eval()
    images = torch.rand(40, 1, 8, 8)
    labels = model(images).argmax(1)
    ball: dict[str, Any] = {"norm": "linf", "eps": 0.2, "steps": 20, "step_size": 0.04, "keep": "last"}
    robust = TransformedPGD(**ball, transformations=8, shift=0.15, degrees=20.0)
    plain = PGD(**ball, loss="cross_entropy")
    fresh = Draws.of(99, torch.arange(len(images)))

    def loss_when_seen(attack: Attack | None) -> float:
        points = images if attack is None else attack(model, images, labels, seed=0)
        seen = [robust.transform(points, fresh.fold(number)) for number in range(20)]
        with torch.no_grad():
            losses = [F.cross_entropy(model(batch), labels) for batch in seen]
        return float(torch.stack(losses).mean())

    alone = loss_when_seen(None)
    assert loss_when_seen(robust) - alone > 1.3 * (loss_when_seen(plain) - alone)
    cost = robust.run(model, images, labels)
    assert cost.backwards.tolist() == [20 * 8] * len(images)
    assert robust.cost(4).backwards == 20 * 8
