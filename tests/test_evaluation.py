"""Evaluation: exact outcomes of a model that is a table, intervals by hand, and records that survive a kill."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import run as run_program
from scipy.stats import binomtest
from sklearn.metrics import brier_score_loss, log_loss
from torch import Tensor, nn
from toys import Saturated, Wrapped, half_spaces, images_of_classes

from ecnn import files
from ecnn.attacks import FGSM, FMN, PGD, Attack, AutoAttack, RandomNoise
from ecnn.attacks.base import Target
from ecnn.attacks.randomness import Draws
from ecnn.codes import CodeMatrix
from ecnn.constructions import random_code
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import (
    TRANSFER_PGD,
    Evaluation,
    Outcomes,
    calibration,
    compare,
    evaluate,
    load_evaluation,
    load_images,
    member_flips,
    member_transfer,
    model_transfer,
    wilson_interval,
)
from ecnn.evaluation.intervals import compare_counts, mcnemar_p_value
from ecnn.evaluation.outcomes import COLUMNS, join
from ecnn.evaluation.provenance import ask_probes, describe, describe_model, hash_images, same_answers
from ecnn.model import ECNN
from ecnn.progress import Milestone

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIDENT = math.log(9)  # a lead of this much means a probability of 0.9 among two classes


class Table(nn.Module):
    """A model that is a table: pixel 0 says which image it is, pixel 1 which state it is in; nothing else counts."""

    scores: Tensor

    def __init__(self, predictions: list[list[int]], num_classes: int = 2, lead: float = CONFIDENT) -> None:
        super().__init__()
        table = lead * nn.functional.one_hot(torch.tensor(predictions), num_classes)
        self.register_buffer("scores", table.float())

    def forward(self, images: Tensor) -> Tensor:
        state, image = ((images[:, 0, 0, place] * 255).round().long() for place in (1, 0))
        return self.scores[state, image]


@dataclass(frozen=True, kw_only=True)
class Switch(Attack):
    """Puts every image into the state that eps says, in units of 1/255."""

    norm: str = "linf"
    eps: float | str

    def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        points = images.clone()
        points[:, 0, 0, 1] = torch.tensor(eval_fraction(self.eps))
        target.count(2, 1)
        calls.append(len(images))
        return points


calls: list[int] = []


def eval_fraction(eps: float | str) -> float:
    top, _, bottom = str(eps).partition("/")
    return float(top) / float(bottom or 1)


def switch(state: int, **options: Any) -> Switch:
    return Switch(eps=f"{state}/255", **options)


def numbered(labels: list[int]) -> Split:
    images = torch.zeros(len(labels), 1, 1, 3, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(len(labels))
    return Split(images, torch.tensor(labels))


def make_outcomes(robust: list[bool], name: str = "made", **columns: Any) -> Outcomes:
    n = len(robust)
    zeros = np.zeros(n)
    every = dict.fromkeys(COLUMNS, zeros) | {
        "index": np.arange(n),
        "image_hash": np.arange(n, dtype=np.uint64),
        "prediction": np.where(robust, 0, 1),
    }
    return Outcomes(name=name, **{**every, **columns})


def arrays_of(outcomes: Outcomes) -> dict[str, np.ndarray]:
    return {column: getattr(outcomes, column) for column in COLUMNS}


def assert_same(one: Outcomes, other: Outcomes) -> None:
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(one, column), getattr(other, column), err_msg=column)


# State 0 is clean; each row is a state, each column an image. The true classes are all 0.
STATES = [[0, 0, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 1, 0]]


def test_last_iterates_can_beat_clean_accuracy_and_robust_cannot() -> None:
    """Images 4 and 5 are wrong when clean and right after: the paper's protocol counts them, robust does not."""
    found = evaluate(
        Table(STATES), numbered([0] * 6), {"a": switch(1, keep="last")}, limit=None, batch_size=4
    )
    outcomes = found.outcomes["a"]
    assert outcomes.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert outcomes.clean_prediction.tolist() == STATES[0]
    assert outcomes.prediction.tolist() == STATES[1]
    assert outcomes.correct_after.tolist() == [True, False, False, True, True, True]
    assert outcomes.robust.tolist() == [True, False, False, True, False, False]
    assert outcomes.l0.tolist() == [1] * 6
    np.testing.assert_allclose(outcomes.linf, 1 / 255, rtol=1e-6)
    np.testing.assert_allclose(outcomes.l2, 1 / 255, rtol=1e-6)
    assert outcomes.forwards.tolist() == [4] * 6  # two verdicts and what the attack booked
    assert outcomes.backwards.tolist() == [1] * 6
    assert found.clean_accuracy == pytest.approx(4 / 6)
    assert found.accuracy["a"] == pytest.approx(2 / 6)
    assert found.accuracy_after["a"] == pytest.approx(4 / 6)
    assert found.interval["a"] == wilson_interval(2, 6)
    assert found.interval["clean"] == wilson_interval(4, 6)
    higher = evaluate(Table(STATES), numbered([0] * 6), {"a": switch(2, keep="last")}, limit=5)
    assert higher.accuracy_after["a"] == pytest.approx(3 / 5)
    assert higher.accuracy["a"] == pytest.approx(3 / 5)


def test_best_leaves_alone_what_it_cannot_break() -> None:
    found = evaluate(Table(STATES), numbered([0] * 6), {"a": switch(1)}, limit=None).outcomes["a"]
    assert found.robust.tolist() == [True, False, False, True, False, False]
    assert found.correct_after.tolist() == found.robust.tolist()
    assert found.l0.tolist() == [0, 1, 1, 0, 0, 0]
    assert found.forwards.tolist() == [4, 4, 4, 4, 2, 2]  # images that were never right cost two verdicts
    assert found.broken.tolist() == [False, True, True, False, False, False]


def test_worst_case_of_attacks_that_break_disjoint_images() -> None:
    found = evaluate(Table(STATES), numbered([0] * 6), {"one": switch(1), "two": switch(2)}, limit=None)
    assert found.accuracy == {"one": pytest.approx(2 / 6), "two": pytest.approx(3 / 6)}
    assert found.survivors().tolist() == [False, False, False, True, False, False]
    assert found.worst_case.accuracy == pytest.approx(1 / 6)
    assert found.worst_case.interval == wilson_interval(1, 6)
    assert found.worst_over(["two"]).accuracy == found.accuracy["two"]
    with pytest.raises(InputError, match="no attack is called 'three'; known: one, two"):
        found.worst_over(["three"])
    assert evaluate(Table(STATES), numbered([0] * 6), {}, limit=None).worst_case.accuracy == pytest.approx(
        4 / 6
    )


def test_curve_falls_only_when_it_is_cumulative() -> None:
    """At 2/255 the attack leaves images alone that it broke at 1/255; what broke them is still in the ball."""
    found = evaluate(
        Table(STATES), numbered([0] * 6), {"a": switch(1)}, limit=None, eps=["2/255", "0", 1 / 255]
    )
    assert list(found.outcomes) == ["a@2/255", "a@0", "a@0.00392157"]
    curve = found.curve("a")
    assert curve.eps == (0.0, 0.0, 1 / 255, 2 / 255)
    assert [rate.successes for rate in curve.robust] == [4, 4, 2, 3]
    assert [rate.successes for rate in curve.cumulative] == [4, 4, 2, 1]
    with pytest.raises(InputError, match=r"no attack called 'b' was run at a radius; known: a\."):
        found.curve("b")


def test_curve_by_distance() -> None:
    found = evaluate(Table(STATES), numbered([0] * 6), {"a": switch(2)}, limit=None)
    curve = found.curve_by_distance("a", norm="linf", eps=["1/255", "2/255", "3/255"])
    assert [rate.successes for rate in curve.cumulative] == [4, 4, 3, 3]
    assert found.curve_by_distance("a", norm="l0", eps=[1]).cumulative[-1].successes == 3
    assert [rate.successes for rate in found.curve("a").robust] == [4, 3]  # one radius is a curve too


def test_the_border_of_a_ball_belongs_to_it() -> None:
    """A pixel moved by eps in float32 is a little more or less than eps away; all of these lie on the border."""
    pixels = np.arange(240, dtype=np.float32) / np.float32(255)
    moved = pixels + np.float32(8 / 255)
    distances = moved.astype(np.float64) - pixels
    assert (distances > 8 / 255).any()
    clean, broken = make_outcomes([True] * 240), make_outcomes([False] * 240, linf=distances)
    curve = Evaluation(clean, {"a": broken}).curve_by_distance("a", norm="linf", eps=[0.0313, "8/255"])
    assert [rate.successes for rate in curve.cumulative] == [240, 240, 0]


def test_attacks_without_a_radius_are_not_repeated() -> None:
    found = evaluate(
        Table(STATES),
        numbered([0] * 6),
        {"a": switch(1), "alone": leave_alone},
        limit=None,
        eps=["1/255", "2/255"],
    )
    assert list(found.outcomes) == ["a@1/255", "a@2/255", "alone"]


