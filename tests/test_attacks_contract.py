"""The contract, for every attack there is: what comes back, what is left alone, and what nothing depends on."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import coded_model, distance

from ecnn.attacks import ATTACKS, PGD, Attack, EstimatedPGD, Transfer
from ecnn.constructions import random_code
from ecnn.errors import InputError
from ecnn.evaluation.batch import predict
from ecnn.model import ECNN

pytestmark = pytest.mark.usefixtures("one_thread", "short_autoattack")

BALL: dict[str, Any] = {"norm": "linf", "eps": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "fgsm": BALL,
    "bim": {**BALL, "steps": 4, "step_size": 0.04},
    "pgd": {**BALL, "steps": 4, "step_size": 0.04, "restarts": 2, "targets": 2, "start": "odi"},
    "apgd": {**BALL, "steps": 6, "loss": "dlr", "targets": 2},
    "fab": {**BALL, "steps": 5},
    "square": {**BALL, "queries": 12},
    "autoattack": BALL,
    "race": BALL,
    "cw": {"steps": 12, "search_steps": 3, "initial_constant": 1.0, "lr": 0.05},
    "member_cw": {"steps": 12, "search_steps": 3, "initial_constant": 1.0, "lr": 0.05},
    "blindspot": {"steps": 12, "search_steps": 3, "initial_constant": 1.0, "lr": 0.05},
    "jsma": {"max_pixel_fraction": 0.3},
    "sparse_pgd": {"max_pixel_fraction": 0.3, "steps": 4, "step_size": 0.3, "restarts": 2, "targets": 2},
    "deepfool": {"norm": "l2", "steps": 5},
    "fmn": {"norm": "l2", "steps": 8},
    "hopskipjump": {"norm": "l2", "steps": 2, "samples": 8},
    "rays": {**BALL, "queries": 400},
    "noise": {**BALL, "samples": 3},
    "transformed_pgd": {**BALL, "steps": 3, "step_size": 0.05, "transformations": 2},
    "estimated_pgd": {**BALL, "steps": 3, "step_size": 0.05, "pairs": 5, "restarts": 2, "targets": 2},
    "none": {},
}
OTHER_BALLS: dict[str, dict[str, Any]] = {"l2": {"norm": "l2", "eps": 0.4}, "l1": {"norm": "l1", "eps": 1.5}}
WITH_A_NORM = [name for name, options in SETTINGS.items() if "norm" in options and name != "hopskipjump"]
IN_A_BALL = [name for name, options in SETTINGS.items() if "eps" in options]
SLOW = pytest.param("autoattack", marks=pytest.mark.slow)
EVERY = [SLOW if name == "autoattack" else name for name in SETTINGS]
#: Settings under which an attack goes another way, and the attack that has no name on the command line.
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"{name}-{norm}": ball
        for norm, ball in OTHER_BALLS.items()
        for name in ("apgd", "fab", "square", "noise", "rays", "estimated_pgd")
    },
    "estimated_pgd-spsa": {"estimator": "spsa", "memory": False},
    "estimated_pgd-prior": {},
    "noise-corners": {"kind": "corners"},
    "jsma-one": {"pixels": "one"},
    "jsma-each": {"pixels": "one", "goal": "each"},
    "jsma-tempered": {"on": "tempered"},
    "deepfool-linf": {"norm": "linf"},
    "fmn-linf": {"norm": "linf"},
    "hopskipjump-linf": {"norm": "linf"},
    "transfer": {},
}
VARIED = [*EVERY, *VARIANTS]


def make(name: str, **changes: Any) -> Attack:
    if name == "transfer":
        source: dict[str, Any] = {"source": coded_model(), "attack": make("pgd", early_exit=False)}
        return Transfer(**{**source, **changes})
    kind = name.partition("-")[0]
    if name == "estimated_pgd-prior":
        changes = {"prior": coded_model(), **changes}
    return ATTACKS[kind](**{**SETTINGS[kind], **VARIANTS.get(name, {}), **changes})


def batch(size: int = 5) -> tuple[Tensor, Tensor]:
    """Images with the labels that the model gives them, but for one that it has wrong from the start."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(size, 2, 6, 6, generator=generator, dtype=torch.float64)
    labels = coded_model()(images).argmax(1)
    labels[1] = (labels[1] + 1) % 5
    return images, labels


