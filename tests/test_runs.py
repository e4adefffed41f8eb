"""Run folders and shipped models."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DATA
from torch import nn
from typer.testing import CliRunner

import ecnn
from ecnn import files, runs
from ecnn.attacks import FGSM
from ecnn.baselines import Ensemble
from ecnn.cli import app
from ecnn.codes import load_code
from ecnn.data import Split, load_data
from ecnn.errors import InputError
from ecnn.pipeline import train_run
from ecnn.predicting import load_classifier
from ecnn.report.contents import read_run
from ecnn.spec import DataTable, Spec, load_spec
from ecnn.training.checkpoints import load_checkpoint, save_halved
from ecnn.training.loop import accuracy

# name: parameters, test accuracy as recorded when it was trained (10,000 images)
SHIPPED = {
    "cifar10-adp": (819_198, 0.9331),
    "cifar10-ecnn30": (490_497, 0.8566),
    "cifar10-ecnn30-at": (492_577, 0.6045),
    "cifar10-ecnn30-ce": (490_497, 0.8618),
    "cifar10-ecnn30-q2": (490_530, 0.8561),
    "cifar10-resnet20-at": (273_066, 0.6824),
    "mnist-ecnn30": (490_209, 0.996),
    "mnist-tanh16": (401_168, 0.9945),
}
PLACES = {"cifar10": "cifar-10-batches-py", "mnist": "MNIST/raw"}


def tiny(**changes: object) -> Spec:
    """One epoch of a small network; changes by dotted names."""
    small = {"model.width": 4, "model.depth": 8, "train.epochs": 1}
    return Spec(data=DataTable(name="digits")).changed({**small, **changes})


def test_a_run_can_be_loaded_and_says_what_it_was(tmp_path: Path) -> None:
    run = train_run(tiny(), out=tmp_path)
    spec = files.read_toml(tmp_path / "spec.toml")
    assert spec["model"]["width"] == 4
    assert spec["model"]["branch"] == "conv"  # defaults are spelled out
    assert spec["data"]["fingerprint"] == load_data("digits").fingerprint
    assert load_code(tmp_path / "code.json") == load_code("10x30")
    assert files.read_json(tmp_path / "env.json")["torch"] == torch.__version__
    assert (tmp_path / "DONE").exists()
    model = runs.load_model(tmp_path)
    assert not model.training
    assert accuracy(model, load_data("digits").test) == run.test_accuracy
    mean = load_data("digits").mean_image
    assert torch.allclose(model.state_dict()["centre.mean"], mean)


def test_a_folder_is_one_run(tmp_path: Path) -> None:
    train_run(tiny(), out=tmp_path)
    with pytest.raises(
        InputError, match=r"another spec\.toml \(seed: 0 there, 1 here\): choose another folder"
    ):
        train_run(tiny(seed=1), out=tmp_path)


def test_plain_network_and_own_code(tmp_path: Path) -> None:
    plain = train_run(tiny(**{"model.kind": "resnet"}), out=tmp_path / "plain")
    assert not (tmp_path / "plain" / "code.json").exists()
    assert files.read_toml(tmp_path / "plain" / "spec.toml")["train"]["objective"] == "cross_entropy"
    coded = train_run(tiny(**{"code.name": "10x10"}), out=tmp_path / "coded")
    assert runs.load_model(tmp_path / "coded").code == load_code("10x10")
    assert plain.parameters != coded.parameters


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"code.name": "43x30"}, "the code has 43 classes, but 10 are wanted"),
        ({"model.kind": "transformer"}, "model.kind must be one of ecnn, resnet"),
        ({"model.wide": 3}, "'ecnn' has no option 'wide'; .* did you mean 'width'"),
        ({"train.epoch": 1}, r"\[train\] has no option 'epoch'; .* did you mean 'epochs'"),
        ({"train.batch_size": 10_000}, "larger than the training set"),
        ({"data.name": "digitz"}, "digits, mnist"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        train_run(tiny(**changes), out=tmp_path / "run")


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="device 'quantum' cannot be used"):
        train_run(tiny(), out=tmp_path / "run", device="quantum")


def test_broken_runs(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"and a model by name must be one of cifar10-adp, .*, not 'nothing'"
    ):
        runs.load_model("nothing")
    with pytest.raises(InputError, match=r"has no spec\.toml.*: give one that `ecnn train` made"):
        runs.load_model(tmp_path)
    (tmp_path / "digits" / "ecnn" / "0").mkdir(parents=True)
    (tmp_path / "digits" / "ecnn" / "0" / "spec.toml").touch()
    with pytest.raises(InputError, match=r"has no spec\.toml.*: did you mean .*/digits/ecnn/0\?$"):
        runs.load_model(tmp_path)  # the folder above the one that `ecnn train --data digits` makes
    (tmp_path / "spec.toml").write_text("seed = ")
    with pytest.raises(InputError, match="is not TOML"):
        runs.load_model(tmp_path)
    (tmp_path / "spec.toml").write_text("seed = 1")
    with pytest.raises(InputError, match=r"needs the table \[data\]"):
        runs.load_model(tmp_path)
    (tmp_path / "spec.toml").write_text('data.name = "digits"')
    with pytest.raises(InputError, match="does not say num_classes"):
        runs.load_model(tmp_path)


def test_a_run_without_weights_says_so(tmp_path: Path) -> None:
    train_run(tiny(), out=tmp_path / "run", device="cpu")
    for name in ("DONE", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(InputError, match="run has no weights yet: its training was stopped, or is under way"):
        runs.load_model(tmp_path / "run")


def test_a_run_folder_that_may_not_be_read_is_named(tmp_path: Path, as_nobody: Any) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(runs.zoo_folder("cifar10-resnet20-at"), folder)
    folder.chmod(0)
    for use in (runs.load_model, runs.read_spec, load_classifier, read_run):
        with as_nobody(tmp_path), pytest.raises(InputError, match=r"cannot read .*: Permission denied\."):
            use(folder)
    folder.chmod(0o700)


def test_a_run_folder_may_have_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / "bad\udcff"
    trained = train_run(tiny(), out=folder)
    assert train_run(tiny(), out=folder).was_finished
    assert sum(value.numel() for value in runs.load_model(folder).parameters()) == trained.parameters


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    train_run(tiny(), out=tmp_path / "a")
    train_run(tiny(**{"model.width": 8}), out=tmp_path / "b")
    models = {name: runs.load_model(tmp_path / name) for name in ("a", "b")}
    for place in (tmp_path / "a", tmp_path / "nowhere", tmp_path):
        runs.check_same_model(place, models["a"])
    for name, wrong in (("a", "b"), ("b", "a")):  # whose audit would be taken for the run's own
        with pytest.raises(InputError, match="is the run folder of another model: choose another"):
            runs.check_same_model(tmp_path / name, models[wrong])
    (tmp_path / "b" / "model.safetensors").replace(tmp_path / "a" / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors was damaged or changed .* or delete DONE"):
        runs.load_model(tmp_path / "a")
    (tmp_path / "a" / "DONE").unlink()
    with pytest.raises(InputError, match="was made for another model"):
        runs.load_model(tmp_path / "a")


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_weights_of_another_type_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs.zoo_folder("cifar10-resnet20-at"), folder, ignore=shutil.ignore_patterns("DONE"))
    assert runs.load_model(folder)  # files of before have neither DONE nor a checksum
    tensors, header = files.read_tensors(folder / "model.safetensors")
    name = sorted(tensors)[-1]
    files.write_tensors(folder / "model.safetensors", {**tensors, name: tensors[name].to(dtype)}, header)
    with pytest.raises(InputError, match=rf"holds '{name}' as {str(dtype)[6:]} instead of float32"):
        runs.load_model(folder)


def test_weights_that_are_rounded_on_purpose_take_half_the_room(tmp_path: Path) -> None:
    train_run(tiny(), out=tmp_path)
    whole, halved = tmp_path / "model.safetensors", tmp_path / "halved.safetensors"
    save_halved(halved, whole)
    (before, facts), (after, new_facts) = load_checkpoint(whole), load_checkpoint(halved)
    assert new_facts == {**facts, "stored_as": "float16"}
    for name, value in before.items():
        is_weight = name.endswith((".weight", ".bias")) and value.dtype == torch.float32
        assert torch.equal(after[name], value.half().float() if is_weight else value), name
    sizes = [sum(value.nbytes for value in files.read_tensors(path)[0].values()) for path in (whole, halved)]
    assert sizes[1] < 0.6 * sizes[0]
    first = min(name for name in before if name.endswith(".weight"))
    save_halved(halved, whole, only=[first])
    one = load_checkpoint(halved)[0]
    assert [name for name in before if not torch.equal(one[name], before[name])] == [first]
    tensors, header = files.read_tensors(whole)
    big = {name: 1e9 * value if name.endswith(".weight") else value for name, value in tensors.items()}
    files.write_tensors(whole, big, header)
    with pytest.raises(InputError, match="float16 cannot hold"):
        save_halved(halved, whole)


def test_a_finished_run_is_whole_repaired_or_refused(tmp_path: Path) -> None:
    """Every file that decides a number, deleted, cut short or with one bit changed."""
    first = train_run(tiny(), out=tmp_path)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    done = subprocess.run(["sha256sum", "-c", "DONE"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert train_run(tiny(), out=tmp_path).was_finished
    for name in ("model.safetensors", "train.jsonl", "code.json", "env.json", "DONE"):
        for content in (
            None,
            whole[name][:-20],
            bytes([*whole[name][:40], whole[name][40] ^ 1, *whole[name][41:]]),
        ):
            (tmp_path / name).unlink()
            if content is not None:
                (tmp_path / name).write_bytes(content)
                assert not runs.is_finished(tmp_path, load_spec(tmp_path / "spec.toml"))
            if name == "model.safetensors":
                with pytest.raises(InputError, match=r"model\.safetensors"):
                    runs.load_model(tmp_path)
            again = train_run(tiny(), out=tmp_path)
            assert not again.was_finished
            if name != "DONE":
                assert again.notes == (f"damaged or missing, and written again by this run: {name}",)
            assert again.test_accuracy == first.test_accuracy
            assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == whole
    for name, old, new in (("spec.toml", b"seed = 0", b"seed = 1"), ("eval.json", b": 360", b": 361")):
        assert old in whole[name]
        (tmp_path / name).write_bytes(whole[name].replace(old, new))
        with pytest.raises(InputError, match=rf"{name} was damaged or changed"):
            runs.describe_run(tmp_path)
        with pytest.raises(InputError, match=r"eval.json was damaged|another spec\.toml"):
            train_run(tiny(), out=tmp_path)
        (tmp_path / name).write_bytes(whole[name])


def test_two_identical_runs_have_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_run(tiny(), out=tmp_path / name)
    for name in ("model.safetensors", "spec.toml", "code.json", "eval.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_run_of_before_is_repaired_too(tmp_path: Path) -> None:
    train_run(tiny(), out=tmp_path)
    (tmp_path / "DONE").write_text("")  # without checksums
    assert train_run(tiny(), out=tmp_path).was_finished
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-1])
    assert not train_run(tiny(), out=tmp_path).was_finished
    assert (tmp_path / "model.safetensors").read_bytes() == weights


def test_one_user_of_a_folder_whatever_it_does(tmp_path: Path) -> None:
    """Training, evaluation and audit are kept out while another process has the folder; it is named, and no longer."""
    fcntl = pytest.importorskip("fcntl")
    data, model = load_data("digits"), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    attack = FGSM(norm="linf", eps=0.1)
    for act in (
        lambda: train_run(tiny(), out=tmp_path),
        lambda: ecnn.fit(model, data.train, val=None, objective="cross_entropy", seed=0, run_dir=tmp_path),
        lambda: ecnn.evaluate(model, data.test, {"fgsm": attack}, limit=4, run_dir=tmp_path),
        lambda: ecnn.audit(model, data.test, norm="linf", eps=0.1, limit=4, budget="quick", run_dir=tmp_path),
    ):
        with (tmp_path / ".ecnn-lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write("training by process 7 on a machine")
            lock.flush()
            with pytest.raises(InputError, match=r"in use \(training by process 7 on a machine\): wait"):
                act()
        assert [path.name for path in tmp_path.iterdir()] == [".ecnn-lock"]
    ecnn.evaluate(model, data.test, {"fgsm": attack}, limit=4, run_dir=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"eval", "eval.json"}


def test_shipped_models_are_checked(tmp_path: Path) -> None:
    for name in runs.models():
        assert not runs.damaged_files(runs.zoo_folder(name))
        assert len((runs.zoo_folder(name) / "DONE").read_text().splitlines()) >= 4
    folder = tmp_path / "run"
    shutil.copytree(runs.zoo_folder("mnist-tanh16"), folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1000] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors was damaged or changed"):
        runs.load_model(folder)


def test_toml_round_trip(tmp_path: Path) -> None:
    table = {
        "seed": 3,
        "data": {"name": 'a "quoted" name', "size": [8, 8]},
        "train": {"lr": 1e-3, "flip": True},
    }
    assert files.read_toml(files.write_toml(tmp_path / "x.toml", {**table, "attack": None})) == table


@pytest.mark.parametrize(("name", "facts"), SHIPPED.items())
def test_shipped_model(name: str, facts: tuple[int, float]) -> None:
    model = runs.load_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == facts[0]
    assert runs.describe_run(runs.zoo_folder(name))["test_accuracy"] == facts[1]
    assert f"{100 * facts[1]:.2f} %" in (runs.zoo_folder(name) / "card.md").read_text()
    shape = (1, 28, 28) if name.startswith("mnist") else (3, 32, 32)
    # Six of the codewords of TanhEns16 belong to no class.
    scores = 16 if name == "mnist-tanh16" else 10
    assert model(torch.zeros(2, *shape)).shape == (2, scores)


def test_all_models_are_known() -> None:
    assert runs.models() == tuple(sorted(SHIPPED))


@functools.cache
def real_images(name: str) -> Split:
    return load_data(name, DATA, download=False).test.take(300)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        pytest.param(name, facts, marks=pytest.mark.data(PLACES[name.partition("-")[0]]))
        for name, facts in SHIPPED.items()
    ],
)
def test_shipped_model_on_real_images(name: str, facts: tuple[int, float]) -> None:
    """300 test images: within three standard errors of the recorded accuracy."""
    share = accuracy(runs.load_model(name), real_images(name.partition("-")[0]), batch_size=300)
    assert abs(share - facts[1]) < 3 * (facts[1] * (1 - facts[1]) / 300) ** 0.5


@pytest.mark.parametrize("kind", ["ecnn", "no mean", "resnet", "adp", "trunk", "module"])
def test_what_fit_leaves_can_be_loaded(tmp_path: Path, kind: str) -> None:
    digits = load_data("digits")
    few = digits.train.take(64)

    def made() -> nn.Module:
        small: Any = {"width": 4, "depth": 8}
        if kind == "adp":
            return Ensemble(10, 1, num_members=2, mean=digits.mean_image, **small)
        if kind == "resnet":
            return ecnn.ResNet(10, 1, mean=digits.mean_image, **small)
        if kind == "module":
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        trunk = nn.Conv2d(1, 4, 3) if kind == "trunk" else None
        mean = None if kind == "no mean" else digits.mean_image
        return ecnn.ECNN(load_code("10x10"), 1, trunk=trunk, mean=mean, **small)

    model = made()
    objective = "member_hinge" if isinstance(model, ecnn.ECNN) else "cross_entropy"
    ecnn.fit(model, few, val=None, recipe="small", epochs=1, objective=objective, seed=0, run_dir=tmp_path)
    if kind in ("trunk", "module"):
        with pytest.raises(InputError, match="pass it as module="):
            ecnn.load_model(tmp_path)
        loaded = ecnn.load_model(tmp_path, module=made())
    else:
        loaded = ecnn.load_model(tmp_path)
    assert not loaded.training
    assert torch.equal(loaded(few[:8][0]), model(few[:8][0]))
    with pytest.raises(InputError, match="made for another model"):
        ecnn.load_model(tmp_path, module=nn.Linear(2, 2))


def small_network(name: str, *, in_chans: int, **options: Any) -> nn.Module:
    """What stands for a network of timm."""
    layers = [nn.Conv2d(in_chans, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize("real", [False, True])
def test_a_trunk_of_timm_is_trained_from_the_command_line_and_rebuilt(
    real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if real:
        try:
            import timm  # noqa: F401
        except Exception as error:  # it needs a torchvision that fits torch
            pytest.skip(f"timm cannot be imported: {error}")
    else:
        stub = SimpleNamespace(list_models=lambda: ["resnet10t"], create_model=small_network)
        monkeypatch.setitem(sys.modules, "timm", stub)
    words = f"train --data digits --epochs 1 --set model.trunk=timm:resnet10t --code 10x10 --out {tmp_path / 'run'}"
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    assert runs.read_spec(tmp_path / "run").model["trunk"] == "timm:resnet10t"
    model: Any = ecnn.load_model(tmp_path / "run")
    weights, _ = files.read_tensors(tmp_path / "run" / "model.safetensors")
    own = {name for name in weights if name.startswith("trunk.")}
    assert own
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in own)
    assert model(load_data("digits").test[:4][0]).shape == (4, 10)
