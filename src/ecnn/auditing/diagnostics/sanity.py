"""What must hold between attacks that work: larger balls, more steps and more knowledge never help the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ecnn.attacks.blackbox import RandomNoise
from ecnn.attacks.gradient import PGD
from ecnn.attacks.images import at_once
from ecnn.attacks.norms import NORMS
from ecnn.attacks.square import Square
from ecnn.attacks.views import SCORES
from ecnn.auditing.diagnostics.probes import Probe, diagnostic, percent, share
from ecnn.auditing.diagnostics.statistics import DOMINATED_TOLERANCE, TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm, alarm_if, note, ok
from ecnn.objectives import predicted_classes

_RESTARTS = 2
_NOISES = 20

_CARLINI = "Carlini et al. 2019, On evaluating adversarial robustness"
_ATHALYE = "Athalye, Carlini & Wagner 2018, Obfuscated gradients give a false sense of security"
_PINTOR = "Pintor et al. 2022, Indicators of attack failure"
_NOTHING = "No image is classified correctly, so that there is nothing to attack."


def grey_radius(norm: str, images: Tensor) -> float:
    """The radius from which on every image's ball contains the grey image, all pixels 0.5."""
    return float(NORMS[norm].length(torch.full_like(images[:1], 0.5, dtype=torch.float64)))


@diagnostic("radius", f"{_CARLINI}; {_ATHALYE}")
def check_radius(probe: Probe) -> Finding:
    """Alarm where PGD at some radius leaves images that are known to be breakable at it.

    Two facts are certain. A point that breaks an image within one radius also lies within every larger one. The grey
    image lies within 0.5 of every image in Linf (0.5 sqrt(pixels) in L2, 0.5 pixels in L1), so all images are breakable
    there whose class is not that of the grey image. The check asks no more: accuracy may stay equal as the radius
    grows, and images of the grey image's class may be left.
    """
    if not probe.num_right:
        return note(_NOTHING, {"images": 0}, kind="nothing_to_attack")
    wide = grey_radius(probe.norm, probe.images)
    radii = [radius for radius in (probe.eps / 2, probe.eps, 2 * probe.eps) if 0 < radius < wide] + [wide]
    grey_image = torch.full_like(probe.images[:1], 0.5)
    grey = predicted_classes(probe.target.narrow(probe.rows[:1]).scores(grey_image))
    breakable, curve, worst = torch.zeros_like(probe.right), [], (0, 0.0)
    for radius in radii:
        if radius == wide:
            breakable = breakable | (probe.right & (probe.labels != grey).cpu())
        broken = (
            probe.right & probe.margin_walk.broken
            if radius == probe.eps
            else probe.broken_by(probe.pgd(radius), probe.right)
        )
        left = int((breakable & ~broken).sum())
        curve.append(
            {
                "eps": radius,
                "accuracy": share(probe.right & ~broken, len(probe.images)),
                "breakable": int(breakable.sum()),
                "breakable_left": left,
            }
        )
        worst = max(worst, (left, radius))
        breakable = breakable | broken
    evidence = {
        "images": probe.num_right,
        "probed": len(probe.images),
        "curve": curve,
        "grey_class": int(grey),
    }
    left, radius = worst
    claim = f"At radius {radius:.3g} PGD fails on {percent(left, probe.num_right)} that can certainly be broken there."
    advice = "The attack is at fault, not the radius: look for what hides the gradient."
    fine = f"Accuracy falls as it must when the radius grows, up to {wide:.3g}."
    return alarm_if(exceeds(left, probe.num_right, TOLERANCE), claim, evidence, advice, otherwise=fine)


@diagnostic("unbounded", f"{_CARLINI}; {_PINTOR}: unconstrained attack failure")
def check_unbounded(probe: Probe) -> Finding:
    """Alarm where PGD leaves images although its ball holds all images.

    Every image lies within radius 1 of every other in Linf (sqrt(pixels) in L2, pixels in L1), so each can be broken if
    the model predicts at least two classes. If it predicts only one on these images, the finding is a note.
    """
    if not probe.num_right:
        return note(_NOTHING, {"images": 0}, kind="nothing_to_attack")
    radius = 2 * grey_radius(probe.norm, probe.images)
    broken = probe.broken_by(probe.pgd(radius, start="image"), probe.right)
    left, n = int((probe.right & ~broken).sum()), probe.num_right
    classes = len(torch.unique(predicted_classes(probe.scores)))
    evidence = {"images": n, "left": left, "eps": radius, "classes_seen": classes}
    if classes < 2:
        claim = "The model gives all images the same class: whether it ever predicts another one is unknown."
        return note(claim, evidence, kind="one_class")
    claim = (
        f"An unbounded attack fails on {percent(left, n)}, although it may turn each into any other image."
    )
    advice = "Attacks fail on this model for another reason than robustness: find that reason first."
    fine = f"An unbounded attack breaks {percent(n - left, n)}."
    return alarm_if(exceeds(left, n, TOLERANCE), claim, evidence, advice, otherwise=fine)


