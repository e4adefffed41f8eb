"""Findings that do not query the model: they compare the recorded outcomes of several attacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ecnn.auditing.diagnostics.probes import percent, plain
from ecnn.auditing.diagnostics.statistics import DOMINATED_TOLERANCE, TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm, note, ok
from ecnn.evaluation.outcomes import Outcomes
from ecnn.evaluation.results import Evaluation

_SCORES = "scores"
#: Names of the views that read the scores and nothing else.
_ON_SCORES = (_SCORES, "scaled cross-entropy", "log scores", "mean probability")


def read_evidence(evaluation: Evaluation) -> list[Finding]:
    """Findings that compare the attacks of a suite: which images each broke, and what this tells of the others.

    In a cascade each attack runs only on images that the ones before left. An image on which an attack was not run
    counts as right under it, at no cost, so "stand under attacks" means under those that were run on the image.

    An attack is black-box if it used no gradient, of the model or of a surrogate. Its view is read from its settings
    (`on`); an attack without this setting counts as one on the scores.
    """
    found = []
    for name, (read, source) in _READINGS.items():
        finding = read(evaluation)
        found.append(replace(finding, name=name, source=source, evidence=plain(finding.evidence)))
    return found


def _broken_by(evaluation: Evaluation) -> Finding:
    """How many images each attack was run on, how many it broke, and how many it alone broke."""
    right = evaluation.clean.robust
    broken = {name: outcomes.broken for name, outcomes in evaluation.outcomes.items()}
    total = np.sum(list(broken.values()), axis=0) if broken else np.zeros(len(evaluation), dtype=int)
    table = [
        {
            "attack": name,
            "made_on": int((right & evaluation.outcomes[name].attacked).sum()),
            "broken": int(mask.sum()),
            "broken_alone": int((mask & (total == 1)).sum()),
        }
        for name, mask in broken.items()
    ]
    table.sort(key=lambda row: -int(str(row["broken"])))
    claim = "No attack was run."
    if table:
        left = 100 * evaluation.worst_case.accuracy
        claim = (
            f"{table[0]['attack']} broke the most images, {table[0]['broken']} of the {table[0]['made_on']} that it "
            f"attacked; all attacks together leave {left:.1f} % of all images correctly classified."
        )
    return ok(claim, {"attacks": table})


def _black_box(evaluation: Evaluation) -> Finding:
    """Alarm where attacks without gradients broke images that no gradient attack broke."""
    blind = {name for name, outcomes in evaluation.outcomes.items() if asks_answers_alone(outcomes)}
    seeing = [name for name, outcomes in evaluation.outcomes.items() if (outcomes.backwards != 0).any()]
    n = int(evaluation.clean.robust.sum())
    alone = evaluation.survivors(seeing) & ~evaluation.survivors(sorted(blind))
    count = int(alone.sum())
    evidence = {"black_box": sorted(blind), "images": n, "broken_without_gradients_only": count}
    if blind and seeing and exceeds(count, n, DOMINATED_TOLERANCE):
        claim = f"Attacks without gradients break {percent(count, n)} that no gradient attack breaks."
        advice = "Gradients mislead on this model: find what masks them, and attack with more queries."
        return alarm(claim, evidence, advice)
    return ok("Attacks without gradients break no significant number of further images.", evidence)


def asks_answers_alone(outcomes: Outcomes) -> bool:
    """Whether an attack used no gradient, neither of the model nor of a surrogate that it may have trained itself."""
    return not bool((outcomes.backwards != 0).any()) and _view_of(outcomes) != "surrogate"


def _views(evaluation: Evaluation) -> Finding:
    """Alarm where attacks on members, features or other views break images that attacks on the scores leave."""
    n = int(evaluation.clean.robust.sum())
    groups = _group(evaluation, _view_of)
    right = evaluation.clean.robust
    broken = {view: int((right & ~evaluation.survivors(names)).sum()) for view, names in groups.items()}
    on_scores = groups.get(_SCORES, [])
    elsewhere = [name for view, names in groups.items() if view != _SCORES for name in names]
    hidden = evaluation.survivors(on_scores) & ~evaluation.survivors(elsewhere)
    count = int(hidden.sum())
    evidence = {"images": n, "broken_by_place": broken, "hidden_from_scores": count}
    if on_scores and elsewhere and exceeds(count, n, TOLERANCE):
        claim = f"{percent(count, n)} withstand attacks on the scores, but not attacks on other values of the model."
        advice = (
            "A claim measured on the scores is too high by this share: attack the members or the features."
        )
        return alarm(claim, {**evidence, "answered": True}, advice)
    claim = (
        "Attacks on other values than the scores break no significant number of further images."
        if elsewhere
        else "All attacks are attacks on the scores."
    )
    return ok(claim, evidence)


def _losses(evaluation: Evaluation) -> Finding:
    """A note where cross-entropy on the scores leaves many images that margin or DLR break; 5 points are usual."""
    n = int(evaluation.clean.robust.sum())
    groups = _group(evaluation, _loss_of)
    entropy = groups.pop("cross_entropy", [])
    others = [name for loss, names in groups.items() if loss is not None for name in names]
    hidden = evaluation.survivors(entropy) & ~evaluation.survivors(others)
    count = int(hidden.sum())
    evidence = {"images": n, "cross_entropy": entropy, "others": others, "hidden_from_cross_entropy": count}
    if entropy and others and exceeds(count, n, TOLERANCE):
        claim = (
            f"{percent(count, n)} withstand cross-entropy, but not the margin or DLR loss on the same scores."
        )
        advice = "A claim measured with cross-entropy is too high by this share."
        return note(claim, evidence, advice)
    return ok("The choice of the loss makes no significant difference.", evidence)


def _group(evaluation: Evaluation, key: Any) -> dict[Any, list[str]]:
    groups: dict[Any, list[str]] = {}
    for name, outcomes in evaluation.outcomes.items():
        groups.setdefault(key(outcomes), []).append(name)
    return groups


def _settings(outcomes: Outcomes) -> dict[str, Any]:
    """Settings of the innermost attack, which queries the model; {} if there are none."""
    settings = outcomes.about.get("attack")
    while (
        isinstance(settings, dict) and "source" not in settings and isinstance(settings.get("attack"), dict)
    ):
        settings = settings["attack"]
    return settings if isinstance(settings, dict) else {}


def _view_of(outcomes: Outcomes) -> str:
    return _place(_settings(outcomes))


def _place(settings: dict[str, Any]) -> str:
    """The view of an attack with these settings: the name of a view or function, "scores" if none is given."""
    if "source" in settings:
        return "surrogate"
    if "views" in settings:
        return "several"
    on = settings.get("on", _SCORES)
    while isinstance(on, dict) and "view" in on:  # a wrapped view: the inner one counts
        on = on["view"]
    name = on.get("name", "own") if isinstance(on, dict) else on
    return _SCORES if name in _ON_SCORES else str(name)


def _loss_of(outcomes: Outcomes) -> str | None:
    """The loss of a gradient attack on the scores, or the name of the view if that has its own; None for others."""
    settings = _settings(outcomes)
    on, loss = settings.get("on", _SCORES), settings.get("loss")
    if loss is None or _view_of(outcomes) != _SCORES or not (outcomes.backwards != 0).any():
        return None
    if (
        isinstance(on, dict) and "view" in on
    ):  # a wrapped view, such as straight-through: more than the loss differs
        return None
    return str(on["name"] if isinstance(on, dict) else loss)


#: By name: the function that makes the finding, and the source of the question.
_READINGS: dict[str, tuple[Callable[[Evaluation], Finding], str]] = {
    "attacks": (_broken_by, "per-image outcomes of the suite"),
    "black_box_suite": (_black_box, "Athalye et al. 2018; Croce & Hein 2020, AutoAttack: flags"),
    "views": (
        _views,
        "Tramer et al. 2020, On adaptive attacks; Zhang et al. 2020 on error-correcting output codes",
    ),
    "losses": (_losses, "Carlini & Wagner 2017; Croce & Hein 2020 on the scale of scores"),
}