def leave_alone(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return images


def test_first_images_and_limits() -> None:
    split = numbered([0] * 6)
    assert evaluate(Table(STATES), split, {"a": switch(1)}, limit=4).outcomes["a"].index.tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert len(evaluate(Table(STATES), split, {"a": switch(1)}, limit=100)) == 6
    for limit in (0, -1, 2.5):
        with pytest.raises(InputError, match="limit"):
            evaluate(Table(STATES), split, {}, limit=limit)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"Split such as data\.test"):
        evaluate(Table(STATES), split.images, {}, limit=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batch_size"):
        evaluate(Table(STATES), split, {}, limit=None, batch_size=0)
    with pytest.raises(InputError, match="torch module"):
        evaluate(leave_alone, split, {}, limit=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="eps must be None or a list"):
        evaluate(Table(STATES), split, {}, limit=None, eps="8/255")


def test_classes_of_model_and_data() -> None:
    split = numbered([0, 1, 2])
    three = evaluate(Table([[0, 1, 0]], num_classes=1000), split, {}, limit=None)
    assert three.clean.rate().successes == 2
    with pytest.raises(InputError, match="a label is 2, but the model has scores for 2 classes"):
        evaluate(Table([[0, 1, 0]]), split, {}, limit=None)
    assert evaluate(Table([[0, 1, 0]]), split, {}, limit=2).clean_accuracy == 1
    with pytest.raises(InputError, match="at least 2 classes"):
        evaluate(Table([[0, 0, 0]], num_classes=1), split, {}, limit=None)


def strange(answer: Callable[[Tensor], Any]) -> Wrapped:
    """A model that returns what it was given."""
    return Wrapped(nn.Identity(), answer)


def test_scores_that_are_not_numbers_are_confidently_wrong() -> None:
    inf = math.inf
    rows = torch.tensor(
        [[math.nan, inf], [0, math.nan], [inf, inf], [-inf, -inf], [0, -inf], [inf, 0], [0, inf], [9, 0]]
    )
    model = strange(lambda images: rows[(images[:, 0, 0, 0] * 255).round().long()])
    found = evaluate(model, numbered([0] * 8), {}, limit=None)
    assert found.clean.prediction.tolist() == [-1, -1, -1, -1, 0, 0, 1, 0]
    assert found.clean.nll.tolist()[:7] == [inf] * 4 + [0.0, 0.0, inf]
    assert found.clean.brier.tolist()[:7] == [2.0] * 4 + [0.0, 0.0, 2.0]
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["clean"]["calibration"]["nll"] == "inf"


def test_scores_that_ask_for_a_gradient_are_scores() -> None:
    rows = torch.eye(2)
    model = strange(
        lambda images: rows[(images[:, 0, 0, 0] * 255).round().long()].detach().requires_grad_(True)
    )
    assert evaluate(model, numbered([0, 1]), {}, limit=None).clean.prediction.tolist() == [0, 1]


@pytest.mark.parametrize(
    "answer", [lambda images: images, lambda images: images[:, 0, 0, 0], lambda images: "scores"]
)
def test_models_that_return_no_scores(answer: Callable[[Tensor], Any]) -> None:
    with pytest.raises(InputError, match="the model must return scores"):
        evaluate(strange(answer), numbered([0, 0]), {}, limit=None)


def test_one_output_for_two_classes_is_told_how_to_become_two() -> None:
    for answer in (
        lambda images: images.flatten(1).mean(1),
        lambda images: images.flatten(1).mean(1, keepdim=True),
    ):
        with pytest.raises(InputError, match=r"torch\.stack\(\[-z, z\], dim=1\)"):
            evaluate(strange(answer), numbered([0, 0]), {}, limit=None)


@pytest.mark.parametrize(
    ("pack", "came", "advice"),
    [
        (lambda scores: (scores.sum(), scores), "tuple", r"model(images)[1]"),
        (lambda scores: {"features": scores[0], "logits": scores}, "dict", r"model(images)['logits']"),
        (lambda scores: torch.return_types.max((scores, scores)), "max", "model(images)[0]"),
        (lambda scores: Bunch(features=None, scores=scores), "Bunch", "model(images).scores"),
        (lambda scores: scores[:, :, None, None], "shape (1, 2, 1, 1)", "model(images).flatten(1)"),
        (lambda scores: scores.to_sparse(), "shape (1, 2) in a sparse layout", "model(images).to_dense()"),
        (lambda scores: torch.complex(scores, scores), "shape (1, 2) of complex numbers", ""),
        (lambda scores: None, "NoneType", ""),
    ],
)
def test_a_model_that_packs_its_scores_is_told_how_to_unpack_them(
    pack: Callable[[Tensor], Any], came: str, advice: str
) -> None:
    wrap = f": wrap it in a module that returns {advice}." if advice else "."
    with pytest.raises(InputError, match=re.escape(f"gave {came}{wrap}")):
        evaluate(strange(lambda images: pack(images.flatten(1)[:, :2])), numbered([0, 0]), {}, limit=None)


@dataclass
class Bunch:
    """Scores with something beside them."""

    features: Tensor | None
    scores: Tensor


@pytest.mark.parametrize(
    ("attack", "complaint"),
    [
        (lambda model, images, labels: images + 1, r"'bad' left \[0, 1\]: its pixels reach from 1 to 1.0"),
        (lambda model, images, labels: images - 1e-7, r"'bad' left \[0, 1\]"),
        (lambda model, images, labels: images * math.nan, r"'bad' left \[0, 1\]"),
        (lambda model, images, labels: images[:, :, :, :2], r"'bad' must return floating images of shape"),
        (lambda model, images, labels: images[:-1], r"'bad' must return floating images of shape"),
        (lambda model, images, labels: (images * 255).byte(), r"but returned torch.uint8"),
        (lambda model, images, labels: None, r"'bad' must return .* but returned NoneType"),
        (lambda model, images, labels: (images, labels), r"but returned tuple"),
        ("pgd", "'bad' cannot be called"),
        (PGD, "'bad' is the class PGD: make one with its settings"),
    ],
)
def test_attacks_that_cheat_are_named(attack: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        evaluate(Table(STATES), numbered([0] * 6), {"bad": attack}, limit=None)


def test_an_attack_that_leaves_its_own_ball_is_named() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Liar(Switch):
        def search(self, target: Target, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
            return images + 0.01

    for norm in ("linf", "l2"):
        with pytest.raises(InputError, match=f"'liar' left its {norm} ball of radius 0.00392157"):
            evaluate(
                strange(lambda images: images.flatten(1)),
                numbered([0] * 6),
                {"liar": Liar(eps="1/255", norm=norm, keep="last")},
                limit=None,
            )


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["../x"], "must be letters"),
        ([""], "must be letters"),
        (["a\nb"], "must be letters"),
        (["clean"], "is taken"),
        (["a/b", "a-b"], "is taken"),
        (["PGD", "pgd"], "is taken"),
    ],
)
def test_names_that_cannot_be_files(names: list[str], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        evaluate(Table(STATES), numbered([0] * 6), {name: switch(1) for name in names}, limit=None)


def test_two_equal_radii_are_refused() -> None:
    with pytest.raises(InputError, match="is taken"):
        evaluate(Table(STATES), numbered([0] * 6), {"a": switch(1)}, limit=None, eps=["1/255", " 1/255"])


def test_the_model_is_evaluated_in_eval_mode_and_restored() -> None:
    table = Table(STATES)
    model = nn.Sequential(table, nn.Dropout(0.99), nn.Sequential(nn.BatchNorm1d(2), nn.Identity()))
    model.train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    seen = []

    def spy(attacked: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        seen.append(any(module.training for module in attacked.modules()))
        attacked.train()  # an attack may be so rude
        return images

    found = evaluate(model, numbered([0] * 6), {"spy": spy, "again": leave_alone}, limit=None, batch_size=2)
    assert seen == [False] * 3
    assert found.outcomes["again"].prediction.tolist() == STATES[0]
    assert [module.training for module in model.modules()] == before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match="a bug"):
        evaluate(model, numbered([0] * 6), {"spy": Stops(0)}, limit=None)
    assert [module.training for module in model.modules()] == before


class Stops:
    """An attack of other make that leaves images alone and fails after some batches; what is private is no setting."""

    def __init__(self, batches: int) -> None:
        self._left = batches

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        if not self._left:
            raise RuntimeError("a bug")
        self._left -= 1
        return images


def test_foreign_attacks_touch_nothing_and_are_repeatable() -> None:
    layer = nn.Linear(3, 2)
    model, weight = nn.Sequential(nn.Flatten(), layer), layer.weight
    weight.grad = torch.ones_like(weight)
    kept = weight.grad

    def noisy(attacked: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        torch.autograd.backward(nn.functional.cross_entropy(attacked(images.requires_grad_()), labels))
        images.detach().mul_(0)  # in place, on its own copy
        return torch.rand_like(images)

    torch.manual_seed(7)
    state = torch.get_rng_state()
    found = [
        evaluate(model, numbered([0] * 6), {"noisy": noisy}, limit=None, seed=seed, batch_size=3).outcomes[
            "noisy"
        ]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert weight.grad is kept
    assert torch.equal(kept, torch.ones_like(weight))
    assert_same(found[0], found[1])
    assert not np.array_equal(found[0].l2, found[2].l2)
    assert not np.array_equal(found[0].l2[:3], found[0].l2[3:])
    assert set(found[0].forwards.tolist() + found[0].backwards.tolist()) == {-1}


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 3 * 3, 4))
    return nn.Sequential(*layers).to(dtype)


def random_split(images: int = 23, classes: int = 4) -> Split:
    generator = torch.Generator().manual_seed(0)
    return Split(
        torch.randint(256, (images, 3, 8, 8), generator=generator, dtype=torch.uint8),
        torch.randint(classes, (images,), generator=generator),
    )


def test_batch_size_changes_nothing() -> None:
    """In float64, so that not even rounding can: the model then sees images in float64 too."""
    attacks = {
        "last": PGD(norm="linf", eps=0.1, steps=4, step_size=0.04, keep="last"),
        "l2": PGD(norm="l2", eps=0.5, steps=3, step_size=0.2, start="odi", early_exit=False),
        "fgsm": FGSM(norm="linf", eps=0.3, early_exit=False),
    }
    runs = [
        evaluate(small_model(torch.float64), random_split(), attacks, limit=12, seed=3, batch_size=size)
        for size in (12, 5, 1)
    ]
    assert runs[0].clean.rate().successes > 0
    assert runs[0].worst_case.successes < runs[0].clean.rate().successes
    for other in runs[1:]:
        for name, outcomes in other.outcomes.items():
            for column, values in arrays_of(outcomes).items():
                expected = getattr(runs[0].outcomes[name], column)
                if values.dtype.kind == "f":
                    np.testing.assert_allclose(
                        values, expected, rtol=1e-5, atol=1e-7, err_msg=f"{name} {column}"
                    )
                else:
                    np.testing.assert_array_equal(values, expected, err_msg=f"{name} {column}")


def test_the_seed_decides() -> None:
    attack = PGD(norm="linf", eps=0.1, steps=1, step_size=0.0, keep="last")
    first, again, other = (
        evaluate(small_model(), random_split(), {"a": attack}, limit=5, seed=seed).outcomes["a"]
        for seed in (0, 0, 1)
    )
    assert_same(first, again)
    assert (first.l2 != other.l2).all()


def test_verdicts_of_a_model_that_rolls_dice_disagree() -> None:
    """The attack saw one roll and we another; a deterministic model never disagrees with itself."""
    dice = strange(lambda images: torch.rand(len(images), 2))
    torch.manual_seed(0)
    found = evaluate(dice, numbered([0] * 200), {"a": switch(1)}, limit=None)
    assert 40 < found.outcomes["a"].about["disagreements"] < 160
    calm = evaluate(Table(STATES), numbered([0] * 6), {"a": switch(1)}, limit=None)
    assert calm.outcomes["a"].about["disagreements"] == 0


def test_an_image_that_was_left_alone_has_the_outcome_it_had() -> None:
    """Otherwise rounding, or here dice, would break images without an attack."""
    dice = strange(lambda images: torch.rand(len(images), 2))
    found = evaluate(dice, numbered([0] * 50), {"nothing": leave_alone}, limit=None)
    for column in ("prediction", "nll", "confidence", "brier"):
        left = getattr(found.outcomes["nothing"], column)
        np.testing.assert_array_equal(left, getattr(found.clean, column))


# Intervals


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [(0, 10, (0, 0.2775)), (5, 10, (0.2366, 0.7634)), (10, 10, (0.7225, 1)), (15, 148, (0.0624, 0.1605))],
)
def test_wilson_intervals_as_published(successes: int, n: int, interval: tuple[float, float]) -> None:
    """The last is the example of Newcombe (1998), Statistics in Medicine 17:857."""
    assert wilson_interval(successes, n) == pytest.approx(interval, abs=6e-5)


