"""Folders for other collections of models: Hugging Face's layout, RobustBench's entry."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import TINY, Linear
from typer.testing import CliRunner

import ecnn
from ecnn import files, runs
from ecnn.cli import app
from ecnn.data import load_data
from ecnn.errors import DiskError, InputError
from ecnn.exporting import export_model
from ecnn.hub import CARD, PretrainedModel, export_folder
from ecnn.pipeline import train_run, write_report
from ecnn.predicting import load_classifier
from ecnn.serving.subject import load_subject
from ecnn.spec import Spec

pytestmark = pytest.mark.usefixtures("one_thread")
THREE = {"config.json", "model.safetensors", "README.md"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run on digits with an audit of seconds."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    small = {"model": {"width": 2, "depth": 8}, "train": {"epochs": 1, "recipe": "small"}}
    spec = Spec.from_dict({"data": {"name": "digits"}, "code": {"name": "10x10"}, **small})
    train_run(spec, out=folder)
    model, test = ecnn.load_model(folder), load_data("digits").test
    ecnn.audit(model, test, norm="linf", eps="8/255", claim=0.9, limit=20, budget=TINY, seed=0).save(
        folder / "audit.json"
    )
    return folder


def test_a_folder_brings_the_model_back(run: Path, tmp_path: Path) -> None:
    made = PretrainedModel.from_run(run)
    made.save_pretrained(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == THREE
    again = PretrainedModel.from_pretrained(tmp_path / "out")
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(again(images), runs.load_model(run)(images))
    assert again.predict(images)[0].name == load_classifier(run).predict(images)[0].name
    assert again.class_names == tuple("0123456789")
    assert not again.model.training
    again.save_pretrained(tmp_path / "twice")
    for name in THREE:
        assert files.file_sum(tmp_path / "twice" / name) == files.file_sum(tmp_path / "out" / name)
    # Everything else of ecnn reads the folder too.
    assert torch.equal(ecnn.load_model(tmp_path / "out")(images), again(images))
    assert load_classifier(tmp_path / "out").image_size == (8, 8)
    card = (tmp_path / "out" / CARD).read_text()
    assert card.startswith("---\nlibrary_name: ecnn\npipeline_tag: image-classification\n")
    assert "Audited: **" in card
    assert "float32 (batch, 1, 8, 8), grey" in card


@pytest.mark.parametrize("name", ["mnist-tanh16", "cifar10-resnet20-at", "cifar10-ecnn30-q2"])
def test_shipped_models_of_every_kind(name: str, tmp_path: Path) -> None:
    export_folder(name, tmp_path / "out", format="huggingface")
    again = PretrainedModel.from_pretrained(str(tmp_path / "out"))
    images = torch.rand(2, again.in_channels, *again.image_size)
    assert torch.equal(again(images), runs.load_model(name)(images))


def test_names_are_sent_to_and_fetched_from_the_hub(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the two calls that need a network."""
    hub: Any = pytest.importorskip("huggingface_hub")
    sent = tmp_path / "sent"

    def upload_folder(self: Any, *, repo_id: str, folder_path: Path, **options: Any) -> str:
        shutil.copytree(folder_path, sent)
        return f"sent {repo_id}"

    class Made:
        repo_id = "me/digits"

    monkeypatch.setattr(hub.HfApi, "create_repo", lambda self, **options: Made())
    monkeypatch.setattr(hub.HfApi, "upload_folder", upload_folder)
    made: Any = PretrainedModel.from_run(run)
    assert made.push_to_hub("me/digits") == "sent me/digits"
    assert {path.name for path in sent.iterdir()} == THREE
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(name=name, **options)
        return str(sent)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub.hub_mixin, "hf_hub_download", lambda **options: str(sent / "config.json"))
    fetched = PretrainedModel.from_pretrained("me/digits", revision="v1")
    assert torch.equal(fetched(torch.ones(1, 1, 8, 8)), runs.load_model(run)(torch.ones(1, 1, 8, 8)))
    assert asked["name"] == "me/digits"
    assert asked["revision"] == "v1"
    assert set(asked["allow_patterns"]) == THREE


def test_what_cannot_be_fetched_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(InputError, match="is no folder and cannot be fetched by this name: "):
        PretrainedModel.from_pretrained("nobody/nothing", local_files_only=True)
    with pytest.raises(InputError, match="is no folder and cannot be fetched"):
        PretrainedModel.from_pretrained(tmp_path / "nowhere" / "at" / "all")


