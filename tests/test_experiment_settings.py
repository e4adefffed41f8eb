"""No number of other settings is ever printed or kept: what reproductions compare before they go on."""

from __future__ import annotations

import dataclasses
import io
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from toys import shorten_audits

from ecnn import files, progress_bar
from ecnn.errors import InputError
from ecnn.experiment import Experiment, from_tables, quick_form
from ecnn.pipeline import Task, audit_again, estimate_tasks, read_cells, run_task, tasks_of
from ecnn.pipeline.recording import (
    Record,
    covers,
    made_otherwise,
    place_of,
    read_record,
    settings_of,
)
from ecnn.progress import Milestone

BALL = {"norm": "linf", "eps": 0.1, "steps": 1, "step_size": 0.1, "keep": "last"}
SPEC: dict[str, Any] = {
    "data": {"name": "digits", "test_limit": 10},
    "code": {"name": "10x10"},
    "model": {"kind": "ecnn", "width": 4, "depth": 8, "batch_norm": True},
    "train": {"recipe": "small", "epochs": 1, "lr": 0.01, "ema": 0.5},
    "audit": {"eps": 0.001, "budget": "quick", "limit": 8},
    "attacks": {"pgd": BALL, "first/two": {"kind": "pgd", **BALL, "members": 2}},
}


def experiment(arms: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any) -> Experiment:
    """SPEC with tables replaced or, where None, removed; one arm without changes, or those given."""
    spec = {name: table for name, table in {**SPEC, **changes}.items() if table is not None}
    columns = [
        {"name": name, "title": name, **({"spec": own} if own else {})}
        for name, own in (arms or {"a": {}}).items()
    ]
    tables = {"title": "Tiny", "paper": "tab:none", "rows": ["clean", "pgd"], "audited": {"pgd": "audit"}}
    return from_tables("tiny", {**tables, "spec": spec, "arms": columns})


