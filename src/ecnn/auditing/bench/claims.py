"""Protocols that compute the claimed accuracy of a model, and the decorators that register models."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ecnn.attacks import BIM, FGSM, PGD, Attack, AutoAttack, Square
from ecnn.attacks.views import Loss
from ecnn.auditing.bench.informed import informed_accuracy
from ecnn.auditing.bench.networks import interval_margins
from ecnn.auditing.bench.subject import EPS, Half, Key, Make, Protocol, Subject, Train
from ecnn.data import Dataset
from ecnn.objectives import predicted_classes


def reports(make: Callable[[float], Attack], count: Literal["robust", "after"] = "robust") -> Protocol:
    """Protocol: the accuracy under one attack, of images right before and after it, or with "after" only after it.

    The paper's tables count "after".
    """

    def claim(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
        attacked = make(eps).run(model, images, labels)
        right = attacked.predictions == labels
        if count == "robust":
            with torch.no_grad():
                right &= model(images).argmax(dim=1) == labels
        return float(right.double().mean())

    return claim


def proven_by_intervals(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
    with torch.no_grad():
        margins = interval_margins(model, images, labels, eps)
    margins.scatter_(1, labels[:, None], math.inf)
    return float((margins.amin(dim=1) > 0).double().mean())


def known_exactly(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
    """Exact robust accuracy of a linear model: interval bounds are tight there, since a corner of the box is worst."""
    return proven_by_intervals(model, images, labels, eps)


def fgsm(eps: float) -> Attack:
    return FGSM(norm="linf", eps=eps)


def bim(eps: float) -> Attack:
    return BIM(norm="linf", eps=eps, steps=10, step_size=eps / 4)


def pgd(eps: float) -> Attack:
    return PGD(norm="linf", eps=eps, steps=10, step_size=eps / 4, loss="cross_entropy")


def large_steps(loss: Loss) -> Callable[[float], Attack]:
    """Maker of the PGD of the paper's authors: 200 steps of half the radius, keeping the last iterate."""

    def make(eps: float) -> Attack:
        return PGD(norm="linf", eps=eps, steps=200, step_size=eps / 2, loss=loss, loss_slack=50, keep="last")

    return make


def own_label(eps: float) -> Attack:
    """PGD on the model's own predictions: 7 steps of twice the radius, keeping the last iterate."""
    return PGD(
        norm="linf",
        eps=eps,
        steps=7,
        step_size=2 * eps,
        loss="cross_entropy",
        keep="last",
        labels="predicted",
    )


def tiny_steps(eps: float) -> Attack:
    """BIM from the image: its ten steps together cover a tenth of the radius."""
    return BIM(norm="linf", eps=eps, steps=10, step_size=eps / 100)


def autoattack(eps: float) -> Attack:
    return AutoAttack(norm="linf", eps=eps)