@given(st.integers(1, 20_000), st.data())
def test_wilson_ends_are_where_the_score_test_changes_its_mind(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            score = (successes / n - end) ** 2 / (end * (1 - end) / n)
            assert score == pytest.approx(1.959963984540054**2, rel=1e-6)
    assert (1 - high, 1 - low) == pytest.approx(wilson_interval(n - successes, n), abs=1e-12)


@pytest.mark.parametrize("arguments", [(1, 0), (-1, 5), (6, 5), (1.0, 5), (1, 5, 1.0), (1, 5, 0.0)])
def test_bad_shares(arguments: Any) -> None:
    with pytest.raises(InputError):
        wilson_interval(*arguments)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p_value"),
    [
        (0, 0, 1.0),
        (0, 1, 1.0),
        (0, 5, 2 / 32),
        (1, 5, 14 / 64),
        (3, 3, 1.0),
        (12, 2, 0.0129),
        (6, 16, 0.0525),
    ],
)
def test_mcnemar_by_hand(only_a: int, only_b: int, p_value: float) -> None:
    """12 and 2 are Armitage and Berry's sputum specimens, 6 and 16 Cavo's patients."""
    assert mcnemar_p_value(only_a, only_b) == pytest.approx(p_value, abs=5e-5)
    assert mcnemar_p_value(only_b, only_a) == mcnemar_p_value(only_a, only_b)


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_mcnemar_is_a_sign_test(only_a: int, only_b: int) -> None:
    expected = binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert mcnemar_p_value(only_a, only_b) == pytest.approx(expected, rel=1e-6, abs=1e-300)


@pytest.mark.parametrize(
    ("table", "difference", "interval"),
    [((59, 6, 16, 80), -0.0621, (-0.1186, -0.0046)), ((1, 1, 7, 12), -0.2857, (-0.507, -0.026))],
)
def test_newcombe_intervals_as_published(
    table: tuple[int, int, int, int], difference: float, interval: tuple[float, float]
) -> None:
    """Cavo et al. and Bentur et al., in Fagerland, Lydersen & Laake."""
    found = compare_counts(*table)
    assert found.difference == pytest.approx(difference, abs=6e-5)
    assert found.interval == pytest.approx(interval, abs=5e-4 if table[0] == 1 else 6e-5)


@given(*[st.integers(0, 500)] * 3, st.integers(1, 500))
def test_paired_intervals(both: int, only_a: int, only_b: int, neither: int) -> None:
    found = compare_counts(both, only_a, only_b, neither)
    low, high = found.interval
    assert -1 <= low <= found.difference <= high <= 1
    assert low < high
    mirrored = compare_counts(both, only_b, only_a, neither)
    assert (-mirrored.interval[1], -mirrored.interval[0]) == pytest.approx(found.interval, abs=1e-12)
    assert compare_counts(both, only_a, only_b, neither, confidence=0.99).interval[0] <= low


def test_compare_is_paired() -> None:
    """Two models that differ on 10 of 1000 images, always the same way: separate intervals would overlap."""
    a = make_outcomes([True] * 510 + [False] * 490)
    b = make_outcomes([True] * 500 + [False] * 500)
    found = compare(a, b)
    assert (found.only_a, found.only_b, found.n, found.difference) == (10, 0, 1000, 0.01)
    assert found.p_value == pytest.approx(2 / 2**10)
    assert found.interval[0] > 0
    assert wilson_interval(510, 1000)[0] < wilson_interval(500, 1000)[1]
    last = make_outcomes([True, False], clean_prediction=[1, 0])
    assert compare(last, make_outcomes([False, False])).only_a == 0
    assert compare(last, make_outcomes([False, False]), criterion="correct_after").only_a == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"index": [0, 2]},
        {"label": [0, 1]},
        {"image_hash": np.array([0, 7], dtype=np.uint64)},
    ],
)
def test_other_images_are_not_compared(changed: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not outcomes of the same images"):
        compare(make_outcomes([True, False]), make_outcomes([True, False], **changed))
    with pytest.raises(InputError, match="2 and 1 images"):
        compare(make_outcomes([True, False]), make_outcomes([True]))
    with pytest.raises(InputError, match="criterion must be robust or correct_after"):
        compare(make_outcomes([True]), make_outcomes([True]), criterion="linf")  # type: ignore[arg-type]


# Calibration


def test_calibration_by_hand() -> None:
    """Confidence 0.9 four times, right three times; one 0.6 that is wrong."""
    probabilities = np.array([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.9, 0.1], [0.6, 0.4]])
    found = calibration(probabilities, np.array([0, 1, 0, 1, 1]))
    assert found.nll == pytest.approx(-(3 * math.log(0.9) + math.log(0.1) + math.log(0.4)) / 5)
    assert found.ece == pytest.approx(4 / 5 * abs(0.75 - 0.9) + 1 / 5 * 0.6)
    assert found.brier == pytest.approx((3 * 0.02 + 1.62 + 0.72) / 5)
    assert calibration(np.array([[0.0, 1.0]]), np.array([0])).nll == math.inf
    # Bins are closed above: 0.5 belongs to the lower of two, so its gap does not cancel that of 0.8.
    edge = calibration(np.array([[0.5, 0.5], [0.8, 0.2]]), np.array([0, 1]), bins=2)
    assert edge.ece == pytest.approx((0.5 + 0.8) / 2)


