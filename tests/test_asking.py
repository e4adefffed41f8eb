"""Asking a model: whatever happens inside, it stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ecnn
from ecnn.asking import (
    InFixedBatches,
    copy_model,
    eval_mode,
    find_fixed_batch,
    full_precision,
    half_precision_of,
    read_model,
    undisturbed,
    without_tf32,
)
from ecnn.attacks import FGSM
from ecnn.errors import InputError


def network() -> nn.Sequential:
    """With statistics that training changes; its second half stays in eval mode, and one weight is not trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
    model[3].eval()
    model[1].weight.requires_grad_(False)
    return model


def state_of(model: nn.Module) -> Any:
    modes = [module.training for module in model.modules()]
    weights = [(weight.grad, weight.requires_grad) for weight in model.parameters()]
    return modes, weights, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("fails", [False, True])
def test_an_undisturbed_model_is_what_it_was(fails: bool) -> None:
    """Modes, gradients, flags and buffers, after a pass in train mode with a backward pass, and after an error."""
    model, images = network(), torch.rand(8, 1, 2, 2)
    model(images).sum().backward()
    modes, weights, values = state_of(model)
    kept = [None if gradient is None else gradient.clone() for gradient, _ in weights]
    buffers = dict(model.named_buffers())

    def ask() -> None:
        with undisturbed(model):
            assert not any(module.training for module in model.modules())
            assert all(weight.grad is None for weight in model.parameters())
            model.train()
            model.requires_grad_(True)
            model(images).square().sum().backward()
            model[2].running_mean = torch.full((3,), 7.0)
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            ask()
    else:
        ask()
    after, flags, found = state_of(model)
    assert after == modes
    assert [flag for _, flag in flags] == [flag for _, flag in weights]
    for before, (gradient, _) in zip(kept, flags, strict=True):
        assert (gradient is None) if before is None else torch.equal(gradient, before)
    assert all(torch.equal(found[name], value) for name, value in values.items())
    assert dict(model.named_buffers()) == buffers  # the same tensors, not others with their values


def test_eval_mode_gives_every_part_its_own_mode_back() -> None:
    model = network()
    with eval_mode(model):
        assert not model.training
    assert [part.training for part in model] == [True, True, True, False]
    with pytest.raises(InputError, match="a torch module"), eval_mode("model"):  # type: ignore[arg-type]
        pass


class Half(nn.Module):
    """Computes in bfloat16, and is asked in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).bfloat16()

    def forward(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.bfloat16
        return (images.flatten(1) * self.layer.weight.sum()).repeat(1, 2)


def test_a_model_of_half_precision_rounds_images_itself() -> None:
    model = Half()
    assert half_precision_of(model) == torch.bfloat16
    with undisturbed(model):
        said = model(torch.rand(3, 1, 2, 2))
    assert said.dtype == torch.bfloat16
    assert full_precision(said).dtype == torch.float32
    with pytest.raises(AssertionError):
        model(torch.rand(3, 1, 2, 2))
    assert half_precision_of(network()) is None
    model.layer.bias.data = model.layer.bias.data.float()
    assert half_precision_of(model) is None  # of two kinds


def test_full_precision_keeps_what_is_better() -> None:
    values = torch.rand(2, dtype=torch.float64)
    assert full_precision(values) is values


class Checkpointed(nn.Module):
    """With a checkpoint of torch's older kind, through which `torch.autograd.grad` of images cannot go."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        said: Tensor = checkpoint(self.layer, images.flatten(1), use_reentrant=True)
        return said


