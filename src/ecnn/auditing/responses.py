"""Answers to alarms: the attacks made for what an alarm suspects, with doubled effort, until they break no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from ecnn.attacks import Attack
from ecnn.attacks.deadlines import OutOfTimeError, time_is_over
from ecnn.auditing.budgets import Budget
from ecnn.auditing.findings import Finding
from ecnn.auditing.power import FLAT, Turns, has_flattened
from ecnn.auditing.stages import Stages, base_name
from ecnn.auditing.subject import Subject
from ecnn.auditing.suite import Maker, find_places, without_repeats
from ecnn.auditing.surrogates import Examples, Surrogates
from ecnn.auditing.traits import Traits, find_traits
from ecnn.auditing.trials import Found

_BLIND = ("proven", "passing", "layers", "surrogates", "answers", "relays")
_WRONG = ("proven", "layers", "surrogates", "answers", "relays")
_UNFINISHED = ("proven", "climbs", "relays", "answers")
#: By name of an alarm, the groups of attacks that answer it, in their order; alarms not listed get `_BLIND`.
RESPONSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("differentiable", "zero_gradients", "loss_path", "nan_gradients", "saturation"), _BLIND),
    **dict.fromkeys(("gradient_direction", "black_box", "black_box_suite", "one_step", "border"), _WRONG),
    **dict.fromkeys(("noise", "luck"), ("scattered", *_WRONG)),
    **dict.fromkeys(("steps", "restarts", "last_iterate", "unstable_loss", "attacks_not_made"), _UNFINISHED),
}
_STRAIGHT = ("straight-through", "straight-through-near", "straight-through-climb")
_SHORT, _LONG = "rays", "rays-long"
_SEARCHES = {_SHORT, _LONG}
#: Attacks of these kinds that broke nothing before are not repeated: with twice the effort 77 of them broke 1 image.
_ONCE = ("square", "student", "found-")
_ALL = 2**31  # images that the long search by answers takes after an alarm: no sample, but all that are left
#: How many of the attacks that broke most are repeated.
_PROVEN = 3
#: By whether the model is random, the attack that is repeated without an alarm, to see if the search has converged.
_ONCE_MORE = {False: "apgd-margin", True: "eot-margin"}
#: Alarms that no attack can answer: the model was not judged as deployed, a proof contradicts attacks, time ran out.
UNANSWERABLE = ("stateful", "copies", "certificate_contradicted", "out_of_time")


class Responses:
    """Chooses the attacks for each turn: a round of attacks with more effort on the images that are not broken yet.

    Args:
        subject: what is audited.
        num_classes: scores per image.
        is_random: whether two passes of the model differ.
        examples: clean images to train surrogates on.
        folder, resume: as `suite_parts` takes them.
    """

    def __init__(
        self,
        subject: Subject,
        num_classes: int,
        is_random: bool,
        examples: Examples,
        folder: Path | None,
        resume: bool,
    ) -> None:
        self.subject, self.num_classes, self.is_random = subject, num_classes, is_random
        self.examples, self.folder, self.resume = examples, folder, resume

    @cached_property
    def _traits(self) -> Traits:
        return find_traits(self.subject.model, self.examples.images, self.num_classes)

    @cached_property
    def _surrogates(self) -> Surrogates:
        return Surrogates(self.subject, self.examples, self.num_classes, self.folder, self.resume)

    @cached_property
    def _found(self) -> Found:
        return find_places(
            self.subject,
            self.examples,
            self.num_classes,
            is_random=self.is_random,
            folder=self.folder,
            resume=self.resume,
        )

    def attacks(
        self, doubts: Iterable[str], effort: int, proven: Sequence[str] = (), made: Iterable[str] = ()
    ) -> dict[str, Attack]:
        """The attacks that answer these alarms, by name and effort ("square-x4"), with more effort than in the suite.

        Without an alarm it is one attack of the suite.

        Args:
            doubts: names of alarms.
            effort: by how much the budget is multiplied, a power of two; see `enlarged`.
            proven: names of attacks that have broken images of this model, the most successful first.
            made: names of attacks that were made. Those of the kinds in `_ONCE` are repeated only if they are proven.
        """
        budget = enlarged(self.subject.budget, effort)
        # Twice the passes per step are twice the effort already, and Square gains little from more queries.
        if self.is_random:
            queries = self.subject.budget.queries * min(effort, 2)
            budget = dataclasses.replace(budget, steps=self.subject.budget.steps, queries=queries)
        subject = dataclasses.replace(self.subject, budget=budget)
        maker = Maker(subject, self.num_classes, self._traits)
        groups = self._random_groups(maker) if self.is_random else self._groups(maker)
        wanted = list(dict.fromkeys(group for doubt in doubts for group in RESPONSES.get(doubt, _BLIND)))
        made = set(made)
        attacks: dict[str, Attack] = {}
        if not wanted:
            every = maker.averaged() if self.is_random else maker.on_scores()
            attacks = _named(every, _ONCE_MORE[self.is_random])
        if "proven" in wanted:
            known = maker.plain()
            for group in ("scores", "targets", "layers", "members", "relays"):
                known |= groups[group]() if group in groups else {}
            attacks |= {name: known[name] for name in proven[:_PROVEN] if name in known}
        for group in wanted:
            attacks |= without_repeats(groups[group](), attacks) if group in groups else {}
        if _LONG in made and self._all_were_searched and not _SEARCHES & set(proven):
            # The long search of the suite took all images and found next to nothing: a longer one finds little more.
            attacks.pop(_LONG, None)
        elif _LONG in attacks:
            attacks.pop(_SHORT, None)  # the long search begins with the same queries
        idle = {name for name in made if name.startswith(_ONCE) and name not in proven}
        return {f"{name}-x{effort}": attack for name, attack in attacks.items() if name not in idle}

    @property
    def _all_were_searched(self) -> bool:
        """Whether the suite's long search by answers, if there is one, takes all images that are left and no sample."""
        return len(self.subject.images) <= self.subject.budget.searched

    def _groups(self, maker: Maker) -> dict[str, Callable[[], dict[str, Attack]]]:
        def layers() -> dict[str, Attack]:
            return maker.where_found(self._found, is_random=False)

        return {
            "passing": lambda: _named(maker.on_scores(), *_STRAIGHT),
            "layers": lambda: {
                name: part for name, part in layers().items() if not name.endswith("-targets")
            },
            "surrogates": lambda: maker.by_student(self._surrogates, is_random=False),
            "climbs": lambda: _named(maker.on_scores(), "apgd-margin"),
            "answers": lambda: {"square": maker.square()} | maker.by_classes(self._surrogates, imitate=True),
            "relays": maker.relays,
            "scattered": maker.scattered,
            # No alarm asks for these groups: single attacks of them are repeated if they are proven.
            "scores": maker.on_scores,
            "targets": lambda: layers() | maker.automatic(),
            "members": lambda: maker.on_members() | maker.on_votes(),
        }

    def _random_groups(self, maker: Maker) -> dict[str, Callable[[], dict[str, Attack]]]:
        return {
            "climbs": lambda: _named(maker.averaged(), "eot-margin"),
            "passing": lambda: _named(maker.averaged(), "eot-straight-through", "eot-straight-through-near"),
            "layers": lambda: maker.where_found(self._found, is_random=True),
            "answers": lambda: {"square": maker.averaged_square(), "rays": maker.averaged_rays()},
            "scores": maker.averaged,
        }


