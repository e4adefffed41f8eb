"""audit(): the truth where it is known, the verdict's rule, resumption, records, random models and hostile input."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import toys
from torch import Tensor, nn

from ecnn import files
from ecnn.attacks import PGD, Attack, Attacked
from ecnn.auditing import Audit, Finding, Stage, audit, load_audit, resolve_budget
from ecnn.auditing.report import EXIT_CODES, Verdict
from ecnn.auditing.verdicts import judge
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.plots import plot_audit

pytestmark = pytest.mark.usefixtures("one_thread", "short_lessons")
HALL = sys.modules["ecnn.auditing.auditor"]
EPS = 0.04
BALL: dict[str, Any] = {"norm": "linf", "eps": EPS}
TINY = dataclasses.replace(
    toys.TINY, images=150, steps=20, probe_images=12, probe_steps=10, queries=40, eot=10
)


@pytest.fixture
def _no_diagnostics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HALL, "diagnose", lambda subject, progress=None: [])


class Linear(nn.Module):
    """Scores linear in the pixels: whether an image stands can be computed."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(num_classes, 36, generator=generator))

    def forward(self, images: Tensor) -> Tensor:
        return (images.flatten(1) - 0.5) @ self.weight.T


def make_split(count: int = 150, num_classes: int = 3) -> Split:
    """Random images; one in ten has a label that the linear model does not give."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(256, (count, 1, 6, 6), generator=generator, dtype=torch.uint8)
    labels = Linear(num_classes)(images.float() / 255).argmax(dim=1)
    labels[::10] = (labels[::10] + 1) % num_classes
    return Split(images, labels)


def robust_share(model: Linear, split: Split, eps: float) -> float:
    """Share of images for which no point of the ball, cut to [0, 1], has another class: exact, pixel by pixel."""
    images, labels = split[:]
    flat = images.flatten(1).double()
    low, high = (flat - eps).clamp(0), (flat + eps).clamp(max=1)
    weight = model.weight.detach().double()
    stands = torch.ones(len(flat), dtype=torch.bool)
    for other in range(len(weight)):
        slopes = weight[labels] - weight[other]
        least = (torch.where(slopes > 0, low, high) - 0.5) * slopes
        stands &= (least.sum(dim=1) > 0) | (labels == other)
    return float(stands.double().mean())


def test_an_honest_model_reaches_the_closed_form() -> None:
    model, split = Linear(), make_split(400)  # enough to tell any claim from one five points lower
    truth = robust_share(model, split, EPS)
    assert 0.2 < truth < 0.8
    found = audit(model, split, claim=truth, limit=400, budget=TINY, **BALL)
    assert found.accuracy == pytest.approx(truth, abs=1e-9)
    assert found.interval[0] < truth < found.interval[1]
    assert found.verdict == "believable", found.markdown()
    assert found.exit_code == 0
    assert found.clean_accuracy == 0.9
    assert found.images == 400
    assert found.claimed == truth
    assert found.stages[0].name == "pgd-ce"
    assert found.stages[0].attacked == 360
    assert found.stages[-1].accuracy == found.accuracy
    assert sum(stage.broken for stage in found.stages) == 400 * (0.9 - truth)
    assert found.broken_by.count(-2) == 40
    assert found.broken_by.count(-1) == round(400 * truth)


class Loud(Linear):
    """Scores so large that the cross-entropy's gradient is exactly zero in float32."""

    def forward(self, images: Tensor) -> Tensor:
        return 1e4 * super().forward(images)


def test_an_alarm_that_an_attack_has_answered_leaves_an_honest_claim_alone() -> None:
    split = make_split(400)
    truth = robust_share(Loud(), split, EPS)
    budget = dataclasses.replace(TINY, images=400, probe_images=64)
    found = audit(Loud(), split, claim=truth, budget=budget, **BALL)
    alarms = {finding.name: finding for finding in found.findings if finding.level == "alarm"}
    assert "zero_gradients" in alarms, found.markdown()
    assert not any(finding.is_open for finding in alarms.values())
    assert found.plain_accuracy > truth + 0.1
    assert found.accuracy == pytest.approx(truth, abs=1e-9)
    assert found.verdict == "believable", found.markdown()


