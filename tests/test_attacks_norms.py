"""The table of norms: lengths and their duals, refusals; and L1: steps, thresholds, closed forms, APGD and Square."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ecnn
from ecnn.attacks import APGD, ATTACKS, FAB, FMN, NORMS, PGD, Attack, AutoAttack, Draws, RandomNoise, Square
from ecnn.attacks.apgd import _STREAM
from ecnn.attacks.norms import Geometry, Norm, share_step
from ecnn.attacks.square import _two_bumps
from ecnn.cli.options import NORM_HELP
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation.outcomes import COLUMNS

ORDER = {"linf": math.inf, "l2": 2.0, "l1": 1.0}


def some_images(batch: int, *shape: int) -> Tensor:
    """Pixels at 0 and 1 included."""
    return (Draws.of(7, torch.arange(batch)).uniform(*shape, dtype=torch.float64) * 1.4 - 0.2).clamp(0, 1)


class Linear(nn.Module):
    """Two classes, scores linear in the pixels."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        normal = Draws.of(3, torch.arange(1)).normal(pixels, dtype=torch.float64)[0]
        self.normal = nn.Parameter(normal)

    def forward(self, images: Tensor) -> Tensor:
        lead = (images.flatten(1) - 0.5) @ self.normal
        return torch.stack([-lead / 2, lead / 2], dim=1)


