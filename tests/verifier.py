"""The truth about tiny ReLU networks: proven bounds of margins in a box, and the exact answer by linear programs.

A network is a list of layers, ReLU between them. The box is the Linf ball cut to [0, 1]. All in float64.
Three answers of rising cost: intervals (Gowal et al. 2018), linear bounds carried backwards (CROWN, Zhang et al. 2018),
and branching over the ReLUs whose sign is open, each branch bounded by a linear program (Ehlers 2017; Bunel et al.
2018), which ends with a proof or with a point.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

import ecnn
from ecnn.attacks import PGD
from ecnn.data import Split
from ecnn.training import RECIPES

#: Margins nearer to zero than this are left undecided: linear programs are solved to about 1e-7.
TOLERANCE = 1e-6

Array = np.ndarray
#: (hidden layer, unit) -> whether its ReLU lets through, where that has been decided.
Signs = Mapping[tuple[int, int], bool]


@dataclass(frozen=True)
class Layer:
    """z = weight @ h + bias, with (output, input) and (output,)."""

    weight: Array
    bias: Array


@dataclass(frozen=True)
class Bounds:
    """low <= values <= high, one number each per unit."""

    low: Array
    high: Array

    @property
    def is_empty(self) -> bool:
        return bool((self.low > self.high + TOLERANCE).any())


@dataclass(frozen=True)
class Answer:
    """What is known of an image in its box.

    Attributes:
        robust: whether no point of the box is classified otherwise; None when a margin is too near to zero.
        point: (pixel,) one that is, if there is.
        programs: linear programs that were solved.
    """

    robust: bool | None
    point: Array | None
    programs: int


def layers_of(model: nn.Module) -> list[Layer]:
    """The linear layers of a plain stack of them with ReLUs between; biases may be missing."""
    layers = []
    for part in model.modules():
        if isinstance(part, nn.Linear):
            weight = part.weight.detach().double().numpy()
            bias = np.zeros(len(weight)) if part.bias is None else part.bias.detach().double().numpy()
            layers.append(Layer(weight, bias))
        elif not isinstance(part, nn.ReLU | nn.Flatten | nn.Sequential):
            raise TypeError(f"the verifier does not know {type(part).__name__}")
    return layers


def box_around(image: Array, eps: float) -> Bounds:
    """The Linf ball within [0, 1]."""
    return Bounds(np.maximum(image - eps, 0), np.minimum(image + eps, 1))


def run(layers: list[Layer], point: Array) -> Array:
    """(class,) scores of one point."""
    for layer in layers[:-1]:
        point = np.maximum(layer.weight @ point + layer.bias, 0)
    scores: Array = layers[-1].weight @ point + layers[-1].bias
    return scores


def margins_layer(layer: Layer, label: int) -> Layer:
    """The last layer made to say the label's score minus that of each other class, in their order."""
    others = np.arange(len(layer.bias)) != label
    return Layer(
        layer.weight[label] - layer.weight[others],
        layer.bias[label] - layer.bias[others],
    )


# Bounds --------------------------------------------------------------------------------------------------------------


def interval_bounds(layers: list[Layer], box: Bounds) -> list[Bounds]:
    """Bounds of what every layer says before its ReLU, each unit as if the others were free."""
    found, now = [], box
    for layer in layers:
        found.append(_through(layer, now))
        now = Bounds(np.maximum(found[-1].low, 0), np.maximum(found[-1].high, 0))
    return found


def crown_bounds(layers: list[Layer], box: Bounds, signs: Signs | None = None) -> list[Bounds]:
    """The same by linear functions of the pixels below and above every unit, carried back to the box.

    With signs decided, bounds hold where the network has these signs; empty ones say that it never has.
    """
    found: list[Bounds] = []
    for depth, layer in enumerate(layers):
        whole = np.eye(len(layer.bias))
        low = _lower_bound(layers[: depth + 1], whole, found, box)
        high = -_lower_bound(layers[: depth + 1], -whole, found, box)
        for (decided, unit), active in (signs or {}).items():
            if decided == depth and active:
                low[unit] = max(low[unit], 0)
            elif decided == depth:
                high[unit] = min(high[unit], 0)
        found.append(Bounds(low, high))
    return found


def _through(layer: Layer, box: Bounds) -> Bounds:
    middle = layer.weight @ ((box.low + box.high) / 2) + layer.bias
    radius = np.abs(layer.weight) @ ((box.high - box.low) / 2)
    return Bounds(middle - radius, middle + radius)