def test_a_claim_ten_points_higher_is_not_believed() -> None:
    model, split = Linear(), make_split()
    truth = robust_share(model, split, EPS)
    found = audit(model, split, claim=truth + 0.1, budget=TINY, **BALL)
    assert found.verdict == "not believable"
    assert found.exit_code == 1


def test_without_a_claim_there_is_nothing_to_believe() -> None:
    model, split = Linear(), make_split()
    found = audit(model, split, budget=TINY, **BALL)
    assert (found.verdict, found.exit_code, found.claimed) == ("trustworthy", 0, None)
    left = f"{100 * found.accuracy:.1f} %"
    page = found.markdown()
    assert page.startswith(f"# Audit: {left} under attack, trustworthy\n\nThe audit finds {left} (95 %: ")
    assert str(found).startswith(f"audited {left} [")
    assert "believ" not in page
    assert "claim" not in page


@pytest.mark.usefixtures("_no_diagnostics")
def test_a_gate_below_which_an_audit_fails() -> None:
    model, split = Linear(), make_split()
    truth = robust_share(model, split, EPS)
    for least, verdict, status in (
        (truth + 0.001, "below minimum", 1),
        (truth - 0.2, "trustworthy", 0),
        (truth, "trustworthy", 0),
    ):
        found = audit(model, split, min_accuracy=least, budget=TINY, **BALL)
        assert (found.verdict, found.exit_code, found.min_accuracy) == (verdict, status, least)
        assert f"| asked for | {100 * least:.1f} % |" in found.markdown()


@pytest.mark.usefixtures("_no_diagnostics")
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_ball_of_radius_zero_leaves_the_clean_accuracy(norm: Any) -> None:
    found = audit(Linear(), make_split(40), norm=norm, eps=0, claim=0.8, budget=TINY)
    assert found.accuracy == found.clean_accuracy == 0.9
    assert found.verdict == "believable"


@pytest.mark.parametrize(
    ("claim", "least", "right", "images", "alarms", "verdict"),
    [
        (0.50, None, 400, 1000, [], "not believable"),
        (0.50, None, 400, 1000, ["noise"], "not believable"),
        (0.408, None, 40_000, 100_000, [], "believable"),  # less than a point above
        (0.43, None, 400, 1000, [], "inconclusive"),  # the interval reaches from 37 to 43 %
        (0.42, None, 400, 1000, [], "believable"),  # within sampling error
        (0.42, None, 40_000, 100_000, [], "not believable"),  # and not
        (0.40, None, 40, 100, [], "believable"),  # what was found supports the claim
        (0.42, None, 40, 100, [], "believable"),
        (0.43, None, 40, 100, [], "inconclusive"),
        (0.40, None, 8, 20, [], "inconclusive"),  # twenty images support anything
        (0.48, None, 40, 100, [], "inconclusive"),  # too few images
        (0.40, None, 400, 1000, ["noise"], "inconclusive"),
        (0.10, None, 400, 1000, ["noise"], "inconclusive"),
        (0.00, None, 400, 1000, ["noise"], "believable"),  # nothing is claimed
        (0.03, None, 0, 100, ["noise"], "believable"),  # nothing stands that could be hiding
        (1.00, None, 100, 100, [], "believable"),
        (1.00, None, 5, 5, [], "inconclusive"),
        (None, None, 5, 5, [], "trustworthy"),
        (None, None, 0, 100, [], "trustworthy"),
        (None, None, 0, 100, ["noise"], "trustworthy"),
        (None, None, 1, 100, ["noise"], "inconclusive"),
        (None, 0.50, 499, 1000, [], "below minimum"),
        (None, 0.50, 499, 1000, ["noise"], "below minimum"),
        (None, 0.50, 500, 1000, [], "trustworthy"),
        (None, 0.50, 900, 1000, ["noise"], "inconclusive"),
        (None, 0.50, 5, 10, [], "inconclusive"),
        (0.40, 0.50, 400, 1000, [], "below minimum"),
        (0.60, 0.30, 400, 1000, [], "not believable"),
        (0.40, 0.30, 400, 1000, [], "believable"),
    ],
)
def test_the_rule(
    claim: float | None, least: float | None, right: int, images: int, alarms: list[str], verdict: str
) -> None:
    found, reason = judge(right / images, images, alarms, claim=claim, min_accuracy=least)
    assert found == verdict
    assert reason.endswith(".")


