"""Attacks: the ball, the contract, closed-form optima on linear models, and what saturation hides."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DATA
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toys import Counting, Saturated, distance, images_of_classes, random_linear, tiny_ecnn

import ecnn
from ecnn.attacks import (
    APGD,
    FAB,
    FGSM,
    FMN,
    JSMA,
    NORMS,
    PGD,
    VIEWS,
    Attack,
    Averaged,
    CarliniWagnerL2,
    DeepFool,
    Draws,
    Square,
)
from ecnn.attacks.views import Linear as LinearView
from ecnn.attacks.views import Members, decode_linearly, member_margins, members_of
from ecnn.checks import parse_eps
from ecnn.errors import InputError
from ecnn.evaluation.provenance import describe
from ecnn.model import ECNN
from ecnn.objectives import score_margin


def images_and_labels(batch: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch, 3, 2, 2, generator=generator, dtype=dtype)
    return images, torch.randint(3, (batch,), generator=generator)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8/255", 8 / 255), ("0.5/255", 0.5 / 255), ("0.04", 0.04), (0.3, 0.3), (0, 0.0), ("1", 1.0)],
)
def test_eps_as_people_write_it(text: Any, value: float) -> None:
    assert parse_eps(text) == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize("eps", ["8/0", "8/255/2", "/255", "eight", -0.1, math.nan, math.inf, "-1/255"])
def test_bad_eps(eps: Any) -> None:
    with pytest.raises(InputError, match="eps must be"):
        parse_eps(eps)


@pytest.mark.parametrize("norm", NORMS)
@given(eps=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_projection_is_into_the_ball_and_leaves_it_alone(norm: Any, eps: float, seed: int) -> None:
    draws = Draws.of(seed, torch.arange(4))
    images = draws.fold(0).uniform(1, 3, 3, dtype=torch.float64)
    points = images + draws.fold(1).normal(1, 3, 3, dtype=torch.float64)
    inside = NORMS[norm].project(points, images, eps)
    start = NORMS[norm].random(images, eps, draws)
    for found in (inside, start):
        assert distance(found, images, norm).max() <= eps + 1e-12
        assert found.min() >= 0
        assert found.max() <= 1
        assert torch.allclose(NORMS[norm].project(found, images, eps), found, atol=1e-12, rtol=0)


def test_random_starts_fill_the_ball() -> None:
    """In L2 and L1 the radius of a uniform point in n dimensions has the mean n / (n + 1); in Linf a pixel has 0."""
    images = torch.full((20_000, 1, 1, 3), 0.5, dtype=torch.float64)
    draws = Draws.of(0, torch.arange(len(images)))
    for norm in ("l2", "l1"):
        points = NORMS[norm].random(images, 0.4, draws)
        assert float(distance(points, images, norm).mean()) / 0.4 == pytest.approx(0.75, abs=0.005)
        assert float((points - images).mean()) == pytest.approx(0, abs=0.004)
    moves = (NORMS["linf"].random(images, 0.4, draws) - images) / 0.4
    assert float(moves.mean()) == pytest.approx(0, abs=0.01)
    assert float(moves.var()) == pytest.approx(1 / 3, abs=0.01)


def test_draws_belong_to_images() -> None:
    whole = Draws.of(5, torch.arange(10))
    part = Draws.of(5, torch.tensor([7, 2]))
    assert torch.equal(whole.fold(3).uniform(4, 2)[[7, 2]], part.fold(3).uniform(4, 2))
    assert torch.equal(whole.take(torch.tensor([7, 2])).normal(9), part.normal(9))
    assert torch.equal(part.uniform(5).double(), part.uniform(5, dtype=torch.float64))
    others = [
        whole.uniform(4),
        whole.fold(0).uniform(4),
        whole.fold(1).uniform(4),
        Draws.of(6, torch.arange(10)).uniform(4),
    ]
    for one, other in itertools.combinations(others, 2):
        assert not torch.isin(one, other).any()


def test_draws_are_uniform_and_normal() -> None:
    """Moments, and no correlation between images, between places, or between streams."""
    draws = Draws.of(1, torch.arange(1000))
    uniform, normal = draws.uniform(1000, dtype=torch.float64), draws.normal(1000, dtype=torch.float64)
    assert 0 <= uniform.min() < uniform.max() < 1
    for power, moment in ((1, 1 / 2), (2, 1 / 3), (3, 1 / 4)):
        assert float((uniform**power).mean()) == pytest.approx(moment, abs=2e-3)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert float((normal**power).mean()) == pytest.approx(moment, abs=2e-2)
    centred = uniform - 0.5
    for lagged in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        draws.fold(1).uniform(1000, dtype=torch.float64) - 0.5,
    ):
        assert abs(float((centred * lagged).mean()) * 12) < 5e-3
    whole = draws.integers(7, 1000)
    assert set(whole.flatten().tolist()) == set(range(7))
    assert torch.bincount(whole.flatten()).float().std() < 1500


@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize("on", [*VIEWS, lambda model, x, y: -model(x).gather(1, y[:, None]).squeeze(1)])
def test_contract(on: Any, keep: Any) -> None:
    model = tiny_ecnn().train()
    images, labels = images_and_labels(dtype=torch.float32)
    attack = PGD(norm="linf", eps=0.1, steps=3, step_size=0.04, on=on, keep=keep)
    before, grads = torch.get_rng_state(), [p.grad for p in model.parameters()]
    crafted = attack(model, images, labels, generator=torch.Generator().manual_seed(0))
    assert crafted.shape == images.shape
    assert (crafted - images).abs().max() <= 0.1 + 1e-6
    assert 0 <= crafted.min() <= crafted.max() <= 1
    assert not crafted.requires_grad
    assert model.training
    assert [p.grad for p in model.parameters()] == grads == [None] * len(grads)
    assert torch.equal(torch.get_rng_state(), before)
    identity = PGD(norm="linf", eps=0, steps=3, step_size=0.04, on=on, keep=keep)
    assert torch.equal(identity(model, images, labels), images)


ON_SCORES: list[tuple[type[Attack], dict[str, Any]]] = [
    (PGD, {"norm": "l2", "eps": 0.5, "steps": 3, "step_size": 0.2}),
    (FGSM, {"norm": "linf", "eps": 0.1}),
    (APGD, {"norm": "linf", "eps": 0.1, "steps": 3, "loss": "dlr"}),
    (FAB, {"norm": "linf", "eps": 0.1, "steps": 3}),
    (Square, {"norm": "linf", "eps": 0.1, "queries": 5}),
    (JSMA, {"max_pixel_fraction": 0.5}),
    (CarliniWagnerL2, {"steps": 3, "search_steps": 1, "initial_constant": 1.0}),
    (DeepFool, {"norm": "l2", "steps": 3}),
    (FMN, {"norm": "l2", "steps": 3}),
]


@pytest.mark.parametrize(("kind", "settings"), ON_SCORES)
def test_a_view_is_as_good_as_its_name(kind: Any, settings: dict[str, Any]) -> None:
    model = tiny_ecnn()
    images, _ = images_and_labels(batch=8, dtype=torch.float32)
    labels = model(images).argmax(1)
    named, given = (kind(**settings, on=on)(model, images, labels) for on in ("linear", LinearView()))
    assert torch.equal(named, given)
    assert LinearView() == VIEWS["linear"]  # equal views share what is recorded of their passes


def test_a_model_that_cannot_decode_is_asked_in_the_end() -> None:
    """Neither PGD nor APGD takes an image for unbroken because its view does not show the scores."""

    class Undecoded(nn.Module):
        def __init__(self, model: ECNN) -> None:
            super().__init__()
            self.model, self.code, self.member_logits = model, model.code, model.member_logits

        def forward(self, images: Tensor) -> Tensor:
            scores: Tensor = self.model(images)
            return scores

    model = tiny_ecnn().double()
    images, _ = images_and_labels(batch=30)
    labels = model(images).argmax(1)
    ball: dict[str, Any] = {"norm": "linf", "eps": 0.3, "loss": "margin", "targets": 3}
    attacks = (PGD(on=Members(), step_size=0.1, steps=9, **ball), APGD(on="linear", steps=9, **ball))
    for attack in attacks:
        known, asked = (attack.run(each, images, labels) for each in (model, Undecoded(model)))
        assert known.success.any()
        assert asked.success.sum() >= 0.8 * known.success.sum()
        # An image broken by the first goal is not attacked with the others.
        assert int(asked.backwards.min()) < int(asked.backwards.max())


def test_the_way_from_the_search_to_the_model_is_short() -> None:
    """Whoever reads PGD in a debugger passes so many of our functions before the model answers."""
    ways: list[list[str]] = []

    def look_back(module: nn.Module, inputs: Any) -> None:
        frame, names = sys._getframe(), []
        while frame.f_back is not None:
            if frame.f_code.co_filename.startswith(str(Path(ecnn.__file__).parent)):
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        ways.append(names)

    model = random_linear(3, 12)
    model.register_forward_pre_hook(look_back)
    PGD(norm="linf", eps=0.1, steps=2, step_size=0.1, early_exit=False)(model, *images_and_labels())
    assert max(names.index("search") for names in ways if "search" in names) <= 8


def test_averages_are_counted_and_described() -> None:
    view = Averaged(view="scores", passes=3)
    assert view.passes_per_look == 3
    assert Averaged(view=view, passes=2).passes_per_look == 6
    with pytest.raises(InputError, match="passes must be"):
        Averaged(view="scores", passes=0)
    with pytest.raises(InputError, match="no DLR"):
        PGD(norm="linf", eps=0.1, steps=1, step_size=0.1, loss="dlr", on=Averaged(view="members", passes=2))
    told = describe(PGD(norm="linf", eps=0.1, steps=1, step_size=0.1, on=view))["on"]
    assert (told["name"], told["view"], told["passes"]) == ("averaged", "scores", 3)


def test_a_row_does_not_depend_on_the_others() -> None:
    model = tiny_ecnn().double()
    images, labels = images_and_labels()
    attack = PGD(norm="linf", eps=0.1, steps=5, step_size=0.04, start="image")
    together = attack(model, images, labels)
    alone = torch.cat([attack(model, images[i : i + 1], labels[i : i + 1]) for i in range(len(images))])
    assert torch.allclose(together, alone, atol=1e-12)


@pytest.mark.parametrize("start", ["uniform", "image", "odi"])
def test_linear_model_reaches_the_optimum(start: Any) -> None:
    """Two classes: the margin's worst point is the corner that the weight difference points at, cut to [0, 1]."""
    model = random_linear(2, 12, middle=0)
    images, _ = images_and_labels()
    labels = torch.tensor([0, 1, 0, 1, 0])
    crafted = PGD(norm="linf", eps=0.2, steps=40, step_size=0.03, start=start, keep="last")(
        model, images, labels
    )
    direction = (model.weight[1] - model.weight[0]).detach().sign().view(3, 2, 2)
    signs = torch.where(labels == 0, 1.0, -1.0)[:, None, None, None]
    optimum = (images + 0.2 * signs * direction).clamp(0, 1)
    assert torch.allclose(crafted, optimum, atol=1e-9)


