"""The tools that the benchmark compares: our audit at three budgets, attacks without a verdict, other libraries."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.attacks import PGD, Attack, AutoAttack
from ecnn.auditing.auditor import audit
from ecnn.auditing.bench.informed import share_right
from ecnn.auditing.bench.subject import seeded
from ecnn.auditing.budgets import BUDGETS
from ecnn.auditing.verdicts import SLACK
from ecnn.data import Split
from ecnn.evaluation.intervals import wilson_interval
from ecnn.objectives import predicted_classes

#: Time limit of our audit, in minutes: models that must be queried one image at a time could take hours.
_MINUTES = 25


@dataclass(frozen=True, eq=False, kw_only=True)
class Question:
    """The input of a tool: is this claim true?

    Attributes:
        model: pixels in [0, 1] to scores, in eval mode; a copy that only this tool uses.
        images: (image, 1, 8, 8) images that the claim is about.
        labels: (image,) their classes.
        eps: the Linf radius.
        claim: the accuracy under attack that is claimed.
        split: these images, followed by more of the same kind.
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    eps: float
    claim: float
    split: Split


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of a tool.

    Attributes:
        accuracy: under attack, as the tool reports it.
        verdict: "flagged", "inconclusive" or "believed".
        verified: accuracy on the same points, measured on fresh copies of the model and for a random model averaged
            over passes. The lowest of all tools may count as the truth.
        alarms: names of the findings that raised an alarm.
        broken_by: how many images each of its attacks broke; fractions for a random model.
    """

    accuracy: float
    verdict: str
    verified: float
    alarms: list[str] = field(default_factory=list)
    broken_by: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that measures the accuracy of a model under attack.

    Attributes:
        name: in tables.
        what: one sentence: what is run.
        run: takes a question and returns an answer, or attacked points (image, 1, 8, 8) in the ball. For points the
            claim is flagged if it lies more than a point above the accuracy on them, and above its 95 % interval.
        needs: name of a module that must be installed; "" for none.
    """

    name: str
    what: str
    run: Callable[[Question], Answer | Tensor]
    needs: str = ""

    @property
    def is_installed(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def answer(self, question: Question) -> Answer:
        """The answer to a question, with every generator seeded."""
        pristine = copy.deepcopy(question.model)
        with seeded(0):
            answer = self.run(question)
            return answer if isinstance(answer, Answer) else _judge(question, pristine, answer)


def _judge(question: Question, pristine: nn.Module, points: Tensor) -> Answer:
    """The answer for attacked points: `accuracy` on the model that was attacked, `verified` on fresh copies.

    Raises ValueError for points outside the ball or outside [0, 1].
    """
    images, labels = question.images, question.labels
    points = points.detach().to(images)
    apart = (points - images).abs().amax().item()
    if not apart <= question.eps + 1e-5 or points.amin() < -1e-6 or points.amax() > 1 + 1e-6:
        raise ValueError(
            f"points lie {apart:.4g} away from their images, outside the ball of radius {question.eps:.4g} or [0, 1]"
        )
    with torch.no_grad():
        right = [predicted_classes(question.model(part)) == labels for part in (images, points)]
    accuracy = float((right[0] & right[1]).double().mean())
    is_worse = share_right(pristine, points, labels) < share_right(pristine, images, labels)
    worst = torch.where(is_worse[:, None, None, None], points, images)
    verified = share_right(
        pristine, worst, labels
    )  # measured anew: the lower of two random shares is too low on average
    return Answer(
        accuracy=accuracy,
        verdict=judge_number(accuracy, len(images), question.claim),
        verified=float(verified.mean()),
    )


def judge_number(accuracy: float, images: int, claim: float) -> str:
    """Verdict for a tool without one: "flagged" by the rule with which our audit refutes a claim, else "believed"."""
    high = wilson_interval(round(accuracy * images), images)[1]
    return "flagged" if claim - accuracy > SLACK and claim > high else "believed"


def _audited(budget: str) -> Callable[[Question], Answer]:
    def run(question: Question) -> Answer:
        found = audit(
            question.model,
            question.split,
            norm="linf",
            eps=question.eps,
            claim=question.claim,
            limit=len(question.images),
            budget=budget,
            minutes=_MINUTES,
        )
        verdicts = {"believable": "believed", "not believable": "flagged"}
        return Answer(
            accuracy=found.accuracy,
            verdict=verdicts.get(found.verdict, found.verdict),
            verified=found.accuracy,
            alarms=[finding.name for finding in found.findings if finding.level == "alarm"],
            broken_by={stage.name: stage.broken for stage in found.stages if stage.broken},
        )

    return run


def _attacked(make: Callable[[float], Attack]) -> Callable[[Question], Tensor]:
    def run(question: Question) -> Tensor:
        return make(question.eps)(question.model, question.images, question.labels)

    return run


def _pgd(eps: float) -> Attack:
    return PGD(norm="linf", eps=eps, steps=40, step_size=eps / 10, loss="cross_entropy")


def _autoattack(eps: float) -> Attack:
    return AutoAttack(norm="linf", eps=eps)


def _pyautoattack(question: Question) -> Tensor:
    peer: Any = importlib.import_module("pyautoattack")
    suite = peer.AutoAttack(question.model, norm="Linf", eps=question.eps, seed=0, version="standard")
    batch = len(question.images)
    points, _ = suite.run_standard_evaluation(question.images, question.labels, batch_size=batch)
    crafted: Tensor = points
    return crafted


def _foolbox(question: Question) -> Tensor:
    peer: Any = importlib.import_module("foolbox")
    wrapped = peer.PyTorchModel(question.model, bounds=(0, 1), device="cpu")
    attack = peer.attacks.LinfPGD()
    _, points, _ = attack(wrapped, question.images, question.labels, epsilons=question.eps)
    crafted: Tensor = points
    return crafted


def _art(question: Question) -> Tensor:
    classifiers: Any = importlib.import_module("art.estimators.classification")
    evasion: Any = importlib.import_module("art.attacks.evasion")
    wrapped = classifiers.PyTorchClassifier(
        question.model,
        loss=nn.CrossEntropyLoss(),
        input_shape=tuple(question.images.shape[1:]),
        nb_classes=10,
        clip_values=(0.0, 1.0),
        device_type="cpu",
    )
    attack = evasion.ProjectedGradientDescent(
        wrapped, eps=question.eps, eps_step=question.eps / 10, max_iter=100, num_random_init=1, verbose=False
    )
    crafted = attack.generate(question.images.numpy(), question.labels.numpy())
    return torch.from_numpy(crafted)


#: Every tool by name; `TOOLS["mine"] = Tool(...)` adds one.
TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        *(
            Tool(
                name=f"audit-{budget}",
                what=f'`ecnn.audit` with budget="{budget}", at most {_MINUTES} minutes',
                run=_audited(budget),
            )
            for budget in ("quick", "fast", "standard")
            if budget in BUDGETS
        ),
        Tool(name="autoattack", what="`ecnn.attacks.AutoAttack` alone", run=_attacked(_autoattack)),
        Tool(
            name="pgd-40",
            what="`ecnn.attacks.PGD` on cross-entropy, 40 steps of a tenth of the radius, a random start",
            run=_attacked(_pgd),
        ),
        Tool(
            name="pyautoattack",
            what="pyautoattack, version standard",
            run=_pyautoattack,
            needs="pyautoattack",
        ),
        Tool(name="foolbox", what="foolbox, LinfPGD as it comes", run=_foolbox, needs="foolbox"),
        Tool(
            name="art",
            what="ART, ProjectedGradientDescent, 100 steps of a tenth of the radius, a random start",
            run=_art,
            needs="art",
        ),
    )
}