@pytest.mark.parametrize("share", [0.0, 0.04, 0.3, 0.5, 0.65, 0.9, 1.0])
@pytest.mark.parametrize("above", [-0.03, 0.0, 0.02, 0.04])
def test_too_few_images_says_how_many_would_do(share: float, above: float) -> None:
    claim = min(1.0, max(0.0, share + above))
    verdict, reason = judge(share, 3, [], claim=claim)
    if verdict == "believable":  # claims of nothing need no images
        assert claim <= 0.1
        return
    assert verdict == "inconclusive"
    enough = int(re.search(r"([\d,]+) images would do", reason)[1].replace(",", ""))  # type: ignore[index]
    decided = judge(round(share * enough) / enough, enough, [], claim=claim)[0]
    fewer = judge(round(share * (enough - 9)) / (enough - 9), enough - 9, [], claim=claim)[0]
    assert decided != "inconclusive"
    assert fewer == "inconclusive"
    assert enough < 1700


def alarm(subject: Any, progress: Any = None) -> list[Finding]:
    return [
        Finding(
            name="siren",
            level="alarm",
            claim="It wails.",
            evidence={"pitch": math.inf, "curve": [0.5, math.nan]},
            advice="Listen.",
            source="ear",
        )
    ]


def test_findings_come_from_the_diagnostics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(HALL, "diagnose", alarm)
    found = audit(Linear(), make_split(40), budget=TINY, run_dir=tmp_path, **BALL)
    assert found.verdict == "inconclusive"
    assert found.exit_code == 3
    assert "siren" in found.reason
    assert "It wails." in found.explanation
    siren = next(finding for finding in found.findings if finding.name == "siren")
    assert siren.evidence == {"pitch": "inf", "curve": [0.5, "nan"]}
    assert "  - figures: pitch inf, curve (0.5, nan)\n" in found.markdown()
    assert load_audit(tmp_path) == found
    # Diagnostics that came to an end are not made again, unless all is to begin anew.
    monkeypatch.setattr(HALL, "diagnose", lambda subject, progress=None: [])
    assert audit(Linear(), make_split(40), budget=TINY, run_dir=tmp_path, **BALL) == found
    fresh = audit(Linear(), make_split(40), budget=TINY, run_dir=tmp_path, resume=False, **BALL)
    assert "siren" not in [finding.name for finding in fresh.findings]


@pytest.mark.parametrize(
    ("evidence", "figures"),
    [
        ({}, ""),
        (
            {"broken_alone": 1234, "answered": True, "share": 1 / 3},
            "broken alone 1,234, answered yes, share 0.3333",
        ),
        ({"trouble": None, "others": [], "table": {}}, "trouble none, others none, table none"),
        ({"margin": {"zero": 0.5, "denormal": 0.0}}, "margin (zero 0.5, denormal 0)"),
        (
            {"curve": [{"eps": 0.1, "left": 3}, {"eps": 0.2, "left": 0}]},
            "curve (eps 0.1, left 3; eps 0.2, left 0)",
        ),
        ({"step": list(range(9))}, "step (0 to 8 (9 values))"),
        ({"by_place": {"scores": ["a", "b"]}}, "by place (scores (a, b))"),
    ],
)
def test_evidence_is_printed_in_words(evidence: dict[str, Any], figures: str) -> None:
    """On the page and in the report alike, without a program's brackets and quotes."""
    finding = Finding(name="noise", level="alarm", claim="Loud.", evidence=evidence, source="us")
    assert finding.figures == figures
    page = an_audit(findings=(finding,)).markdown()
    assert ("figures:" in page) == bool(figures)
    assert not set("{}[]'\"_") & set(figures)