def test_more_steps_never_mend_an_image() -> None:
    model = tiny_ecnn()
    images, labels = images_and_labels(batch=40, dtype=torch.float32)
    labels = model(images).argmax(1)
    broken = []
    for steps in (0, 1, 2, 5, 10):
        attack = PGD(norm="linf", eps=0.3, steps=steps, step_size=0.05, start="image", early_exit=False)
        broken.append(attack.run(model, images, labels).success)
    for fewer, more in itertools.pairwise(broken):
        assert (more >= fewer).all()
    assert not broken[0].any()
    assert broken[-1].any()


def test_slack_stops_pushing() -> None:
    model = random_linear(2, 12, middle=0)
    images, labels = images_and_labels()
    labels = labels.clamp(max=1)
    far = PGD(norm="linf", eps=1.0, steps=50, step_size=0.05, start="image", keep="last")(
        model, images, labels
    )
    near = PGD(norm="linf", eps=1.0, steps=50, step_size=0.05, start="image", keep="last", loss_slack=0.1)(
        model, images, labels
    )

    def lead(points: Tensor) -> Tensor:
        scores: Tensor = model(points).detach()
        return scores.gather(1, 1 - labels[:, None]) - scores.gather(1, labels[:, None])

    assert (lead(near) > 0).all()
    assert (lead(near) < lead(far)).all()


