"""Sparse PGD: the nearest point that changes few values by brute force, closed forms on linear models, beside JSMA."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from toys import Linear, TanhNet, tiny_ecnn

from ecnn.attacks import JSMA, SparsePGD
from ecnn.attacks.randomness import Draws
from ecnn.attacks.sparse import change_few

pytestmark = pytest.mark.usefixtures("one_thread")


def some_images(seed: int, batch: int = 6, shape: tuple[int, ...] = (1, 2, 4)) -> Tensor:
    """Images of which some values are exactly 0 or 1."""
    return (1.4 * Draws.of(seed, torch.arange(batch)).uniform(*shape, dtype=torch.float64) - 0.2).clamp(0, 1)


@given(seed=st.integers(0, 2**31), kept=st.integers(0, 8))
def test_the_nearest_point_that_changes_few_values(seed: int, kept: int) -> None:
    """Against every choice of the values that are kept, each of them at its own nearest place in [0, 1]."""
    images = some_images(seed, batch=3)
    points = images + Draws.of(seed, torch.arange(3)).fold(1).normal(1, 2, 4, dtype=torch.float64)
    found = change_few(points, images, kept / 8)
    assert ((found != images).flatten(1).sum(dim=1) <= kept).all()
    assert 0 <= found.min() <= found.max() <= 1
    best = torch.full((3,), math.inf, dtype=torch.float64)
    for chosen in itertools.combinations(range(8), kept):
        other = images.flatten(1).clone()
        other[:, chosen] = points.flatten(1)[:, chosen].clamp(0, 1)
        best = torch.minimum(best, (other - points.flatten(1)).square().sum(dim=1))
    assert torch.allclose((found - points).flatten(1).square().sum(dim=1), best)


@pytest.mark.parametrize("kept", [1, 3, 8])
def test_on_a_linear_model_it_reaches_the_largest_loss(kept: int) -> None:
    """The best changes are those of the values whose slope times room is largest, each to its end.

    Steps are long: short ones favour the values that are changed already.
    """
    images = some_images(5)
    weight = torch.randn(2, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    model = Linear(weight)
    labels = model(images).argmax(dim=1)
    slopes = weight[1 - labels] - weight[labels]
    room = torch.where(slopes > 0, 1 - images.flatten(1), images.flatten(1))
    most = (slopes.abs() * room).topk(kept, dim=1).values.sum(dim=1)
    attack = SparsePGD(
        max_pixel_fraction=kept / 8, steps=10, step_size=1e4, start="image", keep="last", loss="margin"
    )
    points = attack(model, images, labels)
    gained = (slopes * (points - images).flatten(1)).sum(dim=1)
    assert torch.allclose(gained, most)


def test_it_breaks_what_jsma_breaks_and_more_with_as_many_values() -> None:
    """JSMA takes no move back and only brightens (theta 1)."""
    model = TanhNet(3, pixels=64, hidden=24, spread=1.0)
    images = some_images(1, batch=60, shape=(1, 8, 8))
    labels = model(images).argmax(dim=1)
    jsma = JSMA(max_pixel_fraction=0.05, pixels="one", goal="each").run(model, images, labels)
    sparse = SparsePGD(max_pixel_fraction=0.05, steps=40, step_size=10, restarts=3, schedule="cosine")
    found = sparse.run(model, images, labels)
    assert (found.images != images).flatten(1).sum(dim=1).max() <= 3
    assert 0 < int(jsma.success.sum()) < len(images)
    assert int(found.success.sum()) > int(jsma.success.sum())
    assert (jsma.success <= found.success).all()


def test_no_values_to_change_is_the_image_itself() -> None:
    model, images = tiny_ecnn(1), some_images(0, shape=(1, 8, 8)).float()
    labels = model(images).argmax(dim=1)
    attack = SparsePGD(max_pixel_fraction=0.01, steps=3, step_size=0.5, keep="last")  # 0.64 of a value
    assert torch.equal(attack(model, images, labels), images)