def known_trick(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
    """Accuracy under attacks that know how the model works: an honest claim where AutoAttack finds no gradient."""
    return informed_accuracy(model, images, labels, eps)


#: Makes an untrained network or a piece of one, from a dataset or without arguments.
Network = Callable[..., nn.Module]
AnyNetwork = TypeVar("AnyNetwork", bound=Network)
#: A protocol and its description in words.
Claim = tuple[Protocol, str]
BY_FGSM: Claim = (reports(fgsm), "FGSM")
BY_BIM: Claim = (reports(bim), "BIM, 10 steps")
BY_PGD: Claim = (reports(pgd), "PGD on cross-entropy, 10 steps")
BY_AUTOATTACK: Claim = (reports(autoattack), "AutoAttack")
BY_AN_INFORMED_ATTACK: Claim = (known_trick, "an attack made for the model")


def by_transfer(part: str) -> Claim:
    """Claim: the accuracy on points that PGD finds on a part of the model, such as the network without its defence."""

    def claim(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> float:
        points = pgd(eps)(model.get_submodule(part), images, labels)
        with torch.no_grad():
            right = [predicted_classes(model(shown)) == labels for shown in (images, points)]
        return float((right[0] & right[1]).double().mean())

    return claim, "PGD on a network without the defence, carried over"


def square(eps: float) -> Attack:
    return Square(norm="linf", eps=eps, queries=200)


BY_SQUARE: Claim = (reports(square), "Square, 200 queries")


def false(
    family: str,
    name: str,
    why: str,
    make: Make,
    train: Train,
    claim: Claim,
    *,
    half: Half = "first",
    knows: Key | None = None,
    key: Key | None = None,
) -> Subject:
    """A model that only looks robust."""
    attackers: dict[str, Any] = {"knows": knows, "key": key}
    return _subject(family, name, why, make, train, claim, honest=False, half=half, **attackers)


def honest(
    name: str,
    why: str,
    make: Make,
    train: Train,
    claim: Claim = BY_AUTOATTACK,
    *,
    eps: float = EPS,
    half: Half = "first",
) -> Subject:
    """A model whose claim comes from a strong evaluation, or from a proof."""
    return _subject("honest", name, why, make, train, claim, honest=True, half=half, eps=eps)


def _subject(
    family: str, name: str, why: str, make: Make, train: Train, claim: Claim, **other: Any
) -> Subject:
    protocol, words = claim
    facts: dict[str, Any] = {"family": family, "name": name, "why": why, "make": make, "train": train}
    return Subject(**facts, claim=protocol, protocol=words, **other)


class Subjects:
    """Collects the models of one file, in their order in the file.

    A model is a function that makes its untrained network, from the dataset if it has an argument `data`, decorated
    with `false` or `honest`. The function's name is the model's name. The first paragraph of its docstring says why the
    model looks robust or may be believed. Where a trick only comes before or after an ordinary network, the class of
    the trick is decorated instead: NumpyMedian is the model numpy_median.
    """

    def __init__(self, half: Half = "first") -> None:
        self.half: Half = half
        self.made: list[Subject] = []

    def __iter__(self) -> Iterator[Subject]:
        return iter(self.made)

    def false(
        self,
        family: str,
        train: Train,
        claim: Claim,
        *,
        before: Network | None = None,
        after: Network | None = None,
        knows: Key | None = None,
        key: Key | None = None,
    ) -> Callable[[AnyNetwork], AnyNetwork]:
        """Decorator of a model that only looks robust, or of the trick that makes it look so.

        Args:
            before: makes the network that follows the trick.
            after: makes the network that precedes the trick.
            knows, key: attacks made for this model, see `Subject`.
        """

        def add(network: AnyNetwork) -> AnyNetwork:
            name, why, make = _read(network, before, after)
            attackers: dict[str, Any] = {"knows": knows, "key": key}
            self.made.append(false(family, name, why, make, train, claim, half=self.half, **attackers))
            return network

        return add

    def honest(
        self, train: Train, claim: Claim = BY_AUTOATTACK, *, eps: float = EPS
    ) -> Callable[[AnyNetwork], AnyNetwork]:
        """Decorator of a model whose claim comes from a strong evaluation, or from a proof."""

        def add(network: AnyNetwork) -> AnyNetwork:
            name, why, make = _read(network)
            self.made.append(honest(name, why, make, train, claim, half=self.half, eps=eps))
            return network

        return add


def _read(
    network: Network, before: Network | None = None, after: Network | None = None
) -> tuple[str, str, Make]:
    """Name, reason (`why`) and maker of a model, read from the decorated function or class."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", network.__name__).lower()
    sentence = " ".join(inspect.cleandoc(network.__doc__ or "").partition("\n\n")[0].split())
    takes_data = "data" in inspect.signature(network).parameters

    def make(data: Dataset) -> nn.Module:
        own = functools.partial(network, data) if takes_data else network
        stack = [part() for part in (after, own, before) if part is not None]
        return stack[0] if len(stack) == 1 else nn.Sequential(*stack)

    return name, sentence[:1].lower() + sentence[1:].removesuffix("."), make