@pytest.mark.parametrize("classes", [2, 7])
def test_calibration_agrees_with_scikit_learn_and_with_a_loop(classes: int) -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet([0.5] * classes, size=400)
    labels = rng.integers(classes, size=400)
    found = calibration(probabilities, labels)
    assert found.nll == pytest.approx(log_loss(labels, probabilities, labels=range(classes)))
    one_hot = np.eye(classes)[labels]
    assert found.brier == pytest.approx(((probabilities - one_hot) ** 2).sum(axis=1).mean())
    if classes == 2:
        assert found.brier == pytest.approx(2 * brier_score_loss(labels, probabilities[:, 1]))
    gap = 0.0
    for place in range(15):
        top = probabilities.max(axis=1)
        inside = (top > place / 15) & (top <= (place + 1) / 15)
        if inside.any():
            right = probabilities.argmax(axis=1)[inside] == labels[inside]
            gap += inside.mean() * abs(right.mean() - top[inside].mean())
    assert found.ece == pytest.approx(gap)


@pytest.mark.parametrize(
    ("probabilities", "labels"),
    [
        ([[0.5, 0.6]], [0]),
        ([[-0.5, 1.5]], [0]),
        ([[math.nan, 1.0]], [0]),
        ([[0.5, 0.5]], [2]),
        ([[0.5, 0.5]], [-1]),
        ([[0.5, 0.5]], [0.5]),
        ([0.5, 0.5], [0]),
        ([[0.5, 0.5]], [0, 1]),
        (np.zeros((0, 2)), np.zeros(0, dtype=int)),
    ],
)
def test_what_is_no_probability(probabilities: Any, labels: Any) -> None:
    with pytest.raises(InputError):
        calibration(np.asarray(probabilities), np.asarray(labels))


def test_calibration_of_records_clean_and_attacked() -> None:
    """Confidence is 0.9 throughout: 4 of 6 right when clean, 2 of 6 after the attack."""
    found = evaluate(Table(STATES), numbered([0] * 6), {"a": switch(1)}, limit=None)
    for outcomes, right in ((found.clean, 4), (found.outcomes["a"], 2)):
        told = outcomes.calibration()
        assert told.ece == pytest.approx(abs(right / 6 - 0.9), abs=1e-6)
        assert told.nll == pytest.approx(-(right * math.log(0.9) + (6 - right) * math.log(0.1)) / 6, abs=1e-6)
        assert told.brier == pytest.approx((right * 0.02 + (6 - right) * 1.62) / 6, abs=1e-6)
    np.testing.assert_allclose(found.clean.true_probability, [0.9, 0.9, 0.9, 0.9, 0.1, 0.1], rtol=1e-6)
    sure = evaluate(Table([[0, 1]], lead=500.0), numbered([0, 0]), {}, limit=None).clean
    assert sure.nll.tolist() == [0, 500]  # the probability itself would be 0 in float32


# Records


def test_records_can_be_read_by_numpy_and_by_us(tmp_path: Path) -> None:
    files.write_json(tmp_path / "eval.json", {"test_accuracy": 0.5, "images": 6})
    found = evaluate(
        Table(STATES),
        numbered([0] * 6),
        {"a": switch(1)},
        limit=None,
        eps=["1/255", "2/255"],
        run_dir=tmp_path,
    )
    with np.load(tmp_path / "eval" / "a@1-255.npz", allow_pickle=False) as arrays:
        assert set(arrays) == {*COLUMNS, "correct_after", "robust", "header"}
        assert arrays["robust"].tolist() == [True, False, False, True, False, False]
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == [
        "a@1-255.npz",
        "a@2-255.npz",
        "clean.npz",
    ]
    again = load_evaluation(tmp_path)
    assert again.table() == found.table()
    assert again.to_json() == found.to_json()
    assert list(again.outcomes) == ["a@1/255", "a@2/255"]
    summary = files.read_json(tmp_path / "eval.json")
    assert (summary["test_accuracy"], summary["images"]) == (0.5, 6)  # what training wrote stays
    entry = summary["evaluation"]["attacks"]["a@1/255"]
    assert entry["file"] == "eval/a@1-255.npz"
    assert entry["accuracy"] == pytest.approx(2 / 6)
    assert entry["attack"]["eps"] == "1/255"
    assert entry["seed"] == 0
    assert entry["seconds"] > 0
    assert (
        entry["environments"] == [line for line in entry["environments"] if torch.__version__ in line] != []
    )
    assert summary["evaluation"]["model"] == describe_model(Table(STATES))
    assert summary["evaluation"]["worst_case"]["accuracy"] == pytest.approx(1 / 6)


def test_what_is_finished_is_not_computed_again(tmp_path: Path) -> None:
    split = numbered([0] * 6)

    def attack_with(limit: int | None, batch_size: int = 2, **options: Any) -> tuple[Outcomes, list[int]]:
        calls.clear()
        found = evaluate(
            Table(STATES),
            split,
            {"a": switch(1, keep="last")},
            limit=limit,
            batch_size=batch_size,
            run_dir=tmp_path,
            **options,
        )
        return found.outcomes["a"], list(calls)

    first, cost = attack_with(3)
    assert (len(first), cost) == (3, [2, 1])
    longer, cost = attack_with(None, batch_size=5)
    assert (longer.index.tolist(), cost) == ([0, 1, 2, 3, 4, 5], [3])
    written = (tmp_path / "eval" / "a.npz").read_bytes()
    shorter, cost = attack_with(2)
    assert (len(shorter), cost) == (2, [])
    assert (tmp_path / "eval" / "a.npz").read_bytes() == written
    assert_same(shorter, longer.take(slice(2)))
    _, cost = attack_with(None, resume=False)
    assert cost == [2, 2, 2]
    assert len(load_evaluation(tmp_path)) == 6


