"""Models that only look robust, and honest ones, to try an auditor on: built, trained and attacked here.

All are small networks on the embedded 8x8 digits, each trained in seconds on one core and the same every time. A claim
is computed, never typed: a false model's by the weak protocol that it names, an honest one's by AutoAttack, by an
attack made for it, or by proof. Beside it stands what attackers leave who know the trick.

    from ecnn.auditing import bench
    model = bench.build("thermometer")
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from ecnn.auditing.bench import (
    chance,
    features,
    gradients,
    inputs,
    members,
    memory,
    outside,
    papers_checks,
    papers_inputs,
    papers_networks,
    papers_truthful,
    purifiers,
    scores,
    secrets,
    truthful,
)
from ecnn.auditing.bench.claims import BY_AN_INFORMED_ATTACK, BY_AUTOATTACK, BY_FGSM, BY_PGD, false, honest
from ecnn.auditing.bench.informed import informed_accuracy
from ecnn.auditing.bench.networks import training
from ecnn.auditing.bench.subject import VERSION, Half, Subject
from ecnn.auditing.bench.table import Row
from ecnn.auditing.bench.table import examine as _examine
from ecnn.auditing.bench.tools import TOOLS, Answer, Question, Tool
from ecnn.auditing.bench.tricks import Trick, open_tricks
from ecnn.checks import check_choice
from ecnn.data import Dataset, load_data

_PLACES = (
    members,
    inputs,
    features,
    scores,
    gradients,
    outside,
    chance,
    memory,
    purifiers,
    papers_inputs,
    papers_networks,
    papers_checks,
    secrets,
    truthful,
    papers_truthful,
)

#: Every model by name: false ones family by family, planted secrets, honest ones.
SUBJECTS: dict[str, Subject] = {subject.name: subject for place in _PLACES for subject in place.SUBJECTS}
#: Names of the models of each family.
FAMILIES: dict[str, list[str]] = {}
for _subject in SUBJECTS.values():
    FAMILIES.setdefault(_subject.family, []).append(_subject.name)
HALVES: tuple[Half, ...] = ("first", "second")


def build(
    name: str, *, data: Dataset | None = None, folder: str | os.PathLike[str] | None = None
) -> nn.Module:
    """The trained model of that name, in eval mode, in at most two minutes on one core.

    Args:
        name: a key of `SUBJECTS`.
        data: the digits, if you have them already.
        folder: keeps weights there, and reads those that it finds.
    """
    check_choice("name", name, SUBJECTS)
    data = load_data("digits") if data is None else data
    return SUBJECTS[name].build(data, None if folder is None else Path(folder))


def examine(
    tool: str,
    name: str,
    *,
    limit: int = 360,
    folder: str | os.PathLike[str],
    data: Dataset | None = None,
) -> Row:
    """What a tool says of a model: accuracy, verdict ("flagged", "inconclusive", "believed", "raised"), seconds.

    Args:
        tool: a key of `TOOLS`.
        name: a key of `SUBJECTS`.
        limit: how many images, the first of the test split.
        folder: keeps weights, claims and this row there.
        data: the digits, if you have them already.
    """
    check_choice("tool", tool, TOOLS)
    check_choice("name", name, SUBJECTS)
    data = load_data("digits") if data is None else data
    return _examine(TOOLS[tool], SUBJECTS[name], data, limit=limit, folder=Path(folder))


__all__ = [
    "BY_AN_INFORMED_ATTACK",
    "BY_AUTOATTACK",
    "BY_FGSM",
    "BY_PGD",
    "FAMILIES",
    "HALVES",
    "SUBJECTS",
    "TOOLS",
    "VERSION",
    "Answer",
    "Half",
    "Question",
    "Subject",
    "Tool",
    "Trick",
    "build",
    "examine",
    "false",
    "honest",
    "informed_accuracy",
    "open_tricks",
    "training",
]
