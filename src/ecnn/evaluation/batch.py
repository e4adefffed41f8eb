"""One batch: checks of model and attack, running an attack, and measuring its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import InFixedBatches, find_fixed_batch, read_model, undisturbed
from ecnn.attacks import Aim, Attack, Transfer, View
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import forked_generators
from ecnn.attacks.views import Loss, find_view
from ecnn.checks import check_count, check_kind
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation.own_attacks import OwnAttack
from ecnn.objectives import predicted_classes

BATCH_SIZE = 256
_FEW = 8
#: An attack that is not an `Attack` of this package: (model, images, labels) -> images.
ForeignAttack = Callable[[nn.Module, Tensor, Tensor], Tensor]


def check_request(model: nn.Module, split: Split, limit: int | None, batch_size: int) -> Split:
    """The first `limit` images of the split; InputError unless the model takes them and has scores for their labels."""
    check_kind("model", model, nn.Module, "a torch module")
    check_kind("split", split, Split, "a Split such as data.test")
    check_count("batch_size", batch_size)
    chosen = split.take(limit)
    if not len(chosen):
        raise InputError("there is no image to evaluate: the split is empty or limit is 0.")
    first = place(model, chosen[:_FEW][0])
    try:
        with undisturbed(model):
            scores = _first_scores(model, first)
    except InputError:
        raise
    except Exception as error:
        _check_channel_order(model, first)
        if size := find_fixed_batch(model, first):
            raise InputError(
                f"the model takes batches of {size} images, no more and no fewer: evaluate "
                f"ecnn.asking.InFixedBatches(model, {size}), which fills up smaller ones."
            ) from error
        form = " x ".join(map(str, first.shape[1:]))
        error.add_note(f"The model was given images of {form} (channel, height, width), pixels in [0, 1].")
        raise
    lowest, highest = (int(bound) for bound in chosen.labels.aminmax())
    if highest >= scores.shape[1]:
        is_from_1 = lowest > 0 and highest == scores.shape[1]
        advice = "evaluate it on data of its own classes" + ", or subtract 1 if yours begin at 1" * is_from_1
        raise InputError(
            f"a label is {highest}, but the model has scores for {scores.shape[1]} classes (0 to "
            f"{scores.shape[1] - 1}): {advice}."
        )
    return chosen


def check_attacks(model: nn.Module, images: Tensor, attacks: Mapping[str, Any]) -> None:
    """Raises InputError unless the model has what the view of each attack reads, such as members.

    Args:
        model: the attacked model; for a `Transfer` its source is checked instead.
        images: of which the first is used.
        attacks: by name, for the error message; those that are not an `Attack` are skipped.
    """
    for name, attack in attacks.items():
        asked = model
        while isinstance(attack, Transfer):
            asked, attack = attack.source, attack.attack
        on = getattr(attack, "on", None)
        if isinstance(attack, Attack) and on is not None:
            try:
                _try_view(asked, find_view(on), attack, place(asked, images[:1]))
            except InputError as error:
                raise InputError(f"the attack {name!r}: {error}") from error


def _try_view(model: nn.Module, view: View, attack: Any, images: Tensor) -> None:
    """Evaluates the view once without goals and, if the attack has targets, once with a goal."""
    labels, loss = images.new_zeros(1, dtype=torch.int64), cast(Loss, getattr(attack, "loss", "margin"))
    goals = [None, labels + 1] if getattr(attack, "targets", 0) and view.has_goals else [None]
    with undisturbed(model), forked_generators(images.device), torch.no_grad():
        for goal in goals:
            try:
                view.look(model, images, Aim(labels, goal, loss))
            except InputError:
                raise
            except Exception:  # such as from a model that takes no single image; the attack uses batches
                return


def fill_batches(model: nn.Module, split: Split) -> nn.Module:
    """The model, or `InFixedBatches` of it if it takes batches of one size only."""
    first = place(model, split[:_FEW][0])
    with suppress(Exception), undisturbed(model):
        _first_scores(model, first)
        return model
    size = find_fixed_batch(model, first) if len(first) else None
    return model if size is None else InFixedBatches(model, size)


def _first_scores(model: nn.Module, images: Tensor) -> Tensor:
    """Scores of the first image, or of all if the model raises an error for a single one, as with batch statistics."""
    try:
        return read_model(model, images[:1])
    except InputError:
        raise
    except Exception:
        if len(images) == 1:
            raise
    return read_model(model, images)


def _check_channel_order(model: nn.Module, images: Tensor) -> None:
    """Raises InputError if the model, which fails on these images, takes them with the channels last."""
    try:
        with undisturbed(model):
            read_model(model, images.permute(0, 2, 3, 1).contiguous())
    except Exception:
        return
    raise InputError(
        "the model takes images with the channels last, (image, height, width, channel): wrap it in a module that "
        "calls model(images.permute(0, 2, 3, 1))."
    )


def place(model: nn.Module, images: Tensor) -> Tensor:
    """Images on the model's device, and in float64 if the model computes in it."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    if not tensors:
        return images
    return images.to(tensors[0].device, torch.float64 if tensors[0].dtype == torch.float64 else torch.float32)


def predict(model: nn.Module, images: Tensor) -> Tensor:
    """(batch,) the model's class for each image; -1 if its scores give no answer."""
    return predicted_classes(read_model(model, images))


def batch_seed(seed: int, first: int) -> int:
    """Seed of the global generators for the batch that begins with the image at position `first`."""
    return seed * 1_000_003 + first


