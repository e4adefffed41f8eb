"""Minimum-norm attacks: closed-form distances, confidence, pixels at the ends, what saturation hides, and the cost."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import Constant, Linear, Saturated, Wrapped, images_of_classes, random_linear, tiny_ecnn

from ecnn.attacks.base import Attack, Target
from ecnn.attacks.carlini import BlindSpot, CarliniWagnerL2, MemberCarliniWagner, _Descent
from ecnn.attacks.minimal import FMN, DeepFool, MinimumNormAttack
from ecnn.attacks.norms import NORMS
from ecnn.attacks.views import Aim, Look
from ecnn.errors import InputError

PIXELS = (3, 2, 2)


def linear(num_classes: int, pixels: int = 12) -> Linear:
    """Scores zero at mid-gray."""
    return random_linear(num_classes, pixels, seed=num_classes)


def equidistant(num_classes: int) -> Linear:
    """Every two classes' weights are equally far apart in all norms, so that the second best class is the nearest.

    An attack that follows the best wrong score ends at the border of that class, which need not be the nearest one.
    """
    model = linear(num_classes)
    signs = model.weight.detach().sign()
    own = torch.arange(signs.shape[1]) % num_classes == torch.arange(num_classes)[:, None]
    model.weight = nn.Parameter(signs * own)
    return model


def near_gray(batch: int = 12, spread: float = 0.1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Images so near to mid-gray that the nearest border of a linear model is inside [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    return 0.5 + spread * (
        2 * torch.rand(batch, *PIXELS, generator=generator, dtype=torch.float64).to(dtype) - 1
    )


def smallest_distance(
    model: Linear, images: Tensor, labels: Tensor, norm: str, confidence: float = 0.0
) -> Tensor:
    """(batch,) the least over the wrong classes of (margin + confidence) / dual norm of the weight difference."""
    weight = model.weight.detach()
    scores = model(images).detach()
    order = {"linf": 1, "l2": 2, "l1": math.inf}[norm]
    results = []
    for row, label in enumerate(labels.tolist()):
        others = [other for other in range(len(weight)) if other != label]
        results.append(
            min(
                (scores[row, label] - scores[row, other] + confidence)
                / torch.linalg.vector_norm(weight[label] - weight[other], ord=order)
                for other in others
            )
        )
    return torch.stack(results)


def measured(points: Tensor, images: Tensor, norm: str) -> Tensor:
    order = {"linf": math.inf, "l2": 2, "l1": 1}[norm]
    lengths: Tensor = (points - images).flatten(1).norm(order, dim=1)
    return lengths


def carlini(**changes: Any) -> CarliniWagnerL2:
    return CarliniWagnerL2(**{"steps": 100, "search_steps": 6, "initial_constant": 0.1, **changes})


ALL: list[MinimumNormAttack] = [
    carlini(steps=30, search_steps=4),
    BlindSpot(steps=30, search_steps=4, initial_constant=0.1),
    MemberCarliniWagner(steps=30, search_steps=4, initial_constant=0.1, lr=0.02),
    DeepFool(norm="l2"),
    DeepFool(norm="linf"),
    FMN(norm="l2", steps=30),
    FMN(norm="linf", steps=30),
    DeepFool(norm="l1"),
    FMN(norm="l1", steps=30),
]


def name_of(attack: Any) -> str:
    return f"{type(attack).__name__}-{getattr(attack, 'norm', 'l2')}"


@pytest.fixture(params=[2, 3])
def num_classes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("norm", NORMS)
def test_deepfool_ends_at_its_overshoot_of_the_smallest_distance(norm: Any, num_classes: int) -> None:
    model, images = linear(num_classes), near_gray()
    labels = model(images).argmax(1)
    attacked = DeepFool(norm=norm, overshoot=0.05).run(model, images, labels)
    assert attacked.success.all()
    expected = 1.05 * smallest_distance(model, images, labels, norm)
    assert torch.allclose(measured(attacked.images, images, norm), expected, rtol=1e-9, atol=0)
    # the verdict, a look, one gradient per wrong class with its pass, the look that sees the success, the verdict
    assert attacked.forwards.tolist() == [5] * len(images)
    assert attacked.backwards.tolist() == [num_classes - 1] * len(images)


@pytest.mark.parametrize("norm", NORMS)
def test_fmn_reaches_the_smallest_distance(norm: Any, num_classes: int) -> None:
    model, images = equidistant(num_classes), near_gray()
    labels = model(images).argmax(1)
    attacked = FMN(norm=norm, steps=300).run(model, images, labels)
    ratio = measured(attacked.images, images, norm) / smallest_distance(model, images, labels, norm)
    assert attacked.success.all()
    assert 1 <= ratio.min() <= ratio.max() < 1 + 1e-5
    assert attacked.forwards.tolist() == [303] * len(images)
    assert attacked.backwards.tolist() == [300] * len(images)


@pytest.mark.parametrize(
    ("pull_steps", "lr", "slack"), [(0, 0.001, 1e-3), (10, 0.01, 1e-3), (30, 0.001, 1e-5)]
)
def test_carlini_wagner_reaches_the_smallest_distance(
    pull_steps: int, lr: float, slack: float, num_classes: int
) -> None:
    """After halving the line 30 times, what remains is the error of its direction."""
    model, images = equidistant(num_classes), near_gray()
    labels = model(images).argmax(1)
    attack = carlini(steps=400, search_steps=9, lr=lr, pull_steps=pull_steps)
    crafted = attack(model, images, labels)
    ratio = measured(crafted, images, "l2") / smallest_distance(model, images, labels, "l2")
    assert 1 <= ratio.min() <= ratio.max() < 1 + slack


def test_confidence_is_kept_and_costs_distance() -> None:
    model, images = equidistant(3), near_gray()
    labels = model(images).argmax(1)
    lengths = []
    for confidence in (0.0, 0.5, 1.0):
        crafted = carlini(steps=300, search_steps=9, confidence=confidence)(model, images, labels)
        scores = model(crafted).detach()
        lead = scores.scatter(1, labels[:, None], -torch.inf).amax(1) - scores.gather(
            1, labels[:, None]
        ).squeeze(1)
        assert lead.min() >= confidence
        lengths.append(measured(crafted, images, "l2"))
        ratio = lengths[-1] / smallest_distance(model, images, labels, "l2", confidence)
        assert ratio.max() < 1.01
    assert (lengths[0] < lengths[1]).all()
    assert (lengths[1] < lengths[2]).all()


def test_without_the_confidence_a_misclassified_image_is_still_returned() -> None:
    """No pixels make these scores differ by 5, but misclassified images exist, and the contract is to return them."""
    model, images = Wrapped(linear(3), after=torch.tanh), near_gray()
    labels = model(images).argmax(1)
    attacked = carlini(confidence=5.0).run(model, images, labels)
    assert attacked.success.all()
    assert (model(attacked.images).argmax(1) != labels).all()


def boxed_optimum(direction: Tensor, gap: float, image: Tensor) -> float:
    """Smallest L2 length of a move inside [0, 1] that gains `gap` along the direction: cut moves, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        move = (image + middle * direction).clamp(0, 1) - image
        low, high = (middle, high) if float(move @ direction) < gap else (low, middle)
    return float(((image + high * direction).clamp(0, 1) - image).norm())


