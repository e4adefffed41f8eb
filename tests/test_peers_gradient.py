"""FGSM and BIM beside foolbox and torchattacks: the same images, iterate by iterate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecnn.attacks import BIM, FGSM

pytestmark = pytest.mark.peer
EPS, STEP = 0.06, 0.017
NORMS = {"linf": 1.0, "l2": 8.0}  # radii of the two balls, in units of EPS


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(392, 7),
    ).eval()


def batch(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, 16, 16, generator=generator), torch.arange(count) % 7


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9, 20])
def test_bim_equals_foolbox(steps: int, norm: Any) -> None:
    foolbox = pytest.importorskip("foolbox")
    model, (images, labels) = small_network(), batch()
    eps, step = EPS * NORMS[norm], STEP * NORMS[norm]
    kind = {"linf": foolbox.attacks.LinfBasicIterativeAttack, "l2": foolbox.attacks.L2BasicIterativeAttack}[
        norm
    ]
    peer = kind(abs_stepsize=step, steps=steps, random_start=False)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    _, theirs, _ = peer(wrapped, images, labels, epsilons=eps)
    ours = BIM(norm=norm, eps=eps, steps=steps, step_size=step, keep="last")(model, images, labels)
    assert torch.allclose(ours, theirs, atol=2e-6, rtol=0)
    assert not torch.allclose(ours, images, atol=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9, 20])
def test_bim_equals_torchattacks(steps: int) -> None:
    torchattacks = pytest.importorskip("torchattacks")
    model, (images, labels) = small_network(), batch()
    theirs = torchattacks.BIM(model, eps=EPS, alpha=STEP, steps=steps)(images, labels)
    ours = BIM(norm="linf", eps=EPS, steps=steps, step_size=STEP, keep="last")(model, images, labels)
    assert torch.allclose(ours, theirs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("norm", NORMS)
def test_fgsm_equals_foolbox(norm: Any) -> None:
    foolbox = pytest.importorskip("foolbox")
    model, (images, labels) = small_network(), batch()
    eps = EPS * NORMS[norm]
    kind = {"linf": foolbox.attacks.LinfFastGradientAttack, "l2": foolbox.attacks.L2FastGradientAttack}[norm]
    _, theirs, broken = kind()(
        foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), images, labels, epsilons=eps
    )
    assert torch.allclose(
        FGSM(norm=norm, eps=eps, keep="last")(model, images, labels), theirs, atol=2e-6, rtol=0
    )
    assert torch.equal(FGSM(norm=norm, eps=eps).run(model, images, labels).success, broken)


def test_fgsm_equals_torchattacks() -> None:
    torchattacks = pytest.importorskip("torchattacks")
    model, (images, labels) = small_network(), batch()
    theirs = torchattacks.FGSM(model, eps=EPS)(images, labels)
    assert torch.allclose(
        FGSM(norm="linf", eps=EPS, keep="last")(model, images, labels), theirs, atol=1e-6, rtol=0
    )