@pytest.mark.usefixtures("_no_diagnostics")
def test_records_and_page(tmp_path: Path) -> None:
    split = make_split(60)
    found = audit(Linear(), split, claim=0.85, budget=TINY, run_dir=tmp_path, limit=50, **BALL)
    assert found.images == 50
    kept = files.read_json(tmp_path / "audit.json")
    assert (kept["format"], kept["version"], kept["exit_code"]) == ("ecnn-audit", 2, 1)
    assert kept == json.loads(json.dumps(found.to_dict()))
    assert load_audit(tmp_path / "audit.json") == load_audit(tmp_path) == found
    page = (tmp_path / "audit.md").read_text()
    assert page == found.markdown()
    assert page.startswith("# Audit: not believable\n")
    for stage in found.stages:
        assert f"| {stage.name} | {stage.attacked} |" in page
    assert "85.0 %" in page
    assert f"{100 * found.accuracy:.1f} %" in page
    assert str(found).startswith("not believable: claimed 85.0 %")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "else"}, "does not hold an audit"),
        ({"version": 3}, "version 3"),
        ({"verdict": "maybe"}, "damaged"),
        ({"stages": [{"name": "pgd"}]}, "damaged"),
        ({"interval": [0.1]}, "damaged"),
        ({"findings": 3}, "damaged"),
        ({"claimed": None}, None),
    ],
)
def test_damaged_records(tmp_path: Path, change: dict[str, Any], sentence: str | None) -> None:
    values = {**an_audit().to_dict(), **change}
    if sentence is None:
        del values["claimed"]
        sentence = "damaged"
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=sentence):
        load_audit(path)


def an_audit(**changes: Any) -> Audit:
    stage = Stage(name="pgd-ce", attacked=9, broken=4, accuracy=0.5, forwards=3, backwards=2, seconds=0.1)
    finding = Finding(name="noise", level="ok", claim="Fine.", evidence={"n": 1}, advice="", source="us")
    values: dict[str, Any] = {
        "verdict": "believable",
        "reason": "So it is.",
        "claimed": 0.5,
        "min_accuracy": None,
        "accuracy": 0.5,
        "interval": (0.3, 0.7),
        "clean_accuracy": 0.9,
        "plain_accuracy": 0.5,
        "images": 10,
        "norm": "linf",
        "eps": 0.1,
        "budget": "quick",
        "seed": 0,
        "is_random": False,
        "stages": (stage,),
        "broken_by": (-2, 0, 0, 0, 0, -1, -1, -1, -1, -1),
        "findings": (finding,),
        "model": {"kind": "x"},
        "environment": "here",
    }
    return Audit(**{**values, **changes})


def test_an_audit_survives_the_disk(tmp_path: Path) -> None:
    assert set(EXIT_CODES) == set(get_args(Verdict))
    for verdict, status in EXIT_CODES.items():
        given = an_audit(verdict=verdict)
        assert given.exit_code == status
        assert load_audit(given.save(tmp_path / "a.json")) == given
    with pytest.raises(InputError, match="verdict must be one of"):
        an_audit(verdict="maybe")


def test_every_audit_can_be_drawn(tmp_path: Path) -> None:
    given = [an_audit(verdict=verdict, claimed=None) for verdict in get_args(Verdict)]
    for one in (*given, an_audit(claimed=0.5, min_accuracy=0.4)):
        assert plot_audit(one, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("source", "claimed"), [("given", 0.5), ("plain attack", None)])
def test_audits_of_the_first_version_are_read(tmp_path: Path, source: str, claimed: float | None) -> None:
    values = {**an_audit().to_dict(), "version": 1, "claim_source": source}
    del values["min_accuracy"]
    (tmp_path / "audit.json").write_text(json.dumps(values))
    assert load_audit(tmp_path) == an_audit(claimed=claimed)


