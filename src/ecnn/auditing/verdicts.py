"""The verdict of an audit and the reason for it, from the audited accuracy, the claim and the alarms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ecnn.auditing.report import Verdict
from ecnn.evaluation.intervals import Interval, wilson_interval

#: A claim this little above the audited accuracy is rounding, not a false claim.
SLACK = 0.01
#: An audited accuracy this little below a claim supports it.
SUPPORT = 0.02
#: A claim is believed only if the images rule out, at 95 %, that the true accuracy lies this far below it.
RESOLUTION = 0.05
#: The same if the audited accuracy supports the claim: then fewer images are enough.
SUPPORTED_RESOLUTION = 0.1


def judge(
    accuracy: float,
    images: int,
    alarms: Sequence[str],
    *,
    claim: float | None = None,
    min_accuracy: float | None = None,
    answered: Sequence[str] = (),
    certified: float = 0.0,
) -> tuple[Verdict, str]:
    """The verdict on what an audit found, and a sentence that gives the reason.

    Args:
        accuracy, images: the audited accuracy, and on how many images.
        alarms: names of the open alarms, by which attacks may be fooled. They do not count if the audited accuracy is
            0, which cannot be too high, or if no more than `SLACK` is claimed or asked for.
        claim, min_accuracy: as `audit` takes them.
        answered: names of alarms that are answered, because the attacks made for them have converged.
        certified: share of the images that is proven robust; a proof counts more than an alarm.
    """
    low, high = interval_of(accuracy, images)
    found = f"the audit finds {_percent(accuracy)} (95 %: {_percent(low)} to {_percent(high)})"
    said = found[0].upper() + found[1:] if claim is None else f"The claim is {_percent(claim)}, and {found}"
    if claim is not None and claim - accuracy > SLACK and claim > high:
        return "not believable", f"{said}."
    if min_accuracy is not None and accuracy < min_accuracy:
        return "below minimum", f"{said}; the minimum asked for is {_percent(min_accuracy)}."
    asked = max((share for share in (claim, min_accuracy) if share is not None), default=None)
    is_proven = asked is not None and asked <= certified + 1e-9
    if alarms and accuracy > 0 and not is_proven and (asked is None or asked > SLACK):
        return "inconclusive", (
            f"{said}; but there are signs that attacks fail for another reason than robustness "
            f"({', '.join(alarms)}), so the true accuracy may be lower."
        )
    if asked is not None and not _rules_out_less(asked, accuracy, images):
        return "inconclusive", (
            f"{said}: too few images to tell whether the accuracy is {_percent(asked)} "
            f"or {100 * _resolution(asked, accuracy):.0f} points less. "
            f"{_images_to_tell(asked, accuracy, more_than=images):,} images would do if they give the same accuracy."
        )
    why = "no sign was found that the attacks were fooled"
    if alarms and is_proven:
        why = f"{_percent(certified)} of the images are proven robust"
    elif answered:
        why = f"the attacks that answer the alarms ({', '.join(answered)}) have converged"
    return "trustworthy" if claim is None else "believable", f"{said}, and {why}."


def _images_to_tell(asked: float, accuracy: float, *, more_than: int) -> int:
    """The least number of images that settles the claimed or asked accuracy, if their audited accuracy is the same.

    Args:
        more_than: a number of images that has turned out too small.
    """
    for images in itertools.count(more_than + 1):
        is_refuted = asked - accuracy > SLACK and asked > interval_of(accuracy, images)[1]
        if is_refuted or _rules_out_less(asked, accuracy, images):
            return images
    raise AssertionError("the interval shrinks to its share")


def _rules_out_less(asked: float, accuracy: float, images: int) -> bool:
    """Whether this accuracy on so many images rules out, at 95 %, a true accuracy far below the asked one."""
    low, _ = wilson_interval(round(accuracy * images), images, confidence=0.9)  # 5 % on either side
    return low >= asked - _resolution(asked, accuracy)


def _resolution(asked: float, accuracy: float) -> float:
    return SUPPORTED_RESOLUTION if asked - accuracy < SUPPORT + 1e-9 else RESOLUTION


def interval_of(accuracy: float, images: int) -> Interval:
    """Wilson's 95 % interval of this accuracy on so many images; fractional counts of a random model are rounded."""
    return wilson_interval(round(accuracy * images), images)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
