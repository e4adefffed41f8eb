"""Experiments as data: every shipped file loads, counts what the paper counts, runs, resumes, and becomes a table."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DATA
from PIL import Image
from processes import run, start, wait_for
from toys import shorten_audits
from typer.testing import CliRunner

import ecnn
from ecnn import evaluate, files, load_model
from ecnn.attacks import TransformedPGD
from ecnn.auditing.report import AUDIT_VERSION
from ecnn.cli import app
from ecnn.data import Dataset, Split, load_adversarial_signs, load_data
from ecnn.data.sources import FORMS
from ecnn.errors import InputError
from ecnn.evaluation import Outcomes, TransferMatrix, member_transfer
from ecnn.experiment import PARAMETERS, Arm, experiments, from_tables, load_experiment, quick_form
from ecnn.models import build_model
from ecnn.pipeline import (
    audit_again,
    cost_text,
    draw_results,
    estimate_tasks,
    plan,
    read_cells,
    results_page,
    run_task,
    run_tasks,
    table_text,
    tasks_of,
)
from ecnn.pipeline.costing import Sizes
from ecnn.pipeline.recording import Record, covers, read_record, save_record
from ecnn.pipeline.spreading import waves
from ecnn.pipeline.training import load_test_images
from ecnn.spec import make_attack

RESULTS = Path(__file__).parents[1] / "results"
TINY: dict[str, Any] = {
    "title": "Tiny",
    "paper": "tab:none",
    "rows": ["clean", "pgd", "cw"],
    "audited": {"pgd": "audit", "cw": ["cw", "strong"]},
    "spec": {
        "data": {"name": "digits", "test_limit": 30},
        "code": {"name": "10x10"},
        "model": {"kind": "ecnn", "width": 4, "depth": 8},
        "train": {"recipe": "small", "epochs": 1, "lr": 0.01},
        "audit": {"eps": 0.001, "budget": "quick", "limit": 8},
        "attacks": {
            "pgd": {"norm": "linf", "eps": 0.1, "steps": 5, "step_size": 0.05, "keep": "last"},
            "cw": {"steps": 5, "search_steps": 1, "initial_constant": 0.1, "limit": 10},
            "strong": {"kind": "cw", "steps": 10, "search_steps": 2, "initial_constant": 1.0, "limit": 10},
        },
    },
    "arms": [
        {"name": "a", "title": "A", "seeds": [0, 1], "paper": {"clean": 90.0, "pgd": 50.0}},
        {"name": "b", "title": "B", "spec": {"attacks": {"cw": False}}},
        {"name": "c", "title": "C", "spec": {"attacks": {"pgd": {"eps": 0.2}}}},
    ],
}


def stand_in(name: str) -> Dataset:
    """One random image per class, with the form of the dataset."""
    _, _, classes, channels, size = FORMS[name]
    images = torch.randint(256, (classes, channels, size, size), dtype=torch.uint8)
    split = Split(images, torch.arange(classes))
    return Dataset(name, split, split, split, tuple(map(str, range(classes))))


def short_design(arm: Arm) -> Any:
    """The arm's spec with a code that is found at once; its size is what counts here."""
    code = arm.spec.code
    quick = None if code is None or code.name is not None else {"code.steps": 2000}
    return arm.spec.changed(quick or {})


def test_every_file_of_the_package_is_listed_once() -> None:
    folder = Path(ecnn.__file__).parent / "experiments"
    assert sorted(experiments()) == sorted(path.stem for path in folder.glob("*.toml"))