class Constant(nn.Module):
    """Says the same of every image, with a gradient of zero: no attack can succeed."""

    def __init__(self, answer: int = 0) -> None:
        super().__init__()
        self.code = random_code(5, 7, seed=0)
        self.answer = answer

    def member_logits(self, images: Tensor) -> Tensor:
        signs = torch.from_numpy(self.code.signed[self.answer].astype("float64"))
        return 3 * signs.expand(len(images), -1) + 0 * images.sum(dim=(1, 2, 3))[:, None]

    def decode(self, member_logits: Tensor) -> Tensor:
        return member_logits @ torch.from_numpy(self.code.signed.T.astype("float64"))

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.member_logits(images))


def test_every_named_attack_is_here() -> None:
    assert list(SETTINGS) == list(ATTACKS)


@pytest.mark.parametrize("name", VARIED)
def test_what_comes_back(name: str) -> None:
    model, (images, labels) = coded_model(), batch()
    attack, given = make(name), images.clone()
    found = attack.run(model, images, labels, seed=1)
    assert torch.equal(images, given)
    assert found.images.shape == images.shape
    assert found.images.dtype == images.dtype
    assert not found.images.requires_grad
    assert 0 <= found.images.min() <= found.images.max() <= 1
    with torch.no_grad():
        fresh = model(found.images).argmax(1)
    assert torch.equal(found.success, fresh != labels)
    assert torch.equal(found.predictions, fresh)
    assert torch.equal(found.images[~found.success], images[~found.success])
    assert torch.equal(found.images[1], images[1])  # wrong from the start: left alone
    assert torch.equal(found.images, attack(model, images, labels, seed=1))
    assert_in_the_ball(attack, found.images, images)


def assert_in_the_ball(attack: Any, points: Tensor, images: Tensor, slack: float = 1e-12) -> None:
    if hasattr(attack, "max_pixel_fraction"):
        changed = (points != images).flatten(1).sum(dim=1)
        assert changed.max() <= attack.max_pixel_fraction * images[0].numel()
    if hasattr(attack, "eps"):
        assert distance(points, images, attack.norm).max() <= attack.eps + slack


@pytest.mark.parametrize("name", ["pgd", "noise", "square", "estimated_pgd"])
def test_the_verdict_is_of_the_image_that_comes_back(name: str) -> None:
    """Also of an image that is wrong when clean, where a search that goes on all the same ends at a right point."""
    model, (images, _) = coded_model(), batch(12)
    classes = model(images).argmax(1)
    near = make("pgd", steps=20, eps=0.3)(
        model, images, classes
    )  # these have another class, close to a border
    found = make(name, early_exit=False).run(model, near, classes, seed=1)
    with torch.no_grad():
        fresh = model(found.images).argmax(1)
    assert torch.equal(found.predictions, fresh)
    assert torch.equal(found.success, fresh != classes)


def test_a_search_that_ends_where_the_model_is_right_leaves_the_wrong_clean_image() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Back(Attack):
        def search(self, target: Any, images: Tensor, labels: Tensor, draws: Any) -> Tensor:
            return good

    model, (images, labels) = coded_model(), batch()
    good = images[[0]].expand_as(images)
    labels = torch.full_like(labels, int(model(good)[0].argmax()))
    wrong = model(images).argmax(1) != labels
    assert wrong.any()
    assert not wrong.all()
    found = Back(early_exit=False).run(model, images, labels)
    assert torch.equal(found.images, images)
    assert torch.equal(found.success, wrong)
    assert torch.equal(found.predictions, model(images).argmax(1))


