"""The search by classes alone: closed-form distances in every norm, what it reads, and what its starts are worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_attacks_blackbox import FEATURES, SHAPE, Net, classes, plane_and_images, some_images
from torch import Tensor, nn
from toys import Counting, LabelsOnly, half_spaces

from ecnn.attacks import PGD, Neighbours, RaySearch, rays
from ecnn.attacks.images import at_most

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2), ("l1", torch.inf)])
def test_a_plane_within_the_ball_is_found_and_one_outside_is_not(norm: Any, dual: float) -> None:
    """The distance is the height over the dual norm of the weights; the ball reaches a little beyond, or not quite."""
    model, images = plane_and_images(torch.float64)
    with torch.no_grad():
        heights = model(images).amax(dim=1)
    nearest = heights / torch.linalg.vector_norm(model.weight[0], dual)
    labels = classes(model, images)
    for image, label, distance in zip(images, labels, nearest.tolist(), strict=True):
        given = image[None], label[None]
        assert not RaySearch(norm=norm, eps=0.99 * distance, queries=500).run(model, *given).success
        found = RaySearch(norm=norm, eps=1.06 * distance, queries=3000).run(model, *given)
        # In L1 the plane is met along one pixel of 48, whose room in [0, 1] may end before.
        assert found.success or norm == "l1"
        assert found.backwards == 0


class Refusing(nn.Module):
    """Raises an error where one of the images is dark."""

    def __init__(self, inner: nn.Module, least: float) -> None:
        super().__init__()
        self.inner, self.least, self.refused = inner, least, 0

    def forward(self, images: Tensor) -> Tensor:
        if (images.flatten(1).mean(dim=1) < self.least).any():
            self.refused += 1
            raise ValueError("no digit found")
        scores: Tensor = self.inner(images)
        return scores


def test_a_model_that_refuses_some_points_is_searched_all_the_same() -> None:
    model, images = plane_and_images(torch.float64)
    labels = classes(model, images)
    attack = RaySearch(norm="linf", eps=0.3, queries=1000)
    expected = attack.run(model, images, labels)
    refusing = Refusing(model, float(images.flatten(1).mean(dim=1).min()) - 0.02)
    found = attack.run(refusing, images, labels)
    assert refusing.refused
    assert expected.success.any()
    assert found.success.tolist() == expected.success.tolist()
    with pytest.raises(ValueError, match="no digit"):
        attack.run(Refusing(model, 2.0), images, labels)


def test_in_l1_the_one_pixel_that_matters_is_found() -> None:
    weight = torch.full((FEATURES,), 0.1, dtype=torch.float64)
    weight[7] = 1.0
    model = half_spaces(weight, middle=0.5)
    images = torch.full((2, *SHAPE), 0.5, dtype=torch.float64)
    images.view(2, -1)[:, 7] += 0.2
    found = RaySearch(norm="l1", eps=0.25, queries=1000).run(model, images, classes(model, images))
    assert found.success.all()
    moved = (found.images - images).flatten(1).abs()
    assert (moved.argmax(dim=1) == 7).all()


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_only_classes_are_read(norm: Any) -> None:
    model, images = Net(), some_images()
    labels = classes(model, images)
    attack = RaySearch(norm=norm, eps={"linf": 0.1, "l2": 0.5, "l1": 2.0}[norm], queries=300)
    known, hidden = attack.run(model, images, labels), attack.run(LabelsOnly(model), images, labels)
    assert torch.equal(known.images, hidden.images)
    assert torch.equal(known.forwards, hidden.forwards)
    assert known.success.any()


def test_it_finds_what_gradients_find() -> None:
    """Where PGD with many starts breaks some images and leaves others, the search breaks these but one at most."""
    model, images = Net(5), some_images(24)
    labels = classes(model, images)
    ball: dict[str, Any] = {"norm": "linf", "eps": 0.03}
    by_gradients = PGD(steps=60, step_size=0.005, restarts=3, **ball).run(model, images, labels).success
    by_classes = RaySearch(queries=1500, **ball).run(LabelsOnly(model), images, labels).success
    assert 4 <= int(by_gradients.sum()) <= 20
    assert int((by_gradients & ~by_classes).sum()) <= 1
    assert int(by_classes.sum()) <= 20


def test_what_broke_a_neighbour_is_tried_first() -> None:
    """A move that broke the nearest image of the class breaks this one with the first questions."""
    model, images = plane_and_images(torch.float64)
    labels = classes(model, images)
    moves = -model.weight[labels].view(-1, *SHAPE).sign()
    known = Neighbours(images=images.flip(3), labels=labels, moves=moves)
    with torch.no_grad():
        nearest = model(images).amax(dim=1) / model.weight[0].abs().sum()
    ball: dict[str, Any] = {"norm": "linf", "eps": 1.05 * float(nearest.max())}
    helped = RaySearch(queries=400, neighbours=known, **ball).run(model, images, labels)
    alone = RaySearch(queries=400, **ball).run(model, images, labels)
    assert helped.success.all()
    assert helped.forwards.max() <= 2 + 4 + 8
    assert alone.forwards.min() > helped.forwards.max()
    # An image of another class shows the way, too: there is one at the end of it.
    strangers = Neighbours(images=images, labels=labels, moves=torch.zeros_like(images))
    assert (
        RaySearch(norm="l2", eps=0.6, queries=50, neighbours=strangers)
        .run(model, images, labels)
        .success.all()
    )


def test_the_ends_of_other_attacks_are_directions() -> None:
    model, images = Net(5), some_images(8)
    labels = classes(model, images)
    walk = PGD(norm="linf", eps=0.02, steps=10, step_size=0.005, keep="last")
    found = RaySearch(norm="linf", eps=0.15, queries=40, starts=(walk,)).run(model, images, labels)
    assert found.success.all()
    assert (found.backwards == 10).all()
    assert int((found.forwards == 2 + 10 + 2).sum()) >= 6


def test_a_share_of_the_images_is_chosen_image_by_image() -> None:
    model, images = Net(5), some_images(24)
    labels = classes(model, images)
    attack = RaySearch(norm="linf", eps=0.03, queries=60, share=0.5)
    found = attack.run(model, images, labels)
    asked = found.forwards > 2
    assert 5 <= int(asked.sum()) <= 19
    rows = torch.tensor([3, 17, 5])
    apart = attack.run(model, images[rows], labels[rows], index=rows)
    assert torch.equal(apart.forwards, found.forwards[rows])
    assert attack.cost(5).forwards == 32
    assert (
        RaySearch(norm="linf", eps=0.03, queries=60, share=0.0).run(model, images, labels).forwards == 2
    ).all()


def test_portions_and_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = Net(3), some_images(7)
    labels = classes(model, images)
    settings: dict[str, Any] = {"norm": "linf", "eps": 0.02, "queries": 250}
    whole = RaySearch(**settings).run(model, images, labels)
    parts = RaySearch(max_batch=5, **settings).run(model, images, labels)
    monkeypatch.setattr(rays, "_MOST_NUMBERS", 2 * FEATURES * 32)
    groups = RaySearch(**settings).run(model, images, labels)
    for other in (parts, groups):
        assert torch.allclose(whole.images, other.images, atol=1e-9)
        assert torch.equal(whole.forwards, other.forwards)


def test_images_that_are_no_pictures() -> None:
    """One row of numbers per image, and pictures of one pixel."""
    weight = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = half_spaces(weight, middle=0.5)
    for shape in ((6,), (6, 1, 1), (1, 1, 6)):
        images = 0.5 + 0.1 * (some_images(4).flatten(1)[:, :6] - 0.5).view(4, *shape)
        found = RaySearch(norm="linf", eps=0.2, queries=200).run(model, images, classes(model, images))
        assert found.success.all()


def test_large_images_are_searched_a_few_at_a_time_where_the_batch_is_bounded() -> None:
    """Of 12 images of 96 pixels at once a tensor of probes would hold 10.6 million numbers; the fate is the same."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(12, 3, 96, 96, generator=generator) * 0.02 + 0.49
    model = half_spaces(torch.randn(images[0].numel(), generator=generator))
    labels = classes(model, images)
    attack = RaySearch(norm="linf", eps=0.001, queries=200)
    with at_most(12), Counting() as counted:
        found = attack.run(model, images, labels)
    assert counted.largest <= 2**23
    alone = attack.run(model, images[5:6], labels[5:6], index=torch.tensor([5]))
    assert torch.equal(alone.images, found.images[5:6])
    assert found.forwards.max() > 64  # probes were asked