def _lower_bound(layers: list[Layer], rows: Array, before: list[Bounds], box: Bounds) -> Array:
    """(row,) lower bounds of rows @ (what the last of the layers says), given bounds of all that come before."""
    constant = rows @ layers[-1].bias
    rows = rows @ layers[-1].weight
    for layer, bounds in zip(layers[-2::-1], before[::-1], strict=True):
        upper_slope, intercept, lower_slope = _relu_lines(bounds)
        positive, negative = np.maximum(rows, 0), np.minimum(rows, 0)
        constant = constant + negative @ intercept
        rows = positive * lower_slope + negative * upper_slope
        constant = constant + rows @ layer.bias
        rows = rows @ layer.weight
    result: Array = constant + np.maximum(rows, 0) @ box.low + np.minimum(rows, 0) @ box.high
    return result


def _relu_lines(bounds: Bounds) -> tuple[Array, Array, Array]:
    """A line above ReLU (slope, intercept) and one through zero below it (slope), for each unit within its bounds."""
    low, high = np.minimum(bounds.low, 0), np.maximum(bounds.high, 0)
    width = np.where(high > low, high - low, 1)
    upper_slope = np.where(bounds.low >= 0, 1.0, high / width)
    intercept = np.where(bounds.low >= 0, 0.0, -low * high / width)
    lower_slope = np.where(bounds.low >= 0, 1.0, np.where(high > -low, 1.0, 0.0))
    return upper_slope, intercept, np.where(bounds.high <= 0, 0.0, lower_slope)


def certified_margin(layers: list[Layer], image: Array, label: int, eps: float, method: str) -> float:
    """A proven lower bound of the smallest margin in the box, by "intervals" or "crown"."""
    whole = [*layers[:-1], margins_layer(layers[-1], label)]
    bounds = {"intervals": interval_bounds, "crown": crown_bounds}[method](whole, box_around(image, eps))
    return float(bounds[-1].low.min())


# The exact answer ----------------------------------------------------------------------------------------------------


def verify(layers: list[Layer], image: Array, label: int, eps: float) -> Answer:
    """Whether the label's score is the largest in the whole box, decided one other class at a time."""
    box = box_around(image, eps)
    margins = margins_layer(layers[-1], label)
    if float(margins_of(layers, image, label).min()) < -TOLERANCE:
        return Answer(False, image, 0)
    programs, robust = 0, True
    for row in range(len(margins.bias)):
        goal = Layer(margins.weight[row : row + 1], margins.bias[row : row + 1])
        answer = _search([*layers[:-1], goal], box)
        programs += answer.programs
        if answer.robust is False:
            return Answer(False, answer.point, programs)
        robust = robust and answer.robust is True
    return Answer(True if robust else None, None, programs)


def margins_of(layers: list[Layer], point: Array, label: int) -> Array:
    """(class - 1,) the label's score minus the others' at a point."""
    scores = run(layers, point)
    return np.delete(scores[label] - scores, label)


def _search(layers: list[Layer], box: Bounds) -> Answer:
    """Whether the single output stays above zero: branches on the ReLU that a relaxation gets most wrong."""
    open_branches: list[dict[tuple[int, int], bool]] = [{}]
    programs, decided = 0, True
    while open_branches:
        signs = open_branches.pop()
        bounds = crown_bounds(layers, box, signs)
        if any(part.is_empty for part in bounds) or bounds[-1].low[0] > TOLERANCE:
            continue
        programs += 1
        solved = _solve_relaxation(layers, box, bounds)
        if solved is None or solved.value > TOLERANCE:
            continue
        if float(run(layers, solved.point)[0]) < -TOLERANCE:
            return Answer(False, solved.point, programs)
        if solved.worst is None:  # the program was exact: the smallest value is zero but for rounding
            decided = False
            continue
        open_branches += [{**signs, solved.worst: active} for active in (True, False)]
    return Answer(True if decided else None, None, programs)


@dataclass(frozen=True)
class _Solved:
    """The smallest value of a relaxation, where, and the open ReLU that it bends most there (None if none is open)."""

    value: float
    point: Array
    worst: tuple[int, int] | None


def _solve_relaxation(layers: list[Layer], box: Bounds, bounds: list[Bounds]) -> _Solved | None:
    """Minimises the output over pixels and activations, each open ReLU replaced by its triangle; None if impossible."""
    sizes = [len(box.low), *(len(layer.bias) for layer in layers[:-1])]
    starts = np.cumsum([0, *sizes])
    above, limits, equal, values = [], [], [], []
    ranges = list(zip(box.low, box.high, strict=True))
    for depth, (layer, own) in enumerate(zip(layers[:-1], bounds[:-1], strict=True)):
        for unit in range(len(layer.bias)):
            low, high = float(own.low[unit]), float(own.high[unit])
            before, after = np.zeros(starts[-1]), np.zeros(starts[-1])
            before[starts[depth] : starts[depth + 1]] = layer.weight[unit]
            after[starts[depth + 1] + unit] = 1
            bias = float(layer.bias[unit])
            ranges.append((max(low, 0.0), max(high, 0.0)))
            if low >= 0:  # h = z
                equal.append(after - before)
                values.append(bias)
                continue
            above.append(before - after)  # z <= h, which for h = 0 says that the unit is off
            limits.append(-bias)
            if high > 0:  # h <= high (z - low) / (high - low)
                slope = high / (high - low)
                above.append(after - slope * before)
                limits.append(slope * (bias - low))
    goal = np.zeros(starts[-1])
    goal[starts[-2] :] = layers[-1].weight[0]
    result = linprog(
        goal,
        A_ub=np.array(above) if above else None,
        b_ub=limits or None,
        A_eq=np.array(equal) if equal else None,
        b_eq=values or None,
        bounds=ranges,
        method="highs",
    )
    if result.status == 2:
        return None
    if result.status != 0:
        raise RuntimeError(f"the linear program was not solved: {result.message}")
    point = np.clip(result.x[: sizes[0]], box.low, box.high)
    parts = [result.x[start:stop] for start, stop in itertools.pairwise(starts)]
    return _Solved(float(result.fun + layers[-1].bias[0]), point, _worst_unit(layers, bounds, parts))