def test_folders_need_no_huggingface_hub(run: Path, tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["huggingface_hub"] = None  # as if it were not installed
import torch
from ecnn.errors import DiskError, InputError
from ecnn.hub import PretrainedModel
PretrainedModel.from_run({str(run)!r}).save_pretrained({str(tmp_path)!r})
print(PretrainedModel.from_pretrained({str(tmp_path)!r})(torch.ones(1, 1, 8, 8)).shape)
model = PretrainedModel.from_run({str(run)!r})
for ask in (PretrainedModel.from_pretrained, model.push_to_hub):
    try:
        ask("me/x")
    except InputError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    shape, fetching, sending = done.stdout.splitlines()
    assert shape == "torch.Size([1, 10])"
    assert fetching.endswith("huggingface_hub is needed: pip install 'ecnn[hub]'.")
    assert (
        sending == "to send a model to me/x the package huggingface_hub is needed: pip install 'ecnn[hub]'."
    )


def test_a_damaged_folder_is_one_sentence(run: Path, tmp_path: Path) -> None:
    PretrainedModel.from_run(run).save_pretrained(tmp_path)
    config = files.read_json(tmp_path / "config.json")
    for change, sentence in (
        ({"version": 2}, "describes no model of this version of ecnn"),
        ({"image_size": [8]}, r"image_size must be \[height, width\]"),
        ({"class_names": None}, "class_names must be a list"),
        ({"class_names": ["a"]}, "should name as many classes as its model has, not 1"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(InputError, match=sentence):
            PretrainedModel.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"model\.safetensors"):
        PretrainedModel.from_pretrained(tmp_path)


def test_what_others_wrote_is_not_replaced(run: Path, tmp_path: Path) -> None:
    made = PretrainedModel.from_run(run)
    (tmp_path / "README.md").write_text("my project")
    with pytest.raises(InputError, match=r"README\.md would be replaced.*choose another folder"):
        made.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "my project"
    (tmp_path / "README.md").unlink()
    for _ in range(2):  # its own it replaces
        made.save_pretrained(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.py").write_text("my code")
    with pytest.raises(InputError, match=r"mine\.py would be replaced"):
        export_folder(run, tmp_path / "mine", format="robustbench")
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "vit"}')
    with pytest.raises(InputError, match=r"config\.json would be replaced"):
        made.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"config\.json describes no model of this version of ecnn"):
        PretrainedModel.from_pretrained(tmp_path)


def test_a_model_without_a_name_is_not_saved(tmp_path: Path) -> None:
    mine = PretrainedModel(Linear(torch.rand(2, 4)), ["a", "b"], 1, (2, 2))
    with pytest.raises(InputError, match="no file can describe this Linear"):
        mine.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_an_entry_in_the_manner_of_robustbench(run: Path, tmp_path: Path) -> None:
    words = ["export", str(run), "--format", "robustbench", "--out", str(tmp_path / "Song-2021"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["format"] == "robustbench"
    folder = tmp_path / "Song-2021"
    assert {path.name for path in folder.iterdir()} == THREE | {"Song_2021.py", "Song_2021.json"}
    specification = importlib.util.spec_from_file_location("Song_2021", folder / "Song_2021.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(module.load_model()(images), runs.load_model(run)(images))
    info, found = json.loads((folder / "Song_2021.json").read_text()), ecnn.auditing.load_audit(run)
    assert (info["dataset"], info["threat_model"], info["eps"]) == ("digits", "Linf", "8/255")
    assert info["clean_acc"] == f"{100 * found.clean_accuracy:.2f}"
    assert info["external"] == f"{100 * found.accuracy:.2f}"
    assert info["reported"] == "90.00"
    assert info["unreliable"] == (found.verdict not in ("believable", "trustworthy"))
    assert info["images"] == 20
    assert "members" in info["architecture"]


def test_an_entry_needs_an_audit(run: Path, tmp_path: Path) -> None:
    for options, sentence in (
        ("robustbench", r"has no audit\.json: run ecnn audit"),
        ("robustbank", "did you mean 'robustbench'"),
    ):
        words = ["export", "mnist-tanh16", "--format", options, "--out", str(tmp_path / "entry")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert re.search(sentence, done.stderr)
    assert not (tmp_path / "entry").exists()


def test_an_audit_of_another_network_is_quoted_by_nobody(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    said = files.read_json(copied / "audit.json")
    files.write_json(copied / "audit.json", {**said, "model": {**said["model"], "sha256": 64 * "0"}})
    for quote in (
        lambda: export_model(copied, tmp_path / "m.pt2"),
        lambda: export_folder(copied, tmp_path / "hf", format="huggingface"),
        lambda: export_folder(copied, tmp_path / "entry", format="robustbench"),
        lambda: write_report([copied], tmp_path / "report.html", images=0),
        lambda: load_subject(copied),
    ):
        with pytest.raises(InputError, match=r"audit\.json describes another network than the one in this"):
            quote()
    assert {path.name for path in tmp_path.iterdir()} == {"copied"}


@pytest.mark.parametrize("name", ["audit.json", "eval"])
def test_no_run_takes_over_what_was_found_of_another(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(
        InputError, match=f"{name} describes another model, and would be mistaken for this one's"
    ):
        train_run(runs.read_spec(run), out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {name}


def test_a_full_disk_leaves_the_folder_as_it_was(run: Path, tmp_path: Path, full_disk: Any) -> None:
    made, size = PretrainedModel.from_run(run), (run / "model.safetensors").stat().st_size
    for _ in range(2):  # nothing there, and an export of before
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with full_disk(size // 2), pytest.raises(DiskError, match=r"cannot write .*model\.safetensors"):
            export_folder(run, tmp_path, format="robustbench")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        made.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # as a kill between two of the files leaves it
    with pytest.raises(InputError, match=r"model\.safetensors"):
        PretrainedModel.from_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    PretrainedModel.from_run("mnist-tanh16").save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path)
    with pytest.raises(InputError, match="do not belong together"):
        PretrainedModel.from_pretrained(tmp_path)


def test_what_people_wrote_into_an_entry_stays(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Me2026"
    export_folder(run, folder, format="robustbench")
    info = json.loads((folder / "Me2026.json").read_text())
    mine = {"link": "https://example.org", "authors": "Me et al.", "additional_data": True}
    (folder / "Me2026.json").write_text(json.dumps({**info, **mine, "external": "99.99"}))
    export_folder(run, folder, format="robustbench")
    assert json.loads((folder / "Me2026.json").read_text()) == {**info, **mine}
    card = (folder / CARD).read_text() + "A paragraph of mine."
    (folder / CARD).write_text(card)
    with pytest.raises(InputError, match=r"README\.md was changed after it had been exported.*move it away"):
        export_folder(run, folder, format="robustbench")
    assert (folder / CARD).read_text() == card
    PretrainedModel.from_pretrained(folder).save_pretrained(folder)  # which has read it
    assert (folder / CARD).read_text() == card


@pytest.mark.parametrize("name", ["ecnn", "class", "json", "torch", "2026 me"])
def test_a_module_hides_no_other_and_can_be_imported(run: Path, tmp_path: Path, name: str) -> None:
    export_folder(run, tmp_path / name, format="robustbench")
    module = f"model_{name.replace(' ', '_')}"
    assert {path.name for path in (tmp_path / name).iterdir()} == THREE | {f"{module}.py", f"{module}.json"}
    assert "shlex" not in (tmp_path / name / f"{module}.py").read_text()


def test_what_could_not_be_loaded_is_not_saved(run: Path, tmp_path: Path) -> None:
    def made(names: str, channels: int, size: int, change: str = "float") -> PretrainedModel:
        return PretrainedModel(getattr(ecnn.load_model(run), change)(), names, channels, (size, size))

    for model, sentence in (
        (made("abcdefghij", 1, 8, "half"), "as float16 instead of float32: it was converted"),
        (made("abcdefghij", 1, 8, "double"), "as float64 instead of float32: it was converted"),
        (made("ab", 1, 8), "with 2 class_names .* the code has 10 classes"),
        (made("abcdefghijkl", 1, 8), "with 12 class_names .* the code has 10 classes"),
        (made("abcdefghij", 3, 8), r"images of 3x8x8, .* has shape \(2, 1, 3, 3\), not \(2, 3, 3, 3\)"),
        (made("abcdefghij", 1, 9), r"images of 1x9x9, .* the mean has shape \(1, 8, 8\)"),
    ):
        with pytest.raises(InputError, match=sentence):
            model.save_pretrained(tmp_path)
        assert list(tmp_path.iterdir()) == []
    made("abcdefghij", 1, 8).save_pretrained(tmp_path)
    assert PretrainedModel.from_pretrained(tmp_path).class_names == tuple("abcdefghij")


def test_commands_say_what_takes_a_folder_of_the_hub(run: Path, tmp_path: Path) -> None:
    export_folder(run, tmp_path / "hub", format="huggingface")
    for words in ("audit {} --eps 0.1", "export {} --out m.pt2", "serve {}", "report {} --out r.html"):
        done = CliRunner().invoke(app, words.format(tmp_path / "hub").split())
        assert done.exit_code == 2
        assert (
            "is a folder for the Hugging Face hub, without the spec.toml of its run: ecnn predict"
            in done.stderr
        )
    (tmp_path / "mine.py").write_text(f"import ecnn\nmodel = ecnn.load_model({str(tmp_path / 'hub')!r})\n")
    asked = [
        "audit",
        "--module",
        f"{tmp_path / 'mine.py'}:model",
        "--data",
        "digits",
        "--eps",
        "0.1",
        "--dry-run",
    ]
    assert CliRunner().invoke(app, asked).exit_code == 0


def test_the_card_of_a_folder_whose_name_is_not_utf8(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / os.fsdecode(b"bad\xff")
    shutil.copytree(run, copied)
    assert "\n# bad?\n" in export_folder(copied, tmp_path / "entry", format="robustbench").card.read_text()
