"""Findings of an audit: each is a reason to believe or to doubt a model's number."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ecnn.checks import check_choice

Level = Literal["ok", "note", "alarm"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of the check; stays the same from version to version.
        kind: which of its possible results the check found, just as stable; the name where there is only one.
        level: "ok" when nothing speaks against the model's number; "note" for something a reader should know that is
            no reason to disbelieve it; "alarm" for a sign that attacks fail for another reason than robustness.
        claim: one sentence for a person: what was found.
        evidence: the figures behind it, plain JSON values.
        advice: what to do about it; empty when nothing is to be done.
        source: where the check comes from, such as a paper.
    """

    name: str = ""
    kind: str = ""
    level: Level
    claim: str
    evidence: dict[str, Any]
    advice: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        check_choice("level", self.level, get_args(Level))
        object.__setattr__(self, "kind", self.kind or self.name)

    @property
    def is_open(self) -> bool:
        """Whether it is an alarm that the audit has not answered.

        An answered alarm (evidence "answered") explains why a weaker evaluation reports too much. It is no reason to
        doubt the audited accuracy: stronger attacks broke the images in question or have converged, or the model was
        asked in a way that avoids the problem.
        """
        return self.level == "alarm" and not self.evidence.get("answered", False)

    @property
    def figures(self) -> str:
        """The evidence in words: "images 40, cross entropy (zero 0.5, denormal 0)"; empty if there is none."""
        return _in_words(self.evidence)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


#: Longest list that is shown in full; of a longer one, such as a curve, only the first and last value are shown.
_SHOWN = 6


def _in_words(value: Any) -> str:
    """A JSON value as text for people: names without underscores, fractions with four digits, no code brackets."""
    if isinstance(value, dict):
        return ", ".join(_named(str(name).replace("_", " "), entry) for name, entry in value.items())
    if isinstance(value, list | tuple):
        mark = "; " if any(isinstance(entry, dict | list | tuple) for entry in value) else ", "
        if len(value) > _SHOWN:
            return f"{_in_words(value[0])} to {_in_words(value[-1])} ({len(value)} values)"
        return mark.join(map(_in_words, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value)


def _named(name: str, value: Any) -> str:
    words = _in_words(value)
    return (
        f"{name} ({words})"
        if isinstance(value, dict | list | tuple) and value
        else f"{name} {words or 'none'}"
    )


def ok(claim: str, evidence: dict[str, Any]) -> Finding:
    """A finding that nothing speaks against the model's number; the caller of the check adds its name and source."""
    return Finding(level="ok", claim=claim, evidence=evidence)


def note(claim: str, evidence: dict[str, Any], advice: str = "", *, kind: str = "") -> Finding:
    """A finding that a reader should know, but that is no reason to disbelieve the number."""
    return Finding(level="note", kind=kind, claim=claim, evidence=evidence, advice=advice)


def alarm(claim: str, evidence: dict[str, Any], advice: str, *, kind: str = "") -> Finding:
    """A finding that attacks seem to fail for another reason than robustness."""
    return Finding(level="alarm", kind=kind, claim=claim, evidence=evidence, advice=advice)


def alarm_if(is_wrong: bool, claim: str, evidence: dict[str, Any], advice: str, *, otherwise: str) -> Finding:
    """An alarm with this claim and advice if `is_wrong`; otherwise `ok` with the sentence `otherwise`."""
    return alarm(claim, evidence, advice) if is_wrong else ok(otherwise, evidence)
