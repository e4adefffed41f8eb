"""What an audit says: findings, each a reason to believe or to doubt."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ecnn.errors import InputError

Level = Literal["ok", "note", "alarm"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was checked.

    Attributes:
        name: of the check, a word that stays the same from version to version.
        level: "ok" when nothing speaks against the model's number; "note" for something a reader should know that is
            no reason to disbelieve it; "alarm" for a sign that attacks fail for another reason than robustness.
        claim: one sentence for a person: what was found.
        evidence: the figures behind it, plain JSON values.
        advice: what to do about it; empty when nothing is to be done.
        source: where the check comes from.
    """

    name: str
    level: Level
    claim: str
    evidence: dict[str, Any]
    advice: str
    source: str

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise InputError(f"level must be one of {', '.join(get_args(Level))}, not {self.level!r}.")

    @property
    def is_open(self) -> bool:
        """An alarm that no attack of ours has answered.

        Where another attack has broken the images in question (evidence "answered"), the alarm explains why a weaker
        evaluation reports too much, and is no reason to doubt the audited accuracy.
        """
        return self.level == "alarm" and not self.evidence.get("answered", False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)
