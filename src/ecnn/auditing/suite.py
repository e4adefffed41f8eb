"""Which attacks an audit makes on a model, from cheap to expensive, and what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecnn.attacks import (
    APGD,
    PGD,
    Attack,
    AutoAttack,
    Cost,
    Race,
    RandomNoise,
    RaySearch,
    Square,
    Transfer,
)
from ecnn.attacks.norms import Norm
from ecnn.attacks.views import Averaged, View, WeakestBit, find_view
from ecnn.auditing.adaptive import (
    CheapestBits,
    FeatureDistance,
    InDouble,
    InnerScores,
    LogScores,
    MeanMembers,
    MeanProbability,
    OnMean,
    OwnTransfer,
    Relay,
    ScaledCrossEntropy,
    WorstMembers,
)
from ecnn.auditing.alone import OneAtATime
from ecnn.auditing.bpda import Passing
from ecnn.auditing.budgets import Budget, resolve_budget
from ecnn.auditing.holding import Holding
from ecnn.auditing.levels import OnBytes, RoundedScores, whole_levels
from ecnn.auditing.search import search
from ecnn.auditing.subject import Subject, once
from ecnn.auditing.surrogates import Examples, Surrogates
from ecnn.auditing.traits import Traits, find_traits, unseen_traits
from ecnn.auditing.trials import Found

PLAIN = "pgd-ce"  # the attack of a usual evaluation
_BLIND = 0.01  # least share of images without a usable gradient for which students are worth their cost
#: Least share of the images left that found views must break for students and targeted attacks to be worth their cost.
_DOUBTFUL = 0.1
_DENSE = 3072  # most numbers in an image for which a student without convolutions is worth a try
_FEATURE_TARGETS = 3
_REACH = 2.5  # radii that a walk with short steps can cover
_FEW_ANSWERS, _FEW_RANDOM_ANSWERS = 1000, 500


def suite(subject: Subject, **settings: Any) -> dict[str, Attack]:
    """The attacks of all parts of the suite by name; the arguments are those of `suite_parts`."""
    return {name: attack for part in suite_parts(subject, **settings) for name, attack in part.items()}


def suite_parts(
    subject: Subject,
    *,
    num_classes: int,
    is_random: bool,
    examples: Examples | None = None,
    folder: Path | None = None,
    resume: bool = True,
) -> Iterator[dict[str, Attack]]:
    """The attacks by name, in parts, in the order in which they should run.

    Preparing a part is not cheap: it may search for views or train a surrogate. If one part leaves no image unbroken,
    do not ask for the next.

    The first attack, "pgd-ce", is that of a usual evaluation. Without examples the attacks that need some are left
    out: those on features, those by surrogates, and those chosen by asking the model (`find_traits`, `search`).

    Args:
        subject: what is audited; it may have no images.
        num_classes: scores per image.
        is_random: whether passes differ; then attacks average over passes and return their last points.
        examples: clean images, see `Examples`.
        folder: where surrogates and found views are kept, so that a resumed audit has the same; None for nowhere.
        resume: reads them from there.
    """
    model = subject.model
    traits = unseen_traits(model) if examples is None else find_traits(model, examples.images, num_classes)
    maker = Maker(subject, num_classes, traits)
    in_the_dark = examples is not None and (traits.blind >= _BLIND or subject.budget.name == "thorough")
    first = maker.averaged() if is_random else maker.on_scores() | maker.on_members() | maker.on_votes()
    first = maker.plain() | first
    yield first
    surrogates = None
    if examples is not None:
        surrogates = Surrogates(subject, examples, num_classes, folder, resume)
        found = find_places(subject, examples, num_classes, is_random=is_random, folder=folder, resume=resume)
        yield without_repeats(maker.where_found(found, is_random=is_random), first)
        in_the_dark = in_the_dark or found.share >= _DOUBTFUL
        yield maker.by_surrogates(surrogates, imitate=in_the_dark or is_random, is_random=is_random)
    if is_random:
        yield {"square": maker.averaged_square(), "rays": maker.averaged_rays()}
        return
    yield maker.relays() | maker.automatic()
    yield maker.by_classes(surrogates, imitate=in_the_dark)


def without_repeats(attacks: Mapping[str, Attack], made: Mapping[str, Attack]) -> dict[str, Attack]:
    """The attacks, without those that equal a straight-through attack in `made` under another name."""
    known = [attack for name, attack in made.items() if name.startswith("straight-through")]
    return {name: attack for name, attack in attacks.items() if not any(attack == other for other in known)}


def find_places(
    subject: Subject,
    examples: Examples,
    num_classes: int,
    *,
    is_random: bool,
    folder: Path | None,
    resume: bool,
) -> Found:
    """The views that `search` finds; searched once for each subject."""
    settings: dict[str, Any] = {"is_random": is_random, "folder": folder, "resume": resume}
    found: Found = once(subject, "places", lambda: search(subject, examples.images, num_classes, **settings))
    return found


@dataclass(frozen=True)
class Maker:
    """Makes groups of attacks, by name, for one model and ball."""

    subject: Subject
    num_classes: int
    traits: Traits

    @property
    def budget(self) -> Budget:
        return self.subject.budget

    @property
    def ball(self) -> dict[str, Any]:
        return {"norm": self.subject.norm, "eps": self.subject.eps}

    @property
    def walk(self) -> dict[str, Any]:
        """Settings of PGD attacks: their step size falls from a quarter of the radius to 0."""
        size = {"steps": self.budget.steps, "step_size": self.subject.eps / 4, "schedule": "cosine"}
        return {**self.ball, **size, "restarts": self.budget.restarts}

    @property
    def near(self) -> dict[str, Any]:
        """Settings of PGD attacks with short steps from the image itself.

        Where a model hides derivatives, those of another function take their place. They are best near the image: a
        random start and long steps can destroy what they were derived from, such as a background of equal pixels.
        """
        steps = self.budget.steps
        size = {
            "steps": steps,
            "step_size": min(1.0, _REACH / steps) * self.subject.eps,
            "schedule": "constant",
        }
        return {**self.ball, **size, "start": "image"}

    @property
    def auto(self) -> dict[str, Any]:
        return {**self.ball, "steps": self.budget.steps, "restarts": self.budget.restarts}

    @property
    def targets(self) -> int:
        return min(self.budget.targets, self.num_classes - 1)

    def plain(self) -> dict[str, Attack]:
        walk = {**self.ball, "steps": self.budget.steps, "step_size": self.subject.eps / 4}
        return {PLAIN: PGD(loss="cross_entropy", **walk)}

    def on_scores(self) -> dict[str, Attack]:
        attacks: dict[str, Attack] = {"race": Race(**self.ball)}
        if not self.budget.race:
            attacks = {
                "apgd-ce": self._standard().get("apgd-ce", APGD(loss="cross_entropy", **self.auto)),
                "apgd-margin": APGD(loss="margin", **self.auto),
            }
        attacks |= {
            "scaled-ce": PGD(on=ScaledCrossEntropy(), **self.walk),
        }
        traits = self.traits
        if traits.gives_probabilities:
            attacks["log-scores"] = PGD(on=LogScores(), **self.walk)
        if traits.hides_scores:
            attacks["inner-scores"] = PGD(on=InnerScores(num_classes=self.num_classes), **self.walk)
        if traits.hides_derivatives:
            view = Passing(view="linear" if traits.has_members else "scores")
            attacks["straight-through"] = PGD(on=view, **self.walk)
            attacks["straight-through-near"] = PGD(on=view, **self.near)
            if (
                self.subject.norm == "l1"
            ):  # where a step of PGD moves 1 % of the pixels, and one of APGD as many as pay
                attacks["straight-through-climb"] = APGD(on=view, loss="margin", **self.auto)
            attacks["straight-through-targets"] = PGD(on=view, targets=self.targets, **self.walk)
        if traits.blind and traits.can_be_double:
            attacks["float64"] = InDouble(attack=APGD(loss="margin", **self.auto), **self.ball)
        return attacks | self.on_bytes()

    def on_bytes(self) -> dict[str, Attack]:
        """Attacks that end on 8-bit images, if the model treats these differently and the radius is a level or more."""
        eps = whole_levels(self.subject.eps)
        if not (self.traits.knows_bytes and eps):
            return {}
        ball: dict[str, Any] = {"norm": self.subject.norm, "eps": eps}
        walk = {**self.walk, **ball, "step_size": eps / 4, "on": RoundedScores()}
        inner: dict[str, Attack] = {
            "on-bytes": PGD(**walk),
            "on-bytes-targets": PGD(targets=self.targets, **walk),
        }
        if self.subject.norm == "linf":  # where Square moves pixels by +-eps, and so by whole levels
            inner["on-bytes-square"] = replace(self.square(), eps=eps)
        return {name: OnBytes(attack=attack, **ball) for name, attack in inner.items()}

    def on_members(self) -> dict[str, Attack]:
        """Attacks on the members' logits instead of the scores; on most models the first one suffices."""
        if not self.traits.has_members:
            return {}
        attacks: dict[str, Attack] = {
            "linear": APGD(on="linear", loss="margin", **self.auto),
            "members": PGD(on="members", loss="margin", **self.walk),
            "cheapest-bits": PGD(on=CheapestBits(), **self.walk),
        }
        if hasattr(self.subject.model, "decode"):
            attacks["tempered"] = PGD(on="tempered", loss="margin", **self.walk)
        attacks["linear-targets"] = APGD(on="linear", loss="margin", targets=self.targets, **self.auto)
        if self.budget.race:
            attacks["linear-targets"] = Race(on="linear", **self.ball)
        attacks["codewords"] = PGD(on="members", loss="margin", targets=self.targets, **self.walk)
        attacks["min-bit"] = PGD(on=WeakestBit(), targets=self.targets, **self.walk)
        return attacks

    def on_votes(self) -> dict[str, Attack]:
        if not self.traits.has_votes:
            return {}
        return {
            "mean-members": PGD(on=MeanMembers(), **self.walk),
            "worst-members": PGD(on=WorstMembers(), **self.walk),
            "mean-targets": PGD(on=MeanMembers(), targets=self.targets, **self.walk),
        }

    def averaged(self) -> dict[str, Attack]:
        """Attacks on the mean over passes of a random model, with half of the steps.

        They return their last points, since one misclassified pass proves nothing.
        """
        views: dict[str, str | View] = {"eot-margin": "scores", "eot-probability": MeanProbability()}
        if self.traits.has_members:
            views |= {"eot-linear": "linear", "eot-cheapest-bits": CheapestBits()}
        if self.traits.has_votes:
            views["eot-mean-members"] = MeanMembers()
        if self.traits.hides_scores:
            views["eot-inner-scores"] = InnerScores(num_classes=self.num_classes)
        if self.traits.blind:
            views["eot-straight-through"] = Passing(view="scores")
        attacks: dict[str, Attack] = {name: self._on_mean(view) for name, view in views.items()}
        if self.traits.blind:
            attacks["eot-straight-through-near"] = replace(self._on_mean(Passing(view="scores")), **self.near)
        return attacks

    def _on_mean(self, view: str | View) -> PGD:
        walk = {**self.walk, "steps": max(1, self.budget.steps // 2), "restarts": 1, "keep": "last"}
        # A view that makes several passes per look needs fewer looks for the same number of passes.
        passes = -(-self.budget.eot // find_view(view).passes_per_look)
        return PGD(on=Averaged(view=view, passes=passes), **walk)

    def where_found(self, found: Found, *, is_random: bool) -> dict[str, Attack]:
        """Attacks on the views and decisions that a search has found; targeted ones too on views that broke many."""
        attacks: dict[str, Attack] = {}
        for name, view in found.views.items():
            if is_random:
                attacks[f"found-{name}"] = self._on_mean(view)
                continue
            attacks[f"found-{name}"] = PGD(on=view, **self.walk)
            if view.has_goals and found.broken[name] >= _DOUBTFUL * found.standing:
                attacks[f"found-{name}-targets"] = PGD(on=view, targets=self.targets, **self.walk)
        for name, forced in found.ways.items():
            attacks[f"found-{name}"] = Holding(forced=forced, **self.auto)
        return attacks

    def by_surrogates(self, surrogates: Surrogates, *, imitate: bool, is_random: bool) -> dict[str, Attack]:
        attacks: dict[str, Attack] = {}
        craft = self._craft()
        keep: Any = "last" if is_random else "best"
        if self.traits.has_features and surrogates.has_features:
            if not is_random:
                view = FeatureDistance(means=surrogates.means())
                targets = min(self.targets, _FEATURE_TARGETS)
                attacks["features"] = PGD(on=view, targets=targets, **self.walk)
            attacks["retrained-head"] = OwnTransfer(source=surrogates.head(), attack=craft, keep=keep)
        if imitate:
            attacks |= self.by_student(surrogates, is_random=is_random)
            is_long = self.budget.answers > _FEW_ANSWERS
            if is_long and surrogates.examples.images[0].numel() <= _DENSE:
                dense = surrogates.student(dense=True)
                if dense is not None:
                    attacks["dense-student"] = Transfer(source=dense, attack=craft, keep=keep)
        return attacks

    def _craft(self) -> Attack:
        """The attack on a surrogate, whose points are then tried on the model."""
        return APGD(**{**self.auto, "restarts": 1}, loss="cross_entropy", keep="last")

    def by_student(self, surrogates: Surrogates, *, is_random: bool) -> dict[str, Attack]:
        keep: Any = "last" if is_random else "best"
        student = surrogates.student()
        return (
            {} if student is None else {"student": Transfer(source=student, attack=self._craft(), keep=keep)}
        )

    def relays(self) -> dict[str, Attack]:
        """PGD on several views in turn, each from the best point of the one before."""
        views: tuple[str | View, ...] = (ScaledCrossEntropy(), "scores")
        if self.traits.has_members:
            views = ("members", CheapestBits(), "linear", "scores")
        elif self.traits.has_votes:
            views = (WorstMembers(), MeanMembers(), "scores")
        steps, rounds = max(1, self.budget.steps // 2), self.budget.restarts
        return {"relay": Relay(steps=steps, views=views, restarts=rounds, **self.ball)}

    def automatic(self) -> dict[str, Attack]:
        """AutoAttack's standard suite without APGD on cross-entropy, which `on_scores` has; or a short form of it."""
        standard = self._standard()
        if standard:
            return {name: part for name, part in standard.items() if name != "apgd-ce"}
        if self.budget.race:
            return {"square": self.square()}
        loss: Any = "dlr" if self.num_classes >= 4 else "margin"
        return {"apgd-t": APGD(loss=loss, targets=self.targets, **self.auto), "square": self.square()}

    def _standard(self) -> dict[str, Attack]:
        return AutoAttack(**self.ball).members(self.num_classes) if self.budget.autoattack else {}

    def square(self) -> Square:
        return Square(queries=max(1, self.budget.queries), l2_moves="turns", **self.ball)

    def scattered(self) -> dict[str, Attack]:
        """Random points, as many as a search by answers queries, for errors that lie scattered in the ball."""
        few, most = self._questions
        alone = isinstance(self.subject.model, OneAtATime)
        return {"scattered": RandomNoise(samples=few if alone else most, **self.ball)}

    @property
    def _questions(self) -> tuple[int, int]:
        """Queries per image of a short search by answers, and of a long one."""
        most = max(self.budget.answers, self.budget.queries)
        return min(most, max(_FEW_ANSWERS, most // 10)), most

    def averaged_square(self) -> Attack:
        """Square on the mean over a few passes. It goes on after an error: points near the border break few others."""
        passes, square = max(4, self.budget.eot // 4), replace(self.square(), early_exit=False)
        return OnMean(attack=square, passes=passes, seed=self.subject.seed, keep="last", **self.ball)

    def averaged_rays(self) -> Attack:
        """RaySearch on the classes of the mean over a few passes. It is short, because every image is attacked."""
        passes, queries = max(4, self.budget.eot // 4), min(_FEW_RANDOM_ANSWERS, self.budget.answers)
        rays = RaySearch(queries=queries, keep="last", **self.ball)
        return OnMean(attack=rays, passes=passes, seed=self.subject.seed, keep="last", **self.ball)

    def by_classes(self, surrogates: Surrogates | None = None, *, imitate: bool = False) -> dict[str, Attack]:
        """Attacks by the model's classes alone: a short search on all images left, and a long one, perhaps on a sample.

        They come last: an image that they break and no gradient attack did is evidence against the gradients.

        Args:
            surrogates: gives the directions that broke similar images, to start with; None for none.
            imitate: also starts with the points of an attack on a student.
        """
        known: dict[str, Any] = {} if surrogates is None else {"neighbours": surrogates.neighbours()}
        student = surrogates.student() if surrogates is not None and imitate else None
        if student is not None:
            known["starts"] = (Transfer(source=student, attack=self._craft()),)
        few, most = self._questions
        if isinstance(self.subject.model, OneAtATime):  # each question costs a pass of its own
            most = few
        attacks: dict[str, Attack] = {"rays": RaySearch(queries=few, **known, **self.ball)}
        long = RaySearch(queries=most, **known, **self.ball)
        if few < most and len(self.subject.images) <= self.budget.searched:
            attacks["rays-long"] = long
        elif few < most:
            # One share for every number of images, so that an audit of more images can continue one of fewer.
            share = min(1.0, self.budget.searched / self.budget.images)
            attacks["rays-sample"] = dataclasses.replace(long, share=share)
        return attacks


def cost_of(attacks: Mapping[str, Attack], images: int, num_classes: int) -> Cost:
    """The cost of the attacks on all images, if they break none; less otherwise."""
    total = Cost(0, 0)
    for attack in attacks.values():
        total = total + attack.cost(num_classes)
    return total * images


def estimate_cost(
    model: nn.Module, budget: str | Budget, limit: int | None, num_classes: int, *, norm: Norm
) -> Cost:
    """An upper estimate of the forward and backward passes of an audit's suite, made without asking the model.

    Diagnostics come on top, on `budget.probe_images` images. A model whose images break early costs a small part of it.
    """
    budget = resolve_budget(budget)
    images = budget.images if limit is None else limit
    nothing = torch.zeros(images, 0, device="cpu")
    subject = Subject(model=model, images=nothing, labels=nothing, norm=norm, eps=0.1, budget=budget)
    attacks = suite(subject, num_classes=num_classes, is_random=False)
    # Attacks that are chosen only by asking the model: on features, on a surrogate, and on one found view.
    extra = Cost(1, 1) * (budget.steps * budget.restarts * (min(budget.targets, _FEATURE_TARGETS) + 2))
    return cost_of(attacks, images, num_classes) + extra * images