@dataclass(frozen=True)
class Crafted:
    """The checked result of an attack on a batch.

    Attributes:
        images: the attacked images, of the batch's shape and in [0, 1].
        forwards: (batch,) forward passes spent on each image; -1 if the attack does not count them.
        backwards: (batch,) gradients, likewise.
        predictions: (batch,) the model's classes according to the attack; None if it does not report them.
        nan_gradients: how many gradients had NaN entries.
        outside: how many points of an `OwnAttack` left the ball or [0, 1] and were replaced by the clean image.
    """

    images: Tensor
    forwards: np.ndarray
    backwards: np.ndarray
    predictions: Tensor | None
    nan_gradients: int = 0
    outside: int = 0


def run_attack(
    model: nn.Module,
    attack: Attack | ForeignAttack | None,
    name: str,
    images: Tensor,
    labels: Tensor,
    seed: int,
    index: Tensor,
) -> Crafted:
    """Runs an attack on a batch; attack None returns the images unchanged.

    Random models, and attacks that are not an `Attack`, draw from global generators: call it inside
    `forked_generators` with a seed.
    """
    if attack is None:
        return Crafted(images, np.ones(len(images), dtype=int), np.zeros(len(images), dtype=int), None)
    if isinstance(attack, Attack):
        found = attack.run(model, images, labels, seed=seed, index=index)
        forwards, backwards = (np.asarray(count.cpu()) for count in (found.forwards, found.backwards))
        attacked = check_attacked(found.images, images, name)
        return Crafted(attacked, forwards, backwards, found.predictions, found.nan_gradients)
    foreign, unknown = _run_foreign(model, attack, images, labels), np.full(len(images), -1)
    if isinstance(attack, OwnAttack):
        points, outside = attack.judge(check_form(foreign, images, name), images)
        return Crafted(points, unknown, unknown, None, outside=outside)
    return Crafted(check_attacked(foreign, images, name), unknown, unknown, None)


def _run_foreign(model: nn.Module, attack: ForeignAttack, images: Tensor, labels: Tensor) -> Tensor:
    """Calls an attack that is not an `Attack`, with copies of images and labels."""
    with undisturbed(model), torch.enable_grad():
        return attack(model, images.clone(), labels.clone())


def check_form(attacked: Any, images: Tensor, name: str) -> Tensor:
    """The tensor that an attack returned, in the images' dtype; InputError unless it is floating, of their shape."""
    if not isinstance(attacked, Tensor) or attacked.shape != images.shape or not attacked.is_floating_point():
        came = (
            f"{attacked.dtype} {tuple(attacked.shape)}"
            if isinstance(attacked, Tensor)
            else type(attacked).__name__
        )
        raise InputError(
            f"the attack {name!r} must return floating images of shape {tuple(images.shape)}, but returned {came}."
        )
    checked: Tensor = attacked.detach().to(images)
    return checked


def check_attacked(attacked: Any, images: Tensor, name: str) -> Tensor:
    """The tensor that an attack returned, as by `check_form`; InputError too if pixels are outside [0, 1] or NaN."""
    checked = check_form(attacked, images, name)
    low, high = (float(bound) for bound in checked.aminmax())
    if not (low >= 0 and high <= 1):  # also catches nan
        raise InputError(f"the attack {name!r} left [0, 1]: its pixels reach from {low:.6g} to {high:.6g}.")
    return checked


def measure_scores(scores: Tensor, labels: Tensor) -> dict[str, np.ndarray]:
    """(batch,) prediction, NLL, confidence and Brier score of each image, by column name.

    Scores without an answer have prediction -1 and the worst values: NLL inf, confidence 1, Brier score 2.
    """
    predictions, scores = predicted_classes(scores), scores.double()
    valid, highest = predictions >= 0, scores.amax(dim=1, keepdim=True)
    # An infinite score has probability 1, as in the limit; -inf beside finite scores has probability 0.
    certain = torch.where(scores == highest, 0.0, -math.inf)
    scores = torch.where(valid[:, None], torch.where(highest.isinf(), certain, scores), 0.0)
    logarithms = torch.log_softmax(scores, dim=1)
    probabilities = logarithms.exp()
    of_truth = logarithms.gather(1, labels[:, None]).squeeze(1)
    brier = (probabilities**2).sum(dim=1) - 2 * of_truth.exp() + 1
    columns = {
        "prediction": predictions,
        "nll": torch.where(valid, -of_truth, math.inf),
        "confidence": torch.where(valid, probabilities.amax(dim=1), 1.0),
        "brier": torch.where(valid, brier.clamp_min(0), 2.0),
    }
    return {name: values.cpu().numpy() for name, values in columns.items()}


def measure_change(attacked: Tensor, images: Tensor) -> dict[str, np.ndarray]:
    """(batch,) length of each image's change in every norm, and as "l0" the number of changed values."""
    changes = (attacked.double() - images.double()).flatten(1)
    columns = {name: norm.length(changes) for name, norm in NORMS.items()}
    columns["l0"] = (changes != 0).sum(dim=1)
    return {name: values.cpu().numpy() for name, values in columns.items()}


def check_ball(name: str, norm: str, eps: float, farthest: float, pixels: int) -> None:
    """Raises InputError if an attack left its ball by more than rounding error.

    Args:
        name: of the attack.
        norm, eps: of the ball.
        farthest: largest distance by which it moved an image, in that norm.
        pixels: number of values in an image.
    """
    if farthest > eps + NORMS[norm].rounding(pixels):
        raise InputError(
            f"the attack {name!r} left its {norm} ball of radius {eps:.6g}: one image is {farthest:.6g} away."
        )
