"""Wiring: settings as people type them, and choices made for them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import run
from typer.testing import CliRunner

import ecnn
from ecnn import asking
from ecnn.attacks import ATTACKS, PGD
from ecnn.cli import app, main
from ecnn.codes import CodeMatrix, load_code
from ecnn.data import Split, load_data
from ecnn.errors import InputError
from ecnn.pipeline import evaluate_run, open_model, plan, plan_evaluation, train_run, training_attack
from ecnn.pipeline.threads import suitable_threads
from ecnn.spec import DataTable, Spec, attack_options, load_spec, make_attack

SMALL = Spec(
    data=DataTable(name="digits"),
    model={"kind": "ecnn", "width": 4, "depth": 8, "feature_dim": 8},
    train={"epochs": 3},
)


def test_choices_that_fit_the_data() -> None:
    made = plan(Spec(data=DataTable(name="digits")), load_data("digits"))
    assert made.code is not None
    assert (made.code.num_classes, made.code.code_length) == (10, 30)
    assert made.spec.model["kind"] == "ecnn"
    assert made.recipe.epochs == 30
    assert "attack" not in made.spec.train


def test_dry_run_prints_the_spec_and_writes_nothing(tmp_path: Path) -> None:
    done = run(*["train", "--data", "digits", "--eps", "0.1", "--dry-run", "--epochs", "3"], cwd=tmp_path)
    spec = json.loads(done.stdout)
    assert spec["train"]["epochs"] == 3
    assert spec["train"]["attack"]["eps"] == "0.1"
    assert list(tmp_path.iterdir()) == []


def test_dry_runs_try_the_model_on_one_image(digits_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails on the images fails before anything is attacked or trained."""
    evaluation = f"evaluate {digits_run} --attack fgsm --eps 0.1 --limit 5 --dry-run".split()
    training = ["train", "--data", "digits", "--dry-run", "--device", "cpu"]
    done = CliRunner().invoke(app, evaluation)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "about 20 images forward and 5 backward\n"
    asked: list[int] = []

    def fails(self: Any, images: torch.Tensor) -> torch.Tensor:
        asked.append(len(images))
        raise RuntimeError("a kernel of 9 does not fit")

    monkeypatch.setattr(ecnn.ECNN, "forward", fails)
    for command in (evaluation, training):
        done = CliRunner().invoke(app, command)
        assert (done.exit_code, done.stdout) == (4, "")
        assert "a kernel of 9 does not fit" in done.stderr
    # One image; where that fails a few, as for batch statistics, these with the channels last, and other numbers.
    sizes = list(asking._SIZES)
    assert asked == [1, 5, 5, *sizes, 1, 1, *sizes]


