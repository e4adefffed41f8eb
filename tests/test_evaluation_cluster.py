"""Batches as tasks of a Ray cluster: the outcomes and verdicts of one process, its records, and its failures."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import TINY, half_spaces
from typer.testing import CliRunner

import ecnn
from ecnn.attacks import PGD, Square
from ecnn.cli import app
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import Evaluation, OwnAttack, evaluate, load_evaluation, load_images
from ecnn.evaluation.outcomes import COLUMNS

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.rand(23, 1, 4, 4, generator=GENERATOR)
MODEL = half_spaces(torch.randn(16, generator=GENERATOR))
with torch.no_grad():
    SPLIT = Split(IMAGES, MODEL(IMAGES).argmax(dim=1))
ATTACKS: dict[str, Any] = {
    "pgd": PGD(norm="linf", eps=0.05, steps=5, step_size=0.02),
    "square": Square(norm="linf", eps=0.1, queries=20),
}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A local cluster of two workers."""
    module = pytest.importorskip("ray")
    module.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield module
    module.shutdown()


def assert_same(one: Evaluation, other: Evaluation) -> None:
    assert {*one.outcomes} == {*other.outcomes}
    assert one.failures == other.failures
    for name in one.outcomes:
        for column in COLUMNS:
            mine, theirs = (getattr(part.outcomes[name], column) for part in (one, other))
            assert np.array_equal(mine, theirs), (name, column)


@pytest.mark.slow
@pytest.mark.parametrize("cascade", [True, False])
def test_outcomes_are_those_of_one_process(ray: Any, cascade: bool, tmp_path: Path) -> None:
    settings: Any = {"limit": None, "batch_size": 5, "cascade": cascade, "save_images": True}
    here = evaluate(MODEL, SPLIT, ATTACKS, run_dir=tmp_path / "here", **settings)
    there = evaluate(MODEL, SPLIT, ATTACKS, run_dir=tmp_path / "there", cluster="ray", **settings)
    assert_same(here, there)
    assert_same(load_evaluation(tmp_path / "here"), load_evaluation(tmp_path / "there"))
    for one, other in zip(
        *(load_images(tmp_path / place, "pgd") for place in ("here", "there")), strict=True
    ):
        assert torch.equal(one, other)


class Process(nn.Module):
    """Says in its scores which process computes them."""

    def forward(self, images: Tensor) -> Tensor:
        first = torch.full((len(images),), float(os.getpid()))
        return torch.stack([first, torch.zeros_like(first)], dim=1) + 0 * images.flatten(1)[:, :2]


@pytest.mark.slow
def test_batches_are_computed_elsewhere(ray: Any) -> None:
    seen: set[int] = set()

    def note(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            pixel = model(images)[0, 0] / 2**23
        return torch.where(torch.arange(16).view(1, 4, 4) == 0, pixel, images)

    split = Split(IMAGES, torch.zeros(len(IMAGES), dtype=torch.int64))
    own = OwnAttack(function=note, norm="linf", eps=1.0)
    evaluate(
        Process(),
        split,
        {"note": own},
        limit=None,
        batch_size=3,
        cluster="ray",
        watch=lambda found, images: seen.update((images[:, 0, 0, 0] * 2**23).round().int().tolist()),
    )
    assert os.getpid() not in seen
    assert 1 <= len(seen) <= 2


class Refusing(nn.Module):
    """Raises at every image whose first pixel is above a limit, when it is asked for a gradient."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.inner, self.most = MODEL, most

    def forward(self, images: Tensor) -> Tensor:
        if images.requires_grad and bool((images[:, 0, 0, 0] > self.most).any()):
            raise RuntimeError("too bright")
        scores: Tensor = self.inner(images)
        return scores


@pytest.mark.slow
@pytest.mark.parametrize("most", [0.5, -1.0])
def test_failures_are_those_of_one_process(ray: Any, most: float) -> None:
    settings: Any = {"limit": None, "batch_size": 4, "keep_going": True}
    here, there = (
        evaluate(Refusing(most), SPLIT, ATTACKS, cluster=cluster, **settings) for cluster in (None, "ray")
    )
    assert here.failures
    assert_same(here, there)
    for name in here.undone:
        assert np.array_equal(here.undone[name], there.undone[name])
    with pytest.raises(RuntimeError, match=r"^too bright$"):
        evaluate(Refusing(most), SPLIT, ATTACKS, limit=None, batch_size=4, cluster="ray")


@pytest.mark.slow
def test_an_audit_is_that_of_one_process(ray: Any) -> None:
    settings: Any = {"norm": "linf", "eps": 0.05, "budget": TINY, "limit": 20, "batch_size": 6}
    here, there = (ecnn.audit(MODEL, SPLIT, cluster=cluster, **settings) for cluster in (None, "ray"))

    def plain(audit: Any) -> Any:
        stages = [dataclasses.replace(stage, seconds=0.0) for stage in audit.stages]
        return dataclasses.replace(audit, stages=tuple(stages)).to_dict()

    assert plain(here) == plain(there)


OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 10)

    def forward(self, images):
        return self.layer(images.flatten(1))

def mine(model, images, labels):
    assert isinstance(model, Own)
    return (images + 0.05).clamp(0, 1)
"""


@pytest.mark.slow
def test_files_of_the_user_travel(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    asked = ["evaluate", "--module", "own.py:Own", "--data", "digits", "--limit", "12", "--batch-size", "4"]
    asked += ["--attack", "own.py:mine", "--eps", "0.1", "--json", "--device", "cpu"]
    found = []
    for more in ([], ["--cluster", "ray"]):
        done = CliRunner().invoke(app, [*asked, *more])
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout)["attacks"]["own-mine"]["robust"])
    assert found[0] == found[1]


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cluster must be ray"):
        evaluate(MODEL, SPLIT, {}, limit=None, cluster="rai")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install .ecnn\[cluster\]"):
        evaluate(MODEL, SPLIT, {}, limit=None, cluster="ray")
