"""The user's own attacks in an audit: they run after the suite, and what they break counts as for any other attack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ecnn.attacks import Attack
from ecnn.auditing.findings import Finding, note
from ecnn.auditing.subject import Subject
from ecnn.checks import check_kind, parse_eps
from ecnn.errors import InputError
from ecnn.evaluation import Evaluation, OwnAttack
from ecnn.evaluation.records import check_names

#: An attack that a user gives to an audit: an `Attack`, an `OwnAttack`, or a function that `OwnAttack` accepts.
AnyAttack = Attack | OwnAttack | Callable[..., Any]


def own_attacks(
    own: Mapping[str, AnyAttack] | None, subject: Subject, *, taken: Iterable[str] = ()
) -> dict[str, Any]:
    """The user's attacks by name, ready for the audit; InputError if one cannot be called or has a name in `taken`.

    An attack with the audited norm and a radius no larger than the audited one stays as it is. Any other is wrapped
    in an `OwnAttack`: its points count only if they lie in the audited ball.
    """
    if own is None:
        return {}
    check_kind("attacks", own, Mapping, "a table of attacks by name")
    check_names(list(own))
    _check_apart(own, taken)
    for name, attack in own.items():
        if not callable(attack):
            raise InputError(f"the attack {name!r} cannot be called with (model, images, labels).")
    return {
        name: attack if _fits(attack, subject) else _as_own(attack, subject) for name, attack in own.items()
    }


def join_own(parts: Iterable[Mapping[str, Any]], own: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of the suite, and the user's attacks as the last part; InputError if a name occurs in both."""
    for part in parts:
        _check_apart(own, part)
        yield dict(part)
    yield dict(own)


def _check_apart(own: Iterable[str], taken: Iterable[str]) -> None:
    for name in sorted(set(own) & set(taken)):
        raise InputError(f"the audit has an attack {name!r} of its own: give yours another name.")


def _fits(attack: Any, subject: Subject) -> bool:
    """Whether an attack declares the audited norm, and a radius no larger than the audited one."""
    if not isinstance(attack, Attack | OwnAttack) or getattr(attack, "norm", None) != subject.norm:
        return False
    radius = getattr(attack, "eps", None)
    return radius is not None and parse_eps(radius) <= subject.eps


def _as_own(attack: Any, subject: Subject) -> OwnAttack:
    settings: Any = {"norm": subject.norm, "eps": subject.eps, "seed": subject.seed}
    if isinstance(attack, OwnAttack):
        return dataclasses.replace(attack, **settings)
    return OwnAttack(function=attack, **settings)


def notes_on_request(
    evaluation: Evaluation, classes: Sequence[int] | None, own: Mapping[str, Any] | None
) -> list[Finding]:
    """Notes on the request: points of the user's attacks that do not count, and a restriction to some classes."""
    found = []
    outside = {
        name: int(evaluation.outcomes[name].about.get("outside", 0))
        for name in own or ()
        if name in evaluation.outcomes
    }
    if any(outside.values()):
        named = ", ".join(f"{name} ({count})" for name, count in outside.items() if count)
        claim = f"Points of your attacks that lie outside the ball or [0, 1], or are no numbers, do not count: {named}."
        advice = "Project the points into the ball: points outside of it say nothing about robustness in it."
        found.append(dataclasses.replace(note(claim, {"points": outside}, advice), name="own_attacks"))
    if classes is not None:
        numbers = sorted({int(number) for number in classes})
        claim = f"Only images of {len(numbers)} classes were audited: {', '.join(map(str, numbers))}."
        advice = "The accuracy says nothing about images of other classes."
        found.append(dataclasses.replace(note(claim, {"classes": numbers}, advice), name="classes"))
    return [dataclasses.replace(one, kind=one.name, source="the request") for one in found]