def test_a_failure_keeps_the_finished_batches(tmp_path: Path) -> None:
    split, model = numbered([0] * 6), Table(STATES)
    with pytest.raises(RuntimeError, match="a bug"):
        evaluate(model, split, {"a": Stops(2)}, limit=None, batch_size=2, run_dir=tmp_path)
    parts = sorted((tmp_path / "eval" / "a.parts").iterdir())
    assert [path.name for path in parts] == ["00000000-00000001.npz", "00000002-00000003.npz"]
    before = [path.read_bytes() for path in parts]
    # A shorter request is met from the parts alone, and loses none of them.
    short = evaluate(model, split, {"a": Stops(0)}, limit=1, run_dir=tmp_path)
    assert len(short) == 1
    assert len(Outcomes.load(tmp_path / "eval" / "a.npz")) == 4
    (tmp_path / "eval" / "a.npz").unlink()
    for path, content in zip(parts, before, strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (parts[0].parent / ".00000004-00000005.npz.x7.npz").write_bytes(b"half a file, as a kill leaves it")
    whole = evaluate(model, split, {"a": Stops(1)}, limit=None, batch_size=4, run_dir=tmp_path).outcomes["a"]
    assert whole.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert not parts[0].parent.exists()


PROGRAM = """
import os, signal, sys
from dataclasses import dataclass
import torch
from ecnn.attacks import PGD
from ecnn.data import Split
from ecnn.evaluation import evaluate
from ecnn.codes import CodeMatrix
from ecnn.model import ECNN

@dataclass(frozen=True, kw_only=True)
class Counting(PGD):
    def search(self, target, images, labels, draws):
        with open(sys.argv[2], "a") as log:
            log.write(f"{len(images)}\\n")
        if sys.argv[3] == "kill" and len(open(sys.argv[2]).readlines()) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().search(target, images, labels, draws)

torch.set_num_threads(1)
torch.manual_seed(0)
model = ECNN(CodeMatrix([[0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1]]), 3, width=4, depth=8, feature_dim=8)
generator = torch.Generator().manual_seed(0)
split = Split(torch.randint(256, (22, 3, 8, 8), generator=generator, dtype=torch.uint8),
              torch.randint(4, (22,), generator=generator))
attack = Counting(norm="linf", eps="8/255", steps=3, step_size="2/255", keep="last")
evaluate(model, split, {"pgd": attack}, limit=20, seed=5, batch_size=4, run_dir=sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL in the third of five batches; two are kept, three computed, and the result is that of a quiet run."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(folder: str, log: str, how: str) -> int:
        return run_program(folder, log, how, cwd=tmp_path, program=tmp_path / "program.py").returncode

    assert start("killed", "first.log", "kill") == -9
    parts = tmp_path / "killed" / "eval" / "pgd.parts"
    finished = {path.name: path.read_bytes() for path in parts.iterdir()}
    assert sorted(finished) == ["00000000-00000003.npz", "00000004-00000007.npz"]
    assert start("killed", "second.log", "go on") == 0
    assert (tmp_path / "second.log").read_text().split() == ["4"] * 3
    assert start("quiet", "third.log", "go on") == 0
    assert (tmp_path / "third.log").read_text().split() == ["4"] * 5
    resumed, quiet = (load_evaluation(tmp_path / folder) for folder in ("killed", "quiet"))
    assert_same(resumed.outcomes["pgd"], quiet.outcomes["pgd"])
    assert_same(resumed.clean, quiet.clean)
    assert not parts.exists()


def unfinished(folder: Path) -> Path:
    """A part of an evaluation that failed after one batch."""
    with pytest.raises(RuntimeError, match="a bug"):
        evaluate(Table(STATES), numbered([0] * 6), {"a": Stops(1)}, limit=None, batch_size=2, run_dir=folder)
    return folder / "eval" / "a.parts" / "00000000-00000001.npz"


def go_on(folder: Path, **changes: Any) -> None:
    asked: dict[str, Any] = {
        "model": Table(STATES),
        "split": numbered([0] * 6),
        "attacks": {"a": Stops(9)},
        "limit": None,
        "run_dir": folder,
    }
    evaluate(**{**asked, **changes})


@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-20], lambda raw: b"", lambda raw: raw[:200] + bytes([raw[200] ^ 255]) + raw[201:]],
)
@pytest.mark.parametrize("which", ["part", "clean"])
def test_damaged_records_are_named(tmp_path: Path, damage: Callable[[bytes], bytes], which: str) -> None:
    path = unfinished(tmp_path)
    if which == "clean":
        path = tmp_path / "eval" / "clean.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        InputError, match=rf"{path.name} is not a whole array file .* Delete it to have it computed"
    ):
        go_on(tmp_path)
    path.unlink()
    go_on(tmp_path)
    assert len(load_evaluation(tmp_path)) == 6


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"seed": 1}, r"another seed \(0 there, 1 here\)"),
        ({"attacks": {"a": switch(1)}}, r"another attack \(kind: .* there, .*Switch here\)"),
        ({"model": Table([[0, 0, 0, 0, 0, 0]])}, r"another model \(sha256: "),
        ({"split": numbered([0, 0, 0, 0, 0, 1])}, "outcomes of other images"),
        (
            {"split": Split(numbered([0] * 6).images + 1, torch.zeros(6, dtype=torch.int64))},
            "outcomes of other images",
        ),
    ],
)
def test_records_of_something_else_are_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    unfinished(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.npz")}
    with pytest.raises(InputError, match=complaint):
        go_on(tmp_path, **changes)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.npz")} == before


def test_starting_anew_replaces_only_what_is_named(tmp_path: Path) -> None:
    unfinished(tmp_path)
    go_on(tmp_path, seed=1, resume=False)
    assert load_evaluation(tmp_path).outcomes["a"].about["seed"] == 1
    go_on(tmp_path, attacks={"b": switch(1)}, seed=1)
    kept = (tmp_path / "eval" / "b.npz").read_bytes()
    go_on(tmp_path, seed=2, resume=False)
    assert (tmp_path / "eval" / "b.npz").read_bytes() == kept
    # Another model's outcomes beside b would be nonsense, asked for anew or not.
    with pytest.raises(InputError, match="another model"):
        go_on(tmp_path, model=Table([[0] * 6]), resume=False)
    go_on(tmp_path, model=Table([[0] * 6, [1] * 6]), attacks={"a": switch(1), "b": switch(1)}, resume=False)
    assert load_evaluation(tmp_path).accuracy == {"a": 0.0, "b": 0.0}
    # Without the clean outcomes the attacks still say whose they are, before anything is computed.
    (tmp_path / "eval" / "clean.npz").unlink()
    calls.clear()
    with pytest.raises(InputError, match=r"a\.npz holds outcomes of another model"):
        go_on(tmp_path, attacks={"c": switch(1)})
    assert not calls
    assert not (tmp_path / "eval" / "clean.npz").exists()


def test_attacks_on_different_numbers_of_images(tmp_path: Path) -> None:
    """Each has its own figures in the summary; worst cases are of the images that they share."""
    go_on(tmp_path, attacks={"long": switch(1)})
    go_on(tmp_path, attacks={"short": switch(2)}, limit=2)
    summary = files.read_json(tmp_path / "eval.json")["evaluation"]
    assert (summary["attacks"]["long"]["images"], summary["attacks"]["short"]["images"]) == (6, 2)
    assert (summary["images"], summary["worst_case"]["accuracy"]) == (2, 0.0)
    assert summary["attacks"]["long"]["accuracy"] == pytest.approx(2 / 6)
    assert len(load_evaluation(tmp_path)) == 2


def test_clean_outcomes_of_another_evaluation_are_refused(tmp_path: Path) -> None:
    """They would cut what is known of every attack to the images that they have."""
    go_on(tmp_path / "all")
    go_on(tmp_path / "some", limit=2)
    shutil.copy(tmp_path / "some/eval/clean.npz", tmp_path / "all/eval/clean.npz")
    with pytest.raises(InputError, match="of 'a' for images that are not in its"):
        load_evaluation(tmp_path / "all")


def test_folders_that_hold_no_evaluation(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no evaluation"):
        load_evaluation(tmp_path)
    go_on(tmp_path)
    (tmp_path / "eval" / "a.npz").rename(tmp_path / "eval" / "b.npz")
    with pytest.raises(InputError, match=r"b\.npz was renamed: it holds outcomes of 'a'"):
        load_evaluation(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        go_on(tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"robust": np.array([True, True])}, "robust contradicts the predictions"),
        ({"label": np.array([0.0, 0.0])}, "'label' is missing or is not int32"),
        ({"index": np.array([1, 0], dtype=np.int32)}, "positions must rise"),
        ({"l2": np.array([0, math.nan], dtype=np.float32)}, "l2 must be from 0 up"),
        ({"nll": np.array([0], dtype=np.float32)}, "one value per image"),
    ],
)
def test_records_that_contradict_themselves(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = make_outcomes([True, False]).save(tmp_path / "x.npz")
    arrays, header = files.read_arrays(path)
    files.write_arrays(path, {**arrays, **change}, header)
    with pytest.raises(InputError, match=complaint):
        Outcomes.load(path)


@pytest.mark.parametrize(
    "header", [{}, {"format": "ecnn-outcomes", "version": "3"}, {"about": "["}, {"about": "3"}]
)
def test_foreign_headers(tmp_path: Path, header: dict[str, str]) -> None:
    path = make_outcomes([True, False]).save(tmp_path / "x.npz")
    arrays, before = files.read_arrays(path)
    files.write_arrays(path, arrays, {**before, **header} if header else {})
    with pytest.raises(InputError, match=r"x\.npz"):
        Outcomes.load(path)


def test_records_of_version_1_do_not_know_l1(tmp_path: Path) -> None:
    """They load, join and are saved as they were; only a curve in L1 is refused."""
    whole = make_outcomes([True, False, True], l1=[0, 0.7, 0])
    path = whole.save(tmp_path / "x.npz")
    arrays, header = files.read_arrays(path)
    assert header["version"] == "2"
    del arrays["l1"]
    with pytest.raises(InputError, match="'l1' is missing"):
        Outcomes.load(files.write_arrays(path, arrays, header))
    old = Outcomes.load(files.write_arrays(path, arrays, {**header, "version": "1"}))
    assert old.l1 is None
    assert join([old.take(slice(2)), whole.take(slice(2, 3))]).l1 is None
    assert files.read_arrays(old.save(path))[1]["version"] == "1"
    clean = make_outcomes([True] * 3)
    known, unknown = Evaluation(clean, {"a": whole}), Evaluation(clean, {"a": old})
    assert [rate.successes for rate in known.curve_by_distance("a", norm="l1", eps=[0.5, 0.7]).robust] == [
        3,
        3,
        2,
    ]
    with pytest.raises(InputError, match="before l1 was measured"):
        unknown.curve_by_distance("a", norm="l1", eps=[0.5])
    assert "L1" in unknown.table()


def test_records_round_trip(tmp_path: Path) -> None:
    whole = make_outcomes([True, False, True], nll=[0, math.inf, 1], about={"seed": 3, "on": ["a", None]})
    again = Outcomes.load(whole.save(tmp_path / "x.npz"))
    assert_same(whole, again)
    assert (again.name, again.about) == (whole.name, whole.about)
    assert_same(join([whole.take(slice(2, 3)), whole.take(slice(2))]), whole)
    with pytest.raises(ValueError, match="read-only"):
        again.label[0] = 5


def test_attacked_images_are_kept_as_they_are(tmp_path: Path) -> None:
    split = random_split(7)
    attack = PGD(norm="linf", eps="8/255", steps=2, step_size="2/255", keep="last")

    def run(**options: Any) -> None:
        evaluate(small_model(), split, {"a": attack}, limit=5, run_dir=tmp_path, seed=4, **options)

    run(batch_size=2)
    with pytest.raises(InputError, match="no attacked images of 'a' were kept"):
        load_images(tmp_path, "a")
    run(batch_size=3, save_images=True)
    index, images = load_images(tmp_path, "a")
    clean, labels = split[:5]
    expected = attack(small_model().eval(), clean, labels, seed=4)
    assert index.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
    assert not torch.equal(images, (images * 255).round() / 255)
    # An attack that would not do the same again: the records are those of the images that were kept.
    noise = {"noise": lambda model, images, labels: torch.rand_like(images)}
    for size, keeps in ((5, False), (2, True)):
        found = evaluate(
            small_model(),
            split,
            noise,
            limit=5,
            run_dir=tmp_path / "noise",
            batch_size=size,
            save_images=keeps,
        )
    moves = (load_images(tmp_path / "noise", "noise")[1] - clean).flatten(1).norm(dim=1)
    np.testing.assert_allclose(found.outcomes["noise"].l2, moves, rtol=1e-5)
    with pytest.raises(InputError, match="needs a run_dir"):
        evaluate(small_model(), split, {}, limit=5, save_images=True)


def test_progress_tells_accuracies_so_far() -> None:
    news: list[tuple[int, int, str]] = []
    evaluate(
        Table(STATES),
        numbered([0] * 6),
        {"a": switch(1), "b": switch(2)},
        limit=None,
        batch_size=4,
        progress=lambda *told: news.append(told),
    )
    ends = [told for told in news if isinstance(told[2], Milestone)]
    assert ends == [
        (6, 18, "clean 66.7 %"),
        (12, 18, "clean 66.7 %, a 33.3 %"),
        (18, 18, "clean 66.7 %, b 50.0 %"),
    ]
    assert [told for told in news if told[0] in (4, 10, 12, 18) and not isinstance(told[2], Milestone)] == [
        (4, 18, "clean 100.0 %"),
        (10, 18, "clean 66.7 %, a 50.0 %"),
        (12, 18, "clean 66.7 %, a 33.3 %"),
        (12, 18, "clean 66.7 %"),
        (18, 18, "clean 66.7 %, b 50.0 %"),
    ]
    assert [told[0] for told in news] == sorted(told[0] for told in news)


def test_the_table() -> None:
    found = evaluate(Table(STATES), numbered([0] * 6), {"a": switch(1), "other": leave_alone}, limit=None)
    lines = found.table().splitlines()
    assert " ".join(lines[0].split()) == "attack robust 95 % interval after Linf L2 L1 L0 passes gradients"
    assert " ".join(lines[2].split()) == "a 33.3 % 9.7 - 70.0 % 33.3 % 0.00392 0.00392 0.00392 1 3 1"
    assert " ".join(lines[3].split()) == "other 66.7 % 30.0 - 90.3 % 66.7 % - - - - - -"
    assert " ".join(lines[4].split()) == "worst case 33.3 % 9.7 - 70.0 %"
    assert lines[5].startswith("6 images.")


# Cascades


def run_cascade(attacks: dict[str, Any], **options: Any) -> Evaluation:
    calls.clear()
    return evaluate(Table(STATES), numbered([0] * 6), attacks, **{"limit": None, "cascade": True, **options})


def test_a_cascade_attacks_only_what_is_left() -> None:
    """One breaks images 1 and 2 of the four that are right, two breaks image 0 of the others; 3 is left for three."""
    found = run_cascade({"one": switch(1), "two": switch(2), "three": switch(1)})
    assert calls == [4, 2, 1]
    assert found.accuracy == {
        "one": pytest.approx(2 / 6),
        "two": pytest.approx(1 / 6),
        "three": pytest.approx(1 / 6),
    }
    assert found.interval["two"] == wilson_interval(1, 6)
    assert found.accuracy_after == found.accuracy
    assert found.worst_case.accuracy == found.accuracy["three"]
    assert found.broken_by.tolist() == [1, 0, 0, -1, -2, -2]
    two = found.outcomes["two"]
    assert two.attacked.tolist() == [True, False, False, True, False, False]
    assert two.forwards.tolist() == [4, 0, 0, 4, 0, 0]
    assert two.backwards.tolist() == [1, 0, 0, 1, 0, 0]
    assert two.prediction.tolist() == [1, 0, 0, 0, 1, 1]  # as when clean, where it was not run
    assert two.about["after"] == ["one"]
    assert [found.curve(name).robust[-1].successes for name in ("one", "two")] == [2, 1]
    apart = evaluate(Table(STATES), numbered([0] * 6), {"one": switch(1), "two": switch(2)}, limit=None)
    assert apart.broken_by.tolist() == found.broken_by.tolist()
    assert "after" not in apart.outcomes["two"].about
    assert "A cascade" in found.table()
    assert " ".join(found.table().splitlines()[3].split()).startswith("two 16.7 %")
    assert found.to_json()["attacks"]["two"]["accuracy"] == pytest.approx(1 / 6)


def test_a_cascade_packs_what_is_left_and_ends_when_nothing_is() -> None:
    labels = [0] * 6
    states = [[0] * 6, [1, 0, 1, 0, 1, 0], [1] * 6]
    calls.clear()
    attacks = {"one": switch(1), "two": switch(2), "never": switch(1)}
    found = evaluate(Table(states), numbered(labels), attacks, limit=None, cascade=True, batch_size=3)
    assert calls == [3, 3, 3]
    assert not found.outcomes["never"].attacked.any()
    assert found.accuracy["never"] == 0


def test_what_an_attack_of_a_cascade_cannot_say() -> None:
    found = run_cascade({"one": switch(1), "two": switch(2)})
    with pytest.raises(InputError, match="run only on images that one left"):
        compare(found.outcomes["two"], found.outcomes["two"])
    assert compare(found.outcomes["one"], found.outcomes["one"]).difference == 0
    with pytest.raises(InputError, match="'two' was run in a cascade"):
        found.curve_by_distance("two", norm="linf", eps=[0.1])
    with pytest.raises(InputError, match="cascade=True takes no eps="):
        run_cascade({"one": switch(1)}, eps=["1/255"])


@pytest.mark.usefixtures("short_autoattack")
def test_autoattack_is_the_cascade_of_its_attacks() -> None:
    model, split = small_model(torch.float64), random_split(23)
    whole = AutoAttack(norm="linf", eps=0.06)
    settings: dict[str, Any] = {"limit": None, "seed": 1}
    alone = evaluate(model, split, {"auto": whole}, **settings).outcomes["auto"]
    found = evaluate(model, split, whole.members(4), cascade=True, **settings)
    assert list(found.outcomes) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert 0 < alone.broken.sum() < alone.correct_clean.sum()
    assert found.survivors().tolist() == alone.robust.tolist()
    shares = [found.clean_accuracy, *found.accuracy.values()]
    assert shares == sorted(shares, reverse=True)


def test_a_cascade_goes_on_where_it_was(tmp_path: Path) -> None:
    attacks: dict[str, Any] = {"one": switch(1), "two": switch(2), "three": switch(1)}
    expected = run_cascade(attacks)

    def stop_at(name: str) -> Callable[[int, int, str], None]:
        def progress(done: int, total: int, news: str) -> None:
            if news.startswith(name) and calls:
                raise KeyboardInterrupt

        return progress

    for name in ("two", "three"):
        with pytest.raises(KeyboardInterrupt):
            run_cascade(attacks, run_dir=tmp_path / name, batch_size=1, progress=stop_at(name))
        resumed = run_cascade(attacks, run_dir=tmp_path / name, batch_size=1)
        for key, outcomes in expected.outcomes.items():
            assert_same(resumed.outcomes[key], outcomes)
        run_cascade(attacks, run_dir=tmp_path / name)
        assert calls == []
        again = load_evaluation(tmp_path / name)
        assert (again.accuracy, again.to_json()) == (resumed.accuracy, resumed.to_json())
        summary = files.read_json(tmp_path / name / "eval.json")["evaluation"]
        assert summary["attacks"]["two"]["accuracy"] == pytest.approx(1 / 6)
    with pytest.raises(InputError, match=r"another order of attacks \(one there, nothing here\)"):
        run_cascade({"two": switch(2)}, run_dir=tmp_path / "two")
    with pytest.raises(InputError, match="another order of attacks"):
        run_cascade({"one": switch(1)}, run_dir=tmp_path / "two", cascade=False)
    grown = {"zero": switch(2), **attacks}
    joined = run_cascade(grown, run_dir=tmp_path / "three")
    for key, outcomes in run_cascade(grown).outcomes.items():
        assert_same(joined.outcomes[key], outcomes)
    assert load_evaluation(tmp_path / "three").accuracy == joined.accuracy
    more = {"limit": 3, "run_dir": tmp_path / "longer"}
    run_cascade(attacks, **more)
    longer = run_cascade(attacks, **{**more, "limit": None})
    for key, outcomes in expected.outcomes.items():
        assert_same(longer.outcomes[key], outcomes)


def test_an_attack_that_the_model_does_not_bear(tmp_path: Path) -> None:
    def fails(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        raise IndexError("no such layer\nand more")

    attacks: dict[str, Any] = {"one": switch(1), "fails": fails, "two": switch(2)}
    with pytest.raises(IndexError, match="no such layer"):
        run_cascade(attacks)
    for folder in (None, tmp_path, tmp_path):
        found = run_cascade(attacks, keep_going=True, run_dir=folder)
        assert found.failures == {"fails": "no such layer"}
        assert list(found.outcomes) == ["one", "two"]
        assert found.outcomes["two"].about["after"] == ["one"]
        assert found.to_json()["failures"] == {"fails": "no such layer"}


@pytest.mark.parametrize("cascade", [False, True])
def test_attacked_images_are_shown_attack_by_attack(tmp_path: Path, cascade: bool) -> None:
    split = numbered([0] * 6)
    clean, _ = split[:]
    for folder in (None, tmp_path, tmp_path):  # computed, kept, and read again
        seen: dict[str, Tensor] = {}

        def watch(outcomes: Outcomes, images: Tensor, seen: dict[str, Tensor] = seen) -> None:
            assert len(outcomes) == len(images) == 6
            seen[outcomes.name] = images

        run_cascade(
            {"one": switch(1, keep="last"), "two": switch(2, keep="last")},
            cascade=cascade,
            watch=watch,
            run_dir=folder,
            batch_size=3,
        )
        moved = {name: (images != clean).flatten(1).any(dim=1).tolist() for name, images in seen.items()}
        assert list(moved) == ["one", "two"]
        # Of a cascade only those that it broke.
        assert moved["one"] == ([False, True, True] + [False] * 3 if cascade else [True] * 6)
        assert moved["two"] == ([True] + [False] * 5 if cascade else [True] * 6)


def test_progress_of_a_cascade_tells_what_stands() -> None:
    news: list[tuple[int, int, str]] = []
    run_cascade({"one": switch(1), "two": switch(2)}, batch_size=2, progress=lambda *told: news.append(told))
    assert [told for told in news if not isinstance(told[2], Milestone)][-5:] == [
        (8, 18, "one: 66.7 % left"),
        (10, 18, "one: 50.0 % left"),
        (12, 18, "one: 33.3 % left"),
        (16, 18, "two: 33.3 % left"),
        (18, 18, "two: 16.7 % left"),
    ]


def test_a_random_model_is_evaluated_alike_twice() -> None:
    """Torch's generators are seeded for each batch, whatever attacks it."""
    dice = strange(lambda images: torch.rand(len(images), 2) + 0 * images.flatten(1)[:, :2])
    attack = PGD(norm="linf", eps=0.1, steps=2, step_size=0.1, keep="last")
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        found.append(evaluate(dice, numbered([0] * 50), {"a": attack}, limit=None, batch_size=20))
    assert_same(found[0].clean, found[1].clean)
    assert_same(found[0].outcomes["a"], found[1].outcomes["a"])


# Provenance


def test_descriptions_tell_attacks_apart() -> None:
    pgd = PGD(norm="linf", eps="8/255", steps=2, step_size=0.1)
    told = describe(pgd)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["kind"] == "ecnn.attacks.gradient.PGD"
    assert (told["eps"], told["loss_slack"], told["on"]) == ("8/255", "inf", "scores")

    def with_weight(weight: float) -> Callable[..., Tensor]:
        return lambda model, images, labels: weight * model(images).sum(dim=1)

    described = [
        describe(thing)
        for thing in (
            pgd,
            PGD(norm="l2", eps="8/255", steps=2, step_size=0.1),
            PGD(norm="linf", eps="8/255", steps=2, step_size=0.1, on=with_weight(1.0)),
            PGD(norm="linf", eps="8/255", steps=2, step_size=0.1, on=with_weight(2.0)),
            leave_alone,
            functools.partial(round, ndigits=1),
            functools.partial(round, ndigits=2),
            functools.partial(divmod, ndigits=2),
            torch.zeros(3),
            torch.ones(3),
            np.float32(0.5),
            Stops(1).__call__,
        )
    ]
    assert len({json.dumps(one, sort_keys=True) for one in described}) == len(described)
    assert "0x" not in json.dumps(described)
    assert describe(with_weight(1.0)) == describe(with_weight(1.0))


def test_models_are_told_apart_by_weights_code_and_decoder() -> None:
    code = random_code(4, 6, seed=0)

    def build(code: CodeMatrix = code, **options: Any) -> ECNN:
        torch.manual_seed(0)
        return ECNN(code, 3, width=4, depth=8, feature_dim=8, **options)

    told = describe_model(build())
    assert told == describe_model(build().eval())
    assert told["parameters"] == sum(parameter.numel() for parameter in build().parameters())
    other = build()
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1e-6
    assert describe_model(other)["sha256"] != told["sha256"]
    for same_weights in (build(random_code(4, 6, seed=1)), build(decoder="linear")):
        assert describe_model(same_weights)["sha256"] == told["sha256"]
        assert describe_model(same_weights)["structure"] != told["structure"]


def test_image_checksums() -> None:
    split = random_split(5)
    told = hash_images(split)
    assert len(set(told.tolist())) == 5
    np.testing.assert_array_equal(told[3:], hash_images(split.select(torch.tensor([3, 4]))))
    flat = Split(split.images.reshape(5, 3, 4, 16), split.labels)
    assert not (hash_images(flat) == told).any()


# Transfer


class Bits(nn.Module):
    """Members that read one pixel each: member n says 1 where pixel n is bright."""

    def __init__(self, code: CodeMatrix, *, symbols: bool = False) -> None:
        super().__init__()
        self.code, self.symbols = code, symbols

    def member_logits(self, images: Tensor) -> Tensor:
        lead = images.flatten(1)[:, : self.code.code_length] - 0.5
        return torch.stack([-lead, lead], dim=2) if self.symbols else lead

    def forward(self, images: Tensor) -> Tensor:
        logits = self.member_logits(images)
        lead = logits[:, :, 1] - logits[:, :, 0] if self.symbols else logits
        return lead @ (2.0 * torch.tensor(self.code.symbols).float() - 1).T


def codewords(brightness: int) -> tuple[CodeMatrix, Split]:
    """Images that are their classes' codewords, 0.5 plus or minus the brightness; member 2 is wrong on the last."""
    code = CodeMatrix([[0, 0, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1]])
    labels = torch.tensor([0, 1, 2, 3, 0])
    bits = torch.tensor(code.symbols, dtype=torch.int64)[labels]
    bits[4, 2] = 1 - bits[4, 2]
    images = (128 + brightness * (2 * bits - 1)).to(torch.uint8).view(5, 1, 1, 3)
    return code, Split(images, labels)


@pytest.mark.parametrize("symbols", [False, True])
def test_members_that_share_nothing_do_not_transfer(symbols: bool) -> None:
    """Each member reads its own pixel, so an attack on one leaves the others as they were: 5, 5 and 4 of 5."""
    code, split = codewords(8)
    attack = dataclasses.replace(TRANSFER_PGD, steps=20, start="image")
    found = member_transfer(Bits(code, symbols=symbols), split, attack, limit=None, batch_size=2)
    assert found.counts.tolist() == [[0, 5, 4], [5, 0, 4], [5, 5, 0]]
    assert found.clean_counts.tolist() == [5, 5, 4]
    assert found.accuracy[0].tolist() == [0, 1, 0.8]
    assert found.rate(0, 0).interval == wilson_interval(0, 5)
    assert found.names == ("member 0", "member 1", "member 2")
    assert found.table().splitlines()[1].split() == ["clean", "100.0", "100.0", "80.0"]
    assert json.loads(json.dumps(found.to_json()))["counts"][0] == [0, 5, 4]
    two = member_transfer(Bits(code, symbols=symbols), split, attack, limit=2, members=[2, 0])
    assert two.counts.tolist() == [[0, 2], [2, 0]]
    assert two.names == ("member 2", "member 0")
    # Beyond the ball nothing can be reached: 0.04 is 10.2 of 255.
    _, far = codewords(12)
    assert member_transfer(Bits(code), far, attack, limit=4).counts.tolist() == [[4] * 3] * 3


def test_the_attack_of_the_figure() -> None:
    assert (TRANSFER_PGD.eps, TRANSFER_PGD.steps, TRANSFER_PGD.step_size) == (0.04, 200, 0.02)
    assert (TRANSFER_PGD.norm, TRANSFER_PGD.start, TRANSFER_PGD.restarts) == ("linf", "uniform", 1)


def test_transfer_between_members_of_a_network() -> None:
    """Batches and eval mode play no part; an attack by one step lowers the attacked member's own accuracy most."""
    torch.manual_seed(0)
    model = ECNN(random_code(4, 6, seed=0), 3, width=4, depth=8, feature_dim=8)
    attack = PGD(norm="linf", eps=0.2, steps=1, step_size=0.2, keep="last", start="image")
    found = [
        member_transfer(model, random_split(6), attack, limit=None, members=range(2), batch_size=size)
        for size in (6, 4)
    ]
    assert found[0].counts.tolist() == found[1].counts.tolist()
    assert all(module.training for module in model.modules())
    assert (np.diag(found[0].counts) <= found[0].clean_counts).all()
    for members in ([], [0, 0], [6], [-1], ["0"]):
        with pytest.raises(InputError, match="members must be distinct numbers from 0 to 5"):
            member_transfer(model, random_split(), attack, limit=2, members=members)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no members"):
        member_transfer(Table(STATES), numbered([0] * 6), attack, limit=None)


class Pixel(nn.Module):
    """Two classes by one pixel."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        lead = self.scale * (images.flatten(1)[:, self.place] - 0.5)
        return torch.stack([-lead, lead], dim=1)


def test_transfer_between_models() -> None:
    """Models of the same pixel fall together, a model of another pixel stands; wrong when clean is never robust."""
    images = torch.tensor([[130, 130], [120, 120], [130, 120]], dtype=torch.uint8).view(3, 1, 1, 2)
    split = Split(images, torch.tensor([1, 0, 1]))
    liar = Pixel(0)  # wrong on all images, and right after an attack on the left pixel
    liar.scale.data.neg_()
    news = []
    found = model_transfer(
        {"left": Pixel(0), "same": Pixel(0), "right": Pixel(1).double(), "liar": liar},
        split,
        PGD(norm="linf", eps=0.04, steps=5, step_size=0.02, keep="last", start="image"),
        limit=None,
        batch_size=2,
        progress=lambda *told: news.append(told),
    )
    assert found.clean_counts.tolist() == [3, 3, 2, 0]
    assert found.counts.tolist() == [[0, 0, 2, 0], [0, 0, 2, 0], [3, 3, 0, 0], [3, 3, 2, 0]]
    assert news[-1] == (12, 12, "liar on itself 0.0 %")
    with pytest.raises(InputError, match="at least one model"):
        model_transfer({}, split, TRANSFER_PGD, limit=None)


class Coded(nn.Module):
    """A linear model whose code, but no weight, can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 12, generator=torch.Generator().manual_seed(1)))
        self.change: Callable[[Tensor], Tensor] = lambda images: images

    def forward(self, images: Tensor) -> Tensor:
        return self.change(images).flatten(1) @ self.weight.T


