"""From an audited accuracy and what was doubted to a verdict, and a sentence that says why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ecnn.auditing.report import Verdict
from ecnn.evaluation.intervals import Interval, wilson_interval

#: A claim this little above the audited accuracy is rounding, not a false claim.
SLACK = 0.01
#: An audited accuracy this little below a claim supports it.
SUPPORT = 0.02
#: That the truth lies this far below a claim must be ruled out before the claim is believed,
RESOLUTION = 0.05
#: or, if the audited accuracy supports it, this far: images then only have to be enough to be worth asking.
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
    """The verdict on what an audit found, and a sentence that says why.

    Args:
        accuracy, images: what the audit found, on how many images.
        alarms: names of the findings that say attacks are fooled. Where nothing stands they have nothing to hide, and
            a claim of nothing cannot be too high.
        claim, min_accuracy: as `audit` takes them.
        answered: names of findings that said so, until the attacks made for them had converged.
        certified: share of the images that is proven robust; no sign outweighs a proof.
    """
    low, high = interval_of(accuracy, images)
    found = f"the audit finds {_percent(accuracy)} (95 %: {_percent(low)} to {_percent(high)})"
    said = found[0].upper() + found[1:] if claim is None else f"The claim is {_percent(claim)}, and {found}"
    if claim is not None and claim - accuracy > SLACK and claim > high:
        return "not believable", f"{said}."
    if min_accuracy is not None and accuracy < min_accuracy:
        return "below minimum", f"{said}; the least that is asked for is {_percent(min_accuracy)}."
    asked = max((share for share in (claim, min_accuracy) if share is not None), default=None)
    is_proven = asked is not None and asked <= certified + 1e-9
    if alarms and accuracy > 0 and not is_proven and (asked is None or asked > SLACK):
        return "inconclusive", (
            f"{said}; but there are signs that attacks fail for another reason than robustness "
            f"({', '.join(alarms)}), so that the truth may be lower."
        )
    if asked is not None and not _rules_out_less(asked, accuracy, images):
        return "inconclusive", (
            f"{said}: too few images to tell whether it is {_percent(asked)} "
            f"or {100 * _resolution(asked, accuracy):.0f} points less. "
            f"{_images_to_tell(asked, accuracy, more_than=images):,} images would do if they go the same way."
        )
    why = "nothing says that the attacks were fooled"
    if alarms and is_proven:
        why = f"{_percent(certified)} are proven"
    elif answered:
        why = f"the attacks made for what was doubted ({', '.join(answered)}) have converged"
    return "trustworthy" if claim is None else "believable", f"{said}, and {why}."


def _images_to_tell(asked: float, accuracy: float, *, more_than: int) -> int:
    """How many images with that share of robust ones settle whether a claimed, or asked, accuracy is true.

    Args:
        more_than: images that have not.
    """
    for images in itertools.count(more_than + 1):
        is_refuted = asked - accuracy > SLACK and asked > interval_of(accuracy, images)[1]
        if is_refuted or _rules_out_less(asked, accuracy, images):
            return images
    raise AssertionError("the interval shrinks to its share")


def _rules_out_less(asked: float, accuracy: float, images: int) -> bool:
    """Whether that share of so many images says, at 95 %, that the truth is not far below what is asked."""
    low, _ = wilson_interval(round(accuracy * images), images, confidence=0.9)  # 5 % on either side
    return low >= asked - _resolution(asked, accuracy)


def _resolution(asked: float, accuracy: float) -> float:
    return SUPPORTED_RESOLUTION if asked - accuracy < SUPPORT + 1e-9 else RESOLUTION


def interval_of(accuracy: float, images: int) -> Interval:
    """For that share of so many images. Of a random model parts of images are added up, with no more spread."""
    return wilson_interval(round(accuracy * images), images)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