@pytest.mark.parametrize(
    ("attack", "slack"),
    [
        (carlini(steps=400, search_steps=9), 1.01),
        (carlini(steps=60), 1.05),
        (FMN(norm="l2", steps=500), 1.02),
        (DeepFool(norm="l2"), 1.04),
    ],
    ids=["carlini", "carlini-few-steps", "fmn", "deepfool"],
)
def test_pixels_at_the_ends_are_no_obstacle(attack: Any, slack: float) -> None:
    """Black and white pixels only, most of which must move away from their end: the optimum has cut moves."""
    model = linear(2, 16)
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(2, (16, 1, 4, 4), generator=generator).double()
    labels = model(images).argmax(1)
    attacked = attack.run(model, images, labels)
    assert attacked.success.all()
    assert 0 <= attacked.images.min() <= attacked.images.max() <= 1
    weight, scores = model.weight.detach(), model(images).detach()
    for row, label in enumerate(labels.tolist()):
        optimum = boxed_optimum(
            weight[1 - label] - weight[label],
            float(scores[row, label] - scores[row, 1 - label]),
            images[row].flatten(),
        )
        length = float((attacked.images[row] - images[row]).norm())
        assert optimum * (1 - 1e-9) <= length < slack * optimum


@pytest.mark.parametrize("symbols", [False, True])
def test_a_saturated_decoder_hides_from_scores_and_not_from_members(symbols: bool) -> None:
    model = Saturated(symbols=symbols)
    images, labels = images_of_classes(2)
    assert (model(images).argmax(1) == labels).all()
    settings: dict[str, Any] = {"steps": 100, "search_steps": 5, "initial_constant": 0.1}
    assert not CarliniWagnerL2(**settings).run(model, images, labels).success.any()
    by_members = MemberCarliniWagner(**settings).run(model, images, labels)
    assert by_members.success.all()
    by_linear = CarliniWagnerL2(**settings, on="linear").run(model, images, labels)
    assert by_linear.success.all()
    # A class is left when it and another look alike, at 0.4 / sqrt 2 from where it is; saturated scores tie there.
    lengths = measured(by_members.images, images, "l2")
    assert 0.9 * 0.35 / 2**0.5 < lengths.min() <= lengths.max() < 1.35 * 0.45 / 2**0.5