class StopError(Exception):
    """As if the process were killed."""


def without_times(found: Audit) -> Audit:
    return dataclasses.replace(
        found, stages=tuple(dataclasses.replace(stage, seconds=0.0) for stage in found.stages)
    )


@pytest.mark.usefixtures("_no_diagnostics")
@pytest.mark.parametrize("kind", ["steady", pytest.param("random", marks=pytest.mark.full)])
def test_a_killed_audit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = Linear() if kind == "steady" else Flicker(0.2)
    split = make_split(60)
    settings: dict[str, Any] = {"budget": dataclasses.replace(TINY, steps=4, eot=2), "claim": 0.5, **BALL}
    stages = sys.modules["ecnn.auditing.stages"]
    monkeypatch.setattr(stages, "_BATCH", {"cpu": 25, "cuda": 25})
    torch.manual_seed(3)
    expected = audit(model, split, **settings)
    names = [stage.name for stage in expected.stages]
    for killed_at in (names[0], names[-1]):
        folder = tmp_path / killed_at
        seen = 0

        def progress(done: int, total: int, news: str, killed_at: str = killed_at) -> None:
            nonlocal seen
            seen += killed_at in news
            if seen == 2:  # after the first batch of three
                raise StopError

        with pytest.raises(StopError):
            audit(model, split, run_dir=folder, progress=progress, **settings)
        assert not (folder / "audit.json").exists()
        torch.manual_seed(4)
        resumed = audit(model, split, run_dir=folder, **settings)
        assert without_times(resumed) == without_times(expected)
        again = audit(model, split, run_dir=folder, **settings)
        assert again == resumed


@pytest.mark.usefixtures("_no_diagnostics")
def test_more_images_continue_fewer(tmp_path: Path) -> None:
    split = make_split(300)
    settings: dict[str, Any] = {"budget": TINY, "run_dir": tmp_path, **BALL}
    part = audit(Linear(), split, limit=50, **settings)
    whole = audit(Linear(), split, limit=100, **settings)
    assert whole.broken_by[:50] == part.broken_by
    with pytest.raises(InputError, match="another model"):
        audit(Linear(4), split, limit=50, **settings)
    fresh = audit(Linear(4), split, limit=50, resume=False, **settings)
    assert fresh.images == 50


class Flicker(Linear):
    """Gives a wrong answer in a share of the passes, whatever it is shown."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, images: Tensor) -> Tensor:
        scores = 0 * super().forward(images) + torch.tensor([3.0, 2.0, 1.0])
        wrong = torch.rand(len(images), 1) < self.share
        return torch.where(wrong, -scores, scores)


@pytest.mark.usefixtures("_no_diagnostics")
def test_the_seed_alone_decides_what_a_random_model_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing else seeds it, as while the suite is chosen."""
    drawn = []

    def draw(*given: Any, **settings: Any) -> dict[str, Attack]:
        drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))
        return {"pgd": PGD(steps=1, step_size=0.1, **BALL)}

    monkeypatch.setattr(HALL, "suite", draw)
    for seed in (1, 2):
        torch.manual_seed(seed)
        audit(Flicker(0.2), make_split(60), limit=12, budget=TINY, **BALL)
    assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("_no_diagnostics")
def test_a_random_model_is_judged_by_the_mean_over_passes() -> None:
    """One unlucky pass among all those that a suite makes would break every image; the truth is 80 %."""
    split = make_split(60)
    split = Split(split.images, torch.zeros_like(split.labels))
    state = torch.get_rng_state()
    found = audit(Flicker(0.2), split, claim=0.7, budget=TINY, **BALL)
    assert torch.equal(torch.get_rng_state(), state) or found.is_random
    assert found.is_random
    assert found.accuracy == pytest.approx(0.8, abs=0.04)  # 1,200 passes
    assert found.clean_accuracy == pytest.approx(0.8, abs=0.06)
    assert found.verdict == "believable"
    assert "means over passes" in found.markdown()
    assert audit(Flicker(0.2), split, claim=0.95, budget=TINY, **BALL).verdict == "not believable"