def _named(attacks: dict[str, Attack], *names: str) -> dict[str, Attack]:
    return {name: attacks[name] for name in names if name in attacks}


def enlarged(budget: Budget, effort: int) -> Budget:
    """The budget with `effort` times the steps and queries, and at most twice the passes per step of a random model.

    Each step makes all passes, so that multiplying both would square the cost. AutoAttack and Race are left out, since
    their settings are fixed.
    """
    return dataclasses.replace(
        budget,
        steps=budget.steps * effort,
        queries=budget.queries * effort,
        answers=budget.answers * effort,
        searched=_ALL,
        eot=budget.eot * min(effort, 2),
        autoattack=False,
        race=False,
    )


def take_turns(responses: Responses, stages: Stages, doubts: Iterable[str], *, start: int = 0) -> Turns:
    """Doubles the effort on the unbroken images until a turn breaks next to nothing, or turns, images or time run out.

    An attack that broke nothing in one turn is not repeated in the next.

    Args:
        doubts: names of the open alarms; without any, one attack of the suite is repeated.
        start: how often the effort was doubled before.
    """
    images, broken, turn = len(responses.subject.images), None, start
    useful: set[str] = set()
    doubts = list(doubts)
    while turn < responses.subject.budget.turns and stages.standing() > 0 and not time_is_over():
        proven = _proven(stages, images)
        try:
            attacks = responses.attacks(doubts, 2 ** (turn + 1), proven, stages.attacks)
        except OutOfTimeError:
            break
        turn += 1
        attacks = {
            name: attack for name, attack in attacks.items() if not useful or base_name(name) in useful
        }
        # The accuracy of a random model may rise by chance.
        broken = max(0.0, stages.make(attacks, seed=responses.subject.seed + turn))
        if broken <= FLAT * images:
            break
        useful = {base_name(name) for name in stages.useful(attacks)}
    return Turns(turn, broken)


def _proven(stages: Stages, images: int) -> list[str]:
    """Names in the suite of the attacks that broke images, the best first; searches by answers only if not by luck."""
    broken = stages.proven()
    names = list(dict.fromkeys(map(base_name, broken)))
    by_answers = sum(count for name, count in broken.items() if base_name(name) in _SEARCHES)
    return [name for name in names if name not in _SEARCHES or not has_flattened(by_answers, images)]


def settle(finding: Finding, *, is_answered: bool, facts: dict[str, object]) -> Finding:
    """The finding; an open alarm is marked as answered if the attacks made for it have converged and can answer it."""
    if not finding.is_open or not is_answered or finding.name in UNANSWERABLE:
        return finding
    return dataclasses.replace(finding, evidence={**finding.evidence, "answered": True, "converged": facts})