def test_more_targets_never_lengthen_the_way() -> None:
    model = Saturated()
    images, labels = images_of_classes(2)
    lengths = [
        measured(
            MemberCarliniWagner(steps=30, search_steps=3, initial_constant=0.1, lr=0.02, targets=targets)(
                model, images, labels
            ),
            images,
            "l2",
        )
        for targets in (1, 3, 20)
    ]
    assert (lengths[1] <= lengths[0]).all()
    assert (lengths[2] <= lengths[1]).all()
    assert (lengths[2] < lengths[0]).any()


def test_member_confidence_reaches_every_member() -> None:
    model = Saturated()
    images, labels = images_of_classes(2)
    attack = MemberCarliniWagner(steps=200, search_steps=6, initial_constant=0.1, confidence=10.0, lr=0.02)
    crafted = attack(model, images, labels)
    logits = model.member_logits(crafted)
    goal = model(crafted).argmax(1)
    assert (goal != labels).all()
    assert (2 * logits * model.signs[goal]).amin(1).min() >= 10


def test_blind_spot_counts_from_the_shrunken_image() -> None:
    """With a bias toward class 1 shrinking alone breaks images of class 0 that are near the border."""
    bias = torch.tensor([0.0, 0.1], dtype=torch.float64)
    model, images = Linear(linear(2).weight.detach(), bias, middle=0.5), near_gray(batch=40)
    labels = model(images).argmax(1)
    shrunken = 0.5 + 0.6 * (images - 0.5)
    already = model(shrunken).argmax(1) != labels
    assert already.any()
    attacked = BlindSpot(shrink=0.6, steps=300, search_steps=9, initial_constant=0.1).run(
        model, images, labels
    )
    assert attacked.success.all()
    assert torch.allclose(attacked.images[already], shrunken[already])
    assert attacked.backwards[already].sum() == 0
    rest = ~already
    scores = model(shrunken).detach()
    margins = (scores[:, 0] - scores[:, 1]).abs()[rest]
    weight = model.weight.detach()
    expected = margins / (weight[0] - weight[1]).norm()
    ratio = measured(attacked.images[rest], shrunken[rest], "l2") / expected
    assert 1 <= ratio.min() <= ratio.max() < 1.01


