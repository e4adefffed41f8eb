"""ResNets: exact parameter counts, initialisation, copies side by side, normalisation inside the model."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import RING, WRONG_IMAGES, count, shake

from ecnn.backbones import (
    ACTIVATIONS,
    Centre,
    ConvUnit,
    Normalized,
    ResidualUnit,
    ResNet,
    Trunk,
    init_he_normal,
    make_trunk,
    resnet20,
    resnet32,
    unit_plan,
    without_batch_norms,
)
from ecnn.codes import load_code
from ecnn.errors import InputError
from ecnn.models import MODELS


def copy_of(module: nn.Module, single: nn.Module, index: int, groups: int) -> nn.Module:
    """`single` with the weights of one of the copies that lie side by side in `module`."""
    state = {
        name: values if values.ndim == 0 else values.chunk(groups)[index]
        for name, values in module.state_dict().items()
    }
    single.load_state_dict(state)
    return single


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (lambda: resnet20(), 273_066),
        (lambda: resnet20(in_channels=1), 272_778),
        (lambda: resnet20(batch_norm=False), 271_690),
        (lambda: resnet32(), 467_946),
        (lambda: resnet32(activation="silu"), 467_946),
        (lambda: Trunk(3, 8), 197_184),
        (lambda: Trunk(1, 8), 196_896),
        (lambda: Trunk(3), 271_040),
        (lambda: ResidualUnit(64, 64), 73_856),
        (lambda: ResidualUnit(32, 64, stride=2), 57_536),
        (lambda: ConvUnit(64, 16), 9_232),
        (lambda: ConvUnit(64, 16, groups=30), 30 * 9_232),
        (lambda: ConvUnit(64, 16, groups=30, shared_input=True), 30 * 9_232),
    ],
)
def test_parameter_counts(model: Any, parameters: int) -> None:
    with torch.device("meta"):
        assert count(model()) == parameters


def test_unit_plan_of_resnet20() -> None:
    plan = unit_plan(20, 16)
    assert [unit[1] for unit in plan] == [16] * 3 + [32] * 3 + [64] * 3
    assert [unit[2] for unit in plan] == [1, 1, 1, 2, 1, 1, 2, 1, 1]
    assert [unit[0] for unit in plan[1:]] == [unit[1] for unit in plan[:-1]]


@pytest.mark.parametrize("depth", [2, 7, 21, 20.0, True])
def test_a_depth_that_no_resnet_has_is_refused(depth: Any) -> None:
    with pytest.raises(InputError, match=r"6n \+ 2"):
        ResNet(10, depth=depth)


def test_other_bad_choices_are_refused() -> None:
    with pytest.raises(InputError, match="activation must be one of relu, silu, gelu, elu"):
        ResNet(10, activation="swish")
    with pytest.raises(InputError, match="from 1 to 9"):
        Trunk(3, 10)
    with pytest.raises(InputError, match="width"):
        ResNet(10, width=0)


def test_he_normal_has_the_asked_variance_and_no_tails() -> None:
    weight = torch.empty(200_000)
    torch.manual_seed(0)
    init_he_normal(weight, fan_in=50)
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 50), rel=0.01)
    assert weight.abs().max().item() <= 2 * math.sqrt(2 / 50) / 0.8796 + 1e-4


@pytest.mark.parametrize("shared_input", [False, True])
def test_every_copy_is_initialised_with_its_own_fan_in(shared_input: bool) -> None:
    torch.manual_seed(0)
    unit = ConvUnit(32, 32, groups=6, shared_input=shared_input)
    for kernel in unit.conv.weight.chunk(6):
        assert kernel.std().item() == pytest.approx(math.sqrt(2 / (32 * 9)), rel=0.05)
    assert unit.conv.bias is not None
    assert not unit.conv.bias.any()


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_grouped_trunk_equals_separate_trunks(batch_norm: bool, training: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"depth": 14, "width": 3, "batch_norm": batch_norm}
    stack = Trunk(3, groups=4, **options).double()
    shake(stack)
    stack.train(training)
    images = torch.rand(3, 3, 9, 9, dtype=torch.float64)
    # The copies first: in training mode a forward moves the statistics that they are given.
    copies = [copy_of(stack, Trunk(3, **options).double(), index, 4).train(training) for index in range(4)]
    maps = stack(images)
    assert maps.shape == (3, 4 * 12, 3, 3)
    for index, single in enumerate(copies):
        torch.testing.assert_close(maps.chunk(4, dim=1)[index], single(images), atol=1e-10, rtol=0)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("out_channels", [4, 6])
def test_copies_that_read_the_same_maps(stride: int, out_channels: int) -> None:
    torch.manual_seed(0)
    unit = ResidualUnit(4, out_channels, stride=stride, groups=3, shared_input=True).double()
    shake(unit)
    maps = torch.rand(2, 4, 8, 8, dtype=torch.float64)
    together = unit(maps)
    for index in range(3):
        single = copy_of(unit, ResidualUnit(4, out_channels, stride=stride).double(), index, 3)
        torch.testing.assert_close(together.chunk(3, dim=1)[index], single(maps), atol=1e-12, rtol=0)


def test_resnet_by_hand() -> None:
    """Depth 8 written out with torch's functions: stem, a plain unit, two strided ones, average, dense."""
    torch.manual_seed(0)
    model = ResNet(5, 1, depth=8, width=2, batch_norm=False, mean=0.25).double()
    shake(model)
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    weights = model.state_dict()

    def conv(maps: Tensor, name: str, stride: int = 1) -> Tensor:
        kernel = weights[f"trunk.{name}.conv.weight"]
        bias = weights[f"trunk.{name}.conv.bias"]
        return torch.conv2d(maps, kernel, bias, stride=stride, padding=kernel.shape[-1] // 2)

    maps = conv(images - 0.25, "stem").relu()
    maps = (maps + conv(conv(maps, "units.0.first").relu(), "units.0.second")).relu()
    for unit in ("units.1", "units.2"):
        change = conv(conv(maps, f"{unit}.first", 2).relu(), f"{unit}.second")
        maps = (change + conv(maps, f"{unit}.shortcut", 2)).relu()
    expected = maps.mean(dim=(2, 3)) @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(model(images), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_no_network_has_a_strided_convolution_of_single_pixels(kind: str) -> None:
    """Training one with few channels writes beyond its memory on a CPU (oneDNN issue 6035), and aborts later on."""
    code = load_code("10x10") if MODELS[kind].needs_code else None
    needed: dict[str, Any] = {"specialists": {"sets": RING}, "feature_squeezing": {"bits": 4, "window": 2}}
    model = MODELS[kind].build(10, 1, None, code=code, **needed.get(kind, {}))
    single = [part for part in model.modules() if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1)]
    assert all(part.stride == (1, 1) for part in single)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_by_name(activation: str) -> None:
    torch.manual_seed(0)
    unit = ConvUnit(1, 1, kernel_size=1, activation=activation)
    maps = torch.linspace(-2, 2, 9).reshape(1, 1, 3, 3)
    torch.testing.assert_close(unit(maps), ACTIVATIONS[activation]()(unit.conv(maps)))


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        (0.5, 0.25),
        ([0.1, 0.2, 0.3], [1.0, 2.0, 3.0]),
        (np.full((3, 4, 4), 0.5), 2.0),
        (torch.rand(3, 4, 4), 1.0),
    ],
)
def test_normalized_subtracts_and_divides(mean: Any, std: Any) -> None:
    model = Normalized(nn.Identity(), mean, std)
    images = torch.rand(2, 3, 4, 4)

    def table(values: Any) -> Tensor:
        tensor = torch.as_tensor(values, dtype=torch.float32)
        return tensor if tensor.ndim == 3 else tensor.reshape(-1, 1, 1)

    torch.testing.assert_close(model(images), (images - table(mean)) / table(std))
    assert model.mean.dtype == torch.float32
    assert set(model.state_dict()) == {"mean", "std"}


