"""A benchmark for auditors: models that only look robust and honest ones, built, trained and attacked here.

All are small networks on the embedded 8x8 digits. Each is trained in seconds on one core, with the same result every
time. A claim is computed, never written by hand: for a false model by a weak protocol, for an honest one by AutoAttack,
an attack made for it, or a proof. The accuracy under attackers who know the trick is computed too.

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

#: Every model by name, file by file.
SUBJECTS: dict[str, Subject] = {subject.name: subject for place in _PLACES for subject in place.SUBJECTS}
#: Names of the models of each family.
FAMILIES: dict[str, list[str]] = {}
for _subject in SUBJECTS.values():
    FAMILIES.setdefault(_subject.family, []).append(_subject.name)
HALVES: tuple[Half, ...] = ("first", "second")


def build(
    name: str, *, data: Dataset | None = None, folder: str | os.PathLike[str] | None = None
) -> nn.Module:
    """The trained model of that name, in eval mode; training takes at most two minutes on one core.

    Args:
        name: a key of `SUBJECTS`.
        data: the digits, if you have them already.
        folder: weights found there are loaded; otherwise the model is trained and its weights are saved there.
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
    """The row of one tool on one model: accuracy, verdict ("flagged", "inconclusive", "believed", "raised"), seconds.

    If the tool raises an error, the verdict is "raised" and the row holds the error instead of an accuracy.

    Args:
        tool: a key of `TOOLS`.
        name: a key of `SUBJECTS`.
        limit: how many images, the first of the test split.
        folder: where weights, claims and this row are saved.
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
