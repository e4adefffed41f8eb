"""Minimum-norm attacks beside other libraries' on the same model and images, at the same settings.

A peer's image counts when the model misclassifies it and it is not black: foolbox returns zeros for failures and calls
them adversarial.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import DATA, benchmark
from torch import Tensor, nn
from toys import Counted, LabelsOnly

from ecnn.attacks.carlini import CarliniWagnerL2
from ecnn.attacks.minimal import FMN, DeepFool
from ecnn.attacks.rays import RaySearch
from ecnn.auditing import bench
from ecnn.data import load_data
from ecnn.runs import load_model

pytestmark = pytest.mark.peer

SETTINGS: dict[str, Any] = {"steps": 100, "search_steps": 4, "initial_constant": 0.1, "lr": 0.01}
Peer = Callable[..., Tensor]


def cleverhans_carlini(model: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    pytest.importorskip("cleverhans.torch.attacks.carlini_wagner_l2")
    settings["num_classes"] = model(images[:1]).shape[1]
    crafted: Tensor = benchmark("peer_carlini").cleverhans_carlini(model, images, labels, **settings)
    return crafted


def foolbox_carlini(model: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    pytest.importorskip("foolbox")
    crafted: Tensor = benchmark("peer_carlini").foolbox_carlini(model, images, labels, **settings)
    return crafted


def run_foolbox(attack: Any, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    foolbox = pytest.importorskip("foolbox")
    _, crafted, _ = attack(foolbox.PyTorchModel(model, bounds=(0, 1)), images, labels, epsilons=None)
    found: Tensor = crafted
    return found


def torchattacks_carlini(model: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    """It has no search: the constant stays."""
    for name in ("torchvision", "torchvision.transforms"):  # imported, but of no use to this attack
        sys.modules.setdefault(name, ModuleType(name))
    torchattacks = pytest.importorskip("torchattacks")
    crafted: Tensor = torchattacks.CW(
        model, c=settings["initial_constant"], steps=settings["steps"], lr=settings["lr"]
    )(images, labels)
    return crafted


def art_carlini(model: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    pytest.importorskip("art.attacks.evasion")
    settings["num_classes"] = model(images[:1]).shape[1]
    crafted: Tensor = benchmark("peer_carlini").art_carlini(model, images, labels, **settings)
    return crafted


PEERS: dict[str, Peer] = {
    "cleverhans": cleverhans_carlini,
    "foolbox": foolbox_carlini,
    "torchattacks": torchattacks_carlini,
    "art": art_carlini,
}


def outcome(model: nn.Module, crafted: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """(batch,) the L2 length of each image's way, infinite where it failed."""
    with torch.no_grad():
        success = (model(crafted).argmax(1) != labels) & (crafted.flatten(1).amax(1) > 0)
    return torch.where(success, (crafted - images).flatten(1).norm(dim=1), torch.inf)


def lengths_of(moves: Tensor, norm: str) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(moves.flatten(1), ord=2 if norm == "l2" else torch.inf, dim=1)
    return lengths


def perceptron() -> tuple[nn.Module, Tensor, Tensor]:
    """A network with random weights, images with some black and white pixels, and its own answers."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.SiLU(), nn.Linear(64, 10)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    images = (1.4 * torch.rand(40, 3, 8, 8, generator=generator) - 0.2).clamp(0, 1)
    with torch.no_grad():
        return model, images, model(images).argmax(1)


def cifar10_model(count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The shipped adversarially trained ResNet-20 and test images that it classifies right."""
    model = load_model("cifar10-resnet20-at").eval()
    images, labels = load_data("cifar10", root=DATA).test[: 2 * count]
    with torch.no_grad():
        right = model(images).argmax(1) == labels
    return model, images[right][:count], labels[right][:count]


