"""The examples run, with few images and little training: what they say then means little, but they do not rot."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from toys import shorten_audits

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _short_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """They still break what rounds its pixels."""
    shorten_audits(monkeypatch, steps=15)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        (
            "design_a_code",
            {"steps": 20_000},
            r"designed 16, drawn \d+\n.*7 wrong .* \[0, 1, 2, 3, 4, 5, 6, 7, 8, 9\]",
        ),
        (
            "train_and_attack",
            {"epochs": 1, "limit": 4},
            r"clean .*\nscores .*\nmembers .*\nworst case .*\n4 images",
        ),
        ("attack_your_own_model", {"epochs": 2, "limit": 4}, r"clean .*\nbrighten .*\npgd .*\nworst case "),
        ("audit_a_claim", {"epochs": 3, "limit": 6}, r"claimed \d+%, audited 0%: not believable\n- "),
        ("custom_loss", {"epochs": 1, "limit": 4}, r"plain: \d+% clean, .*\nadversarial: \d+% clean, "),
    ],
)
def test_example(name: str, settings: dict[str, int], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main(**settings)
    printed = capsys.readouterr().out
    assert re.search(said, printed), printed
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 40
