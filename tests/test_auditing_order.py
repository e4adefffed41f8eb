"""Slopes of the largest of many values, and of what else is taken by its order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecnn.auditing.bpda import straight_through
from ecnn.auditing.decisions import Decisions
from ecnn.auditing.holding import Holding

VALUES = torch.tensor([[0.9, 0.88, 0.1, 0.5], [0.2, 0.3, 0.7, 0.0]])
CUBE = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))

CALLS: list[Any] = [
    lambda x: x.amax(dim=1),
    lambda x: x.amax((1, 2), keepdim=True),
    lambda x: torch.amin(x, dim=-1),
    lambda x: torch.amax(x),
    lambda x: x.max(),
    lambda x: x.max(1).values,
    lambda x: torch.max(input=x, dim=2, keepdim=True)[0],
    lambda x: torch.max(x, 1 - x),
    lambda x: torch.min(x, other=1 - x),
    lambda x: x.sort(dim=2, descending=True)[0],
    lambda x: torch.sort(x, stable=True).values,
    lambda x: x.topk(2).values,
    lambda x: torch.topk(x, 2, 1, largest=False)[0],
    lambda x: x.kthvalue(2, 1).values,
    lambda x: x.median(),
    lambda x: x.median(dim=1).values,
    lambda x: x.nanmedian(1, True)[0],
    lambda x: x.quantile(0.3),
    lambda x: torch.quantile(x, 0.5, dim=1),
    lambda x: torch.quantile(x, torch.tensor([0.1, 0.9]), dim=2),
    lambda x: x.norm(),
    lambda x: x.norm(math.inf),
    lambda x: torch.norm(x, "fro", dim=(1, 2)),
    lambda x: torch.norm(x, p=1, dim=1),
    lambda x: torch.linalg.vector_norm(x, math.inf, (1, 2)),
    lambda x: torch.linalg.vector_norm(x, ord=-math.inf, dim=1, keepdim=True),
]


def watched(call: Any, values: Tensor, *, are_spread: bool) -> tuple[Tensor, Tensor]:
    """What a call makes of values while decisions are watched, and the slope of its sum."""
    points = values.clone().requires_grad_(True)
    with straight_through(batch=len(points)), Decisions(len(points), num_classes=10, forced={}) as decisions:
        made = call(points)
    decisions.slopes.are_spread = are_spread
    (slope,) = torch.autograd.grad(made.sum(), points)
    return made.detach(), slope


@pytest.mark.parametrize("call", CALLS)
def test_values_and_their_own_slope_are_torchs(call: Any) -> None:
    points = CUBE.clone().requires_grad_(True)
    expected = call(points)
    (own,) = torch.autograd.grad(expected.sum(), points)
    made, slope = watched(call, CUBE, are_spread=False)
    assert torch.equal(made, expected)
    assert torch.equal(slope, own)
    _, spread = watched(call, CUBE, are_spread=True)
    torch.testing.assert_close(spread.sum(), own.sum())  # what is taken rises by one where all values do


def test_the_spread_slope_leads_those_that_are_close() -> None:
    """Distances 0, 0.02, 0.8 and 0.4 from the largest are 0.305 on average, and a tenth of it is the unit."""
    _, slope = watched(lambda x: x.amax(dim=1), VALUES, are_spread=True)
    apart = torch.tensor([0.0, 0.02, 0.8, 0.4])
    torch.testing.assert_close(slope[0], torch.softmax(-apart / 0.0305, dim=0))
    assert slope[0, 1] > 0.3
    _, slope = watched(lambda x: x.topk(2, dim=1).values[:, 1], VALUES, are_spread=True)
    assert slope[0].argmax() == 1
    _, slope = watched(lambda x: torch.linalg.vector_norm(x, math.inf, 1), -VALUES, are_spread=True)
    assert (slope[0, :2] < -0.3).all()


def test_what_is_infinite_has_no_slope() -> None:
    """As options that a mask leaves out."""
    masked = VALUES.clone()
    masked[0, 0], masked[1] = -math.inf, math.inf
    made, slope = watched(lambda x: x.amax(dim=1), masked, are_spread=True)
    assert made[1] == math.inf
    assert slope.isfinite().all()
    assert slope[0, 0] == 0
    torch.testing.assert_close(slope[0].sum(), torch.tensor(1.0))


def test_many_values_have_their_own_slope_alone() -> None:
    _, slope = watched(lambda x: x.amax(dim=1), torch.rand(1, 2**14 + 1), are_spread=True)
    assert slope.count_nonzero() == 1


class ByLargest(nn.Module):
    """Class 0, unless the pixels sum up to more than 9.2; always where the largest is above 0.6.

    The largest is one of two options, so that no comparison stands for it. It is passed with sums of up to 9.6.
    """

    def checks(self, images: Tensor) -> Tensor:
        largest = images.flatten(1).amax(dim=1)
        return torch.stack([torch.full_like(largest, 0.6), largest], dim=1).argmax(dim=1) == 1

    def forward(self, images: Tensor) -> Tensor:
        lead = images.flatten(1).sum(dim=1) - 9.2
        inside = torch.stack([-lead, lead, lead - 1], dim=1)
        return torch.where(self.checks(images)[:, None], torch.tensor([1.0, 0.0, 0.0]), inside)


def test_the_largest_pixel_of_a_router_is_met_with_all_that_are_close_to_it() -> None:
    images = torch.linspace(0.45, 0.58, 16).view(1, 1, 4, 4).repeat(3, 1, 1, 1)
    labels = torch.zeros(3, dtype=torch.int64)
    found = Holding(norm="linf", eps=0.2, steps=40).run(ByLargest(), images, labels, seed=0)
    assert found.success.all()
    assert not ByLargest().checks(found.images).any()