class Liar(Attack):
    """Says that it broke everything, and returns what it was given."""

    def run(
        self, model: nn.Module, images: Tensor, labels: Tensor, *, seed: int = 0, index: Tensor | None = None
    ) -> Attacked:
        ones = torch.ones(len(images), dtype=torch.int64)
        return Attacked(images, labels + 1, ones.bool(), ones, ones)


@pytest.mark.usefixtures("_no_diagnostics")
def test_only_a_fresh_pass_breaks_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HALL, "suite_parts", lambda *args, **settings: [{"liar": Liar()}])
    found = audit(Linear(), make_split(40), claim=0.9, budget=TINY, **BALL)
    assert found.accuracy == found.clean_accuracy == 0.9
    assert found.stages[0].broken == 0


class Escapes(Attack):
    def search(self, target: Any, images: Tensor, labels: Tensor, draws: Any) -> Tensor:
        return 1 - images


@pytest.mark.usefixtures("_no_diagnostics")
def test_nothing_outside_the_ball_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HALL, "suite_parts", lambda *args, **settings: [{"escapes": Escapes()}])
    with pytest.raises(InputError, match="left its linf ball"):
        audit(Linear(), make_split(40), budget=TINY, **BALL)


class Fails(Attack):
    def search(self, target: Any, images: Tensor, labels: Tensor, draws: Any) -> Tensor:
        raise RuntimeError("no such kernel\nand more")


@pytest.mark.usefixtures("_no_diagnostics")
def test_an_attack_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pgd = PGD(norm="linf", eps=EPS, steps=10, step_size=EPS / 4)
    monkeypatch.setattr(HALL, "suite_parts", lambda *args, **settings: [{"fails": Fails(), "pgd": pgd}])
    found = audit(Linear(), make_split(40), budget=TINY, **BALL)
    assert [stage.name for stage in found.stages] == ["pgd"]
    assert found.accuracy < found.clean_accuracy
    assert found.plain_accuracy == found.clean_accuracy  # the first attack is the plain one, and it failed
    (alarm,) = [finding for finding in found.findings if finding.name == "attacks_not_made"]
    assert (alarm.level, alarm.kind) == ("alarm", "not_made")
    assert alarm.evidence["attacks"] == {"fails": "no such kernel"}
    assert alarm.evidence["standing"] == round(40 * found.accuracy)
    claimed = audit(Linear(), make_split(40), claim=found.accuracy, budget=TINY, **BALL)
    assert claimed.verdict == "inconclusive"
    strong = PGD(norm="linf", eps=0.5, steps=10, step_size=0.2)
    monkeypatch.setattr(HALL, "suite_parts", lambda *args, **settings: [{"fails": Fails(), "pgd": strong}])
    fallen = audit(Linear(), make_split(40), claim=0, budget=TINY, norm="linf", eps=0.5)
    assert not any(
        finding.is_open for finding in fallen.findings
    )  # nothing stands that could have been missed


class Stepped(Linear):
    """Has an operation that autograd refuses."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(torch.heaviside(images - 0.5, torch.tensor(0.5)))


class Refuses(Linear):
    """Does not want to be differentiated."""

    def forward(self, images: Tensor) -> Tensor:
        if images.requires_grad:
            raise ValueError("only for inference")
        return super().forward(images)


class Detached(Linear):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).detach()


class Votes(Linear):
    """Its scores are whole numbers."""

    def forward(self, images: Tensor) -> Tensor:
        return (10 * super().forward(images)).round().long()


class Rooted(Linear):
    """The root of a product that is 0 for half of the pixels: its derivative there is no number."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images + (images * (images < 0.5)).sqrt())


class Certain(Linear):
    """The log odds of a probability that rounds to 1: infinite, and not differentiable there."""

    def forward(self, images: Tensor) -> Tensor:
        probabilities = torch.softmax(30 * super().forward(images), dim=1)
        return torch.log(probabilities / (1 - probabilities))