@pytest.mark.parametrize("value", [-0.01, 1.01, 255.0, math.nan])
def test_images_outside_the_unit_range_are_refused(value: float) -> None:
    images, labels = images_and_labels(dtype=torch.float32)
    images[2, 1, 0, 1] = value
    with pytest.raises(InputError, match=r"pixels in \[0, 1\].*ecnn\.Normalized"):
        PGD(norm="linf", eps=0.1, steps=1, step_size=0.1)(tiny_ecnn(), images, labels)


@pytest.mark.parametrize("member_output", ["logit", "symbols"])
def test_member_margins_by_hand(member_output: Any) -> None:
    model = tiny_ecnn(member_output=member_output)
    images, labels = images_and_labels(dtype=torch.float32)
    with torch.no_grad():
        logits, margins = model.member_logits(images), member_margins(model, images, labels)
    for row, label in enumerate(labels.tolist()):
        for task, symbol in enumerate(model.code.symbols[label].tolist()):
            if member_output == "logit":
                expected = logits[row, task] * (2 * symbol - 1)
            else:
                expected = logits[row, task, symbol] - logits[row, task, 1 - symbol]
            assert float(margins[row, task]) == pytest.approx(float(expected), abs=1e-5)


def test_a_common_level_of_symbols_moves_no_view() -> None:
    """What the authors' sigmoid decoder depends on, differences do not see."""
    model = tiny_ecnn(member_output="symbols")
    shifted = _Shifted(model, 7.0)
    images, labels = images_and_labels(dtype=torch.float32)
    with torch.no_grad():
        moved, plain = (decode_linearly(*members_of(each, images)) for each in (shifted, model))
        assert torch.allclose(moved, plain, atol=1e-4)
        assert torch.allclose(
            member_margins(shifted, images, labels), member_margins(model, images, labels), atol=1e-4
        )
        assert not torch.allclose(model.decode(shifted.member_logits(images)), model(images), atol=0.1)