def test_what_a_search_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two verdicts, steps x search_steps passes, and the halvings at the end; gradients only where they have weight."""
    model, images = linear(3), near_gray()
    labels = model(images).argmax(1)
    attack = carlini(steps=25, search_steps=3, abort_early=False, pull_steps=7)
    attacked = attack.run(model, images, labels)
    assert attacked.success.all()

    def always(descent: Any, points: Tensor) -> tuple[Look, Tensor]:
        state = descent.state
        looked: tuple[Look, Tensor] = descent.target.ascend(
            descent.view, points, Aim(state.labels, state.goals)
        )
        return looked

    monkeypatch.setattr(_Descent, "_ascend", always)
    whole = attack.run(model, images, labels)
    assert whole.backwards.tolist() == [75] * len(images)
    assert whole.forwards.tolist() == [2 + 75 + 7] * len(images)
    torch.testing.assert_close(attacked.images, whole.images)
    woken = attacked.forwards - whole.forwards  # asked twice: it needed no gradient one step before
    assert (woken >= 0).all()
    assert (woken < attacked.backwards).all()
    assert (attacked.backwards < 60).all()
    monkeypatch.undo()
    failed = carlini(steps=300, search_steps=3).run(Constant(), images, torch.zeros_like(labels))
    # Nothing changes the loss, so each constant ends at its second check, after 30 steps each, and nothing is pulled.
    assert failed.backwards.tolist() == [180] * len(images)
    assert failed.forwards.tolist() == [182] * len(images)


def test_aborting_saves_passes_and_hardly_lengthens_the_way() -> None:
    model, images = tiny_ecnn().double(), near_gray(batch=8, spread=0.5)
    labels = model(images).argmax(1)
    patient = carlini(steps=200, abort_early=False).run(model, images, labels)
    hasty = carlini(steps=200).run(model, images, labels)
    assert (hasty.success == patient.success).all()
    assert hasty.forwards.sum() < 0.6 * patient.forwards.sum()
    lengths = [measured(each.images, images, "l2")[each.success].median() for each in (patient, hasty)]
    assert lengths[1] < 1.03 * lengths[0]


def test_rows_leave_the_batch() -> None:
    """What the target counts is what the model is given, image by image, and that shrinks as searches end."""
    images = near_gray(batch=16, spread=0.5)
    model = tiny_ecnn().double()
    labels = model(images).argmax(1)
    sizes: list[int] = []
    handle = model.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    attacked = carlini(steps=100).run(model, images, labels)
    handle.remove()
    assert sum(sizes) == int(attacked.forwards.sum())
    assert len(set(sizes)) > 2


def test_fewer_candidates_are_a_longer_way() -> None:
    model, images = linear(8), near_gray(batch=40)
    labels = model(images).argmax(1)
    few, all_of_them = (
        measured(DeepFool(norm="l2", num_candidates=count)(model, images, labels), images, "l2")
        for count in (2, 10)
    )
    assert torch.allclose(all_of_them, 1.02 * smallest_distance(model, images, labels, "l2"), rtol=1e-9)
    assert (few >= all_of_them * (1 - 1e-12)).all()
    assert (few > 1.01 * all_of_them).any()


@pytest.mark.parametrize("attack", [DeepFool(norm="l2"), FMN(norm="l2", steps=50), carlini()], ids=name_of)
def test_found_images_survive_another_pass_in_float32(attack: Any) -> None:
    """The nearest image is at the border, where rounding decides: what is found in a batch must hold one by one."""
    model = tiny_ecnn()
    images = near_gray(batch=30, spread=0.5, dtype=torch.float32)
    labels = model(images).argmax(1)
    attacked = attack.run(model, images, labels)
    alone = torch.cat([model(image[None]).argmax(1) for image in attacked.images])
    assert torch.equal(alone != labels, attacked.success)
    assert attacked.success.float().mean() > 0.6


def test_search_returns_the_image_where_nothing_was_found() -> None:
    images, labels = near_gray(), torch.zeros(12, dtype=torch.int64)
    target = Target(Constant(), len(images), images.device)
    for attack in (carlini(steps=10), DeepFool(norm="l2"), FMN(norm="l2", steps=10)):
        assert torch.equal(attack.search(target, images, labels, None), images)  # type: ignore[arg-type]


def test_members_are_needed_for_the_member_attack() -> None:
    images = near_gray()
    with pytest.raises(InputError, match="has no members"):
        MemberCarliniWagner(steps=5, search_steps=1, initial_constant=0.1)(
            linear(3), images, linear(3)(images).argmax(1)
        )


def test_all_are_attacks() -> None:
    for attack in ALL:
        assert isinstance(attack, Attack)
        assert "eps" not in {field.name for field in dataclasses.fields(attack)}
