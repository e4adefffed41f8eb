"""An ECNN in the hands of other attack libraries: the blocks of docs/interop.md, each where its library is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_docs import ROOT, blocks_of, run_python

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("one_thread")]
PAGE = ROOT / "docs" / "interop.md"
NEEDS = "skip, needs "


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page has defined before its first library."""
    torch.manual_seed(0)
    known: dict[str, Any] = {}
    for block in blocks_of(PAGE):
        if block.note.startswith(NEEDS):
            return known
        longer = replace(block, note="shrink fit.epochs=12" if "fit(" in block.text else "")
        run_python(longer, known, f"{PAGE.name}:{block.line}")
    raise AssertionError("no block needs a library")


def test_every_library_has_a_block() -> None:
    needed = [block.note.removeprefix(NEEDS) for block in blocks_of(PAGE) if block.note.startswith(NEEDS)]
    assert needed == ["foolbox", "torchattacks", "art", "pyautoattack"]


@pytest.mark.parametrize("library", ["foolbox", "torchattacks", "art", "pyautoattack"])
def test_a_library_attacks_our_model(library: str, names: dict[str, Any]) -> None:
    pytest.importorskip(library)
    block = next(block for block in blocks_of(PAGE) if block.note == NEEDS + library)
    own = {**names, "left": dict(names["left"])}
    run_python(block, own, f"{PAGE.name}:{block.line}")
    change = (own["adversarial"] - names["images"]).abs()
    assert float(change.max()) <= names["eps"] + 1e-6
    assert float(own["adversarial"].min()) >= 0
    assert float(own["adversarial"].max()) <= 1
    assert abs(own["left"][library] - names["left"]["ecnn"]) <= 5
    assert own["left"][library] < names["left"]["clean"] - 10
