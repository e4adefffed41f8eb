"""Intermediate results of a model as targets of attacks, recorded call by call.

A model may decide by values that its scores hide, such as logits before a one-hot encoding, votes or distances. The
values that best predict its answers are the place to attack (Tramer et al. 2020). A layer here is any torch call that
returns a floating tensor with one row per image, whether a module makes it or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ecnn.asking import full_precision
from ecnn.attacks.images import at_once
from ecnn.attacks.views import Aim, Look, ScoreView, View
from ecnn.auditing.adaptive import weigh_members
from ecnn.errors import InputError

_MOST_FEATURES = 4096  # numbers per image of a layer; larger maps are averaged over their positions first
_MOST_LAYERS = 60
_EXPLAINS = 0.5  # least share of the model's answers that a layer must predict to be worth an attack
_RIDGE = 1e-2
_BATCH = 128


class Listener(TorchFunctionMode):
    """Records the results of torch calls while it is on: floating tensors of two axes or more, one row per image.

    The name of a result is made of the function's name, the shape of a row, and a count of such results: linear-10-1
    is the first one of `linear` with 10 numbers per image.

    Args:
        batch: how many images are classified.
        wanted: names of the results to record, with their gradients. None records every result with more than one
            number per image, as `features_from` returns it and without gradient.

    Attributes:
        heard: the results by name, in the order of the calls.
    """

    def __init__(self, batch: int, wanted: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self.batch, self.wanted = batch, wanted
        self.heard: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        said = func(*args, **(kwargs or {}))
        for tensor in said if isinstance(said, (tuple, list)) else (said,):
            self._hear(getattr(func, "__name__", ""), tensor)
        return said

    def _hear(self, name: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or tensor.ndim < 2 or len(tensor) != self.batch:
            return
        if not tensor.is_floating_point():
            return
        kind = f"{name.strip('_')}-{'x'.join(map(str, tensor.shape[1:]))}"
        self._counts[kind] = self._counts.get(kind, 0) + 1
        key = f"{kind}-{self._counts[kind]}"
        if self.wanted is None:
            if tensor[0].numel() > 1:
                self.heard[key] = features_from(tensor.detach())
        elif key in self.wanted:
            self.heard[key] = tensor


def features_from(values: Tensor) -> Tensor:
    """(batch, feature) a layer's values, flattened; large maps are first averaged over all but a row's first axis."""
    if values[0].numel() > _MOST_FEATURES and values.ndim > 2:
        values = values.flatten(2).mean(dim=2)
    return full_precision(values).flatten(1)


def hear(model: nn.Module, images: Tensor, wanted: tuple[str, ...]) -> tuple[list[Tensor], Tensor]:
    """The values of the named layers, and the model's scores without gradient; InputError if a layer did not run."""
    with Listener(len(images), wanted) as listener:
        scores = full_precision(model(images))
    missing = [key for key in wanted if key not in listener.heard]
    if missing:
        raise InputError(f"{type(model).__name__} did not run its layer {missing[0]} on these images.")
    return [listener.heard[key] for key in wanted], scores.detach()


def class_scores(values: Tensor, num_classes: int) -> Tensor | None:
    """(batch, member, class) a layer's values read as scores of each class; None if their shape has no class axis."""
    values = full_precision(values)
    if values.ndim == 2 and values.shape[1] == num_classes:
        return values[:, None]
    if values.ndim == 3 and values.shape[2] == num_classes:
        return values
    if values.ndim == 3 and values.shape[1] == num_classes and values.shape[2] <= 64:
        return values.transpose(1, 2)
    if values.ndim == 4 and values.shape[1] == num_classes:
        return values.mean(dim=(2, 3))[:, None]
    return None


@dataclass(frozen=True, kw_only=True)
class LayerScores(ScoreView):
    """One score per class from layers inside the model: the mean over the layers and the members of each.

    If there are several members, each is divided by the standard deviation of its scores first.

    Attributes:
        layers: names as a `Listener` gives them; those without scores per class are skipped.
        num_classes: of the model.
        sign: -1 if the smallest value wins, as with distances; 1 otherwise.
    """

    name: str = "layer"
    layers: tuple[str, ...]
    num_classes: int
    sign: float = 1.0

    def members(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, member, class) scores of all layers' members; and the model's own scores, without gradient."""
        heard, scores = hear(model, images, self.layers)
        parts = [class_scores(values, self.num_classes) for values in heard]
        known = [part for part in parts if part is not None]
        if not known:
            raise InputError(f"the layer {self.layers[0]} does not give one number per class.")
        return self.sign * torch.cat(known, dim=1), scores

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        members, scores = self.members(model, images)
        if members.shape[1] == 1:
            return members[:, 0], scores
        spread = members.detach().std(dim=2, keepdim=True).clamp_min(1e-12)
        return (members / spread).mean(dim=1), scores


@dataclass(frozen=True, kw_only=True)
class LayerVotes(View):
    """Margins of the members of one or several layers, weighted as in `WorstMembers`.

    Attributes:
        scores: the view that reads the members.
    """

    name: str = "layer votes"
    scores: LayerScores

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        members, scores = self.scores.members(model, images)
        return Look(weigh_members(members, aim), scores)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerProbe(ScoreView):
    """Scores of a linear probe, which predicts the model's own answers from a layer.

    Attributes:
        layer: its name, as a `Listener` gives it.
        weight, bias: of the probe, (feature, class) and (class,).
    """

    name: str = "layer probe"
    layer: str
    weight: Tensor
    bias: Tensor

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        (heard,), scores = hear(model, images, (self.layer,))
        features = features_from(heard)
        return features @ self.weight.to(features) + self.bias.to(features), scores


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer, and how well it predicts the model's answers.

    Attributes:
        key: its name, as a `Listener` gives it.
        explains: share of the model's answers that its scores per class, or a linear probe of it, predict.
        sign: 1 if the class with the largest value is the answer, -1 if that with the smallest is; 0 with a probe.
        weight, bias: of the probe; None without one.
    """

    key: str
    explains: float
    sign: float
    weight: Tensor | None = None
    bias: Tensor | None = None

    def view(self, num_classes: int) -> View:
        """The view through which attacks target this layer."""
        if self.weight is None or self.bias is None:
            return LayerScores(layers=(self.key,), num_classes=num_classes, sign=self.sign)
        return LayerProbe(layer=self.key, weight=self.weight, bias=self.bias)

    @property
    def kind(self) -> str:
        """The name without the count: layers of one kind may be members of one vote."""
        return self.key.rsplit("-", 1)[0]


