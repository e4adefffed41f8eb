"""Every layer as a target: what a model computes on its way to the scores, heard call by call.

A model may decide by something that its scores do not show: a network whose answer is turned into one-hot numbers, a
vote, a distance. Whatever explains its answers best is the place to attack (Tramer et al. 2020). Every call of torch
that gives one row per image is a layer here, whether a module makes it or not.
"""

from __future__ import annotations

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

_MOST_FEATURES = 4096  # of a layer; larger maps are averaged over the image first
_MOST_LAYERS = 60
_EXPLAINS = 0.5  # share of the answers that a layer must explain to be worth an attack
_RIDGE = 1e-2
_BATCH = 128


class Listener(TorchFunctionMode):
    """While it is on, keeps what calls give: floating tensors with one row per image, by the name of the call.

    The name is that of the function, the shape of a row, and how many such calls came before.

    Args:
        batch: how many images are classified.
        wanted: names to keep; None keeps every layer, without gradient and with large maps averaged.

    Attributes:
        heard: by name, in the order of the calls.
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
    """(batch, feature) a layer's numbers; of a large one the means over all but the first axis of a row."""
    if values[0].numel() > _MOST_FEATURES and values.ndim > 2:
        values = values.flatten(2).mean(dim=2)
    return full_precision(values).flatten(1)


def hear(model: nn.Module, images: Tensor, wanted: tuple[str, ...]) -> tuple[list[Tensor], Tensor]:
    """What the named layers say of the images, and the model's scores; InputError if one of them was not heard."""
    with Listener(len(images), wanted) as listener:
        scores = full_precision(model(images))
    missing = [key for key in wanted if key not in listener.heard]
    if missing:
        raise InputError(
            f"{type(model).__name__} did not come past its layer {missing[0]} with these images."
        )
    return [listener.heard[key] for key in wanted], scores.detach()


def class_scores(values: Tensor, num_classes: int) -> Tensor | None:
    """(batch, member, class) what a layer says of each class, if it says something of each class."""
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
    """One score per class from inside the model: the mean over layers, and over members of each.

    Attributes:
        layers: names that a `Listener` gives.
        num_classes: of the model.
        sign: -1 where the smallest number wins, as with distances.
    """

    name: str = "layer"
    layers: tuple[str, ...]
    num_classes: int
    sign: float = 1.0

    def members(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, member, class) what each of them says; and the model's scores."""
        heard, scores = hear(model, images, self.layers)
        parts = [class_scores(values, self.num_classes) for values in heard]
        known = [part for part in parts if part is not None]
        if not known:
            raise InputError(f"{self.layers[0]} has no number per class.")
        return self.sign * torch.cat(known, dim=1), scores

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        members, scores = self.members(model, images)
        if members.shape[1] == 1:
            return members[:, 0], scores
        spread = members.detach().std(dim=2, keepdim=True).clamp_min(1e-12)
        return (members / spread).mean(dim=1), scores


@dataclass(frozen=True, kw_only=True)
class LayerVotes(View):
    """The members of one or several layers, weighted by how little each needs to change sides, as in `WorstMembers`.

    Attributes:
        scores: where they are.
    """

    name: str = "layer votes"
    scores: LayerScores

    def look(self, model: nn.Module, images: Tensor, aim: Aim) -> Look:
        members, scores = self.scores.members(model, images)
        return Look(weigh_members(members, aim), scores)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerProbe(ScoreView):
    """A linear reading of a layer that predicts the model's own answers.

    Attributes:
        layer: name that a `Listener` gives.
        weight, bias: (feature, class) and (class,).
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
    """What is known of a layer.

    Attributes:
        key: its name.
        explains: share of the model's answers that it, or a linear reading of it, gives too.
        sign: of its numbers per class; 0 where only a reading explains them.
        weight, bias: of the reading; None where none is needed.
    """

    key: str
    explains: float
    sign: float
    weight: Tensor | None = None
    bias: Tensor | None = None

    def view(self, num_classes: int) -> View:
        """Where an attack on it looks."""
        if self.weight is None or self.bias is None:
            return LayerScores(layers=(self.key,), num_classes=num_classes, sign=self.sign)
        return LayerProbe(layer=self.key, weight=self.weight, bias=self.bias)

    @property
    def kind(self) -> str:
        """The name without the count: layers of one kind may be members of one vote."""
        return self.key.rsplit("-", 1)[0]


def survey_layers(model: nn.Module, points: Tensor, num_classes: int) -> list[Layer]:
    """The layers that explain what the model answers at the points, in the order in which they are run.

    Args:
        model: in eval mode.
        points: (image, channel, height, width) clean, noisy and attacked images, mixed: a third of them tests readings.
        num_classes: of the model.
    """
    heard, answers = _hear_all(model, points)
    found: list[Layer] = []
    seen: list[Tensor] = []
    for key, values in _thinned(heard).items():
        if any(values.shape == other.shape and torch.equal(values, other) for other in seen):
            continue  # a copy, a view, or what a flattened map says again
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
    """Not more layers than can be tried: every few of them, and the last ones."""
    keys = list(heard)
    if len(keys) > _MOST_LAYERS:
        late = keys[-_MOST_LAYERS // 2 :]
        early = keys[: -_MOST_LAYERS // 2]
        keys = early[:: -(-len(early) // (_MOST_LAYERS // 2))] + late
    return {key: heard[key] for key in keys}


def _direct(key: str, values: Tensor, answers: Tensor, num_classes: int) -> Layer | None:
    """A layer whose largest, or smallest, number is the answer."""
    shape = [int(size) for size in key.split("-")[-2].split("x")]
    if num_classes not in shape:
        return None
    rows = values if values.shape[1] == num_classes else values.view(len(values), *shape)
    said = class_scores(rows, num_classes)
    if said is None or not bool(torch.isfinite(said).all()):
        return None
    mean = said.mean(dim=1)
    shares = {sign: float(((sign * mean).argmax(dim=1) == answers).double().mean()) for sign in (1.0, -1.0)}
    sign = max(shares, key=lambda one: shares[one])
    return Layer(key, shares[sign], sign) if shares[sign] >= _EXPLAINS else None


def _reading(key: str, values: Tensor, answers: Tensor, num_classes: int) -> Layer | None:
    """A layer from which ridge regression reads the answers; tested on every third point."""
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
