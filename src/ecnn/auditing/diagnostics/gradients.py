"""Whether the gradient that attacks follow exists, is a number, and raises the loss."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ecnn.attacks.base import Target
from ecnn.attacks.norms import NORMS
from ecnn.attacks.randomness import Draws
from ecnn.attacks.views import SCORES, Aim, Averaged
from ecnn.auditing.diagnostics.probes import DIFFERENCE, Probe, diagnostic, percent, share, unusable
from ecnn.auditing.diagnostics.statistics import DOMINATED_TOLERANCE, TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm, alarm_if, note, ok

#: No honest network has a useless gradient on more than this share of images; dead ReLUs cause one only rarely.
_DEAD = 0.01
#: Float32 rounds a well-conditioned gradient by about 1e-5. A gradient whose cosine with the one computed in float64 is
#: below this consists of rounding errors.
_AGREEMENT = 0.5
#: Probabilities in float32 sum to 1 up to this.
_SUM_TOLERANCE = 1e-5
_RANDOM_STEPS = 4
#: Share of images on which a step along the gradient may gain no more than the best of the random steps. With a useless
#: gradient each of the five steps is as likely to be the best, so 4 of 5 images would fail. With a useful gradient in d
#: pixels its step gains about sqrt(2 d / pi) times as much as a random one, unless the loss bends within a quarter of
#: the radius: one image in ten is generous.
_SPOILED = 0.1
_NOISES = 4
#: Noise ten times smaller changes a smooth loss ten times less, but a jagged or random one as much as before; sqrt(10)
#: lies half-way between on the logarithmic scale.
_ROUGH = math.sqrt(10)
#: A change below this share of the largest score may be float32 rounding.
_VISIBLE = 1e-4

_ATHALYE = "Athalye, Carlini & Wagner 2018, Obfuscated gradients give a false sense of security"
_CROCE = "Croce & Hein 2020, AutoAttack: flags"
_PINTOR = "Pintor et al. 2022, Indicators of attack failure"


@diagnostic("finite_scores", "Carlini et al. 2019, On evaluating adversarial robustness")
def check_finite_scores(probe: Probe) -> Finding:
    """Alarm where a score is NaN, at the images or at random points of their balls; a note where one is infinite.

    An image with a NaN score has no answer and counts as misclassified.
    """
    draws = Draws.of(probe.seed, probe.rows).fold(47)
    noisy = NORMS[probe.norm].random(probe.images, probe.eps, draws)
    points = {"clean": probe.images, "noisy": noisy}
    counts: dict[str, Any] = {"images": len(probe.images)}
    for name, images in points.items():
        scores = torch.cat([probe.target.narrow(part).scores(images[part]) for part in probe.groups()])
        counts[f"nan_{name}"] = int(scores.isnan().any(dim=1).sum())
        counts[f"infinite_{name}"] = int(scores.isinf().any(dim=1).sum())
    nan, infinite = (sum(counts[f"{kind}_{name}"] for name in points) for kind in ("nan", "infinite"))
    if nan:
        claim = f"The model gives scores that are not numbers, for {nan} of {2 * len(probe.images)} inputs."
        return alarm(claim, counts, "Find the operation that overflows or divides by zero.", kind="nan")
    if infinite:
        claim = f"The model gives infinite scores, for {infinite} of {2 * len(probe.images)} inputs."
        advice = "Losses of infinite scores have no gradient: attack the values from which the scores are computed."
        return note(claim, counts, advice, kind="infinite")
    return ok("All scores are finite numbers.", counts)


@diagnostic("differentiable", f"{_ATHALYE}; {_PINTOR}: unavailable gradients")
def check_differentiable(probe: Probe) -> Finding:
    """Alarm where no gradient reaches the pixels, for instance because a layer detaches or has no derivative."""
    trouble = probe.gradient_error
    evidence = {"reaches_pixels": trouble is None, "trouble": trouble}
    if trouble is not None:
        return alarm(
            "No gradient reaches the pixels: gradient attacks cannot have attacked this model.",
            evidence,
            "Replace the layer without a derivative by a smooth one in the backward pass (BPDA), or attack without "
            "gradients.",
        )
    return ok("The scores have a gradient with respect to the pixels.", evidence)


@diagnostic("zero_gradients", f"{_ATHALYE}; {_CROCE}; {_PINTOR}: unavailable gradients")
def check_zero_gradients(probe: Probe) -> Finding:
    """Alarm where PGD leaves images because their gradient is zero, denormal or made of rounding errors.

    The gradient is tested at the image and along PGD. With the margin loss, images with such a gradient that PGD leaves
    raise the alarm. The gradient of cross-entropy vanishes with confidence in honest networks too: there the alarm also
    needs that PGD with the margin breaks the images.
    """
    evidence: dict[str, Any] = {"images": probe.num_right}
    margin_bad, evidence["margin"] = _look_at_gradients(probe, "margin")
    entropy_bad, evidence["cross_entropy"] = _look_at_gradients(probe, "cross_entropy")
    margin_bad |= probe.margin_walk.blind >= 0.5
    entropy_bad |= probe.cross_entropy_walk.blind >= 0.5
    n = probe.num_right
    stuck = int((margin_bad & probe.standing).sum())
    hidden = int(
        (entropy_bad & probe.right & ~probe.cross_entropy_walk.broken & probe.margin_walk.broken).sum()
    )
    useless = int(((margin_bad | entropy_bad) & probe.right).sum())
    evidence |= {"standing_without_gradient": stuck, "hidden_from_cross_entropy": hidden}
    if exceeds(stuck, n, _DEAD):
        claim = f"{percent(stuck, n)} withstand PGD without a usable gradient: PGD never attacked them."
        advice = (
            "Attack the values before the layer that saturates or quantises, or attack without gradients."
        )
        return alarm(claim, evidence, advice, kind="standing")
    if exceeds(hidden, n, DOMINATED_TOLERANCE):
        claim = (
            f"{percent(hidden, n)} withstand PGD with cross-entropy only because its gradient vanishes in float32: PGD "
            "with the margin loss breaks them."
        )
        advice = "Use a loss that does not depend on the scale of the scores: margin or DLR."
        return alarm(claim, {**evidence, "answered": True}, advice, kind="hidden")
    if useless:
        claim = f"A gradient is zero, denormal or made of rounding errors for {percent(useless, n)}; PGD works anyway."
        return note(claim, evidence, "Prefer the margin or the DLR loss to cross-entropy.", kind="harmless")
    return ok("Gradients are usable in float32.", evidence)


def _look_at_gradients(
    probe: Probe, loss: Literal["margin", "cross_entropy"]
) -> tuple[Tensor, dict[str, Any]]:
    """(image,) whether the gradient at a right image is useless, and the share of each cause for the evidence."""
    gradients = probe.gradients(loss)
    zero = (gradients == 0).all(dim=1).cpu() & probe.right
    useless = unusable(gradients).cpu() & probe.right
    figures = {
        "zero": share(zero, probe.right),
        "denormal": share(useless & ~zero, probe.right),
        "zero_in_float64": None,
        "agreement_with_float64": None,
    }
    comparable = gradients.dtype == torch.float32 and probe.gradient_error is None and not probe.is_random
    if comparable and probe.double_model is not None:
        exact = probe.gradients(loss, double=True)
        agreement = _cosine(gradients.double(), exact).cpu()
        known = probe.right & ~unusable(exact).cpu()
        figures["zero_in_float64"] = share((exact == 0).all(dim=1).cpu() & probe.right, probe.right)
        figures["agreement_with_float64"] = float(agreement[known].mean()) if bool(known.any()) else None
        useless = useless | (known & ~(agreement >= _AGREEMENT))
    return useless, figures


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """(image,) cosine between gradients (image, pixel); they are rescaled first, so that tiny ones do not underflow."""
    one, other = (rows / rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-300) for rows in (one, other))
    return torch.nn.functional.cosine_similarity(one, other, dim=1, eps=1e-300)


@diagnostic("gradient_direction", f"{_ATHALYE}: shattered and incorrect gradients")
def check_gradient_direction(probe: Probe) -> Finding:
    """Alarm where a step along the gradient raises the loss no more than the best of four random steps.

    Steps are a quarter of the radius long: short beside the ball, and long enough to cross the levels of a quantiser.
    Images without a usable gradient belong to `check_zero_gradients`, and images that PGD broke are left out.
    """
    gradients = probe.gradients("margin")
    usable = probe.standing & ~unusable(gradients).cpu()
    length, draws = probe.eps / 4, Draws.of(probe.seed, probe.rows).fold(31)
    before = _losses(probe, probe.images)
    moves = gradients.view_as(probe.images)
    gain = _losses(probe, _step(probe, moves, length)) - before
    noise = torch.stack(
        [
            _losses(probe, _step(probe, draws.fold(k).normal(*probe.images.shape[1:]), length)) - before
            for k in range(_RANDOM_STEPS)
        ]
    ).amax(dim=0)
    moved = usable & ~((gain == 0) & (noise == 0))
    lost = moved & ~(gain > noise)
    n = int(moved.sum())
    evidence = {
        "images": n,
        "worse_than_random": int(lost.sum()),
        "median_gain": float(gain[moved].median()) if n else None,
        "median_random_gain": float(noise[moved].median()) if n else None,
    }
    claim = (
        f"On {percent(int(lost.sum()), n)} that withstand PGD, a step along the gradient raises the loss no more than "
        "random steps do."
    )
    advice = "The gradient is not the true gradient of the scores: look for detached or noisy layers."
    fine = (
        "Steps along the gradient raise the loss of the images that withstand PGD, or no image withstands it."
    )
    return alarm_if(exceeds(int(lost.sum()), n, _SPOILED), claim, evidence, advice, otherwise=fine)


@diagnostic("unstable_loss", f"{_PINTOR}: unstable predictions")
def check_unstable_loss(probe: Probe) -> Finding:
    """Alarm where the loss is jagged: noise ten times smaller changes it by much more than a tenth.

    Departs: Pintor et al.'s indicator averages the relative change under noise of one radius, which also grows with the
        slope of the loss. The ratio over two radii tells roughness from slope. Theirs is in the evidence.
    """
    double = probe.double_model is not None
    radius, draws = (probe.eps or 0.01) / 10, Draws.of(probe.seed, probe.rows).fold(37)
    base = _losses(probe, probe.images, double=double)
    large, small = torch.zeros(2, len(base), dtype=torch.float64, device="cpu")
    for k in range(_NOISES):
        noise = draws.fold(k).normal(*probe.images.shape[1:])
        for scale, total in ((1.0, large), (0.1, small)):
            changed = _step(probe, noise, scale * radius)
            total += (_losses(probe, changed, double=double) - base).abs() / _NOISES
    least = 0.0 if double else _VISIBLE
    seen = probe.standing & (large > least * probe.scores.abs().amax(dim=1).double().cpu())
    rough = seen & ~(large > _ROUGH * small)
    n = int(seen.sum())
    relative = (large / base.abs().clamp_min(1e-300)).clamp(max=1)
    evidence = {
        "images": n,
        "rough": int(rough.sum()),
        "median_ratio": float((large / small.clamp_min(1e-300))[seen].median()) if n else None,
        "relative_change": float(relative[probe.right].mean()) if probe.num_right else None,
    }
    claim = (
        f"The loss is jagged around {percent(int(rough.sum()), n)} that withstand PGD: noise ten times smaller changes "
        "it by far more than a tenth as much."
    )
    advice = "Average gradients over noise (EOT), or remove what makes the loss jump."
    fine = "The loss is smooth around the images that withstand PGD, or no image withstands it."
    return alarm_if(exceeds(int(rough.sum()), n, TOLERANCE), claim, evidence, advice, otherwise=fine)


def _step(probe: Probe, moves: Tensor, length: float) -> Tensor:
    norm = NORMS[probe.norm]
    moves = norm.step(moves.to(probe.images.dtype), probe.images)
    return norm.project(probe.images + length * moves, probe.images, length)


def _losses(probe: Probe, points: Tensor, *, double: bool = False) -> Tensor:
    """(image,) margin loss at the points, on the CPU in float64."""
    parts = []
    for part in probe.groups():
        target, here = probe.target.narrow(part), points[part]
        if double:
            assert probe.double_model is not None
            target.count(1)
            target, here = Target(probe.double_model, len(part), points.device), here.double()
        parts.append(target.look(SCORES, here, Aim(probe.labels[part])).losses.double().cpu())
    return torch.cat(parts)


@diagnostic("randomness", f"{_ATHALYE}: expectation over transformation; {_CROCE}")
def check_randomness(probe: Probe) -> Finding:
    """Alarm where two passes differ and PGD on averaged gradients breaks images that plain PGD left; else a note.

    It is ok if the passes agree. The suite averages too, so the alarm counts as answered: it tells by how much a claim
    is too high that was measured without averaging.
    """
    probe = probe.raw  # the others average over passes, and their means agree
    difference, flipped = probe.two_passes
    evidence: dict[str, Any] = {"largest_difference": difference, "flipped_predictions": flipped}
    if not probe.is_random:
        return ok("Two passes over the same images, and over points near them, agree.", evidence)
    view = Averaged(view=SCORES, passes=probe.budget.eot)
    rows = torch.nonzero(probe.standing).squeeze(1).to(probe.rows.device)
    looks = [
        probe.target.narrow(part).look(view, probe.images[part], Aim(probe.labels[part])).losses
        for part in probe.groups(rows)
    ]
    rows = (
        rows[torch.cat(looks) < 0] if looks else rows
    )  # the others are wrong on average and were right by luck
    walk = probe.walk(lambda _: view, rows, steps=max(10, probe.budget.probe_steps // 4))
    gained, n = int(walk.broken.sum()), probe.num_right
    evidence |= {"broken_by_averaging": gained, "passes_averaged": probe.budget.eot, "images": n}
    apart = (
        f"differ by up to {difference:.2g} of the scores' spread"
        if difference > DIFFERENCE
        else "differ at some points"
    )
    claim = f"The model is random: two passes {apart}"
    advice = "Attack the average over the model's randomness (EOT), and repeat the measurement."
    if exceeds(gained, n, TOLERANCE):
        claim += f", and averaging gradients breaks {percent(gained, n)} that plain PGD left."
        return alarm(claim, {**evidence, "answered": True}, advice)
    return note(
        f"{claim}; averaging gradients breaks no significant number of further images.", evidence, advice
    )


@diagnostic("probabilities", _CROCE)
def check_probabilities(probe: Probe) -> Finding:
    """A note where the scores are probabilities, which saturate; `check_zero_gradients` tests whether that hurts."""
    scores = probe.scores
    sums = ((scores.sum(dim=1) - 1).abs() < _SUM_TOLERANCE).all()
    inside = (scores > -_SUM_TOLERANCE).all() & (scores < 1 + _SUM_TOLERANCE).all()
    certain = int((scores == 1).any(dim=1).sum())
    evidence = {"probabilities": bool(sums & inside), "images": len(scores), "certain_in_float32": certain}
    if not evidence["probabilities"]:
        return ok("The scores are not probabilities.", evidence)
    if bool(((scores == 0) | (scores == 1)).all()):
        claim = "The scores are hard answers: 1 for the predicted class, and 0 for all others."
        advice = "Attack the values by which the class is chosen: hard answers have no slope to follow."
        return note(claim, evidence, advice)
    claim = (
        f"The scores are probabilities; for {percent(certain, len(scores))} float32 rounds one of them to 1."
    )
    advice = "Attack the logits before the softmax: probabilities saturate, and cross-entropy applies a second softmax."
    return note(claim, evidence, advice)