@pytest.mark.parametrize(
    ("mean", "std", "sentence"),
    [
        ([[1.0, 2.0]], 1.0, r"not of shape \(1, 2\)"),
        ([], 1.0, "not of shape"),
        (math.nan, 1.0, "mean must be finite"),
        ("grey", 1.0, "made of numbers"),
        (0.0, 0.0, "std must be positive"),
    ],
)
def test_a_mean_or_std_that_cannot_be_used(mean: Any, std: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Normalized(nn.Identity(), mean, std)


def test_a_mean_image_fits_only_its_size() -> None:
    with pytest.raises(InputError, match=r"mean has shape \(3, 4, 4\) but the images \(3, 8, 8\)"):
        Centre(torch.zeros(3, 4, 4))(torch.rand(1, 3, 8, 8))
    # A mean with more channels than the image would silently widen it.
    with pytest.raises(InputError, match="but the images"):
        Normalized(nn.Identity(), [0.1, 0.2, 0.3])(torch.rand(1, 1, 8, 8))


def test_the_mean_is_saved_with_the_weights() -> None:
    mean = torch.rand(3, 8, 8)
    saved = ResNet(4, depth=8, width=2, mean=mean)
    rebuilt = ResNet(**saved.config)
    assert rebuilt.centre.mean.shape == (1, 1, 1)
    rebuilt.load_state_dict(saved.state_dict(), strict=True)
    assert torch.equal(rebuilt.centre.mean, mean)
    images = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(rebuilt.eval()(images), saved.eval()(images), atol=0, rtol=0)


def test_the_mean_is_a_copy() -> None:
    mean = torch.zeros(3)
    centre = Centre(mean)
    mean += 1
    assert not centre.mean.any()


@pytest.mark.parametrize(("images", "sentence"), WRONG_IMAGES)
def test_images_are_checked_at_the_door(images: Tensor, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ResNet(10, depth=8, width=2)(images)


def test_scores_stay_float32_under_autocast() -> None:
    model = ResNet(10, depth=8, width=2).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.rand(2, 3, 8, 8)).dtype == torch.float32


def test_batch_norms_are_merged_into_convolutions() -> None:
    torch.manual_seed(0)
    model = ResNet(5, 2, depth=8, width=4).double()
    images = torch.rand(6, 2, 8, 8, dtype=torch.float64)
    shake(model)
    in_training = without_batch_norms(model)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in in_training.modules()) == 7
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merged = without_batch_norms(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in merged.modules())
    assert torch.allclose(merged(images), model(images), rtol=1e-10, atol=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_dense_trunk_reads_feature_vectors() -> None:
    trunk = make_trunk("dense", 7, width=5, activation="relu")
    assert count(trunk) == 7 * 5 + 5 + 5 * 5 + 5
    assert trunk(torch.rand(3, 7, 1, 1)).shape == (3, 5)


def test_a_trunk_of_timm_is_asked_for_features_of_these_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.update(name=name, **options)
        return nn.Conv2d(options["in_chans"], 6, 3)

    stub = SimpleNamespace(list_models=lambda: ["resnet18", "vit_tiny"], create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", stub)
    with torch.device("meta"):
        made = make_trunk("timm:resnet18.a1_in1k", 2, width=16, activation="relu")
    assert next(made.parameters()).device.type == "cpu"
    assert asked == {"name": "resnet18.a1_in1k", "pretrained": False, "num_classes": 0, "in_chans": 2}
    with pytest.raises(InputError, match="timm has no network 'resnet81'; did you mean 'resnet18'"):
        make_trunk("timm:resnet81", 2, width=16, activation="relu")


@pytest.mark.parametrize("name", ["dens", "timm", "timm:", "resnet18", ""])
def test_an_unknown_trunk_is_one_sentence(name: str) -> None:
    with pytest.raises(InputError, match='trunk must be "dense" or "timm:NAME" such as timm:resnet18, not'):
        make_trunk(name, 3, width=16, activation="relu")


def test_a_timm_that_cannot_be_imported_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"needs the package timm, .*pip install 'ecnn\[vision\]'"):
        make_trunk("timm:resnet18", 3, width=16, activation="relu")
