"""Attacks that stay on whole grey levels; audits in any state of torch; models that take only so many images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ecnn
from ecnn.asking import in_usual_state
from ecnn.attacks import PGD
from ecnn.auditing.certificates import certify
from ecnn.auditing.deployment import filled_up, largest_batch
from ecnn.auditing.levels import OnBytes, RoundedScores, is_on_bytes, whole_levels
from ecnn.auditing.traits import find_traits
from ecnn.backbones import ResNet
from ecnn.data import Split
from ecnn.evaluation import model_transfer
from ecnn.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("one_thread")

EPS = 0.1


class ByBytes(nn.Module):
    """Which half is brighter: by its mean in images of whole levels, by votes of pixels in all others.

    Small moves change the mean, and no vote. The check for whole levels is NumPy's: nothing in torch shows it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))

    def forward(self, images: Tensor) -> Tensor:
        left, right = (part.mean(dim=(1, 2, 3)) for part in images.tensor_split(2, dim=3))
        fragile = self.scale * torch.stack([left - right, right - left], dim=1)
        levels = images.detach().numpy() * 255
        whole = np.abs(levels - levels.round()).reshape(len(images), -1).max(axis=1) < 1e-3
        votes = (images > 0.5).float()
        left, right = (part.mean(dim=(1, 2, 3)) for part in votes.tensor_split(2, dim=3))
        robust = 10 * torch.stack([left - right, right - left], dim=1) + 0 * fragile
        return torch.where(torch.from_numpy(whole)[:, None], fragile, robust)


def halves(count: int = 40) -> Split:
    """Images of whole levels: one half a little brighter than mid-grey, the other a little darker."""
    draws = np.random.default_rng(0)
    images = np.full((count, 1, 4, 4), 128, dtype=np.uint8)
    labels = draws.integers(0, 2, count)
    for image, label in zip(images, labels, strict=True):
        image[..., 2 * label : 2 * label + 2] = 160
        image[..., 2 - 2 * label : 4 - 2 * label] = 96
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def sides() -> nn.Sequential:
    """Which half is brighter, linear in the pixels."""
    layer = nn.Linear(16, 2, bias=False)
    left = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(4)
    layer.weight = nn.Parameter(torch.stack([left, -left]))
    return nn.Sequential(nn.Flatten(), layer)


def test_a_check_outside_of_torch_for_whole_levels_is_seen_through() -> None:
    """The gradient, random noise and questions off the levels all speak of a way that no file takes."""
    model, split = ByBytes(), halves()
    images, labels = split[:]
    eps = 0.2
    naive = PGD(norm="linf", eps=eps, steps=40, step_size=0.02).run(model, images, labels)
    assert int(naive.success.sum()) == 0
    assert find_traits(model, images, 2).knows_bytes
    eps = whole_levels(eps)
    walk: Any = {"norm": "linf", "eps": eps, "steps": 10, "step_size": eps / 4, "on": RoundedScores()}
    found = OnBytes(attack=PGD(**walk), norm="linf", eps=eps).run(model, images, labels)
    assert int(found.success.sum()) == len(images)
    assert is_on_bytes(found.images)
    assert float((found.images - images).abs().max()) <= eps + 1e-6
    audit = ecnn.audit(model, split, norm="linf", eps=0.2, claim=1.0, budget="quick")
    assert (audit.verdict, audit.accuracy) == ("not believable", 0.0)


