"""Checks of the loss along an attack: whether it rises, whether it converges, and whether a closed margin is real."""

from __future__ import annotations

import torch
from torch import Tensor

from ecnn.attacks.views import member_margins, members_of
from ecnn.auditing.diagnostics.probes import Probe, diagnostic, percent
from ecnn.auditing.diagnostics.statistics import TOLERANCE, exceeds
from ecnn.auditing.findings import Finding, alarm, alarm_if, note, ok

#: As in Pintor et al.: an attack is incomplete if its best loss, rescaled to [0, 1] over the walk, still rises by more
#: than this within the last steps.
_STILL_RISING = 0.05
_LAST_STEPS = 10
#: More unfinished attacks than this share of images give a note; `check_steps` finds out whether that does harm.
_UNFINISHED = 0.1
#: A margin below a tenth of its start has nearly closed; one above half of its start is kept.
_CLOSED, _KEPT = 0.1, 0.5
#: Share of images with a nearly closed margin. If final margins were uniform between 0 and their start, it would be a
#: tenth; a quarter leaves room.
_NEARLY_CLOSED = 0.25
_CURVE_POINTS = 51
#: A hundredth of the smallest radius in use, 0.5/255; at smaller radii the rise of a loss is lost in float32 rounding.
_LEAST_EPS = 2e-5

_PINTOR = "Pintor et al. 2022, Indicators of attack failure"


@diagnostic("loss_path", f"{_PINTOR}; Carlini et al. 2019")
def check_loss_path(probe: Probe) -> Finding:
    """Alarm where PGD fails to raise the loss of images that it leaves: never above its start, or lower at the end.

    With a constant step PGD may oscillate near the maximum, so the loss need not rise at every step. The evidence holds
    the quartiles of the loss along the steps.
    """
    walk, standing, n = probe.margin_walk, probe.standing, probe.num_right
    losses = walk.losses[:, standing]
    stuck = (
        ~(losses.amax(dim=0) > losses[0]) | ~(losses[-1] >= losses[0]) if len(losses) else losses.new_zeros(0)
    )
    count = int(stuck.sum())
    evidence = {
        "images": n,
        "standing": int(standing.sum()),
        "no_higher_at_the_end": count,
        "falling_steps": _mean(losses.diff(dim=0) < 0),
        "monotone": _mean((losses.diff(dim=0) >= 0).all(dim=0)),
        "curve": _curve(walk.losses[:, probe.right]),
        "curve_standing": _curve(losses),
    }
    if probe.eps < _LEAST_EPS:
        return ok(
            f"A ball of radius {probe.eps:.3g} is too small for float32 to show whether the loss rises.",
            evidence,
        )
    claim = f"The loss of {percent(count, n)} that withstand PGD is no higher after the attack than before."
    advice = "The attack does not raise the loss: its gradient is missing, wrong or too noisy."
    fine = "The loss rises during the attack."
    return alarm_if(exceeds(count, n, TOLERANCE), claim, evidence, advice, otherwise=fine)


