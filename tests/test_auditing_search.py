"""Gradients through what hides them, layers as targets, stand-ins for what is opaque, and the search for the place."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from test_auditing_suite import EPS, Hiding, Sees, broken, firm_images
from torch import Tensor, nn

from ecnn.attacks import NORMS, PGD
from ecnn.attacks.base import raw_gradient
from ecnn.attacks.images import together
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Averaged
from ecnn.auditing import opaque
from ecnn.auditing.adaptive import MeanAround
from ecnn.auditing.bpda import Passing, can_pass_through, straight_through
from ecnn.auditing.budgets import BUDGETS
from ecnn.auditing.layers import LayerScores, LayerVotes, survey_layers
from ecnn.auditing.search import search
from ecnn.auditing.soft_values import Soft, expectation, expected_row
from ecnn.auditing.subject import Subject
from ecnn.auditing.trials import _mixed
from ecnn.errors import InputError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]
WALK: dict[str, Any] = {"norm": "linf", "eps": EPS, "steps": 20, "step_size": EPS / 4, "schedule": "cosine"}
LEVELS = torch.linspace(0, 1, 8)


def _nearness(images: Tensor) -> Tensor:
    return -((images[..., None] - LEVELS) ** 2)


def _write_by_mask(images: Tensor) -> Tensor:
    written = images.clone()
    written[images < 0.5] = 0
    written[images >= 0.5] = 1
    return written


def _in_place(images: Tensor) -> Tensor:
    rounded = images.clone()
    rounded.mul_(8).round_().div_(8)
    rounded[:, :, :2] *= rounded[:, :, :2] > 0.3
    return rounded


def _keep_the_largest(images: Tensor) -> Tensor:
    flat = images.flatten(1)
    mask = torch.zeros_like(flat)
    mask.scatter_(1, flat.topk(32, dim=1).indices, 1.0)
    return mask.view_as(images)


def _write_by_index(images: Tensor) -> Tensor:
    near = _nearness(images).flatten(0, -2)
    chosen = torch.zeros_like(near)
    chosen[torch.arange(len(near)), near.argmax(dim=1)] = 1
    return (chosen @ LEVELS).view_as(images)


def _by_pillow(images: Tensor) -> Tensor:
    from PIL import Image

    coded = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray((image[0] * 255).byte().cpu().numpy()).save(file, "PNG")
        coded.append(torch.from_numpy(np.array(Image.open(file)) // 16 * 16).float()[None] / 255)
    return torch.stack(coded)


class _Lies(torch.autograd.Function):
    """Rounds outside torch, and turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return torch.from_numpy(np.round(values.detach().numpy() * 16) / 16).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -gradients[0]


def _by_its_own_gradient(images: Tensor) -> Tensor:
    with torch.enable_grad():
        moved = images.detach().requires_grad_(True)
        for _ in range(2):
            (gradient,) = torch.autograd.grad((moved**2).sum(), moved)
            moved = (moved - 0.01 * gradient).detach().requires_grad_(True)
    return moved.detach()


def _backward(images: Tensor) -> Tensor:
    with torch.enable_grad():
        moved = images.detach().clone().requires_grad_(True)
        (moved**3).sum().backward()  # type: ignore[no-untyped-call]
        assert moved.grad is not None
        return (moved - 0.01 * moved.grad).detach()


def _infer(images: Tensor) -> Tensor:
    with torch.inference_mode():
        kept = images * 1.0
    return kept.clone()


HIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": _in_place,
    "write by mask": _write_by_mask,
    "write by index": _write_by_index,
    "topk and scatter": _keep_the_largest,
    "argmax and table": lambda images: LEVELS[_nearness(images).argmax(-1)],
    "argmax and one-hot": lambda images: F.one_hot(_nearness(images).argmax(-1), 8).float() @ LEVELS,
    "argmax and ==": lambda images: (
        (_nearness(images).argmax(-1, keepdim=True) == torch.arange(8)).float() @ LEVELS
    ),
    "min and gather": lambda images: torch.gather(
        LEVELS.expand(*images.shape, 8), -1, (-_nearness(images)).min(-1, keepdim=True).indices
    ).squeeze(-1),
    "== the largest": lambda images: (
        (_nearness(images) == _nearness(images).amax(-1, keepdim=True)).float() @ LEVELS
    ),
    "ranks": lambda images: (images.flatten(1).argsort(1).argsort(1) / 63.0).view_as(images),
    "table": lambda images: (torch.linspace(0, 1, 256) * 15).round()[(images * 255).long()] / 15,
    "embedding": lambda images: F.embedding((images * 15).long(), torch.arange(16)[:, None] / 15).squeeze(-1),
    "bucketize": lambda images: torch.bucketize(images, LEVELS) / 8,
    "searchsorted": lambda images: torch.searchsorted(LEVELS, images.contiguous()) / 8,
    "remainder": lambda images: images - images % (1 / 16),
    "floor division": lambda images: (images // (1 / 16)) / 16,
    "bits": lambda images: ((images * 255).to(torch.uint8) & 0xF0).float() / 255,
    "shifts": lambda images: (((images * 255).int() >> 4) << 4).float() / 255,
    "bits of a float": lambda images: (images.contiguous().view(torch.int32) & -(2**20)).view(torch.float32),
    "logic": lambda images: ((images > 0.3) & ~(images < 0.5) | (images > 0.9)).float(),
    "masked_fill": lambda images: torch.ones_like(images).masked_fill(images < 0.5, 0),
    "quantize": lambda images: torch.quantize_per_tensor(images, 1 / 16, 0, torch.quint8).dequantize(),
    "numpy": lambda images: torch.from_numpy(np.round(images.detach().cpu().numpy() * 16) / 16).float(),
    "numpy, one by one": lambda images: torch.stack(
        [torch.tensor(np.round(image.numpy() * 16) / 16) for image in images.detach()]
    ).float(),
    "lists": lambda images: torch.tensor((images * 16).int().flatten(1).tolist()).view_as(images) / 16,
    "pillow": _by_pillow,
    "a function that lies": _Lies.apply,
    "inference_mode": _infer,
    "its own gradient": _by_its_own_gradient,
    "backward": _backward,
}


@pytest.mark.parametrize("how", HIDING)
def test_gradients_pass_and_values_stay(how: str) -> None:
    model = Hiding(HIDING[how])
    images, labels = firm_images(model)
    assert can_pass_through(model, images[:3])
    with straight_through(model, batch=len(images)):
        passed = model(images.clone().requires_grad_(True))
    assert torch.allclose(passed, model(images), atol=1e-4)
    assert broken(PGD(on=Passing(view="scores"), **WALK), model, images, labels) >= 0.9


def test_a_choice_frees_its_graph_and_weighs_places_only_when_asked() -> None:
    values = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    with straight_through():
        top = (2 * values).topk(3, dim=1)
    soft = Soft.of(top.indices)
    assert soft is not None
    assert "weights" not in vars(soft)
    assert soft.weights is not None
    assert soft.weights.shape == (4, 3, 9)
    assert torch.equal(soft.weights.argmax(dim=2), top.indices)
    assert soft.value.requires_grad
    graph = weakref.ref(soft)
    del soft, top
    assert graph() is None


