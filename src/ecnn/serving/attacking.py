"""Attacks one picture, and reports what changed: the predicted class, the members' bits and the pixels."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.attacks import ATTACKS, NORMS, Attack
from ecnn.attacks.attempts import ClimbingAttack
from ecnn.attacks.views import VIEWS, ScoreView
from ecnn.checks import check_choice, check_count, check_fields, either, parse_eps
from ecnn.errors import InputError
from ecnn.predicting import Classifier, ask_model
from ecnn.serving.answers import Answer, answer
from ecnn.serving.limits import Limits
from ecnn.serving.pictures import perturbation_png, rounded
from ecnn.spec import attack_options, make_attack

#: The attacks that are offered, each with the name of its option that `steps` of a request sets; FGSM has none.
EFFORTS: dict[str, str | None] = {
    "pgd": "steps",
    "apgd": "steps",
    "bim": "steps",
    "fgsm": None,
    "fab": "steps",
    "deepfool": "steps",
    "fmn": "steps",
    "square": "queries",
    "noise": "samples",
}
_STEP_SHARE = 2.5  # total length of all steps of PGD, in units of eps (Madry et al. 2018)


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """The settings of an attack, as a request gives them.

    Attributes:
        attack: a name of `EFFORTS`.
        norm: of the ball, or of the distance that the attack makes small; a name of `NORMS`.
        eps: radius on the [0, 1] scale, or a fraction such as "8/255"; only for attacks within a ball.
        steps: steps, queries or samples; for all attacks but FGSM, where it may be 1.
        on: the view that is attacked, a name of `VIEWS`; only for attacks that take a view.
        seed: of all randomness.
    """

    attack: str
    norm: str = "linf"
    eps: float | str | None = None
    steps: int | None = None
    on: str = "scores"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields("the attack", self)
        check_choice("attack", self.attack, EFFORTS)
        check_choice("norm", self.norm, NORMS)
        check_choice("on", self.on, VIEWS)
        check_count("seed", self.seed, least=0)

    def build(self, classifier: Classifier, limits: Limits) -> Attack:
        """The attack; InputError if a setting is missing, too large, or not one of this attack."""
        known, effort, views = attack_options(self.attack), EFFORTS[self.attack], _views(self.attack)
        table: dict[str, Any] = {"kind": self.attack, "norm": self.norm, "labels": "predicted"}
        if not views and self.on != "scores":
            raise InputError(f"the attack {self.attack} uses only the predicted class: leave on out.")
        if views:
            if self.on not in views:
                raise InputError(f"on must be {either(views)} for {self.attack}, not {self.on!r}.")
            table["on"] = self.on
        if effort is None and self.steps not in (None, 1):
            raise InputError(f"{self.attack} is one step: leave steps out.")
        if effort is not None:
            if self.steps is None:
                raise InputError(f"the attack {self.attack} needs steps, from 1 to {limits.attack_steps}.")
            check_count("steps", self.steps, most=limits.attack_steps)
            table[effort] = self.steps
        if "eps" in known:
            table["eps"] = radius = self._radius(classifier)
            if "step_size" in known:
                table["step_size"] = _STEP_SHARE * radius / (self.steps or 1)
        elif self.eps is not None:
            raise InputError(f"the attack {self.attack} has no radius: leave eps out.")
        if self.attack == "apgd":
            table["loss"] = "margin"
        return make_attack(table)

    def _radius(self, classifier: Classifier) -> float:
        if self.eps is None:
            raise InputError(f'the attack {self.attack} needs eps, a radius such as "8/255".')
        everything = torch.ones(1, classifier.in_channels, *classifier.image_size)
        return parse_eps(self.eps, most=float(NORMS[self.norm].length(everything)))


@dataclass(frozen=True)
class AttackResult:
    """What an attack changed in a picture and in the answer of the model.

    Attributes:
        success: whether the predicted class changed.
        before, after: answers for the picture and for the attacked one, with details and PNGs.
        flipped: positions of the members whose symbol changed; empty for a model without a code.
        linf, l2, l1: distance between the picture and the attacked one.
        rounded_label, rounded_name: predicted class of the attacked picture with its pixels rounded to multiples of
            1/255, as in its PNG.
        perturbation: base64 of a PNG of the change: mid grey is no change, black and white the largest.
        forwards, backwards: how many images the attack passed through the model, and how many gradients it took.
        seconds: of wall-clock time for this answer.
    """

    success: bool
    before: Answer
    after: Answer
    flipped: list[int]
    linf: float
    l2: float
    l1: float
    rounded_label: int | None
    rounded_name: str | None
    perturbation: str
    forwards: int
    backwards: int
    seconds: float


def run_attack(
    classifier: Classifier, model: nn.Module, image: Tensor, attack: Attack, seed: int
) -> AttackResult:
    """Attacks one picture (1, channel, height, width), away from the class that the model predicts for it.

    If the attack fails, its last iterate is returned where it has one, made by a second run that is not counted. So one
    sees how many bits it flipped, although too few.

    Args:
        model: the classifier's, or a copy of it.
        seed: of all randomness.
    """
    start, place = time.monotonic(), next(model.parameters(), torch.zeros(0)).device
    pixels, anything = image.to(place), torch.zeros(1, dtype=torch.int64, device=place)
    found = attack.run(model, pixels, anything, seed=seed)
    forwards, backwards = int(found.forwards.sum()), int(found.backwards.sum())
    if not bool(found.success[0]) and attack.has_last_iterate:
        found = dataclasses.replace(attack, keep="last").run(model, pixels, anything, seed=seed)
    attacked = found.images.detach().cpu()
    asked = torch.cat([image, attacked, rounded(attacked)])
    reading = ask_model(model, asked)
    names = ["image", "attacked image", "attacked image, rounded"]
    before, after, last = answer(classifier, reading, asked, names, top=3, reject=None, details=True)
    moves = attacked - image
    return AttackResult(
        success=_label(before) != _label(after),
        before=before,
        after=after,
        flipped=_flipped(before, after),
        **{norm: float(NORMS[norm].length(moves)) for norm in ("linf", "l2", "l1")},
        rounded_label=_label(last),
        rounded_name=last.name,
        perturbation=perturbation_png(moves[0]),
        forwards=forwards,
        backwards=backwards,
        seconds=time.monotonic() - start,
    )


def _label(told: Answer) -> int | None:
    return told.guesses[0].label if told.guesses else None


def _flipped(before: Answer, after: Answer) -> list[int]:
    told = [None if side.details is None else side.details.bits for side in (before, after)]
    if told[0] is None or told[1] is None:
        return []
    return [place for place, (old, new) in enumerate(zip(*told, strict=True)) if old != new]


def offered() -> list[dict[str, Any]]:
    """Plain JSON values: each attack with the options that it has, and the names that its `on` takes."""
    found = []
    for name, effort in EFFORTS.items():
        has = {"has_eps": "eps" in attack_options(name), "has_steps": effort is not None}
        found.append({"name": name, **has, "on": _views(name)})
    return found


def _views(attack: str) -> list[str]:
    """Names of the views that an attack can be run on; empty for an attack without views."""
    if "on" not in attack_options(attack):
        return []
    climbs = issubclass(ATTACKS[attack], ClimbingAttack)
    return [name for name, view in VIEWS.items() if climbs or isinstance(view, ScoreView)]
