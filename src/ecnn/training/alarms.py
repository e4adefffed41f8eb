"""Alarms about a training that goes wrong: sentences that say what to do."""

from __future__ import annotations

from typing import Any

from ecnn.recipes import Recipe

_FIRST_EPOCHS = 5  # within these a network that learns at all exceeds chance
_FEW_STEPS = 20


def few_steps_alarm(steps_per_epoch: int, settings: Recipe) -> str:
    """An alarm if the whole training has fewer than 20 steps, which is hardly intended; else an empty text."""
    steps = steps_per_epoch * settings.epochs
    if steps >= _FEW_STEPS:
        return ""
    return (
        f"training is over after {steps} optimizer steps (epochs: {settings.epochs}, batches of {settings.batch_size} "
        f"in each: {steps_per_epoch}), too few to learn much: use a smaller batch_size or more epochs."
    )


def standstill_alarm(epochs: list[dict[str, Any]], share: float) -> str:
    """An alarm after the fifth epoch if the network has learned nothing so far; else an empty text.

    Args:
        epochs: the records so far.
        share: the best validation accuracy of a classifier that gives all images the same answer.
    """
    first = [record["val_accuracy"] for record in epochs[:_FIRST_EPOCHS]]
    if len(epochs) != _FIRST_EPOCHS or max(first) > 1.1 * share:
        return ""
    return (
        f"nothing is learned: after {_FIRST_EPOCHS} epochs the network does no better than one answer for all images "
        f"({share:.1%} right); another seed, a smaller lr or batch norm may help."
    )


def overfitting_alarms(epochs: list[dict[str, Any]]) -> list[str]:
    """Alarms if accuracy under attack has collapsed in the last epoch, or was below its best for the last five."""
    robust = [record.get("val_robust_accuracy") for record in epochs]
    known = [value for value in robust if value is not None]
    alarms = []
    if len(known) >= 2 and known[-2] > 0.1 and known[-1] < 0.5 * known[-2]:
        alarms.append(
            f"catastrophic overfitting: accuracy under attack fell from {known[-2]:.1%} to {known[-1]:.1%} in epoch "
            f"{epochs[-1]['epoch']}; use more attack steps or a smaller step_size."
        )
    recent = known[-5:]
    if len(known) > 10 and max(recent) < max(known) - 0.03 and epochs[-1]["loss"] < epochs[-6]["loss"]:
        alarms.append(
            "robust overfitting: accuracy under attack has been 3 points below its best for 5 epochs while the "
            "training loss fell; the best epoch is kept, and fewer epochs or more augmentation would do."
        )
    return alarms