@pytest.mark.parametrize("name", experiments())
def test_every_shipped_experiment_counts_what_the_paper_counts(name: str) -> None:
    experiment = load_experiment(name)
    assert experiment.title
    assert experiment.rows[0] == "clean"
    for arm in experiment.arms:
        if PARAMETERS in arm.paper:
            data = stand_in(arm.spec.data.name)
            with torch.device("meta"):  # where weights have sizes and no values
                made = plan(short_design(arm), data)
            assert sum(parameter.numel() for parameter in made.model.parameters()) == arm.paper[PARAMETERS]


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("titel",), "x", "has no option 'titel'; .* did you mean 'title'"),
        (("arms", 0, "nmae"), "x", "has no option 'nmae'; .* did you mean 'name'"),
        (("arms", 0, "paper", "pdg"), 1.0, "has no option 'pdg'; .* did you mean 'pgd'"),
        (("audited", "pgd"), "audti", "did you mean 'audit'"),
        (("audited", "bim"), "audit", "has no option 'bim'"),
        (("arms", 2, "name"), "a", "two arms are called 'a' and 'a': give each a name of its own"),
        (("arms",), [], "has no arms: give it"),
        (("arms", 0, "seeds"), [-1], "a seed must be a whole number"),
        (("spec", "attacks", "pgd", "epss"), 1, "did you mean 'eps'"),
        (("spec", "model", "widht"), 1, "^the arm 'a': .* did you mean 'width'"),
        (("audited", "pgd"), 1e308, "audited must be a table"),
        (("arms", 0, "name"), [1], "name must be text, not"),
        (("arms", 0, "seeds"), "0", "the arm 'a': seeds must be a list of whole numbers"),
        (("arms", 0, "seeds"), [0.0], r"the arm 'a': seeds must be a list of whole numbers, not \[0\.0\]"),
        (("arms", 0, "paper"), {"clean": "90"}, "the arm 'a': paper must be a table of finite numbers, not"),
        (("rows",), 3, "rows must be a list of text, not 3"),
        (("rows",), ["clean", "pgd", "clean"], "rows must differ, but 'clean' is there 2 times"),
        (("arms",), {"a": 1}, "arms must be a list"),
        (("spec", "attacks", "pgd", "source"), "aa", r"attacks\.pgd\.source must be .* did you mean 'a'"),
        (("spec", "attacks", "pgd", "limit"), 0, r"attacks\.pgd\.limit must be a whole number from 1"),
        (("spec", "attacks", "pgd", "limit"), "x", r"attacks\.pgd\.limit must be a whole number from 1"),
        (("spec", "attacks", "pgd", "members"), "x", r"attacks\.pgd\.members must be a whole number from 1"),
        (("spec", "attacks", "pgd", "eps"), [0.1, 0.2], "each radius is an attack, and a row, of its own"),
        (("spec", "attacks", "../x"), {"kind": "cw"}, "an attack's name must be letters"),
        (("spec", "attacks", "pgd", "norm"), "l3", r"^the arm 'a': attacks\.pgd: norm must be"),
        (("spec", "seed"), 5, r"give the arm seeds = \[...\]"),
        (("arms", 0, "seeds"), [], "needs seeds, each once"),
        (("arms", 0, "seeds"), [1, 1], "needs seeds, each once"),
        (("arms", 0, "name"), "../../elsewhere", "it names a folder"),
        (("arms", 0, "name"), "", "it names a folder"),
        (("arms", 0, "name"), "a" * 101, "a name of at most 100 letters, .* it names a folder"),
        (("arms", 0, "name"), "C", "two arms are called 'C' and 'c': give each a name of its own"),
        (("arms", 0, "paper", "clean"), 250.0, "paper.clean must be a number from 0 to 100"),
        (("rows",), ["clean", "pgd", "cw", "pdg"], "a row must be .* did you mean 'pgd'"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[Any, ...], value: Any, sentence: str) -> None:
    tables: Any = json.loads(json.dumps(TINY))
    inner = tables
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(InputError, match=sentence):
        from_tables("tiny", tables)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("train", "optimizer"), "adamm", "did you mean 'adam'"),
        (("train", "objective"), "hing", "not by 'hing'|objective must be"),
        (("train", "lr"), -1.0, "lr must be a number above 0"),
        (("train", "objective_options"), {"margni": 1.0}, "did you mean 'margin'"),
        (("attacks", "pgd", "data"), "optprojtrann", "did you mean 'optprojtran'"),
        (("audit", "data"), "optproj", "data must be"),
        (("attacks", "pgd", "data"), "mnist", r"image_size = \(8, 8\), and the data 'mnist', .* \(28, 28\)"),
        (("attacks", "pgd", "data"), "optprojtran", "in_channels = 1, and the data 'optprojtran', .* 3"),
        (("audit", "data"), "mnist", "the data 'mnist'"),
        (("train", "epochs"), 0, "epochs must be a whole number from 1 up, not 0"),
        (("train", "recipe"), "smal", "recipe must be .* did you mean 'small'"),
        (("model", "depth"), 9, "depth must be"),
        (("code",), {"code_length": 0}, "code_length must be a whole number from 1"),
        (
            ("attacks", "pgd", "members"),
            11,
            r"attacks\.pgd\.members must be at most 10, all of the model's, not 11",
        ),
    ],
)
def test_what_would_end_a_training_is_told_before_it(
    path: tuple[str, ...], value: Any, sentence: str
) -> None:
    tables = json.loads(json.dumps(TINY))
    inner = tables["spec"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(InputError, match=f"^the experiment 'tiny': the arm 'a': .*{sentence}"):
        estimate_tasks(tasks_of(from_tables("tiny", tables), Path("nowhere")))


WITHOUT_MEMBERS = {"code": False, "model": {"kind": "resnet"}}
OF_TWO_SYMBOLS = {"attacks": {"pgd": {"members": 3, "loss": "dlr"}}}
NO_MEMBERS = r'ResNet has no members \(member_logits and code\): use on="scores"'


@pytest.mark.parametrize(
    ("arm", "sentence"),
    [
        ({**WITHOUT_MEMBERS, "attacks": {"pgd": {"on": "members"}}}, f"the attack 'pgd': {NO_MEMBERS}"),
        ({**WITHOUT_MEMBERS, "attacks": {"cw": {"on": "tempered"}}}, f"the attack 'cw': {NO_MEMBERS}"),
        ({**WITHOUT_MEMBERS, "attacks": {"cw": {"kind": "member_cw"}}}, f"the attack 'cw': {NO_MEMBERS}"),
        (
            {**WITHOUT_MEMBERS, "attacks": {"pgd": {"members": 2}}},
            r"attacks\.pgd\.members needs a model that has members, and ResNet has none: leave it out",
        ),
        (
            {**WITHOUT_MEMBERS, "train": {"attack": {"eps": 0.1, "on": "members"}}},
            f"the attack 'train.attack': {NO_MEMBERS}",
        ),
        (
            {**WITHOUT_MEMBERS, "train": {"val_attack": {"eps": 0.1, "on": "linear"}}},
            f"the attack 'train.val_attack': {NO_MEMBERS}",
        ),
        (OF_TWO_SYMBOLS, "the attack 'pgd': the DLR loss needs at least 3 classes, and the model has 2"),
        ({"attacks": {"pgd": {"source": "a", "on": "members"}}}, f"the attack 'pgd': {NO_MEMBERS}"),
    ],
)
def test_where_an_attack_looks_is_tried_before_anything_is_trained(
    tmp_path: Path, arm: dict[str, Any], sentence: str
) -> None:
    """By the dry run and by the run, which name the file and the arm."""
    tables = {
        **TINY,
        "arms": [{"name": "a", "title": "A", "spec": WITHOUT_MEMBERS}, {"name": "b", "title": "B"}],
    }
    write_experiment(tmp_path / "good.toml", tables)
    assert len(estimate_tasks(tasks_of(load_experiment(str(tmp_path / "good.toml")), tmp_path))) == 2
    tables["arms"][1]["spec"] = arm
    write_experiment(tmp_path / "bad.toml", tables)
    words = ["reproduce", str(tmp_path / "bad.toml"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    for command in ([*words, "--dry-run"], words):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2
        assert re.match(f"ecnn: bad.toml: the arm 'b': {sentence}", done.stderr)
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_is_guessed() -> None:
    with pytest.raises(InputError, match="did you mean 'members'"):
        load_experiment("member")


@pytest.mark.usefixtures("short_audits")
def test_an_experiment_runs_resumes_and_becomes_a_table(tmp_path: Path, finished: Path) -> None:
    """Nothing finished is done again, an equal run is adopted, and the numbers are those of the outcomes."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    experiment = from_tables("tiny", TINY)
    tasks = tasks_of(experiment, tmp_path)
    assert [(task.arm.name, task.seed) for task in tasks] == [("a", 0), ("b", 0), ("c", 0), ("a", 1)]
    for task in tasks:
        run_task(task, device="cpu")
    first, twin, other = (read_record(task.folder) for task in tasks[:3])
    assert first is not None
    assert twin is not None
    assert other is not None
    for name in ("audit.png", "record.json"):  # as a kill between the audit and its picture leaves it
        (tasks[0].folder / name).unlink()
    assert not (tasks[1].folder / "last.safetensors").exists()  # it was trained once, for the other arm
    assert np.array_equal(first.arrays["pgd.prediction"], twin.arrays["pgd.prediction"])
    before = {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npz") if path.name != "outcomes.npz"
    }
    for task in tasks:
        run_task(task, device="cpu")
    assert (tasks[0].folder / "audit.png").exists()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    cells = {(cell.arm, cell.row): cell for cell in read_cells(experiment, tmp_path)}
    rows = {"a": experiment.rows, "b": ("clean", "pgd"), "c": experiment.rows}
    assert list(cells) == [(arm, row) for arm, names in rows.items() for row in names]
    pgd = cells["a", "pgd"]
    assert pgd.paper == 50.0
    assert [rate.n for rate in pgd.rates] == [30, 30]
    summary = files.read_json(tasks[0].folder / "eval.json")["evaluation"]["attacks"]["pgd"]
    assert pgd.rates[0].accuracy == summary["accuracy_after"]
    assert pgd.audited[0] == files.read_json(tasks[0].folder / "audit.json")["accuracy"]
    assert cells["a", "cw"].truth is not None
    text = table_text(experiment, list(cells.values()))
    assert text.startswith("Tiny (tab:none), per cent\narm  row")


def test_a_record_alone_does_not_answer_for_an_attack_on_members(tmp_path: Path) -> None:
    """Its settings do not tell which members were meant, so the arm trains a network of its own."""
    ball = {"kind": "pgd", "norm": "linf", "eps": 0.1, "steps": 1, "step_size": 0.1}
    spec = {**TINY["spec"], "audit": False, "attacks": {"members": {**ball, "members": 2}}}
    spec = {name: table for name, table in spec.items() if table}
    arms = [{"name": name, "title": name} for name in "ab"]
    experiment = from_tables("tiny", {**TINY, "spec": spec, "arms": arms, "rows": ["clean"], "audited": {}})
    first, second = tasks_of(experiment, tmp_path)
    run_task(first, device="cpu")
    for path in first.folder.iterdir():  # as in a clone of the repository
        if path.name not in ("record.json", "outcomes.npz"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run_task(second, device="cpu")
    assert second.is_done()
    assert second.is_trained()


def test_the_cost_of_equal_data_of_two_sizes_is_told_apart() -> None:
    small, large = (
        from_tables("tiny", {**TINY, "spec": {**TINY["spec"], "data": {"name": "digits", **more}}})
        .arms[0]
        .spec
        for more in ({"image_size": 8}, {"image_size": 16, "val_fraction": 0.5})
    )
    sizes = Sizes()
    classes, channels, size, training, test = sizes.form(small)
    assert sizes.form(large) == (classes, channels, (16, 16), 719, test)
    assert (size, training) == ((8, 8), 1295)


def test_files_that_only_an_audit_reads_are_named_before_anything_runs(tmp_path: Path) -> None:
    spec = {**TINY["spec"], "data": {"name": "gtsrb"}, "code": {"name": "43x30"}}
    spec["audit"] = {**spec["audit"], "data": "optprojtran"}
    arm = {"name": "a", "title": "A"}
    write_experiment(tmp_path / "signs.toml", {**TINY, "spec": spec, "arms": [arm]})
    words = [str(tmp_path / "signs.toml"), "--root", str(tmp_path), "--device", "cpu", "--dry-run"]
    done = CliRunner().invoke(app, ["reproduce", *words])
    assert done.exit_code == 0, done.output
    assert re.findall("ecnn: (.*) is not there yet", done.stderr) == ["gtsrb", "optprojtran"]


@pytest.mark.usefixtures("unofficial", "short_audits")
def test_black_box_rows(tmp_path: Path) -> None:
    """Signs that others attacked, audited as they are; and an attack crafted on another arm's network."""
    for index in range(12):
        pixels = np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        folder = tmp_path / "toys" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    signs = np.random.default_rng(0).random((4, 32, 32, 3), dtype=np.float32)
    ones = np.array([0, 1, 0, 1])
    (tmp_path / "optprojtran").mkdir()
    np.savez(
        tmp_path / "optprojtran/optprojtran.npz",
        x_adv=signs,
        x_clean=(255 * signs).astype(np.uint8),
        y_true=ones,
        y_target=1 - ones,
        victim=ones,
        y_clean=ones,
    )
    ball = {"norm": "linf", "eps": 0.3, "steps": 2, "step_size": 0.2}
    tables = {
        "title": "Signs",
        "paper": "tab:none",
        "rows": ["clean", "signs", "transfer"],
        "audited": {"signs": "audit"},
        "spec": {
            "data": {"name": "toys"},
            "model": {"kind": "resnet", "depth": 8, "width": 2},
            "train": {"recipe": "small", "epochs": 1, "batch_size": 4},
            "audit": {"eps": 0.1, "budget": "quick", "data": "optprojtran"},
            "attacks": {
                "signs": {"kind": "none", "data": "optprojtran"},
                "transfer": {"kind": "transformed_pgd", "source": "sub", "keep": "last", **ball},
            },
        },
        "arms": [
            {"name": "a", "title": "A"},
            {"name": "sub", "title": "Substitute", "spec": {"model": {"width": 3}}},
        ],
    }
    experiment = from_tables("signs", tables)
    task, substitute = tasks_of(experiment, tmp_path)
    assert waves([task, substitute])[0] == ([substitute], ["--stage", "train"])
    run_task(task, root=tmp_path, device="cpu")
    assert substitute.is_trained()
    assert not substitute.is_done()
    record = read_record(task.folder)
    assert record is not None
    assert task.is_done()
    model, source = load_model(task.folder), load_model(substitute.folder)
    with torch.no_grad():
        answers = model(torch.from_numpy(signs.transpose(0, 3, 1, 2))).argmax(1)
    assert record.arrays["signs.prediction"].tolist() == answers.tolist()
    assert record.audit is not None
    assert record.audit["images"] == 4
    split = load_data("toys", tmp_path).test
    crafted = TransformedPGD(**ball, keep="last")(source, *split[:], seed=0)  # type: ignore[arg-type]
    with torch.no_grad():
        assert record.arrays["transfer.prediction"].tolist() == model(crafted).argmax(1).tolist()


@pytest.mark.data("optprojtran/optprojtran.npz")
def test_the_official_signs_are_evaluated_as_they_are() -> None:
    """All 392, unrounded, with the classes of the signs and not those that they were to be taken for."""
    spec, signs = load_experiment("gtsrb").arm("multiscale").spec, load_adversarial_signs(DATA)
    model = build_model("multiscale", num_classes=43, in_channels=3, mean=0.5, width=4, hidden=8)
    attack = make_attack(spec.attacks["optprojtran"])
    images = load_test_images(spec, DATA, spec.attacks["optprojtran"]["data"])
    found = evaluate(model, images, {"signs": attack}, limit=spec.data.test_limit).outcomes["signs"]
    with torch.no_grad():
        assert found.prediction.tolist() == model(signs.images).argmax(1).tolist()
    assert found.label.tolist() == signs.labels.tolist()
    assert len(found) == 392


def test_the_command(tmp_path: Path) -> None:
    arguments = ["reproduce", "members", "--out", str(tmp_path), "--root", str(tmp_path / "empty")]
    planned = CliRunner().invoke(app, [*arguments, "--dry-run", "--arm", "ecnn10", "--arm", "ecnn30"])
    assert planned.exit_code == 0
    assert planned.stdout.startswith(
        "members/ecnn10 seed 0  trains on 9.0 M images, attacks 24.9 M passes, audit"
    )
    assert "2 of 2 runs to do" in planned.stdout
    assert "Minutes assume 2e+13 operations a second" in planned.stdout
    assert planned.stderr.startswith(f"ecnn: cifar10 is not there yet: {tmp_path}/empty/cifar-10-batches-py/")
    assert planned.stderr.count("\n") == 1  # other datasets are not asked for
    neither = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path)])
    assert neither.exit_code == 2
    assert "or --all" in neither.stderr
    hopeless = {**TINY, "arms": [{"name": "a", "title": "A", "spec": {"model": {"depth": 9}}}]}
    write_experiment(tmp_path / "tiny.toml", hopeless)
    refused = CliRunner().invoke(app, ["reproduce", str(tmp_path / "tiny.toml"), "--dry-run"])
    assert refused.exit_code == 2
    assert "depth" in refused.stderr
    empty = CliRunner().invoke(app, [*arguments, "--table"])
    assert "ecnn30  clean     -" in empty.stdout
    wrong = CliRunner().invoke(app, [*arguments, "--arm", "ecnn11"])
    assert wrong.exit_code == 2
    assert "did you mean 'ecnn1" in wrong.stderr
    wrong = CliRunner().invoke(app, [*arguments, "--stage", "attak"])
    assert "did you mean 'attack'" in wrong.stderr