def only_task(made: Experiment, out: Path) -> Task:
    return tasks_of(made, out)[0]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all experiments with the finished run of SPEC."""
    out = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        shorten_audits(patch)
        run_task(only_task(experiment(), out), device="cpu")
    return out


@pytest.fixture
def out(kept: Path, tmp_path: Path) -> Path:
    """A copy of `kept`."""
    return Path(shutil.copytree(kept, tmp_path / "out"))


def without(table: str, *names: str) -> dict[str, Any]:
    return {table: {name: value for name, value in SPEC[table].items() if name not in names}}


ATTACKS = SPEC["attacks"]
CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    (without("model", "batch_norm"), ["network"]),
    (without("train", "ema"), ["network"]),
    ({"train": {**SPEC["train"], "attack": {"eps": 0.1, "steps": 1}}}, ["network"]),
    ({"attacks": {**ATTACKS, "pgd": {**BALL, "eps": 0.2}}}, ["pgd"]),
    ({"attacks": {**ATTACKS, "pgd": {**BALL, "limit": 5}}}, ["pgd"]),
    ({"attacks": {**ATTACKS, "pgd": {**BALL, "data": "mnist"}}}, ["pgd"]),
    ({"attacks": {**ATTACKS, "first/two": {**ATTACKS["first/two"], "members": 3}}}, ["first/two"]),
    ({"attacks": {**ATTACKS, "first/two": {**ATTACKS["first/two"], "eps": 0.01}}}, ["first/two"]),
    ({"audit": {**SPEC["audit"], "claim": 0.99}}, ["audit"]),
    ({"audit": {**SPEC["audit"], "data": "mnist"}}, ["audit"]),
]


@pytest.mark.parametrize(
    ("changes", "others"), CHANGES, ids=[f"{n}-{o[0]}" for n, (_, o) in enumerate(CHANGES)]
)
def test_a_setting_that_is_changed_added_or_removed_is_seen(
    out: Path, changes: dict[str, Any], others: list[str]
) -> None:
    """In the record by the table, in the folder by a run, also where the record is gone, and by a later audit."""
    changed = experiment(**changes)
    task, record = only_task(changed, out), read_record(only_task(changed, out).folder)
    assert record is not None
    assert made_otherwise(record, task.spec) == others
    assert not task.is_done()
    cells = {cell.row: cell for cell in read_cells(changed, out)}
    assert any(cell.is_of_other_settings for cell in cells.values()) or others == ["first/two"]
    if "network" in others:
        assert not cells["clean"].rates
    before = (task.folder / "record.json").read_bytes()
    for go in (run_task, audit_again):
        with pytest.raises(InputError, match=rf"numbers of other settings \({others[0]}\)"):
            go(task, device="cpu")
    assert (task.folder / "record.json").read_bytes() == before
    (task.folder / "record.json").unlink()
    stage = "audit" if others == ["audit"] else "attack"
    with pytest.raises(InputError, match=r"other settings|choose another folder"):
        run_task(task, device="cpu", stages=[stage])
    assert not (task.folder / "record.json").exists()


@pytest.mark.parametrize("settings", [[], {"attacks": {"pgd": 1}}, {"network": 3}])
def test_a_record_with_settings_of_another_form_is_damaged(out: Path, settings: Any) -> None:
    folder = only_task(experiment(), out).folder
    facts = files.read_json(folder / "record.json")
    files.write_json(folder / "record.json", {**facts, "settings": settings})
    with pytest.raises(InputError, match=r"record\.json.*settings"):
        read_record(folder)


def test_what_only_spells_the_same_differently_is_done(out: Path) -> None:
    made = experiment(attacks={**ATTACKS, "pgd": {"kind": "pgd", **BALL, "eps": "0.1", "limit": 10}})
    record = read_record(only_task(made, out).folder)
    assert record is not None
    assert covers(record, only_task(made, out).spec)


def test_nothing_is_attacked_or_audited_before_it_is_trained(tmp_path: Path) -> None:
    """A network that is only half trained would give its numbers to the finished one."""
    task = only_task(experiment(), tmp_path)
    for stage in ("attack", "audit"):
        with pytest.raises(InputError, match="has no trained network yet: train it first"):
            run_task(task, device="cpu", stages=[stage])


def test_a_record_without_its_network_is_kept(out: Path) -> None:
    """As in a clone of the repository: it answers what it holds, and more is refused instead of trained anew."""
    folder = only_task(experiment(), out).folder
    for path in folder.iterdir():
        if path.name not in ("record.json", "outcomes.npz"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = (folder / "record.json").read_bytes()
    fewer = experiment(attacks={"pgd": BALL})
    assert only_task(fewer, out).is_done()
    more = only_task(experiment(attacks={**ATTACKS, "more": {"kind": "pgd", **BALL}}), out)
    with pytest.raises(InputError, match="has a record but no network to attack"):
        run_task(more, device="cpu")
    assert (folder / "record.json").read_bytes() == before


def test_an_audit_of_another_radius_is_not_the_audit_of_the_record(out: Path) -> None:
    """Not even as the newest file of the folder."""
    task = only_task(experiment(attacks={"pgd": BALL}), out)
    audit = files.read_json(task.folder / "audit.json")
    files.write_json(task.folder / "audits" / "9" / "audit.json", {**audit, "eps": 0.2, "accuracy": 0.0})
    (task.folder / "record.json").unlink()
    run_task(task, device="cpu")
    record = read_record(task.folder)
    assert record is not None
    assert record.audit is not None
    assert record.audit["eps"] == 0.001


def test_an_older_record_is_compared_by_its_parts(out: Path) -> None:
    """Records made before asked.json know the resolved spec: a recipe entry that is not asked for any more is seen."""
    task = only_task(experiment(attacks={"pgd": BALL}), out)
    record = read_record(task.folder)
    assert record is not None
    facts = {name: value for name, value in record.facts.items() if name not in ("settings", "asked")}
    old = Record({**facts, "attacks": {"pgd": facts["attacks"]["pgd"]}}, record.arrays)
    assert covers(old, task.spec)
    for changes in (without("train", "ema"), {"train": {**SPEC["train"], "attack": {"eps": 0.1}}}):
        asked = only_task(experiment(**{"attacks": {"pgd": BALL}, **changes}), out).spec
        assert made_otherwise(old, asked) == ["network"]


def test_a_members_attack_with_a_slash_in_its_name_ends(kept: Path) -> None:
    task = only_task(experiment(), kept)
    assert task.is_done()
    record = read_record(task.folder)
    assert record is not None
    assert list(record.transfers) == ["first/two"]


def test_outcomes_on_a_folder_of_images_stay_in_the_run_folder(tmp_path: Path) -> None:
    """Whatever the path: nothing is written into the images, and no two folders are mistaken for each other."""
    run = tmp_path / "run"
    places = [
        place_of(run, data) for data in ("optprojtran", "/data/signs", "other/signs", "../signs", "signs")
    ]
    assert places[0] == run / "on" / "optprojtran"
    assert len(set(places)) == 5
    assert all(place.parent == run / "on" for place in places)
    assert place_of(run, None) == run


def test_a_damaged_neighbour_stops_nothing(out: Path) -> None:
    """Neither an arm that looks for a network to take over, nor the question what is done."""
    first = only_task(experiment(), out)
    (first.folder / "record.json").write_text("{")
    files.write_text(out / "other" / "project" / "0" / "DONE", "")
    files.write_text(out / "other" / "project" / "1" / "record.json", "not ours")
    assert not first.is_done()
    both = experiment(arms={"a": {}, "b": {}}, attacks={"pgd": BALL}, audit=None)
    second = tasks_of(both, out)[1]
    run_task(second, device="cpu")
    assert second.is_done()
    cells = {(cell.arm, cell.row): cell for cell in read_cells(both, out)}
    assert cells["b", "clean"].rates
    assert cells["a", "clean"].flags == ("a damaged record",)


def test_progress_that_nobody_reads_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    with progress_bar("run") as show:
        show(1, 2, Milestone("epoch 1"))


def test_a_spec_without_a_kind_has_a_cost_and_a_quick_form(tmp_path: Path) -> None:
    made = experiment(model={"width": 4, "depth": 8})
    assert estimate_tasks(tasks_of(made, tmp_path))[0].passes > 0
    assert quick_form(made).arms[0].spec.model["width"] == 4
    wrong = quick_form(experiment(train={**SPEC["train"], "attack": {"eps": 0.1, "steps": "5"}}))
    with pytest.raises(InputError, match="steps"):
        estimate_tasks(tasks_of(wrong, tmp_path))


@pytest.mark.parametrize("name", ["..", "", "-x", "a/b"])
def test_an_experiment_that_names_no_folder_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="it names a folder"):
        dataclasses.replace(experiment(), name=name)


def test_audited_values_of_different_images_are_not_put_together() -> None:
    both = {"pgd": BALL, "signs": {"kind": "pgd", **BALL, "data": "mnist"}}
    tables = {
        "title": "T",
        "paper": "tab:none",
        "rows": ["clean", "pgd"],
        "arms": [{"name": "a", "title": "A"}],
    }
    spec = {**SPEC, "attacks": both}
    with pytest.raises(InputError, match=r"audited\.pgd: pgd, signs are made on different images"):
        from_tables("tiny", {**tables, "spec": spec, "audited": {"pgd": ["pgd", "signs"]}})
    with pytest.raises(InputError, match=r"audited\.clean"):
        from_tables("tiny", {**tables, "spec": spec, "audited": {"clean": "nonsense"}})
    with pytest.raises(InputError, match="an attack cannot be called 'audit'"):
        experiment(attacks={"pgd": BALL, "audit": {"kind": "pgd", **BALL}})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"audit": {**SPEC["audit"], "eps": 8}}, "eps"),
        ({"code": {"code_length": 10, "objective": "energi"}}, "did you mean 'energy'"),
        ({"code": {"code_length": 10, "steps": -1}}, r"code\.steps"),
        ({"code": {"code_length": 10, "seed": -1}}, r"code\.seed"),
        ({"data": {"name": "digits", "val_fraction": 2.0}}, r"data\.val_fraction"),
    ],
)
def test_mistakes_are_told_when_the_file_is_read(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        experiment(**changes)


def test_settings_tell_the_parts_apart() -> None:
    spec = experiment().arms[0].spec
    found = settings_of(spec)
    assert set(found) == {"network", "attacks", "audit"}
    assert set(found["attacks"]) == {"pgd", "first/two"}
    seeded = settings_of(dataclasses.replace(spec, seed=1))
    assert seeded["network"] != found["network"]
    assert seeded["attacks"]["pgd"] != found["attacks"]["pgd"]