@diagnostic("incomplete_optimization", f"{_PINTOR}: incomplete optimisation")
def check_incomplete_optimization(probe: Probe) -> Finding:
    """A note where the best loss still rises in the last steps; `check_steps` tries whether more steps break more."""
    losses = probe.margin_walk.losses[:, probe.standing]
    best = losses.cummax(dim=0).values if len(losses) else losses
    low, high = losses.amin(dim=0), losses.amax(dim=0)
    rescaled = (best - low) / (high - low).clamp_min(1e-300)
    last = min(_LAST_STEPS, len(losses) // 3)  # ten of fewer than thirty steps would hold the main rise
    rising = (rescaled[-1] - rescaled[-1 - last]) > _STILL_RISING
    count, n = int(rising.sum()), int(probe.standing.sum())
    evidence = {"standing": n, "still_rising": count, "last_steps": last}
    if exceeds(count, n, _UNFINISHED):
        claim = (
            f"PGD still raises the loss in its last {last} steps on {percent(count, n)} that withstand it."
        )
        return note(claim, evidence, "Attack with more steps.")
    return ok("The loss has stopped rising when PGD ends, or no image withstands PGD.", evidence)


@diagnostic("saturation", "measured on error-correcting models; Carlini & Wagner 2017 on distillation")
def check_saturation(probe: Probe) -> Finding:
    """Alarm where PGD closes the score margin by saturation alone, so that the image is no closer to an error.

    An attack that works closes the margin because members flip, or because another class catches up. An attack that
    drives a saturating decoder to its limit closes the margin too, but the members are as right, and as far from
    flipping, as before. Without members the check compares the margin divided by the spread of the scores: it does not
    change where all scores shrink together.
    """
    walk, standing = probe.margin_walk, probe.standing
    first, last = walk.margins[0, standing], walk.margins[-1, standing]
    closed = (last > 0) & (last < _CLOSED * first)
    has_members = hasattr(probe.model, "member_logits") and bool(standing.any())
    kept, figures = _members_kept(probe) if has_members else _spread_kept(probe)
    count, n = int((closed & kept).sum()), int(standing.sum())
    evidence = {
        "standing": n,
        "closed": int(closed.sum()),
        "satisfied": count,
        "margin_before": _median(first),
        "margin_after": _median(last),
        **figures,
    }
    if exceeds(count, n, _NEARLY_CLOSED):
        claim = (
            f"PGD closes the score margin of {percent(count, n)} that withstand it, but brings them no closer to an "
            "error."
        )
        if has_members:
            before, after = (100 * (figures[f"right_bits_{when}"] or 0) for when in ("before", "after"))
            claim += f" The share of right bits goes from {before:.2f} to {after:.2f} %."
        advice = "The attack only saturates the scores: attack the member logits or their differences."
        return alarm(claim, evidence, advice)
    return ok("Where PGD closes the score margin, it also brings the image closer to an error.", evidence)


def _spread_kept(probe: Probe) -> tuple[Tensor, dict[str, float | None]]:
    """(standing image,) whether margin / spread keeps more than half of its start, and figures for the evidence."""
    walk, standing = probe.margin_walk, probe.standing
    first, last = (walk.margins / walk.spreads.clamp_min(1e-300))[[0, -1]][:, standing]
    return last > _KEPT * first, {
        "relative_margin_before": _median(first),
        "relative_margin_after": _median(last),
    }


def _members_kept(probe: Probe) -> tuple[Tensor, dict[str, float | None]]:
    """(standing image,) whether few members flip and their mean margin keeps half; figures for the evidence."""
    rows = torch.nonzero(probe.standing).squeeze(1).to(probe.rows.device)
    bits, means = [], []
    for images in (probe.images, probe.margin_walk.last):
        parts = []
        for part in probe.groups(rows):
            with torch.no_grad():
                parts.append(member_margins(probe.model, images[part], probe.labels[part]).double().cpu())
            probe.target.narrow(part).count(1)
        margins = torch.cat(parts)
        bits.append((margins > 0).double().mean(dim=1))
        means.append(margins.mean(dim=1))
    with torch.no_grad():
        _, symbols = members_of(probe.model, probe.images[:1])
    held = bits[1] > bits[0] - _half_way(symbols)
    return held & (means[1] > _KEPT * means[0]), {
        "right_bits_before": float(bits[0].mean()),
        "right_bits_after": float(bits[1].mean()),
        "member_margin_before": _median(means[0]),
        "member_margin_after": _median(means[1]),
    }


def _half_way(symbols: Tensor) -> float:
    """Share of the members whose flips bring an image half of the way to the border between the nearest codewords.

    That border is reached when half of the members in which the two codewords differ have flipped.
    """
    distances = (symbols[:, None] != symbols[None]).sum(dim=2)
    others = distances[~torch.eye(len(symbols), dtype=torch.bool, device=symbols.device)]
    return float(others.min()) / 4 / symbols.shape[1] if len(others) else 0.0


def _curve(losses: Tensor) -> dict[str, list[float]]:
    """Quartiles over images of the losses (step, image), at most 51 evenly spaced steps, for a plot."""
    if not losses.shape[1]:
        return {"step": [], "lower": [], "median": [], "upper": []}
    steps = (
        torch.linspace(0, len(losses) - 1, min(_CURVE_POINTS, len(losses)), device=losses.device)
        .round()
        .long()
    )
    quartiles = (
        losses[steps].double().quantile(losses.new_tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=1)
    )
    return {
        "step": steps.tolist(),
        **{name: row.tolist() for name, row in zip(("lower", "median", "upper"), quartiles, strict=True)},
    }


def _mean(mask: Tensor) -> float | None:
    return float(mask.double().mean()) if mask.numel() else None


def _median(values: Tensor) -> float | None:
    return float(values.median()) if values.numel() else None