def test_where_attacks_look_is_tried_on_one_image_too(tmp_path: Path) -> None:
    """An attack on members of a network without any is refused before an image is classified or an epoch trained."""
    module = tmp_path / "own.py"
    module.write_text(
        "import torch\nnetwork = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    evaluation = f"evaluate --module {module}:network --data digits --attack fgsm --eps 0.1 --limit 5"
    training = "train --data digits --device cpu --set model.kind=resnet --set train.epochs=1"
    for command, name in (
        (f"{evaluation} --on members --out {tmp_path}/out", "fgsm"),
        (f"{evaluation} --on linear --dry-run", "fgsm"),
        (f"{training} --eps 0.1 --set train.attack.on=members --dry-run", "train.attack"),
        (
            f"{training} --set train.val_attack.eps=0.1 --set train.val_attack.on=members --out {tmp_path}/out",
            "train.val_attack",
        ),
    ):
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 2, done.output
        assert f"the attack {name!r}: " in done.stderr
        assert "has no members (member_logits and code): use on=" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_network_that_was_exported_for_one_size_of_batch_is_asked_about_any(tmp_path: Path) -> None:
    """Torch's exported graphs refuse eval() too."""
    (tmp_path / "exported.py").write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "free = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "fixed = torch.export.export(free, (torch.rand(16, 1, 8, 8),)).module()\n"
    )
    command = (
        f"evaluate --data digits --attack fgsm --eps 0.01 --limit 200 --json --module {tmp_path}/exported.py:"
    )
    fixed, free = (CliRunner().invoke(app, f"{command}{name}".split()) for name in ("fixed", "free"))
    assert (fixed.exit_code, free.exit_code) == (0, 0), fixed.output
    assert "The model takes 16 images at a time: smaller batches are filled up." in fixed.stderr
    assert "at a time" not in free.stderr
    found, expected = (json.loads(done.stdout)["attacks"]["fgsm"] for done in (fixed, free))
    assert 0 < found["robust"] == expected["robust"]
    planned = CliRunner().invoke(
        app, f"audit --data digits --eps 0.1 --dry-run --module {tmp_path}/exported.py:fixed".split()
    )
    assert planned.exit_code == 0, planned.output


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("command", ["train", "evaluate", "audit"])
def test_ctrl_c_says_what_is_kept_and_how_to_go_on(
    command: str, keeps: bool, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {
        "train": ["train", "--data", "digits", "--epochs", "2"],
        "evaluate": ["evaluate", str(digits_run), "--attack", "fgsm", "--eps", "0.1", "--limit", "5"],
        "audit": ["audit", str(digits_run), "--eps", "0.1", "--limit", "5"],
    }[command]

    @contextmanager
    def interrupted(title: str) -> Iterator[Any]:
        def progress(done: int, total: int, news: str) -> None:
            raise KeyboardInterrupt

        yield progress

    monkeypatch.setattr("ecnn.progress_bar", interrupted)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words, "--device", "cpu", *(["--out", "mine"] if keeps else [])])
    assert done.exit_code == 130
    folder = "mine" if keeps else "runs/digits/ecnn/0" if command == "train" else None
    says = f"What is finished is kept in {folder}: the same command goes on from there."
    assert done.stderr.splitlines()[-1] == (
        f"ecnn: interrupted. {says if folder else 'Nothing is kept: with --out it could go on.'}"
    )
    again = CliRunner().invoke(app, [*words, "--device", "cpu", "--out", "mine", "--no-resume"])
    assert "the same command without --no-resume goes on" in again.stderr