class Curved(nn.Module):
    """A small smooth classifier of five classes."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        draws = Draws.of(4, torch.arange(2))
        self.first = nn.Parameter(draws.normal(12, pixels, dtype=torch.float64)[0] / pixels**0.5)
        self.second = nn.Parameter(draws.normal(5, 12, dtype=torch.float64)[1])

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(4 * (images.flatten(1) - 0.5) @ self.first.T) @ self.second.T


# The table


@pytest.mark.parametrize("name", ["l3", "L1", "", "l1 ", "linfinity"])
def test_a_name_that_is_no_norm_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="norm must be one of linf, l2, l1, not"):
        NORMS[name]
    with pytest.raises(InputError, match="norm must be one of linf, l2, l1, not"):
        PGD(norm=name, eps=0.1, steps=1, step_size=0.1)  # type: ignore[arg-type]


def test_a_name_nearly_right_is_guessed() -> None:
    with pytest.raises(InputError, match="did you mean 'linf'"):
        NORMS["Linf"]


def test_every_attack_refuses_an_unknown_norm() -> None:
    needed: dict[str, Any] = {"norm": "l7", "eps": 0.1, "steps": 1, "step_size": 0.1, "loss": "margin"}
    needed |= {"queries": 1, "samples": 2, "pairs": 1}
    for name, kind in ATTACKS.items():
        entries = {entry.name: entry.init for entry in kind.__dataclass_fields__.values()}
        if entries.get("norm"):
            with pytest.raises(InputError, match="norm must be"):
                kind(**{key: value for key, value in needed.items() if entries.get(key)})
            assert name not in ("cw", "jsma")


@pytest.mark.parametrize("norm", NORMS)
@given(seed=st.integers(0, 2**31))
def test_the_steepest_move_is_what_the_dual_norm_says(norm: Norm, seed: int) -> None:
    """It has length 1 and gains the dual norm; nothing of length 1 gains more (Hoelder)."""
    draws = Draws.of(seed, torch.arange(4))
    gradient = draws.normal(2, 3, 3, dtype=torch.float64)
    others = draws.fold(1).normal(2, 3, 3, dtype=torch.float64)
    moves = NORMS[norm].steepest(gradient)
    assert torch.allclose(moves.flatten(1).norm(ORDER[norm], dim=1), torch.ones(4).double())
    assert torch.allclose(NORMS[norm].length(others), others.flatten(1).norm(ORDER[norm], dim=1))
    gains = (moves * gradient).flatten(1).sum(dim=1)
    assert torch.allclose(gains, NORMS[norm].dual(gradient))
    assert ((others * gradient).flatten(1).sum(dim=1) <= gains * NORMS[norm].length(others) + 1e-12).all()
    assert NORMS[norm].steepest(torch.zeros_like(gradient)).abs().max() == 0


@pytest.mark.parametrize("norm", NORMS)
@given(seed=st.integers(0, 2**31), radius=st.floats(1e-3, 20))
def test_shortened_moves_are_the_nearest(norm: Norm, seed: int, radius: float) -> None:
    """Nearest in a convex set means: no move of the set lies beyond it, as seen from the move that was shortened."""
    draws = Draws.of(seed, torch.arange(3))
    moves = 2 * draws.normal(1, 2, 4, dtype=torch.float64)
    radii = torch.tensor([radius, radius / 10, math.inf], dtype=torch.float64)
    short = NORMS[norm].shorten(moves, radii)
    assert (NORMS[norm].length(short) <= radii + 1e-9).all()
    assert torch.equal(short[2], moves[2])
    others = draws.fold(1).normal(30, 8, dtype=torch.float64)[:2].flatten(0, 1)
    others = others / NORMS[norm].length(others)[:, None] * radii[:2].repeat_interleave(30)[:, None]
    beyond = (moves - short)[:2].flatten(1)[:, None] * (others.view(2, 30, 8) - short[:2].flatten(1)[:, None])
    assert beyond.sum(dim=2).max() <= 1e-7 * max(1, radius)


@pytest.mark.parametrize("norm", NORMS)
def test_float32_stays_within_what_an_evaluation_forgives(norm: Norm) -> None:
    draws = Draws.of(0, torch.arange(20))
    images = draws.uniform(3, 32, 32)
    eps = {"linf": 0.03, "l2": 0.5, "l1": 12.0}[norm]
    for points in (
        NORMS[norm].random(images, eps, draws),
        NORMS[norm].project(images + draws.fold(1).normal(3, 32, 32), images, eps),
        NORMS[norm].nearest(images + draws.fold(1).normal(3, 32, 32), images, eps),
    ):
        lengths = (points.double() - images.double()).flatten(1).norm(ORDER[norm], dim=1)
        assert lengths.max() <= eps + NORMS[norm].rounding(3 * 32 * 32)
        assert 0 <= points.min() <= points.max() <= 1


class Doubled(Geometry):
    """A norm of one's own: twice the Euclidean length."""

    euclid = NORMS["l2"]

    def length(self, moves: Tensor) -> Tensor:
        return 2 * self.euclid.length(moves)

    def dual(self, gradient: Tensor) -> Tensor:
        return self.euclid.dual(gradient) / 2

    def steepest(self, gradient: Tensor) -> Tensor:
        return self.euclid.steepest(gradient) / 2

    def shorten(self, moves: Tensor, radii: Tensor) -> Tensor:
        return self.euclid.shorten(moves, radii / 2)

    def project(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        return self.euclid.project(points, images, eps / 2)

    def nearest(self, points: Tensor, images: Tensor, eps: float) -> Tensor:
        return self.euclid.nearest(points, images, eps / 2)

    def random(self, images: Tensor, eps: float, draws: Draws) -> Tensor:
        return self.euclid.random(images, eps / 2, draws)

    def move_to_hyperplane(self, points: Tensor, normals: Tensor, offsets: Tensor) -> Tensor:
        return self.euclid.move_to_hyperplane(points, normals, offsets)

    def rounding(self, pixels: int) -> float:
        return 2 * self.euclid.rounding(pixels)


@pytest.mark.usefixtures("short_autoattack")
def test_a_new_norm_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a norm that is twice L2, every attack finds within 2 eps what it finds within eps in L2."""
    monkeypatch.setitem(NORMS, "doubled", Doubled())
    model, images = Curved(48), some_images(8, 3, 4, 4)
    labels, eps = model(images).argmax(dim=1), 0.2

    def attacks(norm: Any, scale: float) -> dict[str, Attack]:
        ball: dict[str, Any] = {"norm": norm, "eps": scale * eps}
        return {
            "pgd": PGD(steps=10, step_size=scale * eps / 4, restarts=2, loss="margin", **ball),
            "fmn": FMN(norm=norm, steps=20),
            "noise": RandomNoise(samples=20, **ball),
            **AutoAttack(**ball).members(5),
            "square": Square(queries=200, **ball),
        }

    broken = {}
    for name, attack in attacks("doubled", 2).items():
        found = attack(model, images, labels)
        same = attacks("l2", 1)[name](model, images, labels)
        broken[name] = int((model(found).argmax(dim=1) != labels).sum())
        if name == "square":  # its moves are added up in squares, and then come back to the ball
            assert (found - images).flatten(1).norm(dim=1).max() <= eps + 1e-12
        else:
            assert torch.allclose(found, same, atol=1e-9), name
    assert min(broken["apgd-ce"], broken["fab-t"]) >= broken["square"] > broken["noise"]


def test_every_norm_has_a_column_of_outcomes_and_is_named_in_help() -> None:
    assert set(NORMS) <= set(COLUMNS)
    assert set(get_args(Norm)) == set(NORMS)
    assert all(norm in NORM_HELP for norm in NORMS)


# Steps in L1


def test_a_step_is_shared_by_the_largest_gradients() -> None:
    gradient = torch.tensor([[0.1, -3.0, 2.0, 0.0], [1.0, 1.0, -1.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    points = torch.full_like(gradient, 0.5)
    step = share_step(gradient, points, torch.tensor([2, 1, 2]))
    assert step[0].tolist() == [0, -0.5, 0.5, 0]
    assert step[1].tolist() == pytest.approx([1 / 3, 1 / 3, -1 / 3, 0])  # of equally large ones all move
    assert step[2].tolist() == [0, 0, 0, 0]
    assert share_step(gradient, points, torch.tensor([0, 0, 0]))[0].tolist() == [0, -1, 0, 0]


def test_a_step_leaves_out_what_cannot_move() -> None:
    """One per cent of 200 pixels, two; the two largest gradients point out of [0, 1]."""
    points, gradient = torch.full((1, 2, 10, 10), 0.5), torch.full((1, 2, 10, 10), 0.1)
    points[0, 0, 0, :2] = torch.tensor([1.0, 0.0])
    gradient[0, 0, 0, :4] = torch.tensor([9.0, -8.0, -7.0, 6.0])
    step = NORMS["l1"].step(gradient, points)
    assert step[0, 0, 0, :4].tolist() == [0, 0, -0.5, 0.5]
    assert step.abs().sum() == 1


# Projections in L1


def project_by_bisection(points: Tensor, images: Tensor, eps: float) -> Tensor:
    """Every move cut by one amount, and to [0, 1]: the amount by bisection."""
    moves = points - images
    low, high = 0.0, float(moves.abs().max())

    def cut(amount: float) -> Tensor:
        return (images + moves.sign() * (moves.abs() - amount).clamp_min(0)).clamp(0, 1)

    if float((cut(0.0) - images).abs().sum()) <= eps:
        return cut(0.0)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((cut(middle) - images).abs().sum()) > eps else (low, middle)
    return cut(high)


@given(seed=st.integers(0, 2**31), eps=st.floats(1e-3, 10), spread=st.floats(1e-3, 3))
def test_projection_by_bisection(seed: int, eps: float, spread: float) -> None:
    """That it is the nearest point of ball and box is tested with the other norms' (test_attacks_auto)."""
    draws = Draws.of(seed, torch.arange(1))
    images = (draws.uniform(1, 3, 7, dtype=torch.float64) * 1.4 - 0.2).clamp(0, 1)
    moves = spread * draws.fold(1).normal(1, 3, 7, dtype=torch.float64).round(
        decimals=1
    )  # with ties and zeros
    found = NORMS["l1"].project(images + moves, images, eps)
    assert torch.allclose(found, project_by_bisection(images + moves, images, eps), atol=1e-9)


def test_what_is_cut_away_is_exactly_the_image() -> None:
    """APGD counts the pixels that differ: rounding must not leave a trace in the others."""
    draws = Draws.of(1, torch.arange(8))
    images = draws.uniform(3, 16, 16)
    points = NORMS["l1"].project(images + draws.fold(1).normal(3, 16, 16), images, 5.0)
    assert ((points != images).flatten(1).sum(dim=1) < 40).all()


# Closed forms on a linear model


def greedy_distance(model: Linear, image: Tensor) -> float:
    """Pixels one by one, the heaviest first, each to its end of [0, 1], until the lead is gone."""
    lead = float((model(image[None])[0, 1] - model(image[None])[0, 0]).detach())
    left, length = abs(lead), 0.0
    direction = -math.copysign(1.0, lead) * model.normal.detach()
    for pixel in direction.abs().argsort(descending=True).tolist():
        weight, value = float(direction[pixel].abs()), float(image.flatten()[pixel])
        room = 1 - value if direction[pixel] > 0 else value
        move = min(room, left / weight)
        length, left = length + move, left - move * weight
        if left <= 1e-12:
            return length
    return math.inf


@pytest.mark.parametrize(
    ("attack", "factor"),
    [(FAB(norm="l1", eps=30.0, steps=50, early_exit=False), 1.02), (FMN(norm="l1", steps=1000), 1.05)],
    ids=["fab", "fmn"],
)
def test_the_smallest_distance_with_a_box_in_the_way(attack: Any, factor: float) -> None:
    model, images = Linear(48), some_images(8, 3, 4, 4)
    labels = model(images).argmax(dim=1)
    found = attack.run(model, images, labels)
    expected = torch.tensor([greedy_distance(model, image) for image in images], dtype=torch.float64)
    ratio = (found.images - images).abs().flatten(1).sum(dim=1) / expected
    assert found.success.all()
    assert 1 <= ratio.min() <= ratio.max() < factor


@pytest.mark.parametrize("attack", ["pgd", "apgd"])
def test_gradient_attacks_break_what_the_greedy_distance_says(attack: str) -> None:
    """A little beyond it every image falls, a little before it none."""
    model, images = Linear(48), some_images(8, 3, 4, 4)
    labels = model(images).argmax(dim=1)
    for row, image in enumerate(images):
        for factor, falls in ((0.999, False), (1.02, True)):
            eps = factor * greedy_distance(model, image)
            options: dict[str, Any] = {"norm": "l1", "eps": eps, "steps": 100, "loss": "margin"}
            if attack == "pgd":
                options |= {"step_size": eps / 4, "schedule": "cosine"}
            found = ATTACKS[attack](**options).run(model, image[None], labels[row : row + 1])
            assert bool(found.success) == falls


# APGD


def climb_slowly(
    model: nn.Module, image: Tensor, label: int, noise: Tensor, eps: float, steps: int
) -> Tensor:
    """APGD of Croce & Hein (2021) in L1, with our two departures, for one image: the point of the highest loss."""

    def ascend(point: Tensor) -> tuple[float, Tensor]:
        point = point.clone().requires_grad_(True)
        scores = model(point[None])[0]
        loss = torch.cat([scores[:label], scores[label + 1 :]]).max() - scores[label]
        return float(loss.detach()), torch.autograd.grad(loss, point)[0]

    current, kept = project_by_bisection(image + noise, image, 3 * eps), image
    for radius, share in ((3 * eps, 0.3), (2 * eps, 0.3), (eps, 0.4)):
        current = project_by_bisection(current, image, radius)
        highest, gradient = ascend(current)
        kept, kept_gradient, size = current, gradient, radius
        changed = int((current != image).sum())
        for step in range(1, round(share * steps) + 1):
            stuck = ((current < 1e-6) & (gradient < 0)) | ((current > 1 - 1e-6) & (gradient > 0))
            free = torch.where(stuck, 0.0, gradient)
            least = free.abs().flatten().sort(descending=True).values[max(1, int(changed / 1.5)) - 1]
            signs = free.sign() * (free.abs() >= least)
            current = project_by_bisection(current + size * signs / signs.abs().sum(), image, radius)
            loss, gradient = ascend(current)
            if loss > highest:
                highest, kept, kept_gradient = loss, current, gradient
            if step % max(1, int(0.04 * share * steps)) == 0:
                before, changed = changed, int((kept != image).sum())
                if changed / before < 0.95:
                    size, current, gradient = radius, kept, kept_gradient
                else:
                    size = max(size / 1.5, radius / 10)
        current = kept
    return kept


def test_apgd_equals_a_slow_transcription() -> None:
    model, images = Curved(48), some_images(3, 3, 4, 4)
    labels = model(images).argmax(dim=1)
    eps, steps = 1.5, 50
    found = (
        APGD(norm="l1", eps=eps, steps=steps, loss="margin", keep="last").run(model, images, labels).images
    )
    draws = Draws.of(0, torch.arange(3)).fold(_STREAM).fold(0).fold(0)
    noise = draws.normal(3, 4, 4, dtype=torch.float64)
    for row in range(3):
        expected = climb_slowly(model, images[row], int(labels[row]), noise[row], eps, steps)
        assert torch.allclose(found[row], expected, atol=1e-7)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("steps", [1, 3, 4, 17])
def test_a_wide_start_ends_in_the_ball(norm: Norm, steps: int) -> None:
    """Whatever the number of steps, which the parts share; a point outside the ball never counts."""
    model, images = Curved(48), some_images(6, 3, 4, 4)
    labels = model(images).argmax(dim=1)
    eps = {"linf": 0.05, "l2": 0.3, "l1": 1.0}[norm]
    for keep in ("last", "best"):
        options: dict[str, Any] = {"norm": norm, "eps": eps, "wide_start": True, "keep": keep}
        attack = APGD(steps=steps, loss="margin", **options)
        found = attack.run(model, images, labels)
        assert (found.images - images).flatten(1).norm(ORDER[norm], dim=1).max() <= eps + 1e-12
        assert (found.backwards <= steps).all()


# Square and noise


@pytest.mark.parametrize("side", [3, 5, 8])
def test_bumps_in_l1_have_length_1_and_fall_off_with_the_fourth_power(side: int) -> None:
    bumps = _two_bumps(side, "l1", torch.float64, torch.device("cpu"))
    assert float(bumps.abs().sum()) == pytest.approx(1)
    upper = bumps[: side // 2]
    rings = max(side // 2, side) // 2
    expected = sum((k + 1) ** -4 for k in range(rings + 1)) / sum((k + 1) ** -4 for k in range(1, rings + 1))
    middle, centre = (side // 2) // 2, side // 2
    assert float(upper[middle, centre] / upper[middle, centre - 1]) == pytest.approx(expected)


def test_square_gains_with_queries() -> None:
    """Never more than the optimum, one pixel, and about half of it on a linear model: bumps are several pixels."""
    model, images = Linear(48), torch.full((6, 3, 4, 4), 0.5, dtype=torch.float64)
    images = images + 1e-3 * (some_images(6, 3, 4, 4) - 0.5)
    labels, eps = model(images).argmax(dim=1), 0.4

    def gain(queries: int) -> Tensor:
        attack = Square(norm="l1", eps=eps, queries=queries, keep="last")
        lead = model(attack(model, images, labels)) - model(images)
        gains: Tensor = (lead.gather(1, 1 - labels[:, None]) - lead.gather(1, labels[:, None])).detach()
        return gains / (eps * model.normal.abs().max())

    few, many = gain(50), gain(1000)
    assert many.mean() > few.mean()
    assert 0.4 < many.min() <= many.max() <= 1 + 1e-9


def test_noise_has_no_corners_in_l1() -> None:
    with pytest.raises(InputError, match="corners"):
        RandomNoise(norm="l1", eps=1.0, samples=1, kind="corners")


# Evaluation and audit


def digits_case() -> tuple[nn.Module, Split]:
    data = ecnn.load_data("digits")
    images, labels = data.train[:600]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval(), data.test


def test_distances_of_an_evaluation() -> None:
    model, split = digits_case()
    attacks = {
        "pgd": PGD(norm="l1", eps=2.0, steps=20, step_size=0.5),
        "fmn": FMN(norm="l1", steps=60),
    }
    found = ecnn.evaluate(model, split, attacks, limit=30)
    assert found.outcomes["pgd"].l1 is not None
    assert 1 < found.outcomes["pgd"].l1.max() <= 2.0 + 1e-5
    curve = found.curve_by_distance("fmn", norm="l1", eps=[0.5, 1, 2, 4])
    counts = [rate.successes for rate in curve.cumulative]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("short_lessons")
def test_an_audit_in_l1() -> None:
    """Both ends: a model that falls in the ball, and a claim that no attack shakes because the ball is tiny."""
    model, split = digits_case()
    fallen = ecnn.audit(model, split, norm="l1", eps=3.0, claim=0.9, budget="quick", limit=30)
    assert fallen.verdict == "not believable"
    assert fallen.accuracy < 0.3
    still = ecnn.audit(model, split, norm="l1", eps=0.01, budget="quick", limit=30)
    assert still.verdict != "not believable"
    assert not [finding for finding in still.findings if finding.level == "alarm"]


# Costs


class Unmoved(nn.Module):
    """Says class 0 of everything, whatever the pixels: no attack ends early."""

    def forward(self, images: Tensor) -> Tensor:
        return 0 * images.flatten(1)[:, :5] - torch.arange(5.0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("wide_start", [None, True, False])
@pytest.mark.parametrize("steps", [2, 10])
def test_apgd_costs_what_it_says(norm: Norm, wide_start: bool | None, steps: int) -> None:
    attack = APGD(norm=norm, eps=0.5, steps=steps, loss="margin", restarts=2, wide_start=wide_start)
    found = attack.run(Unmoved(), torch.rand(2, 1, 3, 3), torch.zeros(2, dtype=torch.int64))
    stated = attack.cost(num_classes=5)
    assert found.forwards.tolist() == [stated.forwards] * 2
    assert found.backwards.tolist() == [stated.backwards] * 2


def test_autoattack_counts_its_five_starts_and_five_targets_in_l1() -> None:
    l2, l1 = (AutoAttack(norm=norm, eps=0.5).cost(num_classes=10) for norm in ("l2", "l1"))
    # APGD: 5 starts and 5 targets, each with two balls more, in place of 1 and 9; FAB and Square are the same.
    assert l1.forwards - l2.forwards == 10 * (100 + 3) - 10 * (100 + 1)
    assert l1.backwards == l2.backwards