def _worst_unit(layers: list[Layer], bounds: list[Bounds], parts: list[Array]) -> tuple[int, int] | None:
    """The open ReLU whose activation in the program is furthest from that of what it is given."""
    worst, furthest = None, -1.0
    for depth, (layer, own) in enumerate(zip(layers[:-1], bounds[:-1], strict=True)):
        wanted = np.maximum(layer.weight @ parts[depth] + layer.bias, 0)
        is_open = (own.low < 0) & (own.high > 0)
        wrong = np.where(is_open, np.abs(parts[depth + 1] - wanted), -1.0)
        unit = int(wrong.argmax())
        if wrong[unit] > furthest:
            worst, furthest = (depth, unit), float(wrong[unit])
    return worst


# Accuracies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """Of some images, (image,) each.

    Attributes:
        right: classified as labelled, in float64.
        by_intervals, by_crown: proven robust by bounds alone.
        robust, broken: proven by the exact answer; neither where a margin is too near to zero.
    """

    right: Array
    by_intervals: Array
    by_crown: Array
    robust: Array
    broken: Array


def find_truth(model: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Truth:
    """Everything that is known of a network on images (batch, ...) in [0, 1]."""
    layers = layers_of(model)
    columns: dict[str, list[bool]] = {name: [] for name in Truth.__annotations__}
    for image, label in zip(images.flatten(1).double().numpy(), labels.tolist(), strict=True):
        answer = verify(layers, image, label, eps)
        columns["right"].append(float(margins_of(layers, image, label).min()) > 0)
        columns["by_intervals"].append(certified_margin(layers, image, label, eps, "intervals") > 0)
        columns["by_crown"].append(certified_margin(layers, image, label, eps, "crown") > 0)
        columns["robust"].append(answer.robust is True)
        columns["broken"].append(answer.robust is False)
    return Truth(**{name: np.array(column) for name, column in columns.items()})


# Networks small enough ------------------------------------------------------------------------------------------------


def random_network(sizes: list[int], seed: int) -> nn.Sequential:
    """Dense layers with ReLU between, weights drawn at the scale that keeps activations alive."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(sizes):
        layer = nn.utils.skip_init(nn.Linear, before, after)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            layer.weight.copy_(torch.randn(after, before, generator=generator) * (2 / before) ** 0.5)
            layer.bias.copy_(0.1 * torch.randn(after, generator=generator))
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


PLAIN = dataclasses.replace(RECIPES["small"], shift=0, objective="cross_entropy", diversity_weight=0.0)


@cache
def small_digits() -> tuple[Split, Split]:
    """The digits at 4x4 pixels, to train on and to test on."""
    data = ecnn.load_data("digits")

    def shrink(split: Split) -> Split:
        means = torch.nn.functional.avg_pool2d(split.images.float(), 2)
        return Split(means.round().to(torch.uint8), split.labels)

    return shrink(data.train), shrink(data.test)


#: (sizes, radius of adversarial training, radius of the audit)
CASES: dict[str, tuple[list[int], float | None, float]] = {
    "linear": ([16, 10], None, 0.03),
    "one hidden layer": ([16, 20, 10], None, 0.02),
    "two hidden layers": ([16, 12, 12, 10], None, 0.03),
    "adversarially trained": ([16, 12, 12, 10], 0.05, 0.05),
}


@cache
def trained(name: str) -> tuple[nn.Module, float]:
    """The network of that name, and the radius to audit it at."""
    sizes, train_eps, eps = CASES[name]
    attack = None
    if train_eps is not None:
        attack = PGD(
            norm="linf", eps=train_eps, steps=5, step_size=train_eps / 2, loss="cross_entropy", keep="last"
        )
    model = random_network(sizes, seed=0)
    ecnn.fit(model, small_digits()[0], val=None, recipe=PLAIN, epochs=15, lr=0.01, attack=attack, seed=0)
    return model.eval(), eps