def coded_split() -> Split:
    images = torch.randint(256, (20, 3, 2, 2), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    return Split(images, torch.arange(20) % 4)


@pytest.mark.parametrize(
    ("first", "then", "is_same"),
    [
        (lambda x: x, lambda x: x, True),
        (lambda x: x, lambda x: x * (1 + 1e-5), True),
        (lambda x: x, lambda x: 1 - x, False),
        (lambda x: x, lambda x: x.flip(3), False),
        (lambda x: x, lambda x: (x * 16).round() / 16, False),
        (lambda x: x, lambda x: x + 0.3 * (x != (x * 255).round() / 255), False),  # other beside the images
        (lambda x: x + torch.rand_like(x), lambda x: x + torch.rand_like(x), True),
        (lambda x: x + torch.rand_like(x), lambda x: 1 - x + torch.rand_like(x), False),
        (lambda x: x + np.random.rand(), lambda x: x + np.random.rand(), True),
        (lambda x: x + time.perf_counter(), lambda x: x + time.perf_counter(), True),  # nothing can be said
        (lambda x: x / (x < 0.2), lambda x: x / (x < 0.2), True),
        (lambda x: x.half().float(), lambda x: x.half().float(), True),
    ],
)
def test_a_record_is_of_what_the_model_does(tmp_path: Path, first: Any, then: Any, is_same: bool) -> None:
    model, noise = Coded(), RandomNoise(norm="linf", eps=0.1, samples=2)
    settings: dict[str, Any] = {"limit": None, "run_dir": tmp_path, "batch_size": 7}
    model.change = first
    before = evaluate(model, coded_split(), {"noise": noise}, **settings)
    model.change = then
    if is_same:
        again = evaluate(model, coded_split(), {"noise": noise}, **settings)
        assert_same(again.outcomes["noise"], before.outcomes["noise"])
        return
    for attacks in ({"noise": noise}, {"other": noise}, {}):
        with pytest.raises(InputError, match=r"another model .* its code has changed"):
            evaluate(model, coded_split(), attacks, **settings)
    evaluate(model, coded_split(), {"noise": noise}, **settings, resume=False)


def test_layers_that_another_torch_prints_otherwise_are_the_same_model(tmp_path: Path) -> None:
    model, noise = Coded(), RandomNoise(norm="linf", eps=0.1, samples=2)
    model.change = lambda x: x
    settings: dict[str, Any] = {"limit": None, "run_dir": tmp_path, "batch_size": 7}
    before = evaluate(model, coded_split(), {"noise": noise}, **settings)
    structure = describe_model(model)["structure"]
    model.extra_repr = lambda: "bias=True"  # type: ignore[method-assign]
    assert describe_model(model)["structure"] != structure
    again = evaluate(model, coded_split(), {"noise": noise, "more": noise}, **settings)
    assert_same(again.outcomes["noise"], before.outcomes["noise"])
    assert list(load_evaluation(tmp_path).outcomes) == ["noise", "more"]


def test_what_cannot_be_attacked_together_is_attacked_in_parts(tmp_path: Path) -> None:
    """Image 3 fails alone, and nothing fails because of it; other attacks go on, and a later run tries again."""
    seen: list[list[int]] = []

    def touchy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        numbers = (images[:, 0, 0, 0] * 255).round().int().tolist()
        seen.append(numbers)
        if 3 in numbers:
            raise ValueError("not this one")
        return switch(1)(model, images, labels)

    attacks: dict[str, Any] = {"touchy": touchy, "two": switch(2)}
    for _ in range(2):
        seen.clear()
        found = run_cascade(attacks, keep_going=True, run_dir=tmp_path)
        assert found.failures == {"touchy": "1 of 4 images: not this one"}
        assert found.undone["touchy"].tolist() == [3]
        assert found.outcomes["touchy"].attacked.tolist() == [True, True, True, False, False, False]
        assert found.broken_by.tolist() == [1, 0, 0, -1, -2, -2]
        assert found.table().endswith("touchy could not be run: 1 of 4 images: not this one")
        kept = load_evaluation(tmp_path)
        assert (kept.failures, kept.undone["touchy"].tolist()) == (found.failures, [3])
    assert seen == [[3]]
    with pytest.raises(ValueError, match="not this one"):
        run_cascade({"touchy": touchy})


def test_an_attack_that_always_fails_is_soon_given_up() -> None:
    tried: list[int] = []

    def fails(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        tried.append(len(images))
        raise KeyError

    found = evaluate(Coded(), coded_split(), {"fails": fails}, limit=None, keep_going=True)
    assert found.failures == {"fails": "KeyError"}
    assert found.undone["fails"].tolist() == list(range(20))
    assert not found.outcomes
    assert tried.count(1) == 8
    assert len(tried) < 20


def test_gradients_that_are_no_numbers_are_told() -> None:
    """They count as zero: the attack neither leaves [0, 1] nor stands still in silence."""
    model = Coded()
    model.change = lambda images: images + (images * (images < 0.5)).sqrt()
    for norm in ("linf", "l2", "l1"):
        pgd = PGD(norm=norm, eps=0.2, steps=3, step_size=0.1, start="image", early_exit=False)
        found = evaluate(model, coded_split(), {"pgd": pgd}, limit=None)
        assert found.outcomes["pgd"].about["nan_gradients"] == 60
        assert "pgd: 60 gradients had entries that are not numbers" in found.table()
        assert (found.outcomes["pgd"].l0 > 0).any()  # the other pixels moved


def test_members_that_were_turned_are_those_in_which_the_codewords_differ() -> None:
    model = Saturated()
    images, labels = images_of_classes(3)
    attacked = images.clone()
    attacked[labels == 2] = images[labels == 7]  # class 2 is made to look like class 7; the others stay
    found = member_flips(model, images, attacked, labels)
    symbols = model.code.symbols
    expected = np.zeros_like(found.flipped)
    expected[2] = 3 * (symbols[2] != symbols[7])
    assert found.flipped.tolist() == expected.tolist()
    assert found.images.tolist() == [3] * 10
    assert (found.right == 3).all()
    assert found.per_image == pytest.approx((symbols[2] != symbols[7]).sum() * 3 / 30)
    assert found.share[2].tolist() == (symbols[2] != symbols[7]).astype(float).tolist()
    with pytest.raises(InputError, match="before and after"):
        member_flips(model, images, attacked[:, :, :2], labels)
    with pytest.raises(InputError, match="labels"):
        member_flips(model, images, attacked, labels[:4])


def test_curves_are_given_by_norm_and_attack() -> None:
    model = half_spaces(torch.ones(16))
    images = torch.full((6, 1, 4, 4), 0.6)
    split = Split((images * 255).to(torch.uint8), torch.zeros(6, dtype=torch.int64))
    attacks: dict[str, Any] = {
        "pgd": PGD(norm="linf", eps=0.1, steps=3, step_size=0.1),
        "noise": RandomNoise(norm="linf", eps=0.1, samples=1),
        "fmn": FMN(norm="l2", steps=30),
        "own": lambda model, images, labels: 1 - images,
    }
    found = evaluate(model, split, attacks, limit=None, eps=[0.05, 0.2])
    curves = found.curves()
    assert {norm: list(own) for norm, own in curves.items()} == {"linf": ["pgd", "noise"], "l2": ["fmn"]}
    assert curves["linf"]["pgd"] == found.curve("pgd")
    assert list(curves["linf"]["pgd"].eps) == [0, 0.05, 0.2]
    assert [rate.accuracy for rate in curves["linf"]["pgd"].robust] == [1, 1, 0]
    assert curves["l2"]["fmn"].cumulative[-1].accuracy == 0


def test_a_model_that_became_random_is_another() -> None:
    """Also on another machine, where the numbers drawn by one random model are others."""

    class Drawn(nn.Module):
        def __init__(self, spread: float) -> None:
            super().__init__()
            self.spread = spread

        def forward(self, images: Tensor) -> Tensor:
            scores = images.flatten(1)[:, 10:20]
            return scores + self.spread * torch.randn_like(scores) if self.spread else scores

    split = Split(torch.rand(9, 1, 8, 8), torch.arange(9))
    fixed, drawn = (ask_probes(Drawn(spread), split) for spread in (0.0, 0.5))
    assert fixed is not None
    assert drawn is not None
    elsewhere = {**drawn, "environment": "elsewhere", "scores": fixed["scores"]}
    assert same_answers(drawn, elsewhere)
    assert same_answers(elsewhere, drawn)
    for random in (drawn, elsewhere):
        assert not same_answers(fixed, random)
        assert not same_answers(random, fixed)