class _Shifted(nn.Module):
    """The model with a constant added to every member logit."""

    def __init__(self, model: ECNN, level: float) -> None:
        super().__init__()
        self.model, self.level, self.code_symbols = model, level, model.code_symbols

    def member_logits(self, images: Tensor) -> Tensor:
        return self.model.member_logits(images) + self.level


def test_a_saturated_decoder_hides_from_scores_and_not_from_members() -> None:
    model = Saturated()
    images, labels = images_of_classes(5)
    assert (model(images).argmax(1) == labels).float().mean() == 1

    def robust(on: str) -> float:
        crafted = PGD(norm="linf", eps=0.3, steps=50, step_size=0.02, on=on, start="image")(
            model, images, labels
        )
        return float((model(crafted).argmax(1) == labels).float().mean())

    assert robust("scores") > 0.9
    assert robust("members") == robust("linear") == 0


class Levelled(Saturated):
    """Members of two symbols whose common level every pixel raises; a sigmoid decoder reads them (FACTS of q = 2)."""

    def member_logits(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)[:, :10]
        level = 1 + 5 * (pixels - 0.3).sum(dim=1)[:, None]
        half = pixels @ self.signs.to(pixels.dtype)
        return torch.stack([level - half, level + half], dim=2)

    def decode(self, member_logits: Tensor) -> Tensor:
        return torch.einsum(
            "bnk,cnk->bc",
            torch.sigmoid(member_logits),
            nn.functional.one_hot(self.code_symbols).to(member_logits.dtype),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.member_logits(images))


def test_a_free_common_level_satisfies_the_attack_and_keeps_the_answer() -> None:
    """The paper's q-ary effect: on scores the margin shrinks through the level, and no prediction changes.

    In float64, where no gradient is zero: nothing is hidden, the attack only finds another way down.
    """
    model = Levelled()
    images, labels = images_of_classes(5)
    images = images.double()
    budget: dict[str, Any] = {
        "norm": "linf",
        "eps": 0.3,
        "steps": 50,
        "step_size": 0.02,
        "start": "image",
        "keep": "last",
    }

    def after(on: str) -> tuple[float, Tensor]:
        points = PGD(on=on, **budget)(model, images, labels)
        return float((model(points).argmax(1) == labels).float().mean()), score_margin(model(points), labels)

    clean = score_margin(model(images), labels)
    on_scores, margins = after("scores")
    assert on_scores == 1
    assert float(margins.median()) < 0.05 * float(clean.median())  # the optimiser is satisfied
    assert after("members")[0] == after("linear")[0] == 0


@pytest.mark.slow
@pytest.mark.data("cifar-10-batches-py")
def test_the_papers_effect_on_cifar() -> None:
    """The shipped q = 2 hinge model, 50 test images, the authors' PGD against the same budget on the members."""
    model = ecnn.load_model("cifar10-ecnn30-q2").eval()
    images, labels = ecnn.load_data("cifar10", root=DATA).test[:50]
    budget: dict[str, Any] = {"norm": "linf", "eps": 0.04, "loss_slack": 50, "keep": "last"}

    def after(**options: Any) -> float:
        points = PGD(**budget, **options)(model, images, labels)
        return float((model(points).argmax(1) == labels).float().mean())

    clean = float((model(images).argmax(1) == labels).float().mean())
    assert after(steps=30, step_size=0.02, on="scores") >= clean - 0.02
    assert after(steps=15, step_size=0.01, on="members") <= 0.01


def test_many_random_numbers_are_drawn_in_pieces_and_are_the_same() -> None:
    draws = Draws.of(3, torch.arange(2))
    with Counting() as counted:
        drawn = draws.uniform(3, 250_000)
    whole = ((draws.bits(3, 250_000) >> 40) & (2**24 - 1)).to(torch.float32) * 2.0**-24
    assert torch.equal(drawn, whole)
    assert counted.largest == drawn.numel()
    assert max(counted.calls.values()) > 1  # more than one piece
