"""A model that wants other pixels than [0, 1] is recognised, and a sentence says what it wants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import TINY

import ecnn
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import evaluate
from ecnn.evaluation.readings import STATISTICS, other_readings

pytestmark = pytest.mark.usefixtures("one_thread")


class Brightest(nn.Module):
    """Which of ten pixels is the brightest, for images in a range of its own; elsewhere always class 0."""

    def __init__(self, wanted: Callable[[Tensor], Tensor], num_classes: int = 10) -> None:
        super().__init__()
        self.wanted, self.num_classes = wanted, num_classes

    def forward(self, images: Tensor) -> Tensor:
        """The images are as wanted if the last row is: it holds marks at 0.2, 0.4 and 0.8 of white."""
        marks = (
            torch.tensor([0.2, 0.4, 0.8])
            .repeat(4, 1)[None, None]
            .expand(len(images), images.shape[1], -1, -1)
        )
        expected = self.wanted(marks + torch.arange(images.shape[1])[:, None, None] / 20)[:, :, 0]
        fits = ((images[:, :, -1, :3] - expected).abs() < 1e-3 * expected.abs() + 1e-3).flatten(1).all(dim=1)
        scores = images[:, 0].flatten(1)[:, : self.num_classes]
        return torch.where(fits[:, None], scores, torch.eye(self.num_classes)[0])


def marked(channels: int, per_class: int = 5) -> Split:
    """Images that `Brightest` classifies right when it is given what it wants."""
    labels = torch.arange(10).repeat(per_class)
    images = torch.full((len(labels), channels, 4, 4), 0.3)
    for channel in range(channels):
        images[:, channel].flatten(1)[torch.arange(len(labels)), labels] = 0.7
        images[:, channel, -1, :3] = torch.tensor([0.2, 0.4, 0.8]) + channel / 20
    return Split(images, labels)


READINGS = [(channels, number) for channels in (1, 3) for number, _ in enumerate(other_readings(channels))]


@pytest.mark.parametrize(("channels", "number"), READINGS)
def test_every_usual_reading_is_recognised(channels: int, number: int) -> None:
    reading = list(other_readings(channels))[number]
    with pytest.raises(InputError) as told:
        evaluate(Brightest(reading.change), marked(channels), {}, limit=None)
    said = str(told.value)
    assert said.startswith(
        "the model classifies 10 % of 50 images right when given pixels in [0, 1], and 100 % when"
    )
    assert f"when given {reading.words}: wrap it: {reading.wrap}." in said


def test_the_advice_is_right() -> None:
    model = Brightest(next(iter(other_readings(1))).change)
    with pytest.raises(InputError, match=r"ecnn\.Normalized\(model, mean=0\.0, std=1 / 255\)"):
        evaluate(model, marked(1), {}, limit=None)
    assert (
        evaluate(ecnn.Normalized(model, mean=0.0, std=1 / 255), marked(1), {}, limit=None).clean_accuracy
        == 1.0
    )
    mean, std = STATISTICS["CIFAR-10"]
    wanted = Brightest(
        lambda images: (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    )
    with pytest.raises(InputError, match=r"CIFAR-10.*mean=\[0.4914, 0.4822, 0.4465\]"):
        evaluate(wanted, marked(3), {}, limit=None)
    wrapped = ecnn.Normalized(wanted, mean=list(mean), std=list(std))
    assert evaluate(wrapped, marked(3), {}, limit=None).clean_accuracy == 1.0


def test_an_audit_says_it_before_it_starts() -> None:
    with pytest.raises(InputError, match=r"pixels of -1\.\.1"):
        ecnn.audit(Brightest(lambda x: 2 * x - 1), marked(1), norm="linf", eps=0.1, limit=50, budget=TINY)


def test_models_that_are_accurate_or_hopeless_are_left_alone() -> None:
    assert evaluate(Brightest(lambda images: images), marked(3), {}, limit=None).clean_accuracy == 1.0
    hopeless = Brightest(lambda images: images + 7)
    assert evaluate(hopeless, marked(3), {}, limit=None).clean_accuracy == 0.1
    # One class alone: whatever always says it would be accurate.
    always = Brightest(lambda images: images + 7)
    assert evaluate(always, marked(1), {}, limit=None, classes=[4]).clean_accuracy == 0.0


def test_channels_last_is_recognised() -> None:
    class Last(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return (
                images.flatten(1) @ torch.ones(48, 10) if images.shape[-1] == 3 else images @ torch.ones(3, 1)
            )

    split = marked(3)
    with pytest.raises(InputError, match=r"images\.permute\(0, 2, 3, 1\)"):
        evaluate(Last(), split, {}, limit=None)