def survey_layers(model: nn.Module, points: Tensor, num_classes: int) -> list[Layer]:
    """The layers that predict at least half of the model's answers at the points, in the order in which they run.

    Args:
        model: in eval mode.
        points: (image, channel, height, width) clean, noisy and attacked images in random order. Probes are fitted to
            two thirds of them and tested on the others.
        num_classes: of the model.
    """
    heard, answers = _hear_all(model, points)
    found: list[Layer] = []
    seen: list[Tensor] = []
    for key, values in _thinned(heard).items():
        if any(values.shape == other.shape and torch.equal(values, other) for other in seen):
            continue  # the same values again: a copy, a view or a flattened map
        seen.append(values)
        layer = _direct(key, values, answers, num_classes) or _reading(key, values, answers, num_classes)
        if layer is not None and layer.explains >= _EXPLAINS:
            found.append(layer)
    return found


def _hear_all(model: nn.Module, points: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    parts: list[dict[str, Tensor]] = []
    answers: list[Tensor] = []
    with torch.no_grad():
        for part in torch.split(points, at_once(_BATCH)):
            with Listener(len(part)) as listener:
                scores = model(part)
            answers.append(full_precision(scores).argmax(dim=1))
            parts.append(listener.heard)
    shared = [key for key in parts[0] if all(key in part for part in parts)]
    alike = [key for key in shared if len({part[key].shape[1] for part in parts}) == 1]
    return {key: torch.cat([part[key] for part in parts]) for key in alike}, torch.cat(answers)


def _thinned(heard: dict[str, Tensor]) -> dict[str, Tensor]:
    """At most `_MOST_LAYERS` layers: half of them are the last ones, the others are spread over the earlier ones."""
    keys = list(heard)
    if len(keys) > _MOST_LAYERS:
        late = keys[-_MOST_LAYERS // 2 :]
        early = keys[: -_MOST_LAYERS // 2]
        keys = early[:: -(-len(early) // (_MOST_LAYERS // 2))] + late
    return {key: heard[key] for key in keys}


def _direct(key: str, values: Tensor, answers: Tensor, num_classes: int) -> Layer | None:
    """A layer whose largest, or smallest, score per class is the answer; None if it predicts too few answers."""
    shape = [int(size) for size in key.split("-")[-2].split("x")]
    if num_classes not in shape:
        return None
    if values.shape[1] == num_classes:
        rows = values
    elif values.shape[1] == math.prod(shape):
        rows = values.view(len(values), *shape)
    else:  # a large map, averaged over the axis of classes
        return None
    said = class_scores(rows, num_classes)
    if said is None or not bool(torch.isfinite(said).all()):
        return None
    mean = said.mean(dim=1)
    shares = {sign: float(((sign * mean).argmax(dim=1) == answers).double().mean()) for sign in (1.0, -1.0)}
    sign = max(shares, key=lambda one: shares[one])
    return Layer(key, shares[sign], sign) if shares[sign] >= _EXPLAINS else None


def _reading(key: str, values: Tensor, answers: Tensor, num_classes: int) -> Layer | None:
    """A layer with a linear probe of the answers, fitted by ridge regression and tested on every third point."""
    if values.shape[1] < 2 or not bool(torch.isfinite(values).all()):
        return None
    tested = torch.arange(len(values), device=values.device) % 3 == 2
    rows = values.double()
    shift = rows[~tested].mean(dim=0)
    spread = rows[~tested].std(dim=0, correction=0)
    varies = spread > 1e-6 * spread.max()
    scale = torch.where(varies, 1 / spread.clamp_min(1e-30), 0.0)
    known = (rows[~tested] - shift) * scale
    if not bool(varies.any()):
        return None
    wanted = nn.functional.one_hot(answers[~tested], num_classes).double()
    level = wanted.mean(dim=0)
    kernel = known @ known.T
    kernel.diagonal().add_(_RIDGE * len(known) * known.shape[1] / 10 + 1e-9)
    weight = scale[:, None] * (known.T @ torch.linalg.solve(kernel, wanted - level))
    bias = level - shift @ weight
    said = (rows[tested] @ weight + bias).argmax(dim=1)
    explains = float((said == answers[tested]).double().mean())
    return Layer(key, explains, 0.0, weight.to(values.dtype), bias.to(values.dtype))
