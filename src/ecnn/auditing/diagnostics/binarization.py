"""The binarization test: a weakness is planted, and an attack that works must find it (Zimmermann et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import Aim, ScoreView
from ecnn.auditing.adaptive import overhearing, whole_batch
from ecnn.auditing.diagnostics.probes import Probe, diagnostic, percent
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm_if, note
from ecnn.errors import InputError

#: How many images get a planted task, and from how many inner points: they bound the cost. The authors' scripts use 999
#: inner points or more and fit a logistic regression to each image.
_PLANTED, _INNER = 32, 100
#: Inner points lie within this share of the radius, as in the authors' program.
_INSIDE = 0.95
#: Where the planted border lies between the outermost inner point (0) and the planted one (1). A logistic
#: regression puts it wherever it fits. Random points cross a border half-way far more often than one near the planted
#: point.
_BORDER = 0.9
_NOISES = 20

Features = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Planted:
    """Two-class heads, one per image: class 0 for points inside the image's ball, class 1 for one point on its edge.

    Attributes:
        rows: (planted,) positions of the images, rising.
        weights: (planted, feature).
        biases: (planted,).
        features: (model, images) -> (image, feature), the input of the heads.
        tried: how many images a head was fitted for.
    """

    rows: Tensor
    weights: Tensor
    biases: Tensor
    features: Features
    tried: int

    def view_of(self, rows: Tensor) -> PlantedScores:
        """A view of the planted scores of the images at these positions, which must have a head."""
        where = torch.searchsorted(self.rows, rows)
        return PlantedScores(weights=self.weights[where], biases=self.biases[where], features=self.features)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlantedScores(ScoreView):
    """View of the planted heads' two scores in place of the model's scores; the fields are those of `Planted`."""

    name: str = "planted scores"
    weights: Tensor
    biases: Tensor
    features: Features

    def read(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        features = self.features(model, images)
        lead = (features * self.weights.to(features.dtype)).sum(dim=1) + self.biases.to(features.dtype)
        scores = torch.stack([-lead / 2, lead / 2], dim=1)
        return scores, scores.detach()


@diagnostic(
    "binarization", "Zimmermann et al. 2022, Increasing confidence in adversarial robustness evaluations"
)
def check_binarization(probe: Probe) -> Finding:
    """Alarm where PGD does not find misclassified points that were planted in the ball.

    For each image the last layer is replaced by a head that separates 100 points inside the ball from one on its edge.
    Its scores have the range of the model's own. The point on the edge is then surely misclassified, and an attack that
    misses it would miss other points too. A note says where most images could not get such a head.

    Departs: the head is the linear discriminant of the inner points and the planted one, found by one solve per image.
        If the model does not end in a linear layer, the head reads the scores, so that decoders stay in the test.
    """
    rows = probe.rows[probe.right.to(probe.rows.device)][:_PLANTED]
    evidence: dict[str, Any] = {"tried": len(rows), "planted": 0}
    if not len(rows):
        claim = "No image is classified correctly, so no weakness was planted."
        return note(claim, evidence, kind="nothing_to_attack")
    features, place = find_features(probe, rows)
    planted = plant(probe, rows, features)
    n = len(planted.rows)
    evidence |= {"planted": n, "on": place}
    if 2 * n < planted.tried:
        claim = (
            f"A weakness could be planted in only {percent(n, planted.tried)}: in the other balls the {place} hardly "
            "change."
        )
        return note(claim, evidence, "This test says nothing about this model.", kind="not_planted")
    zeros = torch.zeros(n, dtype=torch.int64, device=planted.rows.device)
    broken = probe.walk(planted.view_of, planted.rows, labels=zeros).broken
    failed = int((~broken).sum())
    evidence |= {
        "attack_success_rate": 1 - failed / n,
        "random_success_rate": _random_success(probe, planted),
        "random_samples": _NOISES,
    }
    claim = f"PGD misses the misclassified points that were planted in the balls of {percent(failed, n)}."
    advice = "An attack that misses planted points misses other points too: use a stronger attack."
    fine = f"PGD finds the misclassified points that were planted in the balls of {percent(n - failed, n)}."
    return alarm_if(exceeds(failed, n, TOLERANCE), claim, evidence, advice, otherwise=fine)


def find_features(probe: Probe, rows: Tensor) -> tuple[Features, str]:
    """Reader of the input of the linear layer whose output is the scores, else of the scores; and which of the two."""
    rows = probe.groups(rows)[0]
    layers: list[nn.Module] = [module for module in probe.model.modules() if isinstance(module, nn.Linear)]
    given: list[tuple[nn.Module, Any]] = []
    said: list[tuple[nn.Module, Any]] = []
    with overhearing(layers, given, inputs=True), overhearing(layers, said, inputs=False):
        scores = probe.target.narrow(rows).scores(probe.images[rows])
    for layer in dict.fromkeys(layer for layer, _ in said):
        if layer not in layers:  # a layer of a copy made for one query, which copied the hooks too
            continue
        values, output = (
            whole_batch([entry for entry in heard if entry[0] is layer], len(rows)) for heard in (given, said)
        )
        if values is None or output is None or values.ndim != 2:
            continue
        if output.shape == scores.shape and torch.equal(output, scores):
            return _reader(layer), "features"
    return lambda model, images: full_precision(model(images)), "scores"


def _reader(layer: nn.Module) -> Features:
    def read(model: nn.Module, images: Tensor) -> Tensor:
        heard: list[tuple[nn.Module, Any]] = []
        with overhearing([layer], heard, inputs=True):
            model(images)
        found = whole_batch(heard, len(images))
        if found is None:
            raise InputError("the last linear layer gets other batches for some images")
        return full_precision(found)

    return read


def plant(probe: Probe, rows: Tensor, features: Features) -> Planted:
    """Fits a head for each image; keeps those that separate the planted point from all inner ones, in float32 too."""
    draws = Draws.of(probe.seed, rows).fold(41)
    images = probe.images[rows]
    reference = probe.scores[rows].double()
    target = probe.target.narrow(rows)

    def ask(points: Tensor) -> Tensor:
        target.count(1)
        with torch.no_grad():
            return features(probe.model, points).double()

    inside = (NORMS[probe.norm].random(images, _INSIDE * probe.eps, draws.fold(k)) for k in range(_INNER - 1))
    inner = [ask(images), *map(ask, inside)]
    edge = _edge(probe, images, draws.fold(_INNER))
    weights, biases, good = _discriminate(torch.stack(inner, dim=1), ask(edge))
    # Scaled to the range of the model's own scores, as the authors' program can: what only the size of the scores hides
    # from an attack must stay hidden.
    scale = (reference.amax(dim=1) - reference.amin(dim=1)).clamp(min=1e-30)
    weights, biases = weights * scale[:, None], biases * scale
    found = Planted(rows[good], weights[good], biases[good], features, len(rows))
    if not len(found.rows):  # many models refuse an empty batch
        return found
    with torch.no_grad():
        target.count(1)
        scores, _ = found.view_of(found.rows).read(probe.model, edge[good])
    holds = scores[:, 1] > scores[:, 0]
    return Planted(found.rows[holds], found.weights[holds], found.biases[holds], features, len(rows))


def _edge(probe: Probe, images: Tensor, draws: Draws) -> Tensor:
    """A random corner of each ball in Linf, point of its surface in L2, or move of few pixels in L1; cut to [0, 1]."""
    norm = NORMS[probe.norm]
    move = norm.step(draws.normal(*images.shape[1:], dtype=images.dtype), images)
    return norm.project(images + probe.eps * move, images, probe.eps)


def _discriminate(inner: Tensor, edge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (image, feature) and biases (image,) of the heads, and (image,) whether each separates its points.

    A head is 0 on the border, and its values over the inner points and the planted one have a range of 1.

    Args:
        inner: (image, point, feature) of the inner points.
        edge: (image, feature) of the planted point.
    """
    centre = inner.mean(dim=1)
    centred = inner - centre[:, None]
    covariance = centred.transpose(1, 2) @ centred / inner.shape[1]
    spread = covariance.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)
    identity = torch.eye(inner.shape[2], dtype=inner.dtype, device=inner.device)
    # A covariance of 256 features from 100 points is unreliable. Without shrinkage the head would use features that are
    # zero at every inner point, from which no gradient leads to the planted point.
    doubt = inner.shape[2] / (inner.shape[1] + inner.shape[2])
    regular = (1 - doubt) * covariance + (doubt * spread)[:, None, None] * identity
    # By Cholesky, because MKL's batched solver prints errors where there are none.
    factor = torch.linalg.cholesky_ex(regular).L
    weights = torch.cholesky_solve(torch.nan_to_num(edge - centre)[:, :, None], factor).squeeze(2)
    inner_values = (inner * weights[:, None]).sum(dim=2)
    edge_value = (edge * weights).sum(dim=1)
    highest, lowest = inner_values.amax(dim=1), inner_values.amin(dim=1)
    border = highest + _BORDER * (edge_value - highest)
    unit = (edge_value - lowest).clamp_min(1e-30)
    return weights / unit[:, None], -border / unit, (edge_value > highest) & (spread > 1e-30)


def _random_success(probe: Probe, planted: Planted) -> float:
    """Share of the planted tasks that random corners (or points of the surface) solve: how hard the test is."""
    rows, solved = planted.rows, torch.zeros_like(planted.rows, dtype=torch.bool)
    draws = Draws.of(probe.seed, rows).fold(43)
    for k in range(_NOISES):
        points = _edge(probe, probe.images[rows], draws.fold(k))
        look = probe.target.narrow(rows).look(planted.view_of(rows), points, Aim(torch.zeros_like(rows)))
        assert look.scores is not None
        solved |= look.scores[:, 1] > look.scores[:, 0]
    return float(solved.double().mean())
