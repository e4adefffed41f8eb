"""Error-correcting output codes whose members share no weights, as a contrast to an ECNN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ecnn import model
from ecnn.codes import CodeMatrix
from ecnn.errors import InputError
from ecnn.kinds import options_of
from ecnn.model import ECNN


def independent_ecoc(code: CodeMatrix, in_channels: int = 3, *, branch: Any = "conv", **options: Any) -> ECNN:
    """One whole network per column of the code, side by side: ECOC as in Dietterich & Bakiri (1995).

    The joint loss is a mean over members and does not pass through the decoder. Without shared weights its gradient in
    a member's weights is that of the member's own loss, divided by their number: all are trained as if alone.

    Args:
        branch: "conv" is the branch of the shared network, so that only sharing differs: 30 x 206,993 = 6,209,790
            parameters for the 10x30 code. "residual" is the paper's unshared network, 8,194,590 parameters.
        options: of `ECNN`.

    Departs: tab:share compares a shared network with an unshared one that has another branch; "conv" compares equal
        branches.
    """
    for name in ("share_trunk", "share_head"):
        if options.pop(name, False):
            raise InputError(f"members of an independent ECOC share nothing: leave {name} out, or use ECNN.")
    return ECNN(code, in_channels, branch=branch, share_trunk=False, share_head=False, **options)


KIND = replace(
    model.KIND,
    name="independent_ecoc",
    model=independent_ecoc,
    more_options=tuple(name for name in options_of(ECNN) if name != "branch"),
)