class Brief(Linear):
    """Computes in bfloat16, without the product of matrices that some processors have no instruction for."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, images: Tensor) -> Tensor:
        (weights,) = (parameter for parameter in self.parameters() if parameter.ndim == 2)
        return (images.flatten(1).to(weights.dtype)[:, None] * weights).sum(dim=2)


SHORT = dataclasses.replace(
    TINY, images=16, steps=5, probe_images=4, probe_steps=4, queries=40, eot=2, targets=1
)


@pytest.mark.parametrize(
    ("model", "norm", "kinds"),
    [
        (Stepped(), "linf", {"attacks_not_made": "not_made", "differentiable": "differentiable"}),
        (Refuses(), "linf", {"attacks_not_made": "not_made", "differentiable": "differentiable"}),
        (Detached(), "linf", {"differentiable": "differentiable"}),
        (Rooted(), "linf", {"nan_gradients": "nan_gradients"}),
        (Rooted(), "l2", {"nan_gradients": "nan_gradients"}),
        (Certain(), "l2", {"finite_scores": "infinite", "nan_gradients": "nan_gradients"}),
        (Linear().half(), "linf", {"precision": "float16"}),
        (Brief(), "linf", {"precision": "bfloat16"}),
        (Votes(), "linf", {"differentiable": "differentiable"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_of_an_odd_kind_is_audited_all_the_same(
    model: nn.Module, norm: Any, kinds: dict[str, str]
) -> None:
    split = make_split(40)
    with torch.no_grad():
        scores = model(split[:16][0].to(next(model.parameters()).dtype)).float()
    found = audit(model, split, norm=norm, eps=EPS if norm == "linf" else 0.1, claim=0.5, budget=SHORT)
    assert found.clean_accuracy == float((scores.argmax(dim=1) == split.labels[:16]).double().mean())
    assert {finding.name: finding.kind for finding in found.findings}.items() >= kinds.items()
    assert "square" in {stage.name for stage in found.stages}
    if type(model) is not Linear:
        assert found.verdict != "believable" or found.accuracy == 0, found.markdown()


@pytest.mark.usefixtures("_no_diagnostics")
def test_an_audit_of_other_code_is_not_taken_over(tmp_path: Path) -> None:
    """The same weights, and forward turned from net(x) to net(1 - x)."""

    class Turned(Linear):
        turned = False

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(1 - images if self.turned else images)

    model, split = Turned(), make_split(40)
    first = audit(model, split, budget=SHORT, run_dir=tmp_path, **BALL)
    assert audit(model, split, budget=SHORT, run_dir=tmp_path, **BALL).to_dict() == first.to_dict()
    model.turned = True
    with pytest.raises(InputError, match="its code has changed"):
        audit(model, split, budget=SHORT, run_dir=tmp_path, **BALL)
    anew = audit(model, split, budget=SHORT, run_dir=tmp_path, resume=False, **BALL)
    assert anew.clean_accuracy < 0.5 < first.clean_accuracy


@pytest.mark.usefixtures("_no_diagnostics")
@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("keeps_records", [False, True])
def test_the_model_the_images_and_the_clean_pass_count_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_random: bool, keeps_records: bool
) -> None:
    """However many attacks: one fingerprint of the model and of the images, one clean pass over each image."""
    model, split = Flicker(0.2) if is_random else Linear(), make_split(60)
    described: list[Any] = []
    hashed: list[int] = []
    clean: list[int] = []

    def spy(module: str, name: str, note: Any) -> None:
        place = sys.modules[f"ecnn.evaluation.{module}"]
        honest = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given: note(*given) or honest(*given))

    spy("provenance", "describe_model", described.append)
    spy("provenance", "hash_images", lambda part: hashed.append(len(part)))
    spy("loop", "run_attack", lambda *given: clean.append(len(given[3])) if given[1] is None else None)
    folder = tmp_path if keeps_records else None
    found = audit(model, split, budget=dataclasses.replace(TINY, steps=3, eot=2), run_dir=folder, **BALL)
    assert len(found.stages) > 5
    assert sum(type(one) is type(model) for one in described) == 1
    assert hashed == [60]
    assert clean == [60]


@pytest.mark.usefixtures("_no_diagnostics")
def test_what_is_left_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    model.train()
    model[2].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    audit(model, make_split(40), budget=TINY, **BALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert bool((parameter.grad == 1).all())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("claim", [-0.1, 1.1, math.nan, 72, True, "0.7"])
def test_bad_claims(claim: Any) -> None:
    with pytest.raises(InputError, match=r"claim .* must be a number from 0 to 1"):
        audit(Linear(), make_split(10), claim=claim, budget=TINY, **BALL)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"norm": "l7"}, "norm must be"),
        ({"eps": -1}, "eps must be"),
        ({"budget": "endless"}, "budget must be one of quick, fast, standard, thorough"),
        ({"limit": 0}, "no image"),
        ({"limit": -1}, "limit must be"),
    ],
)
def test_bad_requests(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        audit(Linear(), make_split(10), **{**BALL, "budget": TINY, **changes})


def test_no_images_and_too_many_labels() -> None:
    empty = Split(torch.zeros(0, 1, 6, 6, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(InputError, match="no image"):
        audit(Linear(), empty, budget=TINY, **BALL)
    with pytest.raises(InputError, match="a label is 4"):
        audit(Linear(), make_split(30, 5), budget=TINY, **BALL)
    with pytest.raises(InputError, match="budget must be one of"):
        resolve_budget("endless")


class Broken(Linear):
    """Its scores are not numbers for some images, or for all."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        return torch.where(images.flatten(1)[:, :1] > self.bound, math.nan, scores)