def test_training_attacks_move_away_from_predicted_classes_if_asked() -> None:
    """With wrong labels an attack on predicted classes gives what one with those classes as labels gives."""
    model, (images, _) = coded_model().float(), batch()
    images = images.float()
    classes = model(images).argmax(1)

    def craft(classes: Tensor, **changes: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return make("pgd", **changes)(model, images, classes, generator=generator)

    wrong = (classes + 1) % 5
    assert torch.equal(craft(wrong, labels="predicted"), craft(classes))
    assert not torch.equal(craft(wrong), craft(classes))


@pytest.mark.parametrize("change", [{"early_exit": False}, {"keep": "last"}], ids=["whole", "last"])
@pytest.mark.parametrize("name", VARIED)
def test_what_comes_back_in_float32_of_a_whole_search(name: str, change: dict[str, Any]) -> None:
    if "keep" in change:
        if name.startswith(
            ("autoattack", "race", "cw", "member_cw", "blindspot", "deepfool", "fmn", "jsma-each")
        ):
            return  # they have no last iterate
        change = {
            **change,
            **(
                {"targets": 0, "restarts": 1}
                if name.startswith(("pgd", "apgd", "estimated_pgd", "sparse_pgd"))
                else {}
            ),
        }
    model, (images, labels) = coded_model().float(), batch()
    images, attack = images.float(), make(name, **change)
    if isinstance(attack, Transfer):
        attack.source.float()
    if isinstance(attack, EstimatedPGD) and attack.prior is not None:
        attack.prior.float()
    crafted = attack(model, images, labels, generator=torch.Generator().manual_seed(0))
    assert crafted.shape == images.shape
    assert crafted.dtype == torch.float32
    assert not crafted.requires_grad
    assert 0 <= crafted.min() <= crafted.max() <= 1
    assert_in_the_ball(attack, crafted, images, slack=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "pgd",
        "apgd",
        "square",
        "hopskipjump",
        "hopskipjump-linf",
        "rays",
        "noise",
        "noise-l2",
        "estimated_pgd",
    ],
)
def test_another_seed_is_another_search(name: str) -> None:
    model, (images, labels) = coded_model(), batch()
    one, other = (make(name, early_exit=False)(model, images, labels, seed=seed) for seed in (1, 2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("norm", OTHER_BALLS)
@pytest.mark.parametrize("name", [name for name in IN_A_BALL if name != "autoattack"])
def test_other_balls(name: str, norm: str) -> None:
    model, (images, labels) = coded_model(), batch()
    ball = OTHER_BALLS[norm]
    found = make(name, **ball).run(model, images, labels)
    lengths = (found.images - images).flatten(1).norm({"l2": 2, "l1": 1}[norm], dim=1)
    assert lengths.max() <= ball["eps"] + 1e-12
    assert 0 <= found.images.min() <= found.images.max() <= 1


@pytest.mark.parametrize("name", [SLOW if name == "autoattack" else name for name in WITH_A_NORM])
def test_every_attack_with_a_norm_knows_l1(name: str) -> None:
    """What comes back is as the model says, and an image alone has the same fate as among others."""
    model, (images, labels) = coded_model(), batch()
    changes = {"norm": "l1", "eps": 2.0, "step_size": 0.5}
    attack = make(name, **{key: value for key, value in changes.items() if key in SETTINGS[name]})
    found = attack.run(model, images, labels, seed=1)
    assert torch.equal(found.success, model(found.images).argmax(1) != labels)
    assert torch.equal(found.images[~found.success], images[~found.success])
    assert found.success[torch.arange(5) != 1].any() or name == "noise"
    alone = attack.run(model, images[3:4], labels[3:4], seed=1, index=torch.tensor([3]))
    assert torch.allclose(alone.images, found.images[3:4], atol=1e-9, rtol=0)
    assert torch.equal(alone.forwards, found.forwards[3:4])


@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("name", [name for name in IN_A_BALL if name not in ("autoattack", "race")])
def test_a_ball_of_radius_zero_holds_the_image_alone(name: str, norm: str, keep: str) -> None:
    model, (images, labels) = coded_model(), batch(3)
    changes: dict[str, Any] = {"norm": norm, "eps": 0, "keep": keep}
    if keep == "last" and name in ("pgd", "apgd", "estimated_pgd"):
        changes |= {"targets": 0, "restarts": 1}
    assert torch.equal(make(name, **changes)(model, images, labels), images)


@pytest.mark.parametrize("name", VARIED)
def test_failure_returns_the_clean_image(name: str) -> None:
    images, _ = batch(3)
    found = make(name).run(Constant(), images, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(found.images, images)
    assert not found.success.any()


@pytest.mark.parametrize("name", VARIED)
def test_a_row_knows_nothing_of_the_others(name: str) -> None:
    """Alone, in another order or among others an image has the same fate and the same cost, bit for bit."""
    model, (images, labels) = coded_model(), batch()
    attack = make(name)
    together = attack.run(model, images, labels, seed=2)
    for rows in (torch.tensor([3]), torch.tensor([4, 0, 2])):
        apart = attack.run(model, images[rows], labels[rows], seed=2, index=rows)
        assert torch.allclose(apart.images, together.images[rows], atol=1e-9, rtol=0)
        assert torch.equal(apart.success, together.success[rows])
        assert torch.equal(apart.forwards, together.forwards[rows])
        assert torch.equal(apart.backwards, together.backwards[rows])


class Restless(nn.Module):
    """Disturbs whatever a pass can disturb, and fails after some passes.

    Args:
        bears: how many passes it bears.
    """

    seen: Tensor

    def __init__(self, bears: float = math.inf) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = coded_model(), nn.BatchNorm2d(2).double(), nn.Dropout(0.1)
        self.code, self.bears, self.passes = self.inner.code, bears, 0
        self.register_buffer("seen", torch.zeros(()))
        self.inner.trunk.requires_grad_(False)

    def member_logits(self, images: Tensor) -> Tensor:
        self.passes += 1
        self.seen += len(images)
        torch.rand(3), np.random.rand(), random.random()
        self.requires_grad_(True)
        with torch.enable_grad():
            self.norm(images.detach()).sum().backward()
        if self.passes > self.bears:
            raise RuntimeError("not once more")
        return self.inner.member_logits(self.norm(self.drop(images)))

    def decode(self, member_logits: Tensor) -> Tensor:
        return self.inner.decode(member_logits)

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.member_logits(images))


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that a pass could change, as values that can be compared."""
    return [
        {name: value.tolist() for name, value in model.state_dict().items()},
        {name: module.training for name, module in model.named_modules()},
        {
            name: (value.requires_grad, id(value.grad), repr(value.grad))
            for name, value in model.named_parameters()
        },
        [(*module._forward_hooks, *module._forward_pre_hooks) for module in model.modules()],
        (torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()),
        torch.is_grad_enabled(),
    ]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        (name, state)
        for state in ("train", "raises", "eval")
        for name in (*SETTINGS, *(VARIANTS if state == "train" else ()))
    ],
)
def test_what_is_left_alone(name: str, state: str) -> None:
    images, labels = batch(3)
    model, attack = Restless(1 if state == "raises" else math.inf), make(name)
    if isinstance(attack, Transfer):
        attack = dataclasses.replace(attack, source=Restless())
    models: list[Any] = [model, *([attack.source] if isinstance(attack, Transfer) else [])]
    for one in models:
        one.train(state != "eval")
        one.inner.branches.eval()
        for parameter in one.norm.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = [snapshot(one) for one in models]
    if state == "raises":
        with pytest.raises(RuntimeError, match="not once more"):
            attack.run(model, images, labels)
    else:
        attack.run(model, images, labels)
    assert [snapshot(one) for one in models] == before


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    """Tensors that are made without a word on where lie nowhere, as they would on a GPU beside a model that is not."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("name", VARIED)
def test_what_the_caller_has_switched_off_makes_no_difference(name: str) -> None:
    model, (images, labels), attack = coded_model(), batch(), make(name)
    expected = attack.run(model, images, labels, seed=1).images
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            for given in (images, images.clone()):
                assert torch.equal(attack.run(model, given, labels, seed=1).images, expected), off


@pytest.mark.parametrize("name", VARIED)
def test_where_tensors_are_made_by_default_makes_no_difference(
    name: str, request: pytest.FixtureRequest
) -> None:
    model, (images, labels), attack = coded_model(), batch(), make(name)
    expected = attack.run(model, images, labels, seed=1).images
    request.getfixturevalue("meta_by_default")
    assert torch.equal(attack.run(model, images, labels, seed=1).images, expected)


def test_attacks_say_where_gradients_are_not_to_be_had() -> None:
    model, (images, labels) = coded_model(), batch()
    with torch.inference_mode():
        made_there = coded_model()
        with pytest.raises(InputError, match=r"leave torch\.inference_mode"):
            make("pgd")(model, images, labels, generator=torch.Generator())
    with pytest.raises(InputError, match=r"made inside torch\.inference_mode"):
        make("pgd")(made_there, images, labels)
    assert make("pgd")(copy.deepcopy(made_there), images, labels).shape == images.shape


@pytest.mark.parametrize("name", EVERY)
def test_scores_that_are_infinite_or_no_numbers(name: str) -> None:
    """What an attack calls broken is what the evaluator counts, and the search goes on wherever scores are odd."""
    images, labels = batch()
    for odd in (math.inf, -math.inf, math.nan):
        model = Odd(odd)
        found = make(name).run(model, images, labels)
        assert torch.equal(found.predictions, predict(model, found.images))
        assert torch.equal(found.success, found.predictions != labels)
        assert 0 <= found.images.min() <= found.images.max() <= 1
        assert found.success[1]  # wrong from the start
        if odd is math.nan:
            assert (found.predictions == -1).any() or found.success.all() or name in ("noise", "none")


class Odd(Constant):
    """A coded model whose highest score is inf, or its lowest -inf, or whose scores are NaN where it is not sure."""

    def __init__(self, odd: float) -> None:
        super().__init__()
        self.inner, self.odd = coded_model(), odd
        self.code = self.inner.code

    def member_logits(self, images: Tensor) -> Tensor:
        return self.inner.member_logits(images)

    def decode(self, member_logits: Tensor) -> Tensor:
        scores = self.inner.decode(member_logits)
        if math.isnan(self.odd):
            best = scores.detach().topk(2, dim=1).values
            return torch.where(best[:, :1] - best[:, 1:] < 0.07, math.nan, scores)
        highest, lowest = scores.amax(dim=1, keepdim=True), scores.amin(dim=1, keepdim=True)
        is_odd = scores == (highest if self.odd > 0 else lowest)
        return torch.where(is_odd, self.odd, scores)


@pytest.mark.parametrize("name", ["pgd", "apgd", "fgsm"])
def test_checkpoints_of_either_kind_give_gradients(name: str) -> None:
    """torch's older kind, use_reentrant=True, refuses gradients of images alone; afterwards it does so again."""
    model, (images, labels) = coded_model(), batch()
    wanted = make(name).run(model, images, labels)
    for reentrant in (True, False):
        found = make(name).run(Checkpointed(model, reentrant=reentrant), images, labels)
        assert torch.equal(found.images, wanted.images)
        assert int(found.backwards.sum()) > 0
    pixels = images.clone().requires_grad_(True)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        torch.autograd.grad(Checkpointed(model, reentrant=True)(pixels).sum(), pixels)


class Checkpointed(nn.Module):
    """Another model, computed once more on the way back."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, images: Tensor) -> Any:
        return checkpoint(self.inner, images, use_reentrant=self.reentrant)


class Votes(Odd):
    """The same as votes of another type than numbers with a point."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(math.inf)
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.inner(images)
        return (scores == scores.amax(dim=1, keepdim=True)).to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("name", ["pgd", "square", "rays"])
def test_votes_that_are_no_floats(name: str, dtype: torch.dtype) -> None:
    images, labels = batch()
    found, wanted = (make(name).run(Votes(kind), images, labels) for kind in (dtype, torch.float32))
    assert torch.equal(found.images, wanted.images)
    assert torch.equal(found.predictions, wanted.predictions)


@pytest.mark.parametrize("name", EVERY)
def test_every_image_that_goes_through_the_model_is_counted(name: str) -> None:
    model, (images, labels) = coded_model(), batch()
    seen = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal seen
        seen += len(inputs[0])

    handle = model.trunk.register_forward_pre_hook(count)
    found = make(name).run(model, images, labels)
    handle.remove()
    assert int(found.forwards.sum()) == seen
    assert (found.backwards <= found.forwards * (2 if name == "jsma" else 5)).all()
    assert found.forwards[1] == 2  # wrong from the start: the first verdict and the last


@pytest.mark.parametrize("name", [name for name in EVERY if name != "jsma"])
def test_what_it_costs_is_known_beforehand(name: str) -> None:
    """By an image that is never broken. How far JSMA goes depends on the image; HopSkipJump and Race give up here."""
    images, _ = batch(2)
    found = make(name).run(Constant(), images, torch.zeros(2, dtype=torch.int64))
    stated = make(name).cost(num_classes=5)
    assert int(found.backwards.max()) <= 1.3 * stated.backwards
    assert int(found.forwards.max()) <= 1.3 * stated.forwards + 6
    if name not in ("hopskipjump", "race"):
        assert int(found.forwards.max()) >= 0.4 * stated.forwards


@pytest.mark.parametrize("name", EVERY)
def test_its_own_label_may_be_attacked(name: str) -> None:
    model, (images, labels) = coded_model(), batch(3)
    found = make(name, labels="predicted").run(model, images, (labels + 1) % 5)
    expected = make(name).run(model, images, model(images).argmax(1))
    assert torch.equal(found.images, expected.images)


@pytest.mark.parametrize("name", EVERY)
def test_early_exit_saves_and_never_mends(name: str) -> None:
    model, (images, labels) = coded_model(), batch()
    quick, whole = (
        make(name).run(model, images, labels),
        make(name, early_exit=False).run(model, images, labels),
    )
    assert (whole.success >= quick.success).all() or name in ("jsma",)
    assert int(quick.forwards.sum()) <= int(whole.forwards.sum())


def test_transfer_is_an_attack_too() -> None:
    model, (images, labels) = coded_model(), batch()
    inner = PGD(norm="linf", eps=0.1, steps=4, step_size=0.04)
    found = Transfer(source=model, attack=inner).run(model, images, labels)
    assert torch.equal(found.images, inner.run(model, images, labels).images)
    assert (found.forwards == 2).all()


def test_settings_are_frozen() -> None:
    attack = make("pgd")
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.keep = "last"  # type: ignore[misc]


class Hungry(ECNN):
    """Runs out of memory when more than two images come at once."""

    def forward(self, images: Tensor) -> Tensor:
        if len(images) > 2:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return super().forward(images)


def test_a_batch_too_large_for_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model, (images, labels) = coded_model(), batch()
    attack = PGD(norm="linf", eps=0.1, steps=4, step_size=0.04)
    expected = attack.run(model, images, labels)
    model.__class__ = Hungry
    found = attack.run(model, images, labels)
    assert torch.allclose(found.images, expected.images, atol=1e-9)
    assert torch.equal(found.success, expected.success)
    assert torch.equal(found.forwards, expected.forwards)


def test_all_images_may_break_at_once() -> None:
    """Nothing is left to look at in the middle of a search."""
    model = coded_model()
    images, _ = batch(40)
    labels = model(images).argmax(1)
    found = PGD(norm="linf", eps=1.0, steps=30, step_size=0.2, start="image").run(model, images, labels)
    assert found.success.all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["pgd", "apgd", "square", "cw"])
def test_a_quick_search_finds_the_same(name: str, device: str) -> None:
    model, (images, labels) = coded_model().to(device), batch()
    images, labels = images.to(device), labels.to(device)
    plain, replayed = (make(name, quick=quick).run(model, images, labels) for quick in (False, True))
    assert torch.allclose(plain.images, replayed.images, atol=1e-9)
    assert torch.equal(plain.success, replayed.success)
    assert torch.equal(plain.forwards, replayed.forwards)


#: By attack and field: values that are refused in words that begin with the name of the field.
BAD_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "pgd": {"on": ("soul",), "loss": ("hate",), "keep": ("none",), "steps": (-1,), "eps": ("x",)},
    "apgd": {"on": ("soul",), "loss": ("hate",), "steps": (0,), "norm": ("l3",)},
    "fab": {"targets": (0,), "bias": (2.0,), "overshoot": (0.5,), "retreat": (-0.1,), "eps": ("x",)},
    "square": {"queries": (0,), "loss": ("dlr",), "first_share": (0.0,), "l2_moves": ("jumps",)},
    "autoattack": {"version": ("plus",)},
    "race": {"effort": (0,)},
    "deepfool": {"norm": ("l3",), "num_candidates": (1,), "overshoot": (-0.1,)},
    "fmn": {"steps": (0,)},
    "jsma": {
        "max_pixel_fraction": (1.2, -0.1, math.nan),
        "theta": (0.0, 1.5, math.nan),
        "pixels": ("three",),
        "goal": ("worst",),
        "max_pairs": (0,),
        "keep": ("none",),
    },
    "sparse_pgd": {"max_pixel_fraction": (1.2, -0.1, math.nan), "steps": (-1,), "step_size": ("x",)},
    "hopskipjump": {
        "steps": (-1,),
        "samples": (1,),
        "init_tries": (0,),
        "max_batch": (0,),
        "keep": ("none",),
    },
    "rays": {"queries": (0,), "share": (1.5,), "max_batch": (0,), "starts": (("pgd",),)},
    "noise": {"norm": ("l0",), "eps": (-1,), "samples": (0,), "kind": ("pink",)},
    "estimated_pgd": {"pairs": (0,), "deviation": (0.0,), "prior": ("student",)},
    "transfer": {"source": ("resnet",), "attack": ("pgd",), "labels": ("all",)},
}


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        *(
            (name, {field: value}, f"^{field} must be")
            for name, fields in BAD_VALUES.items()
            for field, values in fields.items()
            for value in values
        ),
        *(
            (name, {"on": "members"}, "one score per class")
            for name in ("fab", "square", "autoattack", "race", "cw", "jsma")
        ),
        *((name, {"keep": "last"}, "keep=") for name in ("autoattack", "race")),
        *((name, {"precision": "bfloat16"}, "border") for name in ("hopskipjump", "rays")),
        ("apgd", {"on": "members", "loss": "dlr"}, "no DLR"),
        ("apgd", {"keep": "last", "targets": 2}, "one start"),
        ("apgd", {"targets": 2, "on": lambda model, images, labels: labels}, "this loss cannot be targeted"),
        ("cw", {"steps": 0}, "steps must be a whole number from 1"),
        ("cw", {"search_steps": 2.5}, "search_steps must be a whole number"),
        ("cw", {"initial_constant": 0}, "initial_constant must be a number above 0"),
        ("cw", {"confidence": -1}, "confidence must be a number"),
        ("cw", {"lr": float("nan")}, "lr must be a number"),
        ("cw", {"keep": "last"}, "keep must be"),
        ("blindspot", {"shrink": 1.5}, "shrink must be a number above 0 and up to 1"),
        ("blindspot", {"shrink": 0}, "shrink must be a number above 0"),
        ("member_cw", {"targets": 0}, "targets must be a whole number from 1"),
        ("fmn", {"radius_change": (0.05, 1.0)}, "radius_change must be two numbers"),
        ("fmn", {"step_size": 1.0}, "step_size must be two numbers"),
        ("jsma", {"goal": "each", "keep": "last"}, "one goal"),
        ("hopskipjump", {"norm": "l1"}, "norm must be linf or l2"),
        ("noise", {"kind": "corners", "norm": "l2"}, "corners"),
        ("estimated_pgd", {"estimator": "ness"}, "estimator must be.*did you mean"),
        ("estimated_pgd", {"start": "odi"}, "needs gradients"),
    ],
)
def test_bad_settings_are_found_when_the_attack_is_made(
    name: str, changes: dict[str, Any], sentence: str
) -> None:
    make(name)
    with pytest.raises(InputError, match=sentence):
        make(name, **changes)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"labels": torch.tensor([0, 1, 5])}, "classes of the model, 0 to 4, but one is 5"),
        ({"labels": torch.tensor([0, 1, -1])}, "but one is -1"),
        (
            {"labels": torch.zeros(3)},
            r"int64 of shape \(3,\), one per image, not torch.float32 of \(3,\)",
        ),
        ({"labels": torch.zeros(2, dtype=torch.int64)}, r"not torch.int64 of \(2,\)"),
        ({"labels": [0, 1, 2]}, "not a list"),
        ({"images": torch.full((3, 2, 6, 6), 255.0)}, "divide bytes by 255"),
        ({"images": torch.full((3, 2, 6, 6), math.nan)}, r"pixels in \[0, 1\]"),
        ({"images": torch.zeros(3, 2, 6, 6, dtype=torch.uint8)}, "torch.uint8 of .*: convert them"),
        ({"images": torch.zeros(3, 2, 6, 6).half()}, "float32 or float64"),
        ({"images": np.zeros((3, 2, 6, 6))}, "not a ndarray"),
        ({"index": torch.zeros(4, dtype=torch.int64)}, "index must be int64"),
    ],
)
@pytest.mark.parametrize("name", ["fgsm", "square", "hopskipjump", "cw"])
def test_what_is_refused(name: str, change: dict[str, Any], complaint: str) -> None:
    images, labels = batch(3)
    given = {"images": images, "labels": labels, **change}
    with pytest.raises(InputError, match=complaint):
        make(name).run(coded_model(), **given)
    if "index" not in change and "classes" not in complaint and "-1" not in complaint:
        with pytest.raises(InputError, match=complaint):
            make(name)(coded_model(), **given, generator=torch.Generator())


@pytest.mark.parametrize("name", [name for name in IN_A_BALL if name != "autoattack"])
def test_a_radius_that_cannot_be_meant(name: str) -> None:
    with pytest.raises(InputError, match=r'eps=8: .* did you mean "8/255"'):
        make(name, eps=8)
    make(name, eps=1)
    make(name, norm="l2", eps=8)