def test_ctrl_c_while_a_code_is_designed_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best code so far is not the one that the spec describes."""
    half = CodeMatrix(load_code("10x10").symbols, provenance={"stopped_by": "interrupt"})
    monkeypatch.setattr("ecnn.annealing.design_code", lambda *size, **options: half)
    spec = Spec.from_dict({"data": {"name": "digits"}, "code": {"code_length": 10}})
    with pytest.raises(KeyboardInterrupt):
        train_run(spec, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_small_work_gets_one_thread_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Split(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    large = Split(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    model = ecnn.ResNet(10, 3)  # 273,066 weights
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        for split, threads in ((small, 1), (large, 2)):
            with suitable_threads(model, split):
                assert torch.get_num_threads() == threads
            assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with suitable_threads(model, small):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("own", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    found = dict(own)
    monkeypatch.setattr(os, "environ", found)
    main()
    assert found == (own or {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"})


def test_models_are_listed() -> None:
    assert "cifar10-ecnn30-q2     cifar10   test 85.61 %" in run("models").stdout


def test_tensorboard_shows_every_epoch_in_one_file_for_each_start(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def stop_in_the_third(done: float, total: float, news: str) -> None:
        if done > 2 * total / 3:
            raise KeyboardInterrupt

    spec = SMALL.changed({"train.epochs": 3})
    with pytest.raises(KeyboardInterrupt):
        train_run(spec, out=tmp_path, progress=stop_in_the_third)
    train_run(spec, out=tmp_path)
    folder = tmp_path / "tensorboard"
    assert len(list(folder.glob("events.*"))) == 2
    shown = EventAccumulator(str(folder)).Reload().Scalars("loss")
    log = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [event.step for event in shown] == [0, 1, 2]
    assert [event.value for event in shown] == pytest.approx([record["loss"] for record in log])


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_run(SMALL.changed({"code.name": "10x10", "train.lr": 0.01}), out=folder)
    return folder


def test_attacks_by_name() -> None:
    options = {"norm": "linf", "eps": "8/255", "steps": 5, "step_size": 0.01, "on": "members"}
    made = make_attack({"kind": "pgd", **options})
    assert made == PGD(norm="linf", eps="8/255", steps=5, step_size=0.01, on="members")
    for name, options, sentence in (
        ("pdg", {}, "attack must be one of .* not 'pdg'; did you mean 'pgd'"),
        ("pgd", {"norm": "linf", "eps": 1}, "the attack 'pgd' needs steps, step_size"),
        ("fgsm", {"norm": "linf", "eps": 1, "steps": 3}, "the attack 'fgsm' has no option 'steps'"),
    ):
        with pytest.raises(InputError, match=sentence):
            make_attack({"kind": name, **options})


def test_a_saved_run_is_attacked(digits_run: Path, tmp_path: Path) -> None:
    """The command, the folder it leaves and the images it writes agree with what the parts say by themselves."""
    options = (
        "--attack pgd --attack fgsm --eps 0.1 --eps 0.2 --steps 5 --step-size 0.05 --loss margin --limit 50"
    )
    places = ("--out", str(tmp_path / "out"), "--save-images", str(tmp_path / "adv.npz"))
    command = ("evaluate", *options.split(), "--json", "--seed", "3", str(digits_run), *places)
    done = run(*command)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["attacks"]) == ["pgd@0.1", "pgd@0.2", "fgsm@0.1", "fgsm@0.2"]

    model, data = ecnn.load_model(digits_run), load_data("digits")
    images, labels = data.test[:50]
    attack = PGD(norm="linf", eps="0.2", steps=5, step_size=0.05, loss="margin")
    expected = attack.run(model, images, labels, seed=3)
    assert found["attacks"]["pgd@0.2"]["robust"] == int((~expected.success).sum())
    with np.load(tmp_path / "adv.npz", allow_pickle=False) as arrays:
        assert torch.allclose(torch.from_numpy(arrays["pgd@0.2.images"]), expected.images, atol=1e-6)
        assert arrays["label"].tolist() == labels.tolist()
    assert done.stderr.startswith("attacking: clean ")  # a line per attack, where there is no terminal
    assert done.stderr.count("pgd@0.2 ") == 1
    assert "already finished" not in done.stderr
    again = run(*command)
    assert json.loads(again.stdout)["attacks"] == found["attacks"]
    assert again.stderr.splitlines()[-1] == f"already finished: this is what {tmp_path / 'out'} holds"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--attack", "pgd", "--eps", "0.1"], "the attack 'pgd' needs steps, step_size"),
        (["--attack", "cw2", "--eps", "0.1"], "attack must be one of fgsm"),
        (["--attack", "fgsm", "--eps", "0.1", "--steps", "3"], "none of fgsm has an option 'steps'"),
        (["--attack", "fgsm", "--eps", "0.1", "--data", "nothing"], "nothing"),
        (["--attack", "fgsm", "--eps", "0.1", "--limit", "0"], "limit"),
        (["--attack", "fgsm", "--eps", "0.1", "--set", "train.lr=1"], "--set takes attack.NAME=VALUE"),
        (["--attack", "fgsm", "--eps", "0.1", "--save-images", "code.json"], "code.json is not one: name it"),
    ],
)
def test_mistakes_of_evaluate(digits_run: Path, arguments: list[str], sentence: str) -> None:
    done = run("evaluate", str(digits_run), *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_images_are_not_written_through_a_link_over_another_file(digits_run: Path, tmp_path: Path) -> None:
    kept = tmp_path / "code.json"
    kept.write_text("{}")
    (tmp_path / "images.npz").symlink_to(kept)
    options = ("--attack", "fgsm", "--eps", "0.1", "--limit", "4", "--out", str(tmp_path / "out"))
    done = run("evaluate", str(digits_run), *options, "--save-images", str(tmp_path / "images.npz"))
    assert (done.returncode, kept.read_text()) == (2, "{}")
    assert not (tmp_path / "out").exists()


#: What an attack needs beside a radius to be made short; autoattack is short by naming one of its parts.
SHORT: dict[str, dict[str, object]] = {
    "apgd": {"steps": 2},
    "autoattack": {"version": "apgd-ce"},
    "bim": {"steps": 2},
    "blindspot": {"steps": 2, "search_steps": 1, "initial_constant": 0.1},
    "cw": {"steps": 2, "search_steps": 1, "initial_constant": 0.1},
    "deepfool": {"steps": 2},
    "fab": {"steps": 2, "targets": 1},
    "fmn": {"steps": 2},
    "hopskipjump": {"steps": 1, "samples": 5},
    "jsma": {"max_pixel_fraction": 0.05},
    "member_cw": {"steps": 2, "search_steps": 1, "initial_constant": 0.1},
    "noise": {"samples": 2},
    "pgd": {"steps": 2},
    "rays": {"queries": 20},
    "sparse_pgd": {"max_pixel_fraction": 0.05, "steps": 2, "step_size": 0.5},
    "square": {"queries": 3},
    "estimated_pgd": {"steps": 2, "pairs": 2},
    "transformed_pgd": {"steps": 2, "transformations": 2},
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_any_attack_can_train(kind: str, tmp_path: Path) -> None:
    """What an attack needs is filled in from its kind and radius, and a step of training runs on what it makes."""
    table = {"kind": kind, **SHORT.get(kind, {})}
    if "eps" in attack_options(kind):
        table["eps"] = "0.1"
    made = plan(SMALL.changed({"train.attack": table}), load_data("digits"))
    assert made.attack == make_attack(training_attack(table))
    images, labels = load_data("digits").train[:4]
    crafted = made.attack(made.model.eval(), images, labels, generator=torch.Generator().manual_seed(0))
    assert crafted.shape == images.shape
    assert float(crafted.min()) >= 0
    assert float(crafted.max()) <= 1
    if "eps" in table:
        assert float((crafted - images).abs().max()) <= 0.1 + 1e-6


def test_a_run_on_a_folder_of_images_remembers_where_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "root" / "pics" / name).mkdir(parents=True)
        for image in range(20):
            pixels = rng.integers(256, size=(9, 9), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "root" / "pics" / name / f"{image}.png")
    table = {"name": "pics", "image_size": 8}
    spec = Spec.from_dict(
        {**SMALL.to_dict(), "data": table, "model": {"kind": "resnet", "depth": 8, "width": 4}}
    )
    spec = spec.changed({"train.epochs": 1, "train.batch_size": 16})
    run = train_run(spec, out=tmp_path / "run", root=tmp_path / "root", device="cpu")
    assert "over after 1 optimizer steps" in " ".join(run.notes)
    written = load_spec(tmp_path / "run" / "spec.toml")
    assert (written.data.path, written.data.image_size) == (str(tmp_path / "root" / "pics"), [8, 8])
    asked = written.changed({"attacks": {"fgsm": {"norm": "linf", "eps": 0.1}}, "data.test_limit": 4})

    def evaluated(**options: Any) -> Any:
        opened = open_model(str(tmp_path / "run"), spec=asked, device="cpu", **options)
        found = evaluate_run(plan_evaluation(asked, opened))
        return found.clean.label.tolist()

    assert sorted(evaluated(root=tmp_path)) == [0, 0, 1, 1]
    # Elsewhere it is found by its name, and the run is still the same one.
    (tmp_path / "root").rename(tmp_path / "moved")
    assert sorted(evaluated(root=tmp_path / "moved")) == [0, 0, 1, 1]
    (tmp_path / "root").symlink_to(tmp_path / "root")  # elsewhere it may be a place that nobody may look at
    assert sorted(evaluated(root=tmp_path / "moved")) == [0, 0, 1, 1]
    assert evaluated(data=str(tmp_path / "moved" / "pics"))
    (tmp_path / "root").unlink()
    assert train_run(spec, out=tmp_path / "run", root=tmp_path / "moved", device="cpu").was_finished
    (tmp_path / "moved" / "pics" / "a" / "0.png").unlink()
    with pytest.raises(InputError, match="not those that the model was trained on"):
        evaluated(root=tmp_path / "moved")
    assert evaluated(data=str(tmp_path / "moved" / "pics"))
    shutil.copytree(tmp_path / "moved" / "pics", tmp_path / "other")
    (tmp_path / "other" / "b").rename(tmp_path / "other" / "c")
    with pytest.raises(
        InputError, match=r"class 1 of .*/other is 'c', and that of the model is 'b': name the"
    ):
        evaluated(data=str(tmp_path / "other"))  # whose accuracy would mean nothing
    for name, number in (("a", "0"), ("c", "01")):
        (tmp_path / "other" / name).rename(tmp_path / "other" / number)
    assert evaluated(data=str(tmp_path / "other"))
    with pytest.raises(InputError, match=r"were in .*/root/pics, and are not there, or may not be read: say"):
        evaluated(root=tmp_path)