def assert_no_worse(ours: Tensor, theirs: Tensor) -> None:
    """At least as many successes, and no longer median way, failures counted as infinite."""
    assert int(torch.isfinite(ours).sum()) >= int(torch.isfinite(theirs).sum())
    assert float(ours.median()) <= float(theirs.median())


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """What other libraries warn of is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_carlini_wagner_on_a_perceptron(name: str) -> None:
    model, images, labels = perceptron()
    theirs = outcome(model, PEERS[name](model, images, labels, **SETTINGS), images, labels)
    ours = outcome(model, CarliniWagnerL2(**SETTINGS)(model, images, labels), images, labels)
    assert torch.isfinite(ours).all()
    assert_no_worse(ours, theirs)


@pytest.mark.slow
@pytest.mark.data("cifar-10-batches-py")
@pytest.mark.parametrize("name", ["foolbox", "torchattacks", "cleverhans"])
def test_carlini_wagner_on_cifar10(name: str) -> None:
    model, images, labels = cifar10_model(50)
    settings = {**SETTINGS, "steps": 40}
    theirs = outcome(model, PEERS[name](model, images, labels, **settings), images, labels)
    ours = outcome(model, CarliniWagnerL2(**settings)(model, images, labels), images, labels)
    assert torch.isfinite(ours).all()
    assert_no_worse(ours, theirs)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_deepfool_and_foolbox(norm: Any) -> None:
    """Where no pixel is cut, the same images but for the 0.0001 that foolbox adds to each of a few steps."""
    foolbox = pytest.importorskip("foolbox")
    model, images, _ = perceptron()
    images = 0.2 + 0.6 * images
    with torch.no_grad():
        labels = model(images).argmax(1)
    kind = foolbox.attacks.L2DeepFoolAttack if norm == "l2" else foolbox.attacks.LinfDeepFoolAttack
    theirs = run_foolbox(kind(steps=50, candidates=10, overshoot=0.02), model, images, labels)
    ours = DeepFool(norm=norm)(model, images, labels)
    with torch.no_grad():
        assert (model(ours).argmax(1) != labels).all()
    assert lengths_of(ours - images, norm).median() > 0.005
    assert lengths_of(ours - theirs, norm).max() < 5e-4
    assert (lengths_of(ours - images, norm) <= lengths_of(theirs - images, norm)).all()


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_fmn_and_foolbox(norm: Any) -> None:
    foolbox = pytest.importorskip("foolbox")
    model, images, labels = perceptron()
    kind = foolbox.attacks.L2FMNAttack if norm == "l2" else foolbox.attacks.LInfFMNAttack
    theirs = run_foolbox(kind(steps=100), model, images, labels)
    ours = FMN(norm=norm, steps=100)(model, images, labels)
    with torch.no_grad():
        broken = [model(each).argmax(1) != labels for each in (ours, theirs)]
    assert broken[0].all()
    lengths = [
        torch.where(won, lengths_of(each - images, norm), torch.inf)
        for won, each in zip(broken, (ours, theirs), strict=True)
    ]
    assert float(lengths[0].median()) <= 1.001 * float(lengths[1].median())


def test_rays_break_more_than_foolboxs_hopskipjump_with_as_many_questions() -> None:
    """On a plain network on digits in Linf, where about a third of the images cannot be broken."""
    foolbox = pytest.importorskip("foolbox")
    images, labels = load_data("digits").test[:60]
    model = Counted(LabelsOnly(bench.open_tricks(bench.build("detached")))).eval()
    right = model(images).argmax(dim=1) == labels
    images, labels, eps = images[right], labels[right], 0.1
    model.shown = 0
    start = foolbox.attacks.LinearSearchBlendedUniformNoiseAttack(steps=20)
    walk = foolbox.attacks.HopSkipJumpAttack(
        init_attack=start, steps=8, initial_gradient_eval_steps=50, constraint="linf"
    )
    theirs = run_foolbox(walk, model, images, labels)
    asked = model.shown // len(images)
    fell = ((theirs - images).flatten(1).abs().amax(dim=1) <= eps + 1e-6) & (
        model(theirs).argmax(dim=1) != labels
    )
    ours = RaySearch(norm="linf", eps=eps, queries=asked).run(model, images, labels)
    assert ours.success.sum() >= fell.sum() + 3