class Opaque(ByBytes):
    """The same without any gradient."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).detach()


def test_such_a_check_is_seen_through_without_gradients_too() -> None:
    audit = ecnn.audit(Opaque(), halves(), norm="linf", eps=0.2, claim=1.0, budget="quick")
    assert audit.accuracy <= 0.05
    assert audit.verdict == "not believable"


def test_models_that_go_by_no_levels_are_not_asked_about_them() -> None:
    images = halves()[:][0]
    assert not find_traits(sides(), images, 2).knows_bytes
    assert not find_traits(ByBytes(), images + 1e-3, 2).knows_bytes  # nor where the images have none


@pytest.mark.parametrize(("eps", "levels"), [(8 / 255, 8), (0.1, 25), (0.003, 0), (1.0, 255)])
def test_the_largest_radius_of_whole_levels(eps: float, levels: int) -> None:
    assert whole_levels(eps) == levels / 255


def test_an_audit_is_the_same_in_any_state_of_torch() -> None:
    model, split = sides(), halves(12)
    settings: dict[str, Any] = {"norm": "linf", "eps": EPS, "budget": "quick"}
    usual = ecnn.audit(model, split, **settings)
    attacks = {"pgd": PGD(norm="linf", eps=EPS, steps=3, step_size=0.05)}
    with torch.inference_mode():
        assert ecnn.audit(model, split, **settings).broken_by == usual.broken_by
        assert torch.is_inference_mode_enabled()
    with torch.no_grad():
        without = ecnn.audit(model, split, **settings)
        inside = ecnn.evaluate(model, split, attacks, limit=None).accuracy
        assert not torch.is_grad_enabled()
    assert inside == ecnn.evaluate(model, split, attacks, limit=None).accuracy
    assert [finding.claim for finding in without.findings] == [finding.claim for finding in usual.findings]


def _certified(model: nn.Module, split: Split) -> Any:
    found = certify(model, *split[:], norm="linf", eps=EPS)
    assert found is not None
    return found.proven


def _transferred(model: nn.Module, split: Split) -> Any:
    attack = PGD(norm="linf", eps=EPS, steps=3, step_size=0.05)
    return model_transfer({"model": model}, split, attack, limit=None).counts.tolist()


def _trained(model: nn.Module, split: Split) -> Any:
    with torch.inference_mode(False):
        fresh = ResNet(2, 1, depth=8, width=2)
    recipe = replace(
        RECIPES["small"], epochs=1, batch_size=4, objective="cross_entropy", diversity_weight=0.0
    )
    ecnn.fit(fresh, split, val=None, recipe=recipe, seed=0)
    return [value.tolist() for value in fresh.state_dict().values()]


@pytest.mark.parametrize("ask", [_certified, _transferred, _trained])
def test_what_needs_gradients_has_them_in_any_state_of_torch(ask: Callable[[nn.Module, Split], Any]) -> None:
    model, split = sides(), halves(12)
    torch.manual_seed(0)
    usual = ask(model, split)
    for state in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with state():
            assert ask(model, split) == usual


def test_the_callers_state_comes_back_also_from_an_error() -> None:
    @in_usual_state
    def fails() -> None:
        assert torch.get_default_dtype() == torch.float32
        assert torch.is_grad_enabled()
        raise KeyError

    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(KeyError), torch.no_grad():
            fails()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class AtMost(nn.Module):
    """Takes no more than so many images at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.network = most, sides()

    def forward(self, images: Tensor) -> Tensor:
        assert len(images) <= self.most
        scores: Tensor = self.network(images)
        return scores


def test_models_that_take_so_many_images_at_once() -> None:
    images = halves(100)[:][0]
    assert largest_batch(AtMost(100), images, least=8) is None
    assert largest_batch(AtMost(60), images, least=8) == 50
    assert largest_batch(AtMost(12), images, least=8) == 12
    assert largest_batch(AtMost(4), images, least=8) is None
    assert len(filled_up(images[:40], 256)) == 256
    assert torch.equal(filled_up(images[:40], 256)[40:80], images[:40])
    assert len(filled_up(torch.zeros(3, 3, 224, 224), 256)) == 6
    # The second takes all images at once, and not what attacks make of them.
    for most, limit in ((30, 64), (50, 40)):
        found = ecnn.audit(AtMost(most), halves(64), norm="linf", eps=0.01, budget="quick", limit=limit)
        assert found.images == limit
