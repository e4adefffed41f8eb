"""JSMA: a slow transcription of the published algorithm, all pairs by brute force, closed forms on linear models."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Constant, Linear, TanhNet, Undecoded, tiny_ecnn

from ecnn.attacks.jsma import JSMA, best_one, best_pair, worth_pairing
from ecnn.attacks.randomness import Draws

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (1, 2, 8)
FEATURES, CLASSES = math.prod(SHAPE), 4


class Net(TanhNet):
    """Also differentiated by hand."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, pixels=FEATURES, hidden=10, spread=0.5)

    def scores_and_jacobian(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(class,) and (class, feature), in NumPy."""
        first, last = self.first.detach().numpy(), self.last.detach().numpy()
        hidden = np.tanh(first @ (features - 0.5))
        return last @ hidden, last @ ((1 - hidden**2)[:, None] * first)


def some_images(seed: int, batch: int = 4, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Images of which some pixels are exactly 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(batch, *shape, generator=generator, dtype=torch.float64)
    return (1.4 * images - 0.2).clamp(0, 1)


def transcribe(
    net: Net, features: np.ndarray, goal: int, moves: int, theta: float, together: int
) -> list[np.ndarray]:
    """Papernot et al.'s algorithms 2 and 3 word by word: every iterate, with loops over all pairs (or features)."""
    features = features.copy()
    bound = 1.0 if theta > 0 else 0.0
    domain = [place for place in range(len(features)) if features[place] != bound]
    path = [features.copy()]
    for _ in range(moves):
        scores, jacobian = net.scores_and_jacobian(features)
        if int(scores.argmax()) == goal:
            break
        highest, chosen = 0.0, None
        for places in itertools.combinations(domain, together):
            alpha = sum(jacobian[goal, place] for place in places)
            beta = sum(
                jacobian[other, place] for place in places for other in range(CLASSES) if other != goal
            )
            salient = (alpha > 0 and beta < 0) if theta > 0 else (alpha < 0 and beta > 0)
            if salient and -alpha * beta > highest:
                highest, chosen = -alpha * beta, places
        if chosen is None:
            break
        for place in chosen:
            features[place] = min(1.0, max(0.0, features[place] + theta))
            if features[place] == bound:
                domain.remove(place)
        path.append(features.copy())
    return path


@pytest.mark.parametrize("theta", [1.0, 0.3, -1.0, -0.45])
@pytest.mark.parametrize(("pixels", "together"), [("pair", 2), ("one", 1)])
def test_every_iterate_is_the_published_one(pixels: Any, together: int, theta: float) -> None:
    lengths = []
    for seed in range(4):
        net, images = Net(seed), some_images(seed, batch=3)
        with torch.no_grad():
            scores = net(images)
        labels, goals = scores.argmax(1), scores.argmin(1)
        most = FEATURES // together
        paths = [
            transcribe(net, image.flatten().numpy(), int(goal), most, theta, together)
            for image, goal in zip(images, goals, strict=True)
        ]
        lengths += [len(path) for path in paths]
        for moves in range(min(most, max(map(len, paths))) + 1):
            attack = JSMA(
                max_pixel_fraction=moves * together / FEATURES,
                pixels=pixels,
                goal="least",
                theta=theta,
                keep="last",
            )
            crafted = attack(net, images, labels).flatten(1).numpy()
            for row, path in zip(crafted, paths, strict=True):
                assert np.allclose(row, path[min(moves, len(path) - 1)], rtol=0, atol=1e-12)
    assert max(lengths) >= 4  # three moves and more


def brute_force(toward: np.ndarray, away: np.ndarray) -> tuple[tuple[int, int] | None, float]:
    highest, chosen = 0.0, None
    for p, q in itertools.combinations(range(len(toward)), 2):
        up, down = toward[p] + toward[q], away[p] + away[q]
        if up > 0 and down > 0 and up * down > highest:
            highest, chosen = up * down, (p, q)
    return chosen, highest


@st.composite
def slopes(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Few distinct numbers, so that there are many equals; or many; or every gain one way a cost the other way."""
    batch, features = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    seed, kind = draw(st.integers(0, 2**31)), draw(st.sampled_from(["whole", "real", "trade", "zero"]))
    generator = torch.Generator().manual_seed(seed)
    toward, away = torch.randn(2, batch, features, generator=generator, dtype=torch.float64)
    if kind == "whole":
        toward, away = (2 * toward).round(), (2 * away).round()
    elif kind == "trade":
        away = 1.5 - toward
    elif kind == "zero":
        silent = torch.rand(batch, features, generator=generator) < 0.8
        toward, away = toward.masked_fill(silent, 0.0), away.masked_fill(silent, 0.0)
    out = torch.rand(batch, features, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    return toward.masked_fill(out, -math.inf), away.masked_fill(out, -math.inf)


@given(slopes=slopes(), max_pairs=st.sampled_from([1, 7, 50, 2**20]))
def test_the_best_pair_is_the_best_of_all_pairs(slopes: tuple[Tensor, Tensor], max_pairs: int) -> None:
    toward, away = slopes
    pairs, saliency = best_pair(toward, away, max_pairs)
    for row in range(len(toward)):
        chosen, highest = brute_force(toward[row].numpy(), away[row].numpy())
        assert float(saliency[row]) == highest
        if chosen is not None:
            assert tuple(pairs[row].tolist()) == chosen


@pytest.mark.parametrize("max_pairs", [1, 7, 2**20])
def test_the_first_of_equal_pairs_is_taken(max_pairs: int) -> None:
    """Features 0 and 3, and 1 and 2, are as good: both sums are 3 each way."""
    toward = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    pairs, saliency = best_pair(toward, 3 - toward, max_pairs)
    assert pairs.tolist() == [[0, 3]]
    assert saliency.tolist() == [9.0]


@given(slopes=slopes())
def test_a_feature_is_not_worth_pairing_if_two_are_as_good(slopes: tuple[Tensor, Tensor]) -> None:
    toward, away = slopes
    worth = worth_pairing(toward, away)
    for row, place in itertools.product(range(toward.shape[0]), range(toward.shape[1])):
        here = (float(toward[row, place]), float(away[row, place]))
        as_good = 0
        for other in range(toward.shape[1]):
            there = (float(toward[row, other]), float(away[row, other]))
            if other != place and there[0] >= here[0] and there[1] >= here[1]:
                as_good += there != here or other < place
        assert bool(worth[row, place]) == (as_good < 2 and here[0] > -math.inf)


def test_the_best_single_feature() -> None:
    toward = torch.tensor([[1.0, 2.0, 3.0, -4.0, 2.0], [-1.0, 1.0, 0.0, 0.0, -math.inf]])
    away = torch.tensor([[1.0, 3.0, 2.0, -9.0, 3.0], [5.0, -1.0, 3.0, 0.0, -math.inf]])
    chosen, saliency = best_one(toward, away)
    assert chosen[0].tolist() == [1]  # the first of three with saliency 6
    assert saliency.tolist() == [6.0, 0.0]


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches how many numbers the largest tensor that is made has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            if isinstance(value, Tensor):
                self.numbers = max(self.numbers, value.numel())
        return made


def test_memory_is_bounded_when_no_feature_can_be_left_out() -> None:
    """On a line where every gain costs, all 3,072 features are worth pairing, and still no big tensor is made."""
    max_pairs = 2**19
    toward = Draws.of(0, torch.arange(1)).uniform(3072, dtype=torch.float64)
    away = 1 - toward
    assert worth_pairing(toward, away).all()
    with _Largest() as largest:
        pairs, saliency = best_pair(toward, away, max_pairs)
    assert largest.numbers <= max_pairs
    # On that line the product is s (2 - s) for a sum s, so the best pair is the one whose sum is nearest to 1.
    values = toward[0].sort().values
    partner = torch.searchsorted(values, 1 - values).clamp(1, len(values) - 1)
    gaps = [
        abs(float(values[i] + values[j]) - 1)
        for i in range(len(values))
        for j in (int(partner[i]) - 1, int(partner[i]))
        if i != j
    ]
    total = float(toward[0, pairs[0]].sum())
    assert abs(total - 1) == pytest.approx(min(gaps), abs=1e-15)
    assert float(saliency[0]) == pytest.approx(total * (2 - total), abs=1e-12)


def test_chunks_change_nothing_and_bound_memory_on_colour_images() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3072, generator=generator, dtype=torch.float64)
    weight -= weight.mean(dim=0) - 0.3 * torch.rand(3072, generator=generator, dtype=torch.float64)
    model, images = Linear(weight / 50), some_images(1, batch=8, shape=(3, 32, 32))
    labels = model(images).argmax(1)
    found = []
    for max_pairs in (1, 7, 2**20, 2**40):
        attack = JSMA(max_pixel_fraction=0.004, goal="least", keep="last", max_pairs=max_pairs)
        with _Largest() as largest:
            found.append(attack(model, images, labels))
        assert largest.numbers <= max(min(max_pairs, 2**20), images.numel())
    for other in found[1:]:
        assert torch.equal(found[0], other)
    assert (found[0] != images).flatten(1).sum(1).min() == 12


@pytest.mark.parametrize("theta", [1.0, -1.0])
def test_linear_model_is_fooled_with_the_fewest_features(theta: float) -> None:
    """Two opposite scores, all features alike: the fewest moves are those of the largest slopes, in that order."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        slope = torch.randn(40, generator=generator, dtype=torch.float64)
        image = torch.full((1, 1, 5, 8), 0.3, dtype=torch.float64)
        reach = 0.7 if theta > 0 else 0.3
        gains = (math.copysign(1, theta) * slope * reach).clamp(min=0).sort(descending=True)
        lead = 0.6 * float(gains.values.sum())
        weight = torch.stack([-slope / 2, slope / 2])
        level = float(0.3 * slope.sum())
        model = Linear(weight, torch.tensor([(lead + level) / 2, -(lead + level) / 2], dtype=torch.float64))
        labels = torch.tensor([0])
        needed = int((gains.values.cumsum(0) <= lead).sum()) + 1
        settings: tuple[tuple[Any, int], ...] = (("one", needed), ("pair", needed + needed % 2))
        for pixels, moved in settings:
            attack = JSMA(max_pixel_fraction=1.0, pixels=pixels, theta=theta)
            attacked = attack.run(model, image, labels)
            assert attacked.success.all()
            changed = set(torch.nonzero((attacked.images != image).flatten()).flatten().tolist())
            assert changed == set(gains.indices[:moved].tolist())
            bound = 1.0 if theta > 0 else 0.0
            assert (attacked.images.flatten()[list(changed)] == bound).all()
            assert attacked.forwards.tolist() == [3 + attacked.backwards[0] // 2]
            fewer = JSMA(max_pixel_fraction=(needed - 1) / 40, pixels=pixels, theta=theta)
            assert torch.equal(fewer(model, image, labels), image)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.29, 0.5, 1.0])
@pytest.mark.parametrize("pixels", ["pair", "one"])
@pytest.mark.parametrize("theta", [1.0, 0.2])
def test_no_more_features_than_allowed(fraction: float, pixels: Any, theta: float) -> None:
    net, images = Net(7), some_images(7, batch=6)
    labels = net(images).argmax(1)
    for keep in ("best", "last"):
        crafted = JSMA(max_pixel_fraction=fraction, pixels=pixels, theta=theta, keep=keep)(
            net, images, labels
        )
        moved = (crafted != images).flatten(1).sum(1)
        assert (moved <= fraction * FEATURES + 1e-9).all()
        assert ((crafted - images) * math.copysign(1, theta) >= 0).all()


def test_a_fraction_is_what_was_written() -> None:
    """0.29 * 100 is 28.999999999999996 in binary."""
    image, labels = torch.zeros(1, 1, 10, 10, dtype=torch.float64), torch.tensor([0])
    slope = torch.linspace(1, 2, 100, dtype=torch.float64)
    model = Linear(torch.stack([-slope, slope]), torch.tensor([1e3, -1e3], dtype=torch.float64))
    settings: tuple[tuple[Any, int], ...] = (("one", 29), ("pair", 28))
    for pixels, moved in settings:
        attack = JSMA(max_pixel_fraction=0.29, pixels=pixels, keep="last")
        assert int((attack(model, image, labels) != image).sum()) == moved


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_original_stops_at_the_goal_and_early_exit_at_any_wrong_class(comes_back: bool) -> None:
    """The way to class 2 passes class 1 after its first move; the second ends at 2, or back at the label 0."""
    second = [2.0, -6.0, 0.5] if comes_back else [0.0, -1.0, 3.0]
    weight = torch.tensor([[-3.0, 1.0, 2.0], second, [0.0, -0.1, 0.1], [0.0, 0.0, 0.0]]).double().T
    model = Linear(weight.contiguous(), torch.tensor([1.0, 0.5, -3.0], dtype=torch.float64))
    images, labels = torch.zeros(1, 1, 2, 2, dtype=torch.float64), torch.tensor([0])

    def run(**options: Any) -> tuple[list[float], int, bool]:
        settings: dict[str, Any] = {"max_pixel_fraction": 0.5, "pixels": "one", "goal": "least", **options}
        attacked = JSMA(**settings).run(model, images, labels)
        return attacked.images.flatten().tolist(), int(attacked.predictions), bool(attacked.success)

    one, two = [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]
    assert run(early_exit=True) == (one, 1, True)
    assert run(early_exit=False) == ((one, 1, True) if comes_back else (two, 2, True))
    assert run(keep="last") == ((two, 0, False) if comes_back else (two, 2, True))


def test_random_goals_are_wrong_classes_all_alike() -> None:
    labels = torch.arange(6000) % 5
    goals = JSMA(max_pixel_fraction=0.5)._goals(torch.zeros(6000, 5), labels, Draws.of(3, torch.arange(6000)))
    assert goals.shape == (6000, 1)
    assert (goals[:, 0] != labels).all()
    for label in range(5):
        counts = torch.bincount(goals[labels == label, 0], minlength=5)
        assert counts[label] == 0
        # 1,200 draws of 4 classes: 300 each, standard deviation 15.
        assert (counts[torch.arange(5) != label] - 300).abs().max() < 75


def test_goals_by_rank() -> None:
    scores = torch.tensor([[5.0, 1.0, 4.0, 3.0], [0.0, 9.0, 1.0, 2.0]])
    labels, draws = torch.tensor([0, 3]), Draws.of(0, torch.arange(2))
    settings: tuple[tuple[Any, Any], ...] = (
        ("next", [[2], [1]]),
        ("least", [[1], [0]]),
        ("each", [[2, 3, 1], [1, 2, 0]]),
    )
    for goal, expected in settings:
        attack = JSMA(max_pixel_fraction=0.5, goal=goal)
        assert attack._goals(scores, labels, draws).tolist() == expected


def test_each_goal_keeps_the_fewest_features_and_early_exit_the_first() -> None:
    net, images = Net(3), some_images(3, batch=12)
    labels = net(images).argmax(1)
    settings: dict[str, Any] = {"max_pixel_fraction": 1.0, "pixels": "one"}
    ranked = net(images).detach().scatter(1, labels[:, None], -math.inf).argsort(1, descending=True)
    every = JSMA(**settings, goal="each", early_exit=False).run(net, images, labels)
    first = JSMA(**settings, goal="each", early_exit=True).run(net, images, labels)
    for row, image in enumerate(images):
        moved = []  # by each goal: features at the first and at the last wrong iterate
        for goal in ranked[row, :-1].tolist():
            path = transcribe(net, image.flatten().numpy(), goal, FEATURES, 1.0, 1)
            classes = [int(net.scores_and_jacobian(step)[0].argmax()) for step in path]
            wrong = [moves for moves, found in enumerate(classes) if found != classes[0]]
            moved += [(wrong[0], wrong[-1])] if wrong else []
        assert bool(every.success[row]) == bool(first.success[row]) == bool(moved)
        if moved:
            assert int((every.images[row] != image).sum()) == min(last for _, last in moved)
            assert int((first.images[row] != image).sum()) == moved[0][0]
    assert (first.forwards < every.forwards).any()


def test_costs_by_hand() -> None:
    """Verdict, ranking, one pass with two gradients per look, the look after the last move, verdict."""
    slope = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    images, labels = torch.zeros(2, 1, 2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    images[1, 0, 0, 0] = 1  # the largest slope is spent: 3, 2 and 1 are left
    model = Linear(
        torch.stack([-slope / 2, slope / 2]), torch.tensor([4.25, -4.25], dtype=torch.float64)
    )  # wrong as soon as the slopes that are on exceed 8.5
    attacked = JSMA(max_pixel_fraction=1.0, pixels="one").run(model, images, labels)
    assert attacked.success.tolist() == [True, True]
    # Row 0 moves 4, 3, 2 and is wrong at its fourth look; row 1 moves 3, 2 and is wrong at its third.
    assert attacked.backwards.tolist() == [8, 6]
    assert attacked.forwards.tolist() == [1 + 1 + 4 + 1, 1 + 1 + 3 + 1]
    short = JSMA(max_pixel_fraction=0.5, pixels="one").run(model, images, labels)
    assert short.success.tolist() == [False, True]
    assert short.backwards.tolist() == [4, 4]
    assert short.forwards.tolist() == [1 + 1 + 3 + 1] * 2


def ecnn_images(dtype: torch.dtype, batch: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch, 3, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(4, (batch,), generator=generator)


def test_early_exit_finds_what_the_whole_walk_passes() -> None:
    """Without it the walk goes on to the goal; who is broken is the same, and never with fewer features."""
    model, images = Net(6), some_images(6, batch=30)
    labels = model(images).argmax(1)
    early = JSMA(max_pixel_fraction=1.0, early_exit=True).run(model, images, labels)
    whole = JSMA(max_pixel_fraction=1.0, early_exit=False).run(model, images, labels)
    assert torch.equal(early.success, whole.success)
    assert early.success.any()
    moved = [(run.images != images).flatten(1).sum(1) for run in (early, whole)]
    assert (moved[0] <= moved[1]).all()


def test_a_model_without_slopes_is_left_alone() -> None:
    images, labels = torch.rand(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64)
    settings: tuple[Any, ...] = ("pair", "one")
    for pixels in settings:
        attacked = JSMA(max_pixel_fraction=1.0, pixels=pixels, keep="last").run(Constant(), images, labels)
        assert torch.equal(attacked.images, images)


class Rooted(Linear):
    """The slope of the first two features is no number where they are 0: infinity times zero."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + 0 * images.flatten(1)[:, :2].sqrt().sum(dim=1, keepdim=True)


@pytest.mark.parametrize("pixels", ["pair", "one"])
def test_a_slope_that_is_no_number_moves_nothing(pixels: Any) -> None:
    slope = torch.tensor([9.0, 8.0, 3.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    model = Rooted(torch.stack([-slope, slope]), torch.tensor([50.0, -50.0], dtype=torch.float64))
    images, labels = torch.zeros(1, 1, 2, 3, dtype=torch.float64), torch.tensor([0])
    crafted = JSMA(max_pixel_fraction=0.34, pixels=pixels, keep="last")(model, images, labels)
    assert crafted.flatten().tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_a_model_that_cannot_decode_is_asked_again() -> None:
    model = tiny_ecnn()
    images, labels = ecnn_images(torch.float32)
    settings: dict[str, Any] = {"max_pixel_fraction": 0.2, "on": "linear", "keep": "last"}
    known = JSMA(**settings).run(model, images, labels)
    asked = JSMA(**settings).run(Undecoded(model), images, labels)
    assert torch.equal(known.images, asked.images)
    assert torch.equal(known.backwards, asked.backwards)
    assert torch.equal(asked.forwards - known.forwards, known.backwards // 2)
