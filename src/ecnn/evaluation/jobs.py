"""The jobs of an evaluation: every attack at every radius."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecnn.attacks import Attack
from ecnn.checks import check_count, check_kind, parse_eps
from ecnn.errors import InputError
from ecnn.evaluation.batch import ForeignAttack
from ecnn.evaluation.records import check_names


@dataclass(frozen=True)
class Job:
    """One attack at one radius; with attack None, the clean images."""

    name: str
    base: str | None
    eps: float | None
    attack: Attack | ForeignAttack | None
    seed: int


def plan_jobs(
    attacks: Mapping[str, Attack | ForeignAttack], eps: Sequence[float | str] | None, seed: int
) -> list[Job]:
    """One job for each attack, or for each radius in `eps` if the attack has a radius. Arguments as in `evaluate`."""
    check_count("seed", seed, least=0)
    check_kind("attacks", attacks, Mapping, 'a table of attacks by name, such as {"pgd": attack}')
    if isinstance(eps, str) or (eps is not None and not len(eps)):
        raise InputError(f'eps must be None or a list of radii such as ["2/255", "4/255"], not {eps!r}.')
    jobs = []
    for base, attack in attacks.items():
        if not callable(attack):
            raise InputError(f"the attack {base!r} cannot be called with (model, images, labels).")
        if isinstance(attack, type):
            raise InputError(
                f"the attack {base!r} is the class {attack.__name__}: make one with its settings."
            )
        own = getattr(attack, "eps", None)
        if eps is None or not _has_eps(attack):
            radius = parse_eps(own) if isinstance(own, float | int | str) and _has_eps(attack) else None
            jobs.append(Job(base, base, radius, attack, int(seed)))
            continue
        for value in eps:
            label = value.strip() if isinstance(value, str) else f"{value:g}"
            part: Any = dataclasses.replace(attack, eps=value)  # type: ignore[type-var]
            jobs.append(Job(f"{base}@{label}", base, parse_eps(value), part, int(seed)))
    check_names([job.name for job in jobs])
    return jobs


def _has_eps(attack: Any) -> bool:
    return dataclasses.is_dataclass(attack) and any(
        entry.name == "eps" and entry.init for entry in dataclasses.fields(attack)
    )