@diagnostic("steps", _CARLINI)
def check_steps(probe: Probe) -> Finding:
    """Alarm where PGD with twice the steps breaks many more images; a note where only its own second half did.

    Twice the steps are tried only if the second half of the steps broke many images.
    """
    walk, n = probe.margin_walk, probe.num_right
    half = walk.wrong[: 1 + (len(walk.wrong) - 1) // 2].any(dim=0)
    late = int((walk.broken & ~half & probe.right).sum())
    evidence: dict[str, Any] = {"images": n, "steps": probe.budget.probe_steps, "broken_in_second_half": late}
    if not exceeds(late, n, TOLERANCE):
        return ok("PGD has converged in its steps.", evidence)
    doubled = probe.broken_by(probe.pgd(probe.eps, steps=2 * probe.budget.probe_steps), probe.standing)
    evidence["broken_by_twice_the_steps"] = more = int(doubled.sum())
    advice = "Attack with more steps, until doubling their number changes nothing."
    if probe.breaks_too_much(doubled, TOLERANCE):
        claim = f"PGD has not converged: twice the steps break another {percent(more, n)}."
        return alarm(claim, evidence, advice)
    claim = f"PGD broke {percent(late, n)} only in the second half of its steps."
    return note(claim, evidence, advice, kind="late")


@diagnostic("restarts", _CARLINI)
def check_restarts(probe: Probe) -> Finding:
    """Alarm where a few more random starts break many more images."""
    again = probe.broken_by(probe.pgd(probe.eps, restarts=_RESTARTS), probe.standing, seed=probe.seed + 1)
    claim = f"{_RESTARTS} more random starts break another {{}}."
    advice = (
        "Attack with more restarts, until they change nothing; if the model is random, average its gradients."
    )
    fine = "More random starts break no significant number of further images."
    facts = {"restarts": _RESTARTS, "broken_by_restarts": again}
    return _alarm_if_more_fall(probe, facts, claim, advice, fine, tolerance=TOLERANCE)


@diagnostic("one_step", f"{_ATHALYE}; {_CARLINI}")
def check_one_step(probe: Probe) -> Finding:
    """Alarm where a single step of full length breaks images that the iterated attack leaves."""
    single = PGD(norm=probe.norm, eps=probe.eps, steps=1, step_size=probe.eps, start="image")
    claim = f"A single step breaks {{}} that {probe.budget.probe_steps} steps do not break."
    advice = "The iterated attack gets stuck near the image: look for masked gradients."
    fine = "A single step breaks no significant number of further images."
    broken = probe.broken_by(single, probe.standing)
    facts = {"standing": int(probe.standing.sum()), "broken_by_one_step_only": broken}
    return _alarm_if_more_fall(probe, facts, claim, advice, fine)


@diagnostic("black_box", f"{_ATHALYE}; Croce & Hein 2020, AutoAttack: flags")
def check_black_box(probe: Probe) -> Finding:
    """Alarm where Square, which uses no gradient, breaks images that PGD with either loss leaves."""
    left, queries = probe.standing & ~probe.cross_entropy_walk.broken, probe.budget.queries
    square = Square(norm=probe.norm, eps=probe.eps, queries=queries, l2_moves="turns")
    facts = {"left": int(left.sum()), "queries": queries, "broken_by_square": probe.broken_by(square, left)}
    claim = "Square, which uses no gradients, breaks {} that gradient attacks leave."
    advice = "Gradients mislead here: attack with more queries, and find what masks them."
    fine = "A search without gradients breaks no significant number of further images."
    return _alarm_if_more_fall(probe, facts, claim, advice, fine)


@diagnostic("noise", _CARLINI)
def check_noise(probe: Probe) -> Finding:
    """Alarm where random noise breaks images that PGD with either loss leaves."""
    left = probe.standing & ~probe.cross_entropy_walk.broken
    kind: Any = "corners" if NORMS[probe.norm].is_box else "uniform"
    noise = RandomNoise(norm=probe.norm, eps=probe.eps, samples=_NOISES, kind=kind)
    claim = f"The best of {_NOISES} random points breaks {{}} that gradient attacks leave."
    advice = (
        "Gradients mislead here, or the model is random: attack without gradients, or average the scores."
    )
    fine = "Random noise breaks no significant number of further images."
    facts = {"left": int(left.sum()), "samples": _NOISES, "broken_by_noise": probe.broken_by(noise, left)}
    return _alarm_if_more_fall(probe, facts, claim, advice, fine)


def _alarm_if_more_fall(
    probe: Probe,
    facts: dict[str, Any],
    claim: str,
    advice: str,
    fine: str,
    tolerance: float = DOMINATED_TOLERANCE,
) -> Finding:
    """An alarm if an attack breaks too many of the images that were left, else an ok.

    Args:
        facts: evidence besides the number of images; the last value is the mask (image,) of those the attack broke.
        claim: contains {} where the number of broken images goes.
    """
    *_, (name, broken) = facts.items()
    gained, n = int(broken.sum()), probe.num_right
    evidence = {"images": n, **facts, name: gained}
    evidence |= {"stood": int(probe.stood.sum()), "broken_that_stood": int((broken & probe.stood).sum())}
    is_alarm = probe.breaks_too_much(broken, tolerance)
    return alarm_if(is_alarm, claim.format(percent(gained, n)), evidence, advice, otherwise=fine)


@diagnostic("labels", "Carlini et al. 2019; the ECNN authors' program attacks the model's own predictions")
def check_labels(probe: Probe) -> Finding:
    """A note where an attack on the model's own predictions, not on the labels, makes misclassified images right.

    This does not speak against the model: it tells by how much an accuracy measured with such an attack is too high.
    """
    own = predicted_classes(probe.scores)
    rows = torch.nonzero(~probe.right & (own >= 0).cpu()).squeeze(1).to(probe.rows.device)
    own = own[rows]
    walk = probe.walk(lambda _: SCORES, rows, labels=own)
    ends = [probe.target.narrow(rows[part]).scores(walk.last[part]) for part in _parts(len(rows))]
    now_right = int((predicted_classes(torch.cat(ends)) == probe.labels[rows]).sum()) if ends else 0
    n, after = len(probe.images), int((probe.right & ~probe.margin_walk.wrong[-1]).sum())
    evidence = {
        "images": n,
        "wrong_at_first": len(rows),
        "turned_right": now_right,
        "accuracy_true_labels": after / n if n else None,
        "accuracy_own_labels": (after + now_right) / n if n else None,
    }
    if exceeds(now_right, n, DOMINATED_TOLERANCE):
        claim = f"An attack on the model's own predictions turns {percent(now_right, n)} from wrong to right."
        return note(
            claim,
            evidence,
            "Attack the true labels, and count an image only if it was right before the attack.",
        )
    return ok(
        "It makes no difference here whether the true labels or the model's own predictions are attacked.",
        evidence,
    )


@diagnostic("last_iterate", f"{_PINTOR}: silent success")
def check_last_iterate(probe: Probe) -> Finding:
    """Alarm where PGD passes through misclassified points and ends at one that is right again.

    Also where it ends at right points on images that were misclassified before the attack.
    """
    walk, n = probe.margin_walk, probe.num_right
    silent = int((probe.right & walk.broken & ~walk.wrong[-1]).sum())
    mistaken = ~probe.right
    corrected = int((mistaken & ~walk.wrong[-1]).sum())
    evidence = {
        "images": n,
        "silent_successes": silent,
        "wrong_at_first": int(mistaken.sum()),
        "right_at_last": corrected,
        "accuracy_clean": share(probe.right, len(probe.right)),
        "accuracy_last_iterate": share(~walk.wrong[-1], len(probe.right)),
        "accuracy_best_iterate": share(probe.standing, len(probe.right)),
    }
    advice = 'Keep the best iterate of an attack, not the last one (keep="best").'
    if exceeds(silent, n, TOLERANCE):
        claim = f"PGD passes through misclassified points on {percent(silent, n)}, but ends at points that are right."
        return alarm(claim, {**evidence, "answered": True}, advice, kind="silent_success")
    if exceeds(corrected, int(mistaken.sum()), TOLERANCE):
        claim = f"PGD turns {corrected} of {int(mistaken.sum())} misclassified images into correctly classified ones."
        advice = (
            "The attack helps the model: its loss does not measure which answer is right. Use another loss."
        )
        return alarm(claim, evidence, advice, kind="corrected")
    return ok("The last iterate of PGD breaks about as many images as the best one.", evidence)


def _parts(n: int) -> tuple[Tensor, ...]:
    return torch.split(torch.arange(n, device="cpu"), at_once(128)) if n else ()