@pytest.mark.parametrize("bound", [-1.0, 0.5])
def test_scores_that_are_not_numbers_are_wrong(bound: float) -> None:
    split = make_split(40)
    found = audit(Broken(bound), split, claim=0.9, budget=TINY, **BALL)
    assert found.verdict == "not believable"
    images, _ = split[:]
    failing = (images.flatten(1)[:, 0] > bound).double().mean()
    assert found.clean_accuracy <= 1 - failing
    if bound < 0:
        assert found.accuracy == 0
        assert found.stages == ()
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("num_classes", [2, 1000])
@pytest.mark.parametrize("autoattack", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("_no_diagnostics", "short_autoattack")
def test_few_and_many_classes(num_classes: int, autoattack: bool) -> None:
    model, split = Linear(num_classes), make_split(20, num_classes)
    budget = dataclasses.replace(TINY, steps=10, targets=9, autoattack=autoattack)
    found = audit(model, split, norm="linf", eps=0.02, budget=budget)
    assert found.accuracy >= robust_share(model, split, 0.02)
    assert found.accuracy <= found.plain_accuracy


@pytest.mark.gpu
def test_on_cuda() -> None:
    """The same truth, every attack made, and no check that came to grief over where its tensors are."""
    model, split = Linear(), make_split()
    truth = robust_share(model, split, EPS)
    found = audit(model.cuda(), split, claim=truth, budget=TINY, **BALL)
    assert found.accuracy == pytest.approx(truth, abs=1e-9)
    assert found.verdict == "believable", found.markdown()
    assert "attacks_not_made" not in {finding.name for finding in found.findings}, found.markdown()
    assert not [finding.name for finding in found.findings if "error" in finding.evidence], found.markdown()


class Noisy(Linear):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images + 0.02 * torch.randn_like(images))


@pytest.mark.parametrize("kind", [Linear, Detached, Noisy])
def test_where_tensors_are_made_by_default_makes_no_difference(
    kind: type[Linear], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after torch.set_default_device, beside a model and images that lie elsewhere."""
    toys.shorten_lessons(monkeypatch)
    request.addfinalizer(lambda: torch.set_default_device(None))
    model, split, budget = kind(), make_split(40), dataclasses.replace(TINY, turns=1)
    expected = without_times(audit(model, split, budget=budget, **BALL))
    torch.set_default_device("meta")
    assert without_times(audit(model, split, budget=budget, **BALL)) == expected