def write_experiment(path: Path, tables: dict[str, Any]) -> None:
    """As TOML, with the arms as an array of tables, which `files.write_toml` is not for."""
    files.write_toml(path, {name: value for name, value in tables.items() if name != "arms"})
    arms = []
    for arm in tables["arms"]:
        files.write_toml(path.with_suffix(".arm"), {"arms": arm})
        arms.append(path.with_suffix(".arm").read_text().replace("[arms]", "[[arms]]"))
    path.write_text("\n".join([path.read_text(), *arms]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all experiments, with the first run of TINY."""
    out = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        shorten_audits(patch)
        run_task(tasks_of(from_tables("tiny", TINY), out)[0], device="cpu")
    return out


@pytest.fixture(scope="module")
def unaudited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file of an experiment without an audit whose second arm fails, and a folder with its first run.

    Audits by other processes are asked for in tests/test_evaluation_cluster.py.
    """
    path, out = tmp_path_factory.mktemp("file") / "tiny.toml", tmp_path_factory.mktemp("unaudited")
    spec = {name: table for name, table in TINY["spec"].items() if name != "audit"}
    too_large = {"name": "b", "title": "B", "spec": {"train": {"batch_size": 100_000}}}
    tables = {**TINY, "spec": spec, "arms": [{"name": "a", "title": "A"}, too_large]}
    write_experiment(path, tables)
    assert load_experiment(str(path)) == from_tables("tiny", tables)
    run_task(tasks_of(load_experiment(str(path)), out, arms=["a"])[0], device="cpu")
    return path, out


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"attacks": {"pgd": {"eps": 0.05}}}, {"pgd"}),
        ({"attacks": {"pgd": {"limit": 20}}}, {"pgd"}),
        ({"attacks": {"strong": {"limit": 9}}}, {"cw"}),
        ({"train": {"epochs": 2}}, {"clean", "pgd", "cw"}),
        ({"audit": {"eps": 0.002}}, {"pgd"}),
    ],
)
def test_numbers_of_other_settings_are_neither_printed_nor_replaced(
    tmp_path: Path, finished: Path, changes: dict[str, Any], rows: set[str]
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    own = from_tables("tiny", TINY)
    assert not any(cell.is_of_other_settings for cell in read_cells(own, tmp_path))
    arms = [{"name": "a", "title": "A", "spec": changes}]
    other = from_tables("tiny", {**TINY, "arms": arms})
    cells = {cell.row: cell for cell in read_cells(other, tmp_path)}
    assert {row for row, cell in cells.items() if "of other settings" in cell.flags} == rows
    assert "of other settings" in table_text(other, list(cells.values()))
    if "audit" in changes:
        assert (cells["pgd"].ours is None, cells["pgd"].truth) == (False, None)
    elif "strong" not in changes.get("attacks", {}):
        assert all(cells[row].ours is None for row in rows)
    before = (tmp_path / "tiny" / "a" / "0" / "record.json").read_bytes()
    with pytest.raises(InputError, match="holds numbers of other settings"):
        run_task(tasks_of(other, tmp_path)[0], device="cpu")
    assert (tmp_path / "tiny" / "a" / "0" / "record.json").read_bytes() == before


def test_an_attack_that_is_asked_for_later_is_added(tmp_path: Path, finished: Path) -> None:
    """That is no other setting of what is there: its numbers stay."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    more = {"kind": "fgsm", "norm": "linf", "eps": 0.1, "limit": 5}
    tables = {**TINY, "arms": [{"name": "a", "title": "A", "spec": {"attacks": {"more": more}}}]}
    (task,) = tasks_of(from_tables("tiny", tables), tmp_path)
    before = facts_of(task.folder)
    run_task(task, device="cpu")
    after = facts_of(task.folder)
    assert set(after["attacks"]) == {*before["attacks"], "more"}
    assert before["outcomes"].items() <= after["outcomes"].items()
    assert (before["test"], before["audits"]) == (after["test"], after["audits"])


@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_a_damaged_record_is_written_again_when_it_is_gone(
    tmp_path: Path, finished: Path, content: bytes
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    task = tasks_of(from_tables("tiny", TINY), tmp_path)[0]
    before = facts_of(task.folder)
    for name in ("record.json", "outcomes.npz"):
        (task.folder / name).write_bytes(content)
        with pytest.raises(InputError, match=r"Delete record\.json there"):
            run_task(task, device="cpu")
        (task.folder / "record.json").unlink()
        (task.folder / "times.json").write_bytes(content)  # on which no number hangs
        run_task(task, device="cpu")
        assert facts_of(task.folder) == before


def test_outcomes_belong_to_their_record(tmp_path: Path, finished: Path) -> None:
    """Those of another run are refused; others beside them are what a kill before the next record leaves."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    folder = tasks_of(from_tables("tiny", TINY), tmp_path)[0].folder
    arrays, head = files.read_arrays(folder / "outcomes.npz")
    more = {f"more.{column}": arrays[f"strong.{column}"] for column in ("prediction", "l2")}
    files.write_arrays(folder / "outcomes.npz", {**arrays, **more}, head)
    record = read_record(folder)
    assert record is not None
    assert record.rate("more") == record.rate("strong")
    changed = arrays["pgd.prediction"].copy()
    changed[0] += 1
    files.write_arrays(folder / "outcomes.npz", {**arrays, "pgd.prediction": changed}, head)
    with pytest.raises(InputError, match="does not belong to"):
        read_record(folder)


def test_one_arm_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    spec = {name: table for name, table in TINY["spec"].items() if name not in ("audit", "attacks")}
    quick = {"title": "T", "paper": "tab:none", "rows": ["clean"], "spec": spec}
    arms = [
        {"name": "diverges", "title": "A", "spec": {"train": {"lr": 1e6, "epochs": 2}}},
        {"name": "good", "title": "B"},
    ]
    write_experiment(tmp_path / "tiny.toml", {**quick, "arms": arms})
    (tmp_path / "sub").mkdir()
    write_experiment(tmp_path / "sub" / "tiny.toml", {**quick, "arms": arms[1:]})
    words = ["reproduce", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 4
    assert "tiny/diverges seed 0: " in made.stderr
    assert (tmp_path / "out" / "tiny" / "good" / "0" / "record.json").exists()
    again = CliRunner().invoke(app, [*words, "--seed", "7"])
    assert again.exit_code == 2
    assert "no arm that is asked for has the seed 7" in again.stderr
    twice = CliRunner().invoke(app, [*words[:2], str(tmp_path / "sub" / "tiny.toml"), *words[2:]])
    assert twice.exit_code == 2
    assert "are called 'tiny'" in twice.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whoever_ends_several_processes_ends_them_all(tmp_path: Path, number: signal.Signals) -> None:
    told = (
        "import os, pathlib, sys, time; path = pathlib.Path(sys.argv[1]); part = path.with_suffix('.part'); "
        "part.write_text(str(os.getpid())); part.rename(path); time.sleep(60)"
    )
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom ecnn.pipeline.spreading import _run_here\n"
        f"_run_here([[sys.executable, '-c', {told!r}, path] for path in sys.argv[1:]], 2, print)\n"
    )
    paths = [tmp_path / name for name in ("first", "second", "third")]
    started = start(*map(str, paths), program=program)
    for path in paths[:2]:
        wait_for(path)
    os.kill(started.pid, number)
    assert started.wait().returncode != 0
    for path in paths[:2]:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert not paths[2].exists()


def test_costs_are_those_of_what_is_left(tmp_path: Path, finished: Path) -> None:
    """Images and passes as they are counted while running; what two arms share, or what is done, costs nothing more."""
    experiment = from_tables("tiny", {**TINY, "arms": TINY["arms"][:2]})
    tasks = tasks_of(experiment, tmp_path, seeds=[0])
    first, second = estimate_tasks(tasks)
    train, pgd, cw, strong, audited = first.parts
    assert (train.name, train.images, train.passes) == ("train", 1293, 3 * 1293)
    assert (pgd.images, pgd.passes) == (30, 30 * (2 + 6 + 5))
    assert (cw.images, strong.images, audited.images) == (10, 10, 8)
    assert second.repeats == ("train", "pgd", "strong", "audit")
    assert second.parts == ()
    assert "(train, pgd, strong, audit from a run before)" in cost_text([first, second])
    tasks = tasks_of(experiment, finished, seeds=[0])
    found = files.read_json(tasks[0].folder / "audit.json")["stages"]
    assert sum(stage["forwards"] + stage["backwards"] for stage in found) <= audited.passes
    assert [cost.is_done for cost in estimate_tasks(tasks)] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", experiments())
def test_every_shipped_experiment_runs_in_its_quick_form(name: str, tmp_path: Path) -> None:
    """Every network is trained and every attack made, as --quick does on digits but on fewer; one is audited."""
    whole = quick_form(load_experiment(name))
    assert whole.name == f"{name}-quick"
    arms = (dataclasses.replace(arm, spec=arm.spec.changed({"data.val_fraction": 0.8})) for arm in whole.arms)
    experiment = dataclasses.replace(whole, arms=tuple(arms))
    for task in tasks_of(experiment, tmp_path):
        stages = ("train", "attack", "audit") if task.arm.name == "multiscale" else ("train", "attack")
        run_task(task, device="cpu", stages=stages)
        record = read_record(task.folder)
        assert record is not None
        assert {*record.facts["attacks"], *record.transfers} == set(task.spec.attacks)
        assert task.is_done() == ("audit" in stages or task.spec.audit is None)
    assert all(cell.rates for cell in read_cells(experiment, tmp_path))


@pytest.mark.parametrize("name", experiments())
def test_every_attack_of_a_shipped_experiment_can_be_made(name: str) -> None:
    for arm in load_experiment(name).arms:
        for attack, table in arm.spec.attacks.items():
            assert make_attack({"kind": attack, **table})


@pytest.mark.usefixtures("short_audits")
def test_a_stronger_audit_is_added_and_the_older_value_stays(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = from_tables("tiny", {**TINY, "arms": TINY["arms"][:1]})
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    task = tasks_of(experiment, tmp_path)[0]
    assert not audit_again(task, device="cpu")  # it is of the present version
    before = {path: path.read_bytes() for path in task.folder.rglob("*") if path.is_file()}
    for room in ("auditing.auditor", "pipeline.reproducing"):
        monkeypatch.setattr(f"ecnn.{room}.AUDIT_VERSION", 7)
    run_task(task, device="cpu")  # a finished number stays, although the audit has become stronger
    assert audit_again(task, device="cpu")
    assert not audit_again(task, device="cpu")
    record = read_record(task.folder)
    assert record is not None
    assert [entry["version"] for entry in record.facts["audits"]] == [AUDIT_VERSION, 7]
    assert record.facts["audits"][0] == json.loads(before[task.folder / "record.json"])["audits"][0]
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert {path.name for path in changed} <= {"record.json", "times.json"}
    cells = read_cells(experiment, tmp_path)
    assert [cell.versions for cell in cells] == [(), (7,), ()]
    assert "audit 7" in table_text(experiment, cells)


def test_a_record_of_the_same_network_will_do(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only records are left of another experiment, an arm that repeats one of its networks costs nothing."""
    task = tasks_of(from_tables("tiny", TINY), tmp_path)[0]
    for name in ("record.json", "outcomes.npz"):
        files.copy(finished / task.folder.relative_to(tmp_path) / name, task.folder / name)
    arms = [{"name": "again", "title": "A", "spec": {"attacks": {"cw": False}}}]
    other = {**TINY, "rows": ["clean", "pgd"], "audited": {"pgd": "audit"}, "arms": arms}
    twin = tasks_of(from_tables("other", other), tmp_path)[0]
    run_task(twin, device="cpu")
    assert twin.is_done()
    assert sorted(path.name for path in twin.folder.iterdir()) == ["outcomes.npz", "record.json"]
    first, second = read_record(task.folder), read_record(twin.folder)
    assert first is not None
    assert second is not None
    assert set(second.facts["attacks"]) == {"pgd", "strong"}
    assert np.array_equal(first.arrays["pgd.prediction"], second.arrays["pgd.prediction"])
    assert second.audit == first.audit
    monkeypatch.setattr("ecnn.pipeline.reproducing.AUDIT_VERSION", 9)
    with pytest.raises(InputError, match="no network to audit again"):
        audit_again(twin, device="cpu")
    facts = json.loads((twin.folder / "record.json").read_text())
    facts["audits"][-1]["accuracy"] = 0.0
    files.write_json(twin.folder / "record.json", facts)
    assert not audit_again(twin, device="cpu")  # no audit finds less than nothing


def test_transfer_between_members_is_measured_recorded_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small network in the place of the shipped experiment's: its matrix is that of `member_transfer`."""
    attack = {"kind": "pgd", "members": 3, **ball(0.2)}
    spec = {name: table for name, table in TINY["spec"].items() if name != "audit"}
    spec["attacks"] = {"members": attack}
    tables = {"title": "T", "paper": "fig:transfer", "rows": ["clean"], "spec": spec}
    experiment = from_tables("member_transfer", {**tables, "arms": [{"name": "own", "title": "A"}]})
    task = tasks_of(experiment, tmp_path)[0]
    run_task(task, device="cpu")
    assert task.is_done()
    record = read_record(task.folder)
    assert record is not None
    found = TransferMatrix.from_json(record.transfers["members"])
    model, split = load_model(task.folder), load_data("digits").test
    again = member_transfer(model, split, make_attack(attack), limit=30, seed=0, members=range(3))
    assert np.array_equal(found.counts, again.counts)
    assert np.array_equal(found.clean_counts, again.clean_counts)
    shipped = {name: load_experiment(name) for name in experiments()}
    monkeypatch.setattr(
        "ecnn.pipeline.reporting.load_experiment", {**shipped, "member_transfer": experiment}.__getitem__
    )
    page = results_page(tmp_path, figures="images")
    assert f"| member 1 | {100 * found.accuracy[1, 0]:.1f} |" in page
    assert "![T](images/member_transfer.png)" in page
    assert [path.name for path in draw_results(tmp_path, tmp_path / "images")] == ["member_transfer.png"]


def ball(eps: float) -> dict[str, Any]:
    return {"norm": "linf", "eps": eps, "steps": 3, "step_size": eps / 2, "keep": "last"}


def facts_of(folder: Path) -> dict[str, Any]:
    """A record without what may differ between two runs on one machine: times."""
    return {name: value for name, value in files.read_json(folder / "record.json").items() if name != "times"}


def when_begun(paths: Iterable[Path]) -> dict[Path, str]:
    """When the outcomes in these files began to be computed: another time would be another computation."""
    return {path: Outcomes.load(path).about["started"] for path in paths}


@pytest.mark.slow
def test_a_killed_reproduction_goes_on_and_changes_no_number(tmp_path: Path) -> None:
    """Killed while training, attacking and taking over; whatever was finished stays as it was."""
    spec = {
        name: table for name, table in TINY["spec"].items() if name != "audit"
    }  # tests/test_auditing.py kills one
    spec["train"] = {**spec["train"], "epochs": 3}
    arms = [{**arm, "seeds": [0]} for arm in TINY["arms"][:2]]
    tables = {**TINY, "spec": spec, "arms": arms}
    write_experiment(tmp_path / "tiny.toml", tables)
    command = ("reproduce", str(tmp_path / "tiny.toml"), "--device", "cpu", "--out", str(tmp_path / "killed"))
    first = tmp_path / "killed/tiny/a/0"
    marks = [
        first / "last.safetensors",
        first / "eval/pgd.npz",
        first.parents[1] / "b/0/spec.toml",
    ]
    stood: dict[Path, str] = {}
    for mark in marks:
        process = start(*command)
        wait_for(mark)
        process.kill()
        assert process.wait().returncode == -signal.SIGKILL, f"it ended before {mark.name} was there"
        assert when_begun(stood) == stood
        stood = when_begun((tmp_path / "killed").glob("*/*/*/eval/[!.]*.npz"))
    assert run(*command).returncode == 0
    assert when_begun(stood) == stood
    for task in tasks_of(load_experiment(str(tmp_path / "tiny.toml")), tmp_path / "whole"):
        run_task(task, device="cpu")
        killed = tmp_path / "killed" / task.folder.relative_to(tmp_path / "whole")
        assert facts_of(killed) == facts_of(task.folder)
        whole, other = read_record(task.folder), read_record(killed)
        assert whole is not None
        assert other is not None
        assert whole.arrays.keys() == other.arrays.keys()
        for name, values in whole.arrays.items():
            assert np.array_equal(values, other.arrays[name])


@pytest.mark.slow
def test_ray_does_the_same(tmp_path: Path, unaudited: tuple[Path, Path]) -> None:
    """Two workers of a local Ray: the record of a task is that of this process, and a run that fails is named."""
    ray = pytest.importorskip("ray")
    path, alone = unaudited
    experiment = load_experiment(str(path))
    tasks = tasks_of(experiment, tmp_path / "two")
    arguments = ["--out", str(tmp_path / "two"), "--device", "cpu"]
    try:
        failed = run_tasks(tasks, {"tiny": str(path)}, jobs=2, arguments=arguments, cluster="ray")
        assert ray.cluster_resources()["CPU"] == 2
    finally:
        ray.shutdown()
    assert [task.arm.name for task in failed] == ["b"]
    assert "larger than the training set" in (tasks[1].folder / "log.txt").read_text()
    assert facts_of(tasks[0].folder) == facts_of(alone / "tiny/a/0")


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    tasks = tasks_of(from_tables("tiny", TINY), tmp_path)
    with pytest.raises(InputError, match=r"pip install .ecnn\[cluster\]"):
        run_tasks(tasks, {"tiny": "tiny.toml"}, jobs=2, arguments=[], cluster="ray")


def test_repeated_networks_wait_for_the_first_arm(tmp_path: Path) -> None:
    """Else two processes would train the same network at a time."""
    tasks = tasks_of(from_tables("tiny", TINY), tmp_path)
    assert [[task.folder.parent.name + task.folder.name for task in wave] for wave, _ in waves(tasks)] == [
        ["a0", "a1"],
        ["b0", "c0"],
    ]


@pytest.mark.slow
def test_several_processes_do_the_same(tmp_path: Path, unaudited: tuple[Path, Path]) -> None:
    """The record of a process of its own is that of this one; a run that fails is named and does not stop another."""
    path, alone = unaudited
    experiment = load_experiment(str(path))
    places = (str(path), "--out", str(tmp_path / "two"))
    done = run("reproduce", *places, "--device", "cpu", "--jobs", "2")
    assert done.returncode == 4
    assert "tiny/b seed 0 failed" in done.stderr
    assert "larger than the training set" in (tmp_path / "two/tiny/b/0/log.txt").read_text()
    assert done.stdout.strip() == table_text(experiment, read_cells(experiment, alone)).strip()
    assert facts_of(tmp_path / "two/tiny/a/0") == facts_of(alone / "tiny/a/0")


def test_the_page_is_what_the_records_say(tmp_path: Path) -> None:
    """docs/results.md is never edited by hand: python tools/make_results.py."""
    page = results_page(RESULTS, figures="images/results")
    assert page == (RESULTS.parent / "docs/results.md").read_text()
    for title, anchor in re.findall(r"^\| \[(.+)\]\(#(.+?)\)", page, re.MULTILINE):
        assert f"\n## {title}\n" in page
        assert anchor == title.lower().replace(" ", "-")
    overview = page[: page.index("\n## ")]
    assert "All 84 accuracies of the paper are measured." in overview
    # The tables below say the same: a row with a number of the paper is measured, or it would not be there.
    rows = [line.split(" | ") for line in page[len(overview) :].splitlines() if line.startswith("| ")]
    measured = [row for row in rows if len(row) == 8 and row[2] not in ("paper", "-")]
    assert len(measured) == 84
    clean = [float(row[5]) for row in measured if row[1] == "clean"]
    attacked = [float(row[5]) for row in measured if row[1] != "clean"]
    audited = [float(row[6].split()[0]) for row in measured if row[1] != "clean"]
    assert f"{sum(abs(points) <= 2.5 for points in clean)} of {len(clean)} are within 2.5 points" in overview
    below, above = sum(points < -5 for points in attacked), sum(points > 5 for points in attacked)
    assert f"of {len(attacked)}, {below} are more than 5 points below" in overview
    assert f"and {above} more than 5 points above" in overview
    assert f"{sum(value <= 1 for value in audited)} of {len(audited)} are at most 1 %" in overview
    assert (
        f"{sum('L2' in row[6] for row in measured)} of the {len(audited)} are of attacks without a bound"
        in overview
    )
    # Clean accuracy, PGD and C&W of 30 members on CIFAR-10 stand in four tables, PGD of 10 members in two.
    assert f"{84 - 3 * 3 - 1} of them are different" in overview
    few = results_page(tmp_path / "none", figures="images/results")
    assert "Of the paper's 84 accuracies 0 are measured." in few
    drawn = draw_results(RESULTS, tmp_path)
    committed = RESULTS.parent / "docs/images/results"
    assert sorted(path.name for path in drawn) == sorted(path.name for path in committed.iterdir())


def test_the_followed_attack_says_what_the_page_says() -> None:
    """On the scores: the margin shrinks and keeps its sign, the difference grows. On the members: it changes sign."""
    found = files.read_json(RESULTS / "common_level.json")
    scores, members = found["scores"], found["linear"]
    assert all(value > 0 for value in scores["margin"])
    assert scores["margin"][-1] < scores["margin"][0] / 50
    assert scores["level"][-1] > 8 * scores["level"][0]
    assert scores["difference"][-1] > scores["difference"][0]
    assert scores["accuracy"][-1] > scores["accuracy"][0]
    assert scores["bits"][-1] > scores["bits"][0]
    assert members["difference"][3] < 0
    assert members["accuracy"][6] == members["accuracy"][-1] == 0


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("*/*/*")), ids=lambda path: "-".join(path.parts[-3:]))
def test_committed_results_belong_to_their_experiment(folder: Path) -> None:
    """Each record is of the arm whose folder it lies in, asks for what the arm asks, and holds all its attacks."""
    experiment = load_experiment(folder.parts[-3])
    arm = experiment.arm(folder.parts[-2])
    record = read_record(folder)
    assert record is not None
    spec = arm.spec_for(int(folder.name))
    assert record.facts["spec"]["seed"] == spec.seed
    for name, value in spec.model.items():
        assert record.facts["spec"]["model"][name] == value
    trained = record.facts["spec"]["train"]
    for name, value in spec.train.items():
        # A record spells out what an attack or an objective was not told.
        told = {**trained[name], **value} if isinstance(value, Mapping) else value
        assert name == "recipe" or trained[name] == told
    assert {*record.facts["attacks"], *record.transfers} == set(spec.attacks)
    if PARAMETERS in arm.paper:
        assert record.facts["parameters"] == arm.paper[PARAMETERS]
    clean = record.rate("clean")
    assert clean is not None
    assert clean.n == FORMS[spec.data.name].test
    assert covers(record, spec)
    assert not covers(record, dataclasses.replace(spec, seed=spec.seed + 1))
    assert not covers(record, spec.changed({"train.epochs": 7}))
    assert not covers(record, spec.changed({"attacks.pgd.steps": 7}))


def test_what_attacks_have_in_common_is_written_once(tmp_path: Path) -> None:
    """Labels of the same images; those of other images, and predictions that are alike by chance, stay."""

    def column(kind: str, *values: int) -> np.ndarray:
        return np.array(values).astype({"label": "uint16", "l2": "float16"}.get(kind, "int16"))

    arrays = {
        f"{attack}.{kind}": column(kind, *values)
        for attack, labels in {
            "short": (3, 1),
            "long": (3, 1, 2),
            "signs": (2, 2),
            "again": (3, 1, 2),
        }.items()
        for kind, values in {
            "label": labels,
            "clean_prediction": labels,
            "prediction": labels,
            "l2": labels,
        }.items()
    }
    committed = next(RESULTS.glob("*/*/*"))
    facts = files.read_json(committed / "record.json")
    save_record(tmp_path, Record(facts, arrays))
    kept, _ = files.read_arrays(tmp_path / "outcomes.npz")
    gone = {f"{attack}.{kind}" for attack in ("short", "again") for kind in ("label", "clean_prediction")}
    assert set(arrays) - set(kept) == gone
    found = read_record(tmp_path)
    assert found is not None
    assert set(found.arrays) == set(arrays)
    assert all(np.array_equal(found.arrays[name], values) for name, values in arrays.items())


@pytest.mark.parametrize("name", ["pgd.label", "pgd.l2", "pgd.other"])
def test_a_record_with_columns_of_another_kind_is_refused(name: str, tmp_path: Path) -> None:
    committed = next(RESULTS.glob("*/*/*"))
    files.copy(committed / "record.json", tmp_path / "record.json")
    arrays, header = files.read_arrays(committed / "outcomes.npz")
    files.write_arrays(tmp_path / "outcomes.npz", {**arrays, name: np.zeros(3)}, header)
    with pytest.raises(InputError, match=f"outcomes.npz is damaged: '{name}' is not a column"):
        read_record(tmp_path)
