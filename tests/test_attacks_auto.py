"""APGD, FAB, Square and AutoAttack: exact projections, published schedules, closed forms, independence, warnings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor, nn
from toys import Linear, Saturated, Undecoded, Wrapped, distance, random_linear

from ecnn.attacks.apgd import _STREAM, APGD, checkpoints
from ecnn.attacks.attempts import best_wrong_classes
from ecnn.attacks.auto import AutoAttack, examine
from ecnn.attacks.base import Attack, Target
from ecnn.attacks.fab import FAB
from ecnn.attacks.gradient import PGD
from ecnn.attacks.images import at_most, together
from ecnn.attacks.norms import NORMS, Norm, solve_capped_sum
from ecnn.attacks.race import Race
from ecnn.attacks.randomness import Draws
from ecnn.attacks.square import Square, _two_bumps, square_share
from ecnn.attacks.views import ScoreView
from ecnn.constructions import random_code
from ecnn.errors import InputError
from ecnn.model import ECNN


class Curved(nn.Module):
    """A small smooth classifier whose rows are summed one by one, so that a batch changes no bit of them."""

    def __init__(self, num_classes: int = 5, pixels: int = 75, sharpness: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        first = torch.randn(12, pixels, generator=generator, dtype=torch.float64) / pixels**0.5
        second = torch.randn(num_classes, 12, generator=generator, dtype=torch.float64)
        self.first, self.second = nn.Parameter(first), nn.Parameter(second * sharpness)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(4 * ((images.flatten(1) - 0.5)[:, None] * self.first.to(images.dtype)).sum(2))
        return (hidden[:, None] * self.second.to(images.dtype)).sum(2)


def some_images(batch: int, *shape: int, spread: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    draws = Draws.of(7, torch.arange(batch))
    return 0.5 + spread * (draws.uniform(*shape, dtype=dtype) - 0.5)


def curved_case(batch: int = 8) -> tuple[Curved, Tensor, Tensor]:
    model, images = Curved(), some_images(batch, 3, 5, 5)
    return model, images, model(images).argmax(dim=1)


ORDER = {"linf": math.inf, "l2": 2, "l1": 1}


def lead(model: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    scores: Tensor = model(points).detach()
    own = scores.gather(1, labels[:, None]).squeeze(1)
    return scores.scatter(1, labels[:, None], -math.inf).amax(dim=1) - own


RADIUS = {"linf": 0.06, "l2": 0.35, "l1": 1.2}
MAKERS: dict[str, Callable[[Any, float], Attack]] = {
    "apgd-ce": lambda norm, eps: APGD(norm=norm, eps=eps, steps=20, loss="cross_entropy"),
    "apgd-t": lambda norm, eps: APGD(norm=norm, eps=eps, steps=10, loss="dlr", targets=3, restarts=2),
    "fab": lambda norm, eps: FAB(norm=norm, eps=eps, steps=12, targets=2, restarts=2),
    "square": lambda norm, eps: Square(norm=norm, eps=eps, queries=120, restarts=2),
    "square-turns": lambda norm, eps: Square(norm=norm, eps=eps, queries=120, l2_moves="turns"),
}


# Projections


def shortest_move_linf(point: Tensor, normal: Tensor, offset: float) -> float:
    """By linear programming: the least s with |move| <= s, the box, and the hyperplane; nan where there is none."""
    size = len(point)
    upper = np.block([[np.eye(size), -np.ones((size, 1))], [-np.eye(size), -np.ones((size, 1))]])
    bounds = [(-float(p), 1 - float(p)) for p in point] + [(0, None)]
    found = linprog(
        np.r_[np.zeros(size), 1],
        A_ub=upper,
        b_ub=np.zeros(2 * size),
        A_eq=np.r_[normal.numpy(), 0][None],
        b_eq=[-offset],
        bounds=bounds,
    )
    return float(found.fun) if found.status == 0 else math.nan


def shortest_move_l2(point: Tensor, normal: Tensor, offset: float) -> float:
    """Every way in which pixels can stand at 0, at 1 or free: the free ones then move along the normal."""
    best = math.nan
    for places in itertools.product((0, 1, None), repeat=len(point)):
        fixed = [0.0 if at is None else at - float(p) for p, at in zip(point, places, strict=True)]
        move = torch.tensor(fixed, dtype=torch.float64)
        free = torch.tensor([at is None for at in places])
        rest, slope = offset + float(normal @ move), float((normal * free).square().sum())
        if slope > 0:
            move = move - rest / slope * normal * free
        outside = (point + move < -1e-9).any() or (point + move > 1 + 1e-9).any()
        if not outside and abs(offset + float(normal @ move)) < 1e-9:
            best = min(float(move.norm()), best) if best == best else float(move.norm())
    return best


def shortest_move_l1(point: Tensor, normal: Tensor, offset: float) -> float:
    """By linear programming: the least sum of moves up and moves down."""
    upper, weights = [1 - float(p) for p in point] + [float(p) for p in point], np.r_[normal, -normal]
    bounds = [(0, top) for top in upper]
    found = linprog(np.ones(2 * len(point)), A_eq=weights[None], b_eq=[-offset], bounds=bounds)
    return float(found.fun) if found.status == 0 else math.nan


SHORTEST = {"linf": shortest_move_linf, "l2": shortest_move_l2, "l1": shortest_move_l1}


@pytest.mark.parametrize("norm", NORMS)
@given(seed=st.integers(0, 2**31), reach=st.floats(0, 3))
def test_the_shortest_move_to_a_hyperplane(norm: Norm, seed: int, reach: float) -> None:
    """Against linear programming and against all active sets; pixels at 0 and 1 and zero weights included."""
    draws = Draws.of(seed, torch.arange(1))
    points = (draws.fold(0).uniform(5, dtype=torch.float64) * 1.6 - 0.3).clamp(0, 1)
    normals = draws.fold(1).normal(5, dtype=torch.float64) * (draws.fold(2).uniform(5) > 0.2)
    offsets = reach * (2 * draws.fold(3).uniform(dtype=torch.float64) - 1)
    move = NORMS[norm].move_to_hyperplane(points, normals, offsets)[0]
    assert (points[0] + move).min() >= -1e-12
    assert (points[0] + move).max() <= 1 + 1e-12
    expected = SHORTEST[norm](points[0], normals[0], float(offsets))
    if math.isnan(expected):  # the box does not reach the hyperplane: its nearest corner
        corner = torch.where(normals[0] * offsets < 0, 1.0, 0.0).double()
        assert torch.allclose(points[0] + move, torch.where(normals[0] == 0, points[0], corner), atol=1e-12)
    else:
        assert float(normals[0] @ move + offsets) == pytest.approx(0, abs=1e-9)
        assert float(move.norm(ORDER[norm])) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_hyperplanes_of_any_scale_in_float32(norm: Norm, scale: float) -> None:
    """A hyperplane is the same after multiplying normal and offset; the squares of a tiny gradient would vanish."""
    draws = Draws.of(1, torch.arange(6))
    points, normals = draws.uniform(300), draws.fold(1).normal(300)
    offsets = 5 * draws.fold(2).normal()
    expected = NORMS[norm].move_to_hyperplane(points.double(), normals.double(), offsets.double())
    move = NORMS[norm].move_to_hyperplane(points, normals * scale, offsets * scale)
    assert torch.allclose(move.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_zero_gradient_moves_nothing() -> None:
    points = torch.tensor([[0.0, 0.3, 1.0]])
    for norm in NORMS:
        assert NORMS[norm].move_to_hyperplane(points, torch.zeros(1, 3), torch.ones(1)).abs().max() == 0


@pytest.mark.parametrize("norm", NORMS)
@given(seed=st.integers(0, 2**31), eps=st.floats(0.01, 2))
def test_the_projection_to_ball_and_box_is_the_nearest_point(norm: Norm, seed: int, eps: float) -> None:
    """Nearest in a convex set means: no point of the set lies beyond it, as seen from the point to project."""
    draws = Draws.of(seed, torch.arange(3))
    images = (draws.fold(0).uniform(1, 2, 4, dtype=torch.float64) * 1.6 - 0.3).clamp(0, 1)
    points = images + draws.fold(1).normal(1, 2, 4, dtype=torch.float64)
    nearest = NORMS[norm].nearest(points, images, eps)
    assert distance(nearest, images, norm).max() <= eps + 1e-12
    assert 0 <= nearest.min() <= nearest.max() <= 1
    for number in range(40):
        others = NORMS[norm].random(images, eps, draws.fold(2 + number))
        angles = ((points - nearest) * (others - nearest)).flatten(1).sum(dim=1)
        assert angles.max() <= 1e-9


def test_capped_sums_by_bisection() -> None:
    draws = Draws.of(2, torch.arange(50))
    rates = draws.uniform(30, dtype=torch.float64) * (draws.fold(1).uniform(30) > 0.3)
    caps = draws.fold(2).uniform(30, dtype=torch.float64) * (rates > 0)
    levels = caps.sum(dim=1) * 1.2 * draws.fold(3).uniform(dtype=torch.float64)
    low, high = torch.zeros(50, dtype=torch.float64), torch.full((50,), 1e6, dtype=torch.float64)
    for _ in range(200):
        middle = (low + high) / 2
        below = torch.minimum(middle[:, None] * rates, caps).sum(dim=1) < levels
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    expected = torch.where(levels > caps.sum(dim=1), math.inf, high)
    assert torch.allclose(solve_capped_sum(rates, caps, levels), expected, rtol=1e-9)


# Schedules


def test_checkpoints_are_the_published_ones() -> None:
    assert checkpoints(100) == (0, 22, 41, 57, 70, 80, 87, 93, 99)
    shares = [0.0, 0.22]
    while shares[-1] < 1:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    for steps in (1, 7, 20, 50, 1000):
        printed = [math.ceil(round(share * steps, 6)) for share in shares if share < 1]
        assert checkpoints(steps) == tuple(dict.fromkeys(printed))


def test_square_schedule() -> None:
    """The published halvings for 10,000 queries; half as many come after half as many queries."""
    halvings = [10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000]
    for number, step in enumerate(halvings):
        assert square_share(step, 10_000, 0.8, rescale=True) == 0.8 / 2**number
        assert square_share(step + 1, 10_000, 0.8, rescale=True) == 0.4 / 2**number
        assert square_share(step + 1, 5000, 0.8, rescale=False) == 0.4 / 2**number
        assert square_share(step // 2 + 1, 5000, 0.8, rescale=True) == 0.4 / 2**number


@pytest.mark.parametrize("side", [1, 2, 3, 7, 12])
def test_two_bumps_by_the_printed_sum(side: int) -> None:
    """The printed form, pixel by pixel: sum of 1 / k^2 over the rectangles around the middle that reach the pixel."""
    expected = torch.zeros(side, side, dtype=torch.float64)
    for sign, rows in ((1, range(side // 2)), (-1, range(side // 2, side))):
        bump = torch.zeros(len(rows), side, dtype=torch.float64)
        for down, across in itertools.product(range(len(rows)), range(side)):
            ring = max(abs(down - len(rows) // 2), abs(across - side // 2))
            last = max(len(rows), side) // 2
            bump[down, across] = sum(1 / (k + 1) ** 2 for k in range(ring, last + 1))
        if len(rows):
            expected[rows.start : rows.stop] = sign * bump / bump.norm()
    bumps = _two_bumps(side, "l2", torch.float64, torch.device("cpu"))
    assert torch.allclose(bumps, expected / expected.norm(), atol=1e-12)


# Rows and costs


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MAKERS)
def test_rows_know_nothing_of_each_other(name: str, norm: Norm) -> None:
    """Alone, in other company or in another order, an image ends at the same point at the same cost.

    But for the last bit: some processors round differently at the end of a batch that does not fill their registers.
    """
    model, images, labels = curved_case()
    attack, index = MAKERS[name](norm, 0.4 * RADIUS[norm]), torch.tensor([5, 0, 9, 2, 77, 3, 1, 4])
    whole = attack.run(model, images, labels, seed=3, index=index)
    assert 0 < whole.success.sum() < len(images)
    for rows in ([0], [6], [7, 2, 5], [3, 1, 0, 4, 2, 7, 6, 5]):
        part = attack.run(model, images[rows], labels[rows], seed=3, index=index[rows])
        torch.testing.assert_close(part.images, whole.images[rows], rtol=0, atol=1e-12)
        for value in ("success", "forwards", "backwards"):
            assert torch.equal(getattr(part, value), getattr(whole, value)[rows])


@pytest.mark.parametrize("early_exit", [True, False])
@pytest.mark.parametrize("kind", ["pgd", "apgd", "fab"])
def test_attempts_made_together_find_the_same_with_fewer_passes(kind: str, early_exit: bool) -> None:
    model, images, labels = curved_case()
    size: dict[str, Any] = {
        "norm": "linf",
        "eps": 0.4 * RADIUS["linf"],
        "steps": 6,
        "targets": 2,
        "restarts": 3,
    }
    attack: Attack = {
        "pgd": PGD(step_size=size["eps"] / 4, early_exit=early_exit, **size),
        "apgd": APGD(loss="margin", early_exit=early_exit, **size),
        "fab": FAB(early_exit=early_exit, **size),
    }[kind]
    batches: list[int] = []
    handle = model.register_forward_hook(lambda module, given, said: batches.append(len(given[0])))
    alone = attack.run(model, images, labels, seed=3)
    passes = len(batches)
    with together(2**12):
        joint = attack.run(model, images, labels, seed=3)
    assert 0 < alone.success.sum() < len(images)
    assert torch.equal(joint.images, alone.images)
    assert torch.equal(joint.predictions, alone.predictions)
    assert torch.equal(joint.forwards[~alone.success], alone.forwards[~alone.success])
    assert len(batches) - passes < passes / 2
    batches.clear()
    with together(2**12), at_most(len(images)):
        attack.run(model, images, labels, seed=3)
    assert max(batches) <= len(images)
    handle.remove()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MAKERS)
def test_dropping_broken_rows_saves_work_and_changes_no_verdict(name: str, norm: Norm) -> None:
    model, images, labels = curved_case()
    attack = MAKERS[name](norm, RADIUS[norm])
    dropping = attack.run(model, images, labels)
    object.__setattr__(attack, "early_exit", False)
    whole = attack.run(model, images, labels)
    assert torch.equal(dropping.success, whole.success)
    assert (dropping.forwards <= whole.forwards).all()
    assert (dropping.forwards < whole.forwards)[whole.success].all()


@pytest.mark.parametrize("norm", NORMS)
def test_cost(norm: Norm) -> None:
    """Of an image that nothing breaks: two verdicts, and what the algorithm asks; one gradient less than points."""
    model, images, labels = curved_case(3)
    common: dict[str, Any] = {"norm": norm, "eps": 1e-6}
    points = 13 if norm == "l1" else 11  # two wider balls come first, and each begins with a point of its own
    for attack, forwards, backwards in (
        (APGD(steps=10, loss="margin", restarts=2, **common), 2 * points, 2 * 10),
        (APGD(steps=10, loss="dlr", targets=3, **common), 1 + 3 * points, 3 * 10),
        (FAB(steps=10, targets=2, **common), None, 2 * 10),
        (Square(queries=37, restarts=2, **common), 2 * 37, 0),
    ):
        result = attack.run(model, images, labels)
        assert not result.success.any()
        assert result.backwards.tolist() == [backwards] * 3
        if forwards is None:  # the final search is for those rows that found something
            assert all(1 + 2 * 20 + 2 <= count <= 1 + 2 * 23 + 2 for count in result.forwards.tolist())
        else:
            assert result.forwards.tolist() == [forwards + 2] * 3


@pytest.mark.parametrize(
    ("norm", "l2_moves"), [("linf", "bumps"), ("l2", "bumps"), ("l2", "turns"), ("l1", "bumps")]
)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 2), (3, 2, 7), (2, 11, 4)])
def test_square_on_images_of_any_shape(shape: tuple[int, int, int], norm: Norm, l2_moves: Any) -> None:
    """Brighter is better here: in Linf all pixels get as bright as they may, in L2 no part of the radius is left."""
    images = some_images(6, *shape, spread=0.5)
    labels = torch.zeros(6, dtype=torch.int64)

    class Sum(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            total = images.flatten(1).sum(dim=1)
            return torch.stack([torch.full_like(total, 1000), total], dim=1)

    attack = Square(norm=norm, eps=0.2, queries=1000, l2_moves=l2_moves, keep="last")
    result = attack.run(Sum(), images, labels)
    assert distance(result.images, images, norm).max() <= 0.2 + 1e-12
    if norm == "linf":
        assert torch.allclose(result.images, images + 0.2)
    else:
        assert distance(result.images, images, norm).min() > 0.2 - 1e-9


def test_square_pays_for_the_queries_it_asks() -> None:
    """The model counts by itself; a row that is broken at its k-th query is never asked again."""
    model, images, labels = curved_case()
    asked = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        asked.append(len(inputs[0]))

    model.register_forward_pre_hook(count)
    result = Square(norm="linf", eps=0.06, queries=200).run(model, images, labels)
    assert int(result.forwards.sum()) == sum(asked)
    assert (result.forwards[~result.success] == 202).all()
    assert (result.forwards[result.success] < 202).all()


# Closed forms


def linear_optimum(model: Linear, images: Tensor, labels: Tensor, norm: Norm, eps: float) -> Tensor:
    """(batch,) the highest lead of the wrong class in ball and box; in L2 by bisection over the multiplier."""
    sign = torch.where(labels == 0, 1.0, -1.0).double()[:, None]
    flat, normal = images.flatten(1), sign * model.normal()
    if norm == "linf":
        best = (flat + eps * normal.sign()).clamp(0, 1).maximum(flat - eps).minimum(flat + eps)
    elif norm == "l1":
        best = flat.clone()
        for row in range(len(flat)):
            left = eps
            for pixel in normal[row].abs().argsort(descending=True).tolist():
                end = float(normal[row, pixel] > 0)
                move = max(-left, min(left, end - float(flat[row, pixel])))
                best[row, pixel] += move
                left -= abs(move)
    else:
        low, high = torch.zeros(len(flat), 1).double(), torch.full((len(flat), 1), 1e4).double()
        for _ in range(200):
            middle = (low + high) / 2
            inside = ((flat + middle * normal).clamp(0, 1) - flat).norm(dim=1, keepdim=True) < eps
            low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
        best = (flat + low * normal).clamp(0, 1)
    return lead(model, best.view_as(images), labels)


def linear_case(batch: int = 6, spread: float = 1.0) -> tuple[Linear, Tensor, Tensor]:
    model, images = random_linear(2, 48), some_images(batch, 3, 4, 4, spread=spread)
    return model, images, model(images).argmax(dim=1)


@pytest.mark.parametrize("loss", ["cross_entropy", "margin"])
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("l2", 0.5), ("l2", 2.0), ("l1", 0.3), ("l1", 5.0)])
def test_apgd_reaches_the_optimum_of_a_linear_model(norm: Norm, eps: float, loss: Any) -> None:
    """Also where the box cuts the ball, which scaling and cutting would not reach. In L1 steps stay above eps / 10."""
    model, images, labels = linear_case()
    tolerance = 0.01 if norm == "l1" else 1e-5
    optimum = linear_optimum(model, images, labels, norm, eps)
    for options in ({"keep": "last"}, {"early_exit": False}):
        points = APGD(norm=norm, eps=eps, steps=100, loss=loss, **options).run(model, images, labels).images
        reached = lead(model, points, labels)
        if options == {"early_exit": False}:  # those that cannot be broken come back clean
            reached, best = reached[optimum > 0], optimum[optimum > 0]
        else:
            best = optimum
        assert len(best)
        assert torch.allclose(reached, best, rtol=tolerance, atol=0)
        assert (reached <= best + 1e-9).all()


def share_of_the_optimum(attack: Square, model: Linear, images: Tensor, labels: Tensor) -> Tensor:
    """(batch,) what the attack adds to the lead of another class, over the most that the ball and the box allow."""
    optimum = linear_optimum(model, images, labels, attack.norm, float(attack.eps))
    clean = lead(model, images, labels)
    return (lead(model, attack.run(model, images, labels).images, labels) - clean) / (optimum - clean)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("l2", 0.5), ("l2", 2.0)])
def test_square_nears_the_optimum_of_a_linear_model(norm: Norm, eps: float) -> None:
    """Also where the box cuts the L2 ball."""
    model, images, labels = linear_case()
    attack = Square(norm=norm, eps=eps, queries=2000, l2_moves="turns", keep="last")
    gained = share_of_the_optimum(attack, model, images, labels)
    assert gained.min() > 0.95
    assert gained.max() <= 1 + 1e-12


@pytest.mark.full
def test_published_l2_squares_end_far_from_the_optimum() -> None:
    """However many queries they have: they only concentrate the perturbation."""
    model, images, labels = linear_case()
    attacks = [Square(norm="l2", eps=0.5, queries=queries, keep="last") for queries in (1000, 4000)]
    for attack in attacks:
        gained = share_of_the_optimum(attack, model, images, labels)
        assert 0.5 < gained.min() < gained.max() < 0.8


@pytest.mark.parametrize("norm", NORMS)
def test_fab_finds_the_distance_to_the_border(norm: Norm) -> None:
    """In Linf |f| / |w|_1, in L2 |f| / |w|_2 and in L1 |f| / |w|_inf while the box does not interfere."""
    model, images, labels = linear_case(spread=0.2)
    slope = model.normal().norm({"linf": 1, "l2": 2, "l1": math.inf}[norm])
    expected = lead(model, images, labels).abs() / slope
    anywhere = 1.0 if norm == "linf" else 10.0
    points = FAB(norm=norm, eps=anywhere, steps=20, early_exit=False).run(model, images, labels).images
    assert torch.allclose(distance(points, images, norm), expected, rtol=1e-5, atol=0)
    for factor, broken in ((0.99999, False), (1.00001, True)):
        for row, radius in enumerate((factor * expected).tolist()):
            attack = FAB(norm=norm, eps=radius, steps=20)
            result = attack.run(model, images[row : row + 1], labels[row : row + 1])
            assert bool(result.success) == broken


@pytest.mark.parametrize("norm", NORMS)
def test_fab_with_a_box_in_the_way(norm: Norm) -> None:
    """Half of the pixels stand at 0 or 1: within one per cent of the shortest move that the box allows."""
    model, images, labels = linear_case(spread=2.0)
    images = images.clamp(0, 1)
    labels = model(images).argmax(dim=1)
    offsets = lead(model, images, labels)
    normals = torch.where(labels == 0, 1.0, -1.0).double()[:, None] * model.normal()
    expected = NORMS[norm].move_to_hyperplane(images.flatten(1), normals, offsets)
    anywhere = 1.0 if norm == "linf" else 10.0
    points = FAB(norm=norm, eps=anywhere, steps=100, early_exit=False).run(model, images, labels).images
    ratio = distance(points, images, norm) / distance(expected, torch.zeros_like(expected), norm)
    assert ratio.min() >= 1
    assert ratio.max() < 1.01


def climb_slowly(
    losses_of: Callable[[Tensor], Tensor], image: Tensor, start: Tensor, norm: Norm, eps: float, steps: int
) -> Tensor:
    """Algorithm 1 of the APGD paper as printed, for one image: the point of the highest loss."""

    def ascend(point: Tensor) -> tuple[float, Tensor]:
        point = point.clone().requires_grad_(True)
        loss = losses_of(point)
        (gradient,) = torch.autograd.grad(loss, point)
        return float(loss.detach()), gradient.sign() if norm == "linf" else gradient / gradient.norm()

    def inside(point: Tensor) -> Tensor:
        return NORMS[norm].nearest(point, image, eps)

    marks = checkpoints(steps)
    size, points = 2 * eps, [start, inside(start + 2 * eps * ascend(start)[1])]
    losses = [ascend(point)[0] for point in points]
    best = max(range(2), key=lambda k: losses[k])
    highest, kept = losses[best], points[best]
    sizes, bests, rises = [size], [losses[0]], int(losses[1] > losses[0])
    previous, current, loss = points[0], points[1], losses[1]
    for step in range(1, steps + 1):
        if step in marks:
            width = step - marks[marks.index(step) - 1]
            few = rises < 0.75 * width
            stuck = len(sizes) > 1 and sizes[-1] == sizes[-2] and bests[-1] == highest
            if few or stuck:
                size, current, loss = size / 2, kept, highest
            sizes.append(size)
            bests.append(highest)
            rises = 0
        if step == steps:
            break
        there = inside(current + size * ascend(current)[1])
        ahead = inside(current + 0.75 * (there - current) + 0.25 * (current - previous))
        previous, current = current, ahead
        new = ascend(current)[0]
        rises, loss = rises + (new > loss), new
        if new > highest:
            highest, kept = new, current
    return kept


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("loss", ["cross_entropy", "margin"])
def test_apgd_equals_a_slow_transcription(norm: Norm, loss: Any) -> None:
    model, images, labels = curved_case(4)
    eps, steps = 2 * RADIUS[norm], 60
    found = APGD(norm=norm, eps=eps, steps=steps, loss=loss, keep="last").run(model, images, labels).images
    starts = NORMS[norm].random(images, eps, Draws.of(0, torch.arange(4)).fold(_STREAM).fold(0).fold(0))
    for row in range(4):
        one, label = slice(row, row + 1), labels[row : row + 1]

        def losses_of(point: Tensor, label: Tensor = label) -> Tensor:
            scores = model(point)
            if loss == "cross_entropy":
                return nn.functional.cross_entropy(scores, label)
            wrong: Tensor = scores.scatter(1, label[:, None], -math.inf).amax() - scores[0, int(label)]
            return wrong

        slow = climb_slowly(losses_of, images[one], starts[one], norm, eps, steps)
        assert torch.allclose(found[one], slow, atol=1e-9)


def test_best_wrong_classes_by_hand() -> None:
    scores = torch.tensor([[3.0, 5.0, 4.0, 1.0], [0.0, -1.0, -2.0, -3.0]])
    labels = torch.tensor([1, 2])
    assert best_wrong_classes(scores, labels, 2).tolist() == [[2, 0], [0, 1]]
    assert best_wrong_classes(scores, labels, 9).tolist() == [[2, 0, 3], [0, 1, 3]]


def test_targets_break_what_moving_away_does_not() -> None:
    """The second best class is near and the best far: only a search that goes there finds it."""

    class Wall(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            x, y = images.flatten(1).unbind(dim=1)
            flat = torch.zeros_like(x)
            return torch.stack([flat + 1, 0.9 + 0.01 * x, 30 * (y - 0.62), flat - 5, flat - 6], dim=1)

    images, labels = torch.full((1, 1, 1, 2), 0.5, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    common: dict[str, Any] = {"norm": "linf", "eps": 0.2, "steps": 20}
    assert not APGD(loss="margin", restarts=1, **common).run(Wall(), images, labels, seed=1).success.any()
    assert APGD(loss="dlr", targets=2, **common).run(Wall(), images, labels, seed=1).success.all()
    assert FAB(targets=2, **common).run(Wall(), images, labels).success.all()


# Where it looks


def saturated_case() -> tuple[Saturated, Tensor, Tensor]:
    labels = torch.arange(10).repeat(2)
    images = some_images(20, 1, 4, 4, spread=0.05, dtype=torch.float32) - 0.2
    images.flatten(1)[torch.arange(20), labels] += 0.4
    return Saturated(scale=1e4), images, labels


@pytest.mark.parametrize("on", ["linear", "members"])
def test_apgd_before_the_saturation(on: str) -> None:
    """Members have no decode() here, so that the view does not know what the model says."""
    model, images, labels = saturated_case()
    assert (model(images).argmax(dim=1) == labels).all()
    common: dict[str, Any] = {"norm": "linf", "eps": 0.22, "steps": 20, "loss": "margin"}
    assert APGD(on="scores", **common).run(model, images, labels).success.float().mean() < 0.1
    assert APGD(on=on, **common).run(model, images, labels).success.float().mean() > 0.9


def test_fab_and_square_before_the_saturation() -> None:
    model, images, labels = saturated_case()
    assert FAB(norm="linf", eps=0.3, steps=20, on="linear").run(model, images, labels).success.all()
    result = Square(norm="linf", eps=0.3, queries=100, on="linear").run(Undecoded(model), images, labels)
    assert result.success.float().mean() > 0.9
    assert (
        result.forwards[result.success] % 2 == 0
    ).all()  # every query asks twice, and there are two verdicts


@pytest.mark.parametrize("on", ["scores", "linear", "tempered", "members"])
def test_views_of_an_ecnn(on: str) -> None:
    torch.manual_seed(0)
    model = ECNN(random_code(4, 6, seed=0), 3, width=4, depth=8, feature_dim=8).eval()
    images = some_images(4, 3, 4, 4, dtype=torch.float32)
    labels = model(images).argmax(dim=1)
    common: dict[str, Any] = {"norm": "linf", "eps": 0.5, "on": on}
    attacks: list[Attack] = [APGD(steps=10, loss="margin", targets=2, **common)]
    if on != "members":
        attacks += [FAB(steps=10, **common), Square(queries=50, **common)]
    for attack in attacks:
        result = attack.run(model, images, labels)
        assert torch.equal(model(result.images).argmax(dim=1) != labels, result.success)
        assert result.success.any()


def test_apgd_on_a_loss_of_your_own() -> None:
    model, images, labels = curved_case()

    def own(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        scores: Tensor = model(images)
        return -scores.gather(1, labels[:, None]).squeeze(1)

    result = APGD(norm="linf", eps=0.1, steps=20, loss="margin", on=own).run(model, images, labels)
    assert torch.equal(model(result.images).argmax(dim=1) != labels, result.success)
    assert result.success.any()


# The suite


@pytest.mark.parametrize("norm", NORMS)
def test_suite_is_the_attacks_in_turn(norm: Norm) -> None:
    """Each attack gets what the ones before it left: one after the other they break the same images."""
    model, images, labels = curved_case()
    labels[2] = (labels[2] + 1) % 5  # wrong before any attack
    suite = AutoAttack(norm=norm, eps=1.6 * RADIUS[norm])
    found = suite.run(model, images, labels, seed=1)
    standing = torch.arange(len(images))
    for member in suite.members(5).values():
        attacked = member.run(model, images[standing], labels[standing], seed=1, index=standing)
        standing = standing[~attacked.success]
    assert (~found.success).nonzero().squeeze(1).tolist() == standing.tolist()
    assert torch.equal(model(found.images).argmax(dim=1), found.predictions)
    assert distance(found.images, images, norm).max() <= 1.6 * RADIUS[norm] + 1e-9
    alone = AutoAttack(norm=norm, eps=1.6 * RADIUS[norm], version="apgd-t")
    (member,) = alone.members(5).values()
    assert torch.equal(
        alone.run(model, images, labels, seed=1).images, member.run(model, images, labels, seed=1).images
    )


def test_standard_suite_has_the_published_settings() -> None:
    members = AutoAttack(norm="linf", eps="8/255").members(10)
    assert list(members) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    first, second, third, last = members.values()
    assert isinstance(first, APGD)
    assert (first.loss, first.steps, first.targets, first.restarts) == ("cross_entropy", 100, 0, 1)
    assert isinstance(second, APGD)
    assert (second.loss, second.steps, second.targets, second.restarts) == ("dlr", 100, 9, 1)
    assert isinstance(third, FAB)
    assert (third.steps, third.targets, third.restarts) == (100, 9, 1)
    assert (third.bias, third.overshoot, third.retreat) == (0.1, 1.05, 0.9)
    assert isinstance(last, Square)
    assert (last.queries, last.loss, last.first_share, last.rescale) == (5000, "margin", 0.8, False)
    in_l1: Any = AutoAttack(norm="l1", eps=12).members(10)
    assert (in_l1["apgd-ce"].restarts, in_l1["apgd-t"].targets, in_l1["fab-t"].targets) == (5, 5, 9)
    for version in ("apgd-ce", "apgd-t", "fab-t", "square"):
        alone = AutoAttack(norm="linf", eps="8/255", version=version).members(10)
        assert alone == {version: members[version]}


@pytest.mark.parametrize("num_classes", [2, 3, 10, 1000])
def test_any_number_of_classes(num_classes: int) -> None:
    """A linear model is broken exactly when its optimum is, and there is no class that a target could not be."""
    model = random_linear(num_classes, 48)
    images = some_images(4, 3, 4, 4)
    labels = model(images).argmax(dim=1)
    assert AutoAttack(norm="linf", eps=0.3).run(model, images, labels).success.all()
    _, doubts = examine(Target(model, len(images), images.device), images)
    assert ("few_classes" in [doubt.kind for doubt in doubts]) == (num_classes < 4)
    for version in ("apgd-t", "fab-t"):
        attack = AutoAttack(norm="l2", eps=2.0, version=version)
        assert attack.run(model, images, labels).success.all()


def test_dlr_says_how_many_classes_it_needs() -> None:
    model, images, labels = linear_case()
    with pytest.raises(InputError, match=r"needs at least 3 classes.*margin"):
        APGD(norm="linf", eps=0.1, steps=2, loss="dlr").run(model, images, labels)


# Warnings


def same(tensor: Tensor) -> Tensor:
    return tensor


def purify(images: Tensor) -> Tensor:
    """A defence that improves its input by gradient steps of its own."""
    with torch.enable_grad():
        moved = images.detach().clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad((moved - 0.5).square().sum(), moved)
    return images - 0.01 * gradient


def purify_by_functions(images: Tensor) -> Tensor:
    """The same by torch.func, whose derivatives refuse to be watched."""
    gradient: Tensor = torch.func.grad(lambda moved: (moved - 0.5).square().sum())(images.detach())
    return images - 0.01 * gradient


def round_pixels(images: Tensor) -> Tensor:
    return (images * 8).round() / 8


FLAWED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    "random": (same, lambda scores: scores + 0.01 * torch.rand_like(scores), "random"),
    "probabilities": (same, lambda scores: scores.softmax(dim=1), "probabilities"),
    "zero_gradient": (round_pixels, same, "exactly zero for 100.0%"),
    "no_gradient": (lambda images: images.detach(), same, "No gradient reaches"),
    "dynamic": (purify, same, "computes gradients while it classifies"),
    "few_classes": (same, lambda scores: scores[:, :3], "needs 4 classes"),
}


@pytest.mark.parametrize("kind", [*FLAWED, "dynamic, by torch.func"])
def test_each_doubt_has_its_model(kind: str) -> None:
    by_functions, kind = "torch.func" in kind, kind.split(",")[0]
    before, after, words = FLAWED[kind]
    before = purify_by_functions if by_functions else before
    model, images = Wrapped(Curved(), before, after), some_images(8, 3, 5, 5)
    _, (doubt,) = examine(Target(model, len(images), images.device), images)
    assert doubt.kind == kind
    assert words in doubt.sentence
    assert doubt.sentence.endswith(".")


def test_the_share_of_zero_gradients() -> None:
    """Only images with a bright first pixel lose their gradient."""
    images = some_images(8, 3, 5, 5)
    images[:, 0, 0, 0] = torch.tensor([0.2, 0.9] * 4, dtype=images.dtype)

    def stop_some(images: Tensor) -> Tensor:
        bright = (images[:, :1, :1, :1] > 0.5).to(images.dtype)
        return bright * images.detach() + (1 - bright) * images

    _, (doubt,) = examine(Target(Wrapped(Curved(), stop_some), 8, images.device), images)
    assert "exactly zero for 50.0%" in doubt.sentence


@pytest.mark.parametrize("model", [Curved(), Curved(10), random_linear(4, 75), Curved(sharpness=1e4)])
def test_an_honest_model_gets_no_warning(model: nn.Module) -> None:
    images = some_images(8, 3, 5, 5)
    num_classes, doubts = examine(Target(model, len(images), images.device), images)
    assert num_classes == model(images).shape[1]
    assert doubts == ()


def test_labels_that_do_not_fit_the_images() -> None:
    model, images, labels = curved_case()
    with pytest.raises(InputError, match="labels must be int64"):
        AutoAttack(norm="linf", eps=0.1).run(model, images, labels[:-1])


# Race ----------------------------------------------------------------------------------------------------------------


def test_a_race_finds_what_the_whole_of_apgd_finds_for_less() -> None:
    """Against nine targets of 100 steps each, on a curved model: the same images, for a third of the passes or less."""
    model = Curved(num_classes=10).float()
    images = some_images(40, 3, 5, 5, dtype=torch.float32)
    labels = model(images).argmax(dim=1)
    race = Race(norm="linf", eps=0.012)
    whole = APGD(norm="linf", eps=0.012, steps=100, loss="dlr", targets=9).run(model, images, labels)
    found = race.run(model, images, labels)
    assert 8 < int(whole.success.sum()) < 33
    assert int((whole.success & ~found.success).sum()) <= 1
    assert int(found.forwards.sum()) * 3 < int(whole.forwards.sum())
    assert (found.forwards <= race.cost(10).forwards).all()


def test_effort_in_a_race_goes_where_the_border_is_near() -> None:
    """A linear model: images far from any border never get the last round, those just within reach are broken."""
    model = Linear(torch.eye(5) * 2 - 1)
    images = torch.full((3, 1, 1, 5), 0.2)
    images[:, 0, 0, 0] = torch.tensor([0.9, 0.45, 0.39])
    labels = torch.zeros(3, dtype=torch.int64)
    found = Race(norm="linf", eps=0.1).run(model, images, labels)
    assert found.success.tolist() == [False, False, True]
    far, near, broken = found.forwards.tolist()
    assert broken < 30 < far
    assert near - far == 3 * 101  # three wrong classes with 100 steps


@dataclass(frozen=True)
class Enlarged(ScoreView):
    """Scores a thousand times as large as the model's, as logits are before a decoder that saturates."""

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        scores: Tensor = model(images)
        return 1000 * scores, scores.detach()


def test_hope_is_measured_where_the_race_looks() -> None:
    """Which images get the last round depends on the share of the margin that is left, not on the scale of the view."""
    model = Linear(torch.eye(5) * 2 - 1)
    images = torch.full((2, 1, 1, 5), 0.2)
    images[:, 0, 0, 0] = torch.tensor([0.9, 0.45])
    labels = torch.zeros(2, dtype=torch.int64)
    counts = [
        Race(norm="linf", eps=0.1, on=on).run(model, images, labels).forwards
        for on in ("scores", Enlarged(name="enlarged"))
    ]
    assert torch.equal(*counts)
    assert counts[0][1] - counts[0][0] == 3 * 101


def test_a_race_in_a_ball_without_room_holds_the_image_alone() -> None:
    model, images, labels = curved_case()
    assert torch.equal(Race(norm="linf", eps=0)(model, images, labels), images)


def test_more_effort_in_a_race_means_more_steps() -> None:
    once, twice = (Race(norm="linf", eps=0.1, effort=effort).cost(10) for effort in (1, 2))
    assert twice.backwards == 2 * once.backwards
    assert Race(norm="linf", eps=0.1).cost(2).backwards == 20 + 10 + 30 + 100
