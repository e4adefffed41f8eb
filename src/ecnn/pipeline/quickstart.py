"""The quickstart on the embedded digits: designs a code, trains three networks, attacks and audits them, reports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ecnn import files, runs
from ecnn.auditing import Audit, load_audit
from ecnn.errors import InputError
from ecnn.evaluation import load_evaluation
from ecnn.experiment import Arm, Experiment, load_experiment, quick_form
from ecnn.pipeline.auditing import audit_run, plan_audit
from ecnn.pipeline.evaluating import evaluate_run, plan_evaluation
from ecnn.pipeline.opening import open_model
from ecnn.pipeline.publishing import write_report
from ecnn.pipeline.training import AnyPath, load_spec_data, plan, train_run
from ecnn.plots import plot_code
from ecnn.progress import Progress

PAGE, PAPER = "report.html", "paper"
_IMAGES, _QUICK_IMAGES = 64, 4  # that are attacked for the report's pictures and curves


@dataclass(frozen=True)
class Step:
    """One part of the quickstart.

    Attributes:
        title: of the progress bar.
        run: does the work, or finds that it was done before, and returns a message for the user.
    """

    title: str
    run: Callable[[Progress | None], str]


@dataclass(frozen=True)
class QuickstartRow:
    """One network in the table at the end.

    Attributes:
        name: of the network and its folder.
        claim: accuracy after an attack such as papers use, from 0 to 1.
        audit: of that claim.
    """

    name: str
    claim: float
    audit: Audit


def quickstart_steps(out: AnyPath, *, quick: bool = False, device: str = "auto") -> list[Step]:
    """The steps of the quickstart, in order; networks, attacks and audits that the folder has are not made again.

    Args:
        out: folder for code.json, a run folder for each network, and report.html.
        quick: the quick form, whose numbers mean nothing (see `quick_form`).
    """
    folder, experiment = Path(out), _experiment(quick)
    if files.exists(folder / runs.SPEC):
        raise InputError(f"{folder} is a run folder, whose code this would replace: choose another folder.")
    files.check_writable(folder / PAGE)
    steps = [Step("designing a code", functools.partial(_design, experiment, folder))]
    for arm in experiment.arms:
        place = folder / arm.name
        steps += [
            Step(f"training {arm.name}", functools.partial(_train, arm, place, device)),
            Step(f"attacking {arm.name}", functools.partial(_attack, arm, place, device)),
            Step(f"auditing {arm.name}", functools.partial(_audit, arm, place, device)),
        ]
    return [*steps, Step("drawing the report", functools.partial(_report, experiment, folder, device, quick))]


def quickstart_rows(out: AnyPath) -> list[QuickstartRow]:
    """The claim and the audit of each network, read from the folders that the steps have filled."""
    found = []
    for arm in _experiment(quick=False).arms:
        folder = Path(out) / arm.name
        found.append(QuickstartRow(arm.name, _claim(folder), load_audit(folder)))
    return found


def _experiment(quick: bool) -> Experiment:
    whole = load_experiment(str(resources.files("ecnn") / "quickstart.toml"))
    return quick_form(whole) if quick else whole


def _design(experiment: Experiment, folder: Path, progress: Progress | None) -> str:
    """Designs the code that the coded networks share."""
    spec = next(arm.spec for arm in experiment.arms if arm.spec.code is not None)
    code = plan(spec, load_spec_data(spec, "data")).code
    assert code is not None
    code.save(folder / runs.CODE)
    plot_code(code, folder / "code.png")
    return str(code.report())


def _train(arm: Arm, folder: Path, device: str, progress: Progress | None) -> str:
    bare = dataclasses.replace(arm.spec, attacks={}, audit=None)
    network = dataclasses.replace(bare, data=dataclasses.replace(bare.data, test_limit=None))
    run = train_run(network, out=folder, device=device, progress=progress)
    took = "was trained before" if run.was_finished else f"trained in {run.seconds:.0f} s"
    return f"{arm.title} ({folder}) {took}: {100 * run.test_accuracy:.1f} % of {run.test_images} test images"


def _attack(arm: Arm, folder: Path, device: str, progress: Progress | None) -> str:
    trained = runs.read_spec(folder)
    data = dataclasses.replace(trained.data, test_limit=arm.spec.data.test_limit)
    asked = dataclasses.replace(trained, attacks=arm.spec.attacks, data=data)
    made = plan_evaluation(asked, open_model(str(folder), spec=asked, device=device))
    evaluate_run(made, seed=arm.spec.seed, out=folder, progress=progress)
    return f"  attacked as papers do: {100 * _claim(folder):.0f} % left"


def _claim(folder: Path) -> float:
    """The accuracy that a paper would print: images right after the attack, rounded to whole per cent."""
    return round(load_evaluation(folder).accuracy_after[PAPER], 2)


def _audit(arm: Arm, folder: Path, device: str, progress: Progress | None) -> str:
    assert arm.spec.audit is not None  # quickstart.toml has one
    table = dataclasses.replace(arm.spec.audit, claim=_claim(folder))
    made = plan_audit(table, open_model(str(folder), data=table.data, device=device))
    found = audit_run(made, out=folder, progress=progress)
    return f"  audited: {100 * found.accuracy:.1f} % left; the claim is {found.verdict}"


def _report(experiment: Experiment, folder: Path, device: str, quick: bool, progress: Progress | None) -> str:
    places = [folder / arm.name for arm in experiment.arms]
    images = _QUICK_IMAGES if quick else _IMAGES
    written = write_report(places, folder / PAGE, images=images, device=device, progress=progress)
    return f"wrote {written}"