def test_what_a_model_keeps_has_no_graph_afterwards() -> None:
    class Keeping(Sees):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.last = torch.zeros(0)

        def forward(self, images: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(0.1 * images.detach().mean())
            self.last = images.detach().round()
            return super().forward(self.last)

    model = Keeping()
    images = torch.rand(3, 1, 8, 8).requires_grad_(True)
    for _ in range(2):
        with straight_through(model, batch=3):
            scores = model(images)
        assert raw_gradient(scores.sum(), images).abs().sum() > 0
        assert not model.mean.requires_grad
        assert not model.last.requires_grad
    assert model.mean > 0


@pytest.mark.parametrize(
    "flat",
    [
        torch.relu,
        lambda values: values.clone().relu_(),
        lambda values: (1 * values).clamp_(-0.1, 0.1),
        lambda values: F.relu(1 * values, inplace=True),
        torch.sigmoid,
    ],
)
def test_flat_parts_leak_and_values_stay(flat: Callable[[Tensor], Tensor]) -> None:
    values = 9 * torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    with straight_through(leaks=True):
        leaky = flat(values)
    assert torch.equal(leaky, flat(values))
    (gradient,) = torch.autograd.grad(leaky.sum(), values)
    assert gradient.min() > 0.1


def _turn_round(module: nn.Module, given: Any, said: Any) -> Any:
    return (-given[0],)


def test_hooks_of_modules_are_passed_and_put_back() -> None:
    class Hooked(Sees):
        def __init__(self) -> None:
            super().__init__()
            self.layer.register_full_backward_hook(_turn_round)

    model = Hooked()
    images, labels = firm_images(model)
    assert broken(PGD(**WALK), model, images, labels) == 0
    assert broken(PGD(on=Passing(view="scores"), **WALK), model, images, labels) == 1
    assert len(model.layer._backward_hooks) == 1


class Decides(nn.Module):
    """Twelve times the answer of one network, one-hot, plus the smooth scores of another."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.shown = Sees(), Sees()
        with torch.no_grad():
            self.shown.layer.weight.mul_(0.01).neg_()

    def forward(self, images: Tensor) -> Tensor:
        hot = F.one_hot(self.hidden(images).argmax(dim=1), 4).float().detach()
        said: Tensor = 12 * hot + self.shown(images)
        return said


def test_the_layer_that_explains_the_answers_is_found() -> None:
    model = Decides()
    images, labels = firm_images(model)
    points = torch.rand(300, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    layers = survey_layers(model, points, 4)
    explains = {layer.key: (layer.explains, layer.sign) for layer in layers}
    assert explains["linear-4-1"] == (1.0, 1.0)  # the hidden network's
    assert explains["linear-4-2"][1] == -1.0  # the other one says the opposite
    assert "sub-64-1" in explains  # the pixels themselves, read by a linear probe
    assert broken(PGD(**WALK), model, images, labels) == 0
    for key in ("linear-4-1", "sub-64-1"):
        view = next(layer.view(4) for layer in layers if layer.key == key)
        assert broken(PGD(on=view, **WALK), model, images, labels) >= 0.9
    with pytest.raises(InputError, match="did not run its layer"):
        LayerScores(layers=("linear-4-9",), num_classes=4).read(model, images)


@pytest.mark.parametrize("width", [8, 64])
def test_a_map_as_wide_as_there_are_classes_hides_no_other_layer(width: int) -> None:
    """With 64 channels a map has more numbers than are kept, and is averaged; then no layer was found at all."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    model = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), head).eval()
    layers = survey_layers(model, torch.rand(60, 1, 10, 10), 10)
    assert "linear-10-1" in [layer.key for layer in layers]


def test_a_vote_of_layers_is_attacked_as_one() -> None:
    class Votes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList([Sees() for _ in range(3)])
            for number, member in enumerate(self.members):
                with torch.no_grad():
                    generator = torch.Generator().manual_seed(number)
                    weight = member.layer.weight  # type: ignore[union-attr]
                    weight.add_(0.3 * torch.randn(weight.shape, generator=generator))  # type: ignore

        def forward(self, images: Tensor) -> Tensor:
            return torch.stack([F.one_hot(member(images).argmax(1), 4) for member in self.members]).sum(0) / 3

    model = Votes()
    images, labels = firm_images(model)
    scores = LayerScores(layers=("linear-4-1", "linear-4-2", "linear-4-3"), num_classes=4)
    for view in (scores, LayerVotes(scores=scores)):
        assert broken(PGD(on=view, **WALK), model, images, labels) >= 0.9


class _Rounds(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return torch.round(images * 16) / 16


class Compiled(Sees):
    """Rounding in TorchScript: no call of it can be watched, and its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: nn.Module = torch.jit.script(_Rounds())

    def forward(self, images: Tensor) -> Tensor:
        return self.logits(self.rounds(images))


def test_the_module_where_the_signal_dies_is_named_and_passed() -> None:
    model = Compiled()
    images, labels = firm_images(model)
    assert opaque.find_dead_modules(model, images, images + 0.05) == ("rounds",)
    assert opaque.find_dead_modules(Sees(), images, images + 0.05) == ()
    view = Passing(view="scores", dead=("rounds",))
    assert broken(PGD(on=view, **WALK), model, images, labels) >= 0.9


class Neighbours(Sees):
    """The nearest of a few prototypes, by NumPy: one-hot, from other numbers than pixels."""

    def forward(self, images: Tensor) -> Tensor:
        logits = self.logits(images)
        features = torch.cat([logits, -logits], dim=1).detach().numpy()
        return torch.from_numpy(np.eye(4, dtype=np.float32)[features[:, :4].argmax(axis=1)])


def test_an_opaque_part_gets_a_stand_in_that_has_learnt_it() -> None:
    model = Neighbours()
    images, labels = firm_images(model)
    points = torch.rand(300, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    bridges = opaque.fit_bridges(model, points, 0)
    assert list(bridges) == ["8-to-4"]
    assert broken(PGD(**WALK), model, images, labels) == 0
    view = opaque.Bridged(view="scores", bridges=bridges)
    assert broken(PGD(on=view, **WALK), model, images, labels) >= 0.9


class Purifies(nn.Module):
    """A preprocessor whose gradient leads nowhere, before a network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Sees()

    def forward(self, images: Tensor) -> Tensor:
        cleaned = images + 0.02 * torch.sin(1000 * images)
        said: Tensor = self.network(cleaned)
        return said


def test_what_makes_images_of_images_is_passed_over() -> None:
    model = Purifies()
    images, labels = firm_images(model)
    (found,) = opaque.find_image_inputs(model, images)
    assert (found.module, found.call) == ("network", 1)
    assert opaque.find_image_inputs(Sees(), images) == []
    view = opaque.Skipping(view="scores", module=found.module, call=found.call)
    assert broken(PGD(on=view, **WALK), model, images, labels) == 1


class Blurs(Purifies):
    """The image is turned inside out by NumPy before the network: as if it were not there is the wrong way back."""

    def forward(self, images: Tensor) -> Tensor:
        inverted = torch.from_numpy(np.round(255 * (1 - images.detach().numpy())) / 255).float()
        said: Tensor = self.network(inverted)
        return said


def test_what_makes_images_of_images_is_learnt() -> None:
    model = Blurs()
    images, labels = firm_images(model)
    points = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    bridge = opaque.fit_image_bridge(model, opaque.ImageInput("network", 1), points, 0)
    assert bridge is not None
    assert (bridge(images) - (1 - images)).abs().mean() < 0.05
    around: dict[str, Any] = {"view": "scores", "module": "network", "call": 1}
    assert broken(PGD(on=opaque.Skipping(**around), **WALK), model, images, labels) == 0
    assert broken(PGD(on=opaque.SkippingBy(bridge=bridge, **around), **WALK), model, images, labels) >= 0.9


def test_a_smoothed_view_leads_where_a_jumping_gradient_does_not() -> None:
    class Shakes(Sees):
        def forward(self, images: Tensor) -> Tensor:
            return self.logits(images + 0.01 * torch.sin(1000 * images))

    model = Shakes()
    images, labels = firm_images(model)
    plain = broken(PGD(**WALK), model, images, labels)
    view = MeanAround(view="scores", pairs=8, deviation=EPS / 2)
    assert view.passes_per_look == 17
    found = broken(PGD(on=view, **WALK), model, images, labels)
    assert found > plain
    with together(2**16):  # all 17 points in one pass
        assert broken(PGD(on=view, **WALK), model, images, labels) == found


def make_subject(model: nn.Module, images: Tensor, labels: Tensor) -> Subject:
    return Subject(model=model, images=images, labels=labels, norm="linf", eps=EPS, budget=BUDGETS["quick"])


@pytest.mark.parametrize("kind", [Decides, Compiled, Neighbours, Blurs])
def test_a_search_finds_the_place_and_remembers_it(kind: type[nn.Module], tmp_path: Path) -> None:
    model = kind().eval()
    images, labels = firm_images(model)
    examples = torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    subject = make_subject(model, images, labels)
    found = search(subject, examples, 4, is_random=False, folder=tmp_path)
    assert found.share >= 0.9
    best = next(iter(found.views.values()))
    assert broken(PGD(on=best, **WALK), model, images, labels) >= 0.8
    again = search(subject, torch.zeros(0, 1, 8, 8), 4, is_random=False, folder=tmp_path)
    assert again.broken == found.broken
    points = [
        PGD(on=view.views[next(iter(found.views))], **WALK).run(model, images, labels).images
        for view in (found, again)
    ]
    assert torch.equal(*points)
    (tmp_path / "search.json").write_text("{}")
    with pytest.raises(InputError, match=r"search\.json is damaged"):
        search(subject, examples, 4, is_random=False, folder=tmp_path)


def test_an_honest_model_that_falls_is_not_searched() -> None:
    images, labels = firm_images(Sees())
    found = search(make_subject(Sees(), images, labels), images, 4, is_random=False)
    assert found.views == {}
    assert found.standing == 0


def test_randomness_and_rounding_are_passed_together() -> None:
    class Shaken(Sees):
        def forward(self, images: Tensor) -> Tensor:
            noise = torch.tensor(np.random.normal(0, 0.02, images.shape), dtype=images.dtype)
            return self.logits(((images + noise) * 8).round() / 8)

    model = Shaken()
    images, labels = firm_images(Sees())
    assert can_pass_through(model, images[:4])
    view = Averaged(view=Passing(view="scores"), passes=4)
    found = PGD(on=view, keep="last", **WALK).run(model, images, labels).images
    with torch.no_grad():
        assert (model(found).argmax(1) != labels).double().mean() >= 0.9
    subject = make_subject(model, images, labels)
    assert search(subject, images, 4, is_random=True).share >= 0.9


def test_what_a_search_learns_from_is_clean_noisy_and_attacked_images() -> None:
    """Noise is drawn for a few images at a time, each by its number, as if for all at once."""
    images = torch.rand(75, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    clean, ends = [images[:40], images[40:60]], [images[60:]]
    subject = Subject(
        model=nn.Identity(),
        images=images,
        labels=torch.zeros(75),
        norm="l2",
        eps=0.3,
        budget=BUDGETS["quick"],
        seed=4,
    )
    noisy = NORMS["l2"].random(images[:60], 0.3, Draws.of(4, torch.arange(60)))
    expected = torch.cat([images[:60], noisy, images[60:]])
    order = torch.randperm(135, generator=torch.Generator().manual_seed(4))
    assert torch.equal(_mixed(clean, ends, subject), expected[order])


@pytest.mark.parametrize("places", [5, 3])
def test_rows_of_a_table_are_expected_in_one_product_as_one_by_one(places: int) -> None:
    numbers = torch.Generator().manual_seed(0)
    table = torch.rand(5, 2, 3, generator=numbers)  # row, ...
    weights = torch.rand(4, 6, places, generator=numbers).requires_grad_()  # (image, look, place)
    index = torch.zeros(4, 6, dtype=torch.long)
    pair = expected_row(table, weights), expectation(lambda place: table[place], index, weights)
    torch.testing.assert_close(*pair)
    slopes = [torch.autograd.grad(found.square().sum(), weights)[0] for found in pair]
    torch.testing.assert_close(*slopes)