def test_older_checkpoints_give_gradients_of_images() -> None:
    model, images = Checkpointed(), torch.rand(3, 1, 2, 2, requires_grad=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(model(images)[:, 0].sum(), images)
    with undisturbed(model):
        (gradient,) = torch.autograd.grad(model(images)[:, 0].sum(), images)
    assert torch.allclose(gradient.flatten(1), model.layer.weight[0].expand(3, -1))
    with pytest.raises(RuntimeError):
        torch.autograd.grad(model(images)[:, 0].sum(), images)


def test_a_copy_has_what_was_computed_last_without_its_history() -> None:
    model: Any = network()
    kept: Any = {"list": [model[1].bias * 2]}
    model.kept = kept
    twice: Any = copy_model(model).kept
    assert torch.equal(twice["list"][0], kept["list"][0])
    assert twice["list"][0].grad_fn is None
    assert kept["list"][0].grad_fn is not None


def test_a_copy_that_shares_parts_is_refused() -> None:
    class Single(nn.Module):
        def __deepcopy__(self, memo: Any) -> Single:
            return self

    with pytest.raises(TypeError, match="shares modules"):
        copy_model(nn.Sequential(Single()))


def test_tf32_is_off_inside_and_as_it_was_afterwards() -> None:
    switches: Any = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    try:
        torch.backends.cudnn.allow_tf32 = True
        with without_tf32():
            assert not any(switch.allow_tf32 for switch in switches)
        assert torch.backends.cudnn.allow_tf32
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


class TakesSome(nn.Module):
    """A linear network for batches of some sizes only."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes, self.inner = sizes, nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

    def forward(self, images: Tensor) -> Tensor:
        if len(images) not in self.sizes:
            raise RuntimeError(f"{len(images)} images came, not {self.sizes}")
        scores: Tensor = self.inner(images)
        return scores


@pytest.mark.parametrize("many", [0, 1, 3, 4, 5, 8, 9])
def test_fixed_batches_answer_about_any_number(many: int) -> None:
    model, images = TakesSome(4), torch.rand(many, 1, 2, 2, requires_grad=True)
    said = InFixedBatches(model, 4)(images)
    torch.testing.assert_close(said, model.inner(images))
    slopes = [torch.autograd.grad(scores.square().sum(), images)[0] for scores in (said, model.inner(images))]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize(
    ("sizes", "found"), [((32,), 32), ((1,), 1), ((100,), 100), ((3,), None), ((), None), ((2, 4), None)]
)
def test_the_size_of_a_fixed_batch_is_found(sizes: tuple[int, ...], found: int | None) -> None:
    assert find_fixed_batch(TakesSome(*sizes), torch.rand(3, 1, 2, 2)) == found
    assert find_fixed_batch(nn.Flatten(), torch.rand(3, 1, 2, 2)) is None  # any number will do


def test_evaluate_says_how_a_model_for_one_size_of_batch_is_asked() -> None:
    data = torch.rand(7, 1, 2, 2), torch.arange(7) % 3
    attacks = {"fgsm": FGSM(norm="linf", eps=0.1)}
    with pytest.raises(
        InputError, match=r"takes batches of 4 images.*ecnn.asking.InFixedBatches\(model, 4\)"
    ):
        ecnn.evaluate(TakesSome(4), data, attacks, limit=7)
    filled = ecnn.evaluate(InFixedBatches(TakesSome(4), 4), data, attacks, limit=7)
    free = ecnn.evaluate(TakesSome(4).inner, data, attacks, limit=7)
    assert [filled.accuracy, filled.clean.prediction.tolist()] == [
        free.accuracy,
        free.clean.prediction.tolist(),
    ]


class Says(nn.Module):
    """Says what a function makes of its scores."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, images: Tensor) -> Any:
        return self.change(images.flatten(1)[:, :3])


@pytest.mark.parametrize(
    ("change", "maker"),
    [
        (lambda scores: scores.numpy(), "torch.from_numpy"),
        (lambda scores: scores.tolist(), "torch.tensor"),
        (lambda scores: tuple(map(tuple, scores.tolist())), "torch.tensor"),
        (lambda scores: list(scores), "torch.stack"),
    ],
)
def test_a_model_that_returns_arrays_or_lists_is_told_how_to_wrap_it(change: Any, maker: str) -> None:
    images, model = torch.rand(4, 1, 2, 2), Says(change)
    with pytest.raises(InputError, match=rf"a module that returns {maker}\(model\(images\)\)") as caught:
        read_model(model, images)
    assert ("gradients" in str(caught.value)) == (maker != "torch.stack")
    made: Any = {
        "torch.from_numpy": torch.from_numpy,
        "torch.tensor": torch.tensor,
        "torch.stack": torch.stack,
    }
    wrapped = read_model(Says(lambda scores: made[maker](change(scores))), images)  # as it says
    assert torch.equal(wrapped, images.flatten(1)[:, :3])


def test_a_model_that_returns_classes_is_told_how_to_wrap_it() -> None:
    def classes(scores: Tensor) -> Tensor:
        return scores.argmax(dim=1)

    with pytest.raises(
        InputError, match=r"but 1 image gave shape \(1,\).*one_hot\(model\(images\)\.flatten"
    ) as caught:
        read_model(Says(classes), torch.rand(1, 1, 2, 2))
    assert "returns classes" in str(caught.value)
    images = torch.rand(4, 1, 2, 2)
    wrapped = Says(
        lambda scores: nn.functional.one_hot(classes(scores).flatten().long(), 3).float()
    )  # as it says
    assert torch.equal(read_model(wrapped, images).argmax(dim=1), images.flatten(1)[:, :3].argmax(dim=1))


@pytest.mark.parametrize(
    "said", [np.zeros(4), [["a", "b"]] * 4, [[1.0], [1.0, 2.0]] * 2, "text", [torch.zeros(2), 1]]
)
def test_what_no_wrapper_would_help_is_told_without_one(said: Any) -> None:
    with pytest.raises(InputError, match=rf"but 4 images gave {type(said).__name__}\.$"):
        read_model(Says(lambda scores: said), torch.rand(4, 1, 2, 2))


def test_an_exported_network_is_asked_in_the_mode_that_it_has() -> None:
    """torch.export's graphs refuse eval()."""
    model, images = TakesSome(2, 3, 7).eval().inner, torch.rand(7, 1, 2, 2)
    sizes = {"input": {0: torch.export.Dim("batch", min=1, max=64)}}
    exported = torch.export.export(model, (images,), dynamic_shapes=sizes).module()
    attacks = {"fgsm": FGSM(norm="linf", eps=0.1)}
    found, expected = (
        ecnn.evaluate(one, (images, torch.arange(7) % 3), attacks, limit=7) for one in (exported, model)
    )
    assert found.accuracy == expected.accuracy
