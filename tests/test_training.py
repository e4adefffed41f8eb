"""Training: schedules, equality of every way to run it, kill and resume, divergence, hostile checkpoints."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Started, run, start, wait_for
from torch import Tensor, nn

from ecnn import files
from ecnn.attacks import PGD
from ecnn.backbones import ResNet
from ecnn.constructions import random_code
from ecnn.data import Split
from ecnn.errors import DiskError, InputError
from ecnn.model import ECNN
from ecnn.models import resolve_recipe
from ecnn.training import RECIPES, Recipe, TrainingError, fit
from ecnn.training.alarms import overfitting_alarms, standstill_alarm
from ecnn.training.checkpoints import load_optimizer, optimizer_tensors
from ecnn.training.engine import parameter_groups
from ecnn.training.loop import accuracy

TINY = Recipe(
    epochs=4,
    batch_size=16,
    optimizer="adam",
    lr=0.02,
    schedule="onecycle",
    objective="member_cross_entropy",
    diversity_weight=0.05,
    shift=1,
    ema=0.9,
)


def tiny_data(count: int = 96, seed: int = 0) -> Split:
    """Four classes told apart by which quarter of the image is bright."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    images = torch.randint(0, 90, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    for quarter in range(4):
        rows, columns = 4 * (quarter // 2), 4 * (quarter % 2)
        images[labels == quarter, :, rows : rows + 4, columns : columns + 4] += 120
    return Split(images, labels)


def tiny_model(seed: int = 0, **options: Any) -> ECNN:
    torch.manual_seed(seed)
    return ECNN(random_code(4, 6, seed=0), 1, width=4, depth=8, feature_dim=8, **options)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def without_times(history: Any) -> list[dict[str, Any]]:
    timed = ("seconds", "images_per_second")
    return [{key: value for key, value in record.items() if key not in timed} for record in history.epochs]


def test_schedules() -> None:
    paper = RECIPES["paper"]
    rates = [paper.lr_at(epoch / 200) for epoch in (0, 79, 80, 119, 120, 159, 160, 179, 180, 199)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5, 1e-6, 1e-6, 5e-7, 5e-7])
    adp = RECIPES["adp"]
    rates = [adp.lr_at(epoch / 200) for epoch in (0, 99, 100, 149, 150, 199)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])
    cycle = RECIPES["onecycle"]
    assert [cycle.lr_at(x) / cycle.lr for x in (0, 0.1, 0.2, 0.6, 1)] == pytest.approx([0, 0.5, 1, 0.5, 0])


def test_a_recipe_fills_what_is_not_given() -> None:
    assert resolve_recipe("paper") == RECIPES["paper"]
    changed = resolve_recipe("paper", epochs=3, lr=None)
    assert (changed.epochs, changed.lr) == (3, 1e-3)
    for arguments, sentence in (
        (("poper",), "recipe must be one of paper"),
        (("paper", {"epoch": 3}), "has no option 'epoch'; .* did you mean 'epochs'"),
        (("paper", {"lr": -1.0}), "lr must be"),
        (("paper", {"optimizer": "lion"}), "optimizer must be one of"),
        (("paper", {"ema": 1.0}), "ema must be a number"),
        (("paper", {"adversarial_ratio": 0.0}), "adversarial_ratio"),
    ):
        with pytest.raises(InputError, match=sentence):
            resolve_recipe(arguments[0], **(arguments[1] if len(arguments) > 1 else {}))


def test_it_learns_and_keeps_the_best_validated_epoch(tmp_path: Path) -> None:
    model, val = tiny_model(batch_norm=True), tiny_data(40, seed=1)
    history = fit(model, tiny_data(), val=val, recipe=TINY, epochs=20, seed=0, run_dir=tmp_path)
    values = [record["val_accuracy"] for record in history.epochs]
    assert history.best_accuracy == max(values) > 0.9
    assert history.best_epoch == max(epoch for epoch, value in enumerate(values) if value == max(values))
    assert accuracy(model, val) == history.best_accuracy
    assert not model.training
    logged = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert logged == list(history.epochs)
    tensors, _ = files.read_tensors(tmp_path / "model.safetensors")
    assert all(torch.equal(tensors[key], value) for key, value in model.state_dict().items())


def test_the_same_seed_gives_the_same_bits() -> None:
    models = [tiny_model() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        fit(model, tiny_data(), val=None, recipe=TINY, seed=seed)
    assert same(models[0], models[1])
    assert not same(models[0], models[2])


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_stopping_and_resuming_changes_no_bit(tmp_path: Path, optimizer: str) -> None:
    recipe = dataclasses.replace(TINY, optimizer=optimizer, lr=0.01, weight_decay=1e-3)
    arguments: dict[str, Any] = {"val": tiny_data(40, seed=1), "recipe": recipe, "seed": 0}
    straight = tiny_model()
    whole = fit(straight, tiny_data(), **arguments)

    def stop_in_third_epoch(done: int, total: int, news: str) -> None:
        if done == 2 * 6 + 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        fit(tiny_model(), tiny_data(), **arguments, run_dir=tmp_path, progress=stop_in_third_epoch)
    resumed = tiny_model(seed=9)  # its own start must not matter
    again = fit(resumed, tiny_data(), **arguments, run_dir=tmp_path)
    assert again.resumed_from == 2
    assert same(straight, resumed)
    assert without_times(again) == without_times(whole)
    assert (again.best_epoch, again.best_accuracy) == (whole.best_epoch, whole.best_accuracy)
    done = tiny_model(seed=9)
    assert fit(done, tiny_data(), **arguments, run_dir=tmp_path).resumed_from == 4
    assert same(straight, done)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_loaded_optimizer_still_obeys_its_learning_rate(kind: Any) -> None:
    """On CUDA the rate is a tensor that the loop fills; a copy in its place would stay at what it was: nothing."""
    weight, rate = nn.Parameter(torch.ones(3)), torch.zeros(())

    def step(optimizer: torch.optim.Optimizer, lr: float) -> None:
        rate.fill_(lr)
        weight.grad = torch.ones(3)
        optimizer.step()

    first = kind([weight], lr=rate)
    step(first, 0.1)
    second = kind([weight], lr=rate)
    load_optimizer(second, optimizer_tensors(first))
    assert second.param_groups[0]["lr"] is rate
    before = weight.detach().clone()
    step(second, 0.0)
    assert torch.equal(weight.detach(), before)
    step(second, 0.1)
    assert (weight.detach() < before - 0.05).all()


def test_adversarial_training_by_any_callable() -> None:
    calls: list[int] = []

    def brighten(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        calls.append(len(images))
        assert not model.training  # crafted in eval mode, so that batch statistics stay clean
        return (images + 0.1).clamp(max=1)

    model = tiny_model(batch_norm=True)
    fit(model, tiny_data(), val=None, recipe=TINY, epochs=1, seed=0, attack=brighten, adversarial_ratio=0.5)
    assert calls == [8] * 6
    calls.clear()
    history = fit(
        model, tiny_data(), val=tiny_data(40, seed=1), recipe=TINY, epochs=2, seed=0, attack=brighten
    )
    assert calls == ([16] * 6 + [40]) * 2
    assert "val_robust_accuracy" in history.epochs[0]


def test_an_attack_that_returns_no_images_is_named() -> None:
    split = Split(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]))
    nothing: Any = lambda model, images, labels: None  # noqa: E731
    with pytest.raises(InputError, match=r"what the attack returned must be of shape \(.*\), not NoneType"):
        fit(
            ResNet(2, 1, depth=8, width=2),
            split,
            val=None,
            recipe="small",
            epochs=1,
            batch_size=4,
            seed=0,
            attack=nothing,
        )


def test_validation_images_can_have_an_attack_of_their_own(tmp_path: Path) -> None:
    """It sees validation images alone, chooses the epoch, replaces the training attack there, and makes another run."""
    calls: list[tuple[str, int]] = []
    val = tiny_data(40, seed=1)

    def attack_on(split: str) -> Any:
        def turn_dark(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            calls.append((split, len(images)))
            return images * (0.2 if split == "val" else 0.9)

        return turn_dark

    model = tiny_model(batch_norm=True)
    history = fit(model, tiny_data(), val=val, recipe=TINY, seed=0, val_attack=attack_on("val"))
    assert calls == [("val", 40)] * 4
    robust = [record["val_robust_accuracy"] for record in history.epochs]
    assert history.best_accuracy == max(robust)
    assert history.best_epoch == max(epoch for epoch, value in enumerate(robust) if value == max(robust))
    assert robust != [record["val_accuracy"] for record in history.epochs]
    calls.clear()
    both = {"attack": attack_on("train"), "val_attack": attack_on("val")}
    fit(model, tiny_data(), val=val, recipe=TINY, epochs=1, seed=0, **both)
    assert calls == [("train", 16)] * 6 + [("val", 40)]
    weak, strong = (PGD(norm="linf", eps=eps, steps=1, step_size=0.1) for eps in (0.1, 0.2))
    arguments: dict[str, Any] = {"val": val, "recipe": TINY, "epochs": 1, "seed": 0, "run_dir": tmp_path}
    fit(tiny_model(), tiny_data(), **arguments, val_attack=weak)
    assert fit(tiny_model(), tiny_data(), **arguments, val_attack=weak).resumed_from == 1
    with pytest.raises(InputError, match="other settings, data or code"):
        fit(tiny_model(), tiny_data(), **arguments, val_attack=strong)


def test_weight_decay_leaves_biases_and_norms_alone() -> None:
    """Also biases with an axis for members, which have two."""
    model = tiny_model(batch_norm=True, share_head=False)
    members_bias = dict(model.named_parameters())["head.bias"]
    assert members_bias.dim() == 2
    decaying, others = parameter_groups(model, 0.3)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(decaying["params"]) + len(others["params"]) == len(names)
    assert all(names[id(p)].endswith("weight") and p.dim() > 1 for p in decaying["params"])
    assert all(names[id(p)].endswith("bias") or p.dim() == 1 for p in others["params"])
    assert "head.bias" in {names[id(p)] for p in others["params"]}
    model.head.bias.requires_grad_(False)
    assert len(parameter_groups(model, 0.3)[1]["params"]) == len(others["params"]) - 1


@pytest.mark.parametrize(
    ("optimizer", "shrinks_by"), [("sgd", 0.1 * 0.5), ("adamw", 0.1 * 0.5), ("adam", 0.1)]
)
def test_what_weight_decay_does_without_a_gradient(optimizer: str, shrinks_by: float) -> None:
    """SGD and AdamW shrink a weight by lr * decay; Adam takes decay for a gradient, whose size it does not see."""

    def nothing(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return sum(0 * parameter.sum() for parameter in model.parameters())  # type: ignore[return-value]

    model = tiny_model(share_head=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    recipe = Recipe(epochs=1, batch_size=96, optimizer=optimizer, lr=0.1, weight_decay=0.5)
    fit(model, tiny_data(), val=None, recipe=recipe, objective=nothing, seed=0)
    nesterov = 1.9 if optimizer == "sgd" else 1.0  # its first step counts the gradient and 0.9 of it again
    for name, parameter in model.named_parameters():
        expected = 1.0 - (0.0 if name.endswith("bias") else nesterov * shrinks_by)
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected), msg=name)


def test_adversarial_training_resists_its_attack() -> None:
    attack = PGD(norm="linf", eps=0.15, steps=5, step_size=0.06, loss="cross_entropy", keep="last")
    test = tiny_data(80, seed=2)
    robust = []
    for trained_with in (None, attack):
        model = tiny_model(batch_norm=True)
        fit(model, tiny_data(), val=None, recipe=TINY, epochs=12, seed=0, attack=trained_with)
        robust.append(accuracy(model, test, attack=PGD(norm="linf", eps=0.15, steps=20, step_size=0.03)))
    assert robust[1] > robust[0] + 0.1


def test_objectives_as_callables_and_names() -> None:
    def own(model: Any, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    named, called = tiny_model(), tiny_model()
    fit(named, tiny_data(), val=None, recipe=TINY, seed=0, objective="cross_entropy")
    fit(called, tiny_data(), val=None, recipe=TINY, seed=0, objective=own)
    for a, b in zip(named.state_dict().values(), called.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-3)
    wrong: list[tuple[Any, str]] = [
        ("fame", "objective must be one of"),
        (
            lambda model, images, labels: model(images).logsumexp(1),
            r"one number, shape \(\), not shape \(\d+,\): take",
        ),
        (lambda model, images, labels: 1.0, "one number, .* not float"),
        (lambda model, images, labels: own(model, images, labels).detach(), "depends on no parameter"),
    ]
    for objective, sentence in wrong:
        with pytest.raises(InputError, match=sentence):
            fit(tiny_model(), tiny_data(), val=None, recipe=TINY, seed=0, objective=objective)
    with pytest.raises(InputError, match="depends on no parameter"):
        fit(tiny_model().requires_grad_(False), tiny_data(), val=None, recipe=TINY, seed=0, objective=own)


def test_divergence_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    steps: list[int] = []

    def explode(model: Any, images: Tensor, labels: Tensor) -> Tensor:
        steps.append(1)
        loss = nn.functional.cross_entropy(model(images), labels)
        return loss * float("nan") if len(steps) == 6 + 3 else loss

    model = tiny_model()
    with pytest.raises(TrainingError, match=r"epoch 1, step 2 .*after epoch 0 is kept.*Lower lr"):
        fit(model, tiny_data(), val=None, recipe=TINY, seed=0, objective=explode, run_dir=tmp_path)
    resumed = fit(
        tiny_model(), tiny_data(), val=None, recipe=TINY, seed=0, objective=explode, run_dir=tmp_path
    )
    assert resumed.resumed_from == 1


def test_refusals(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"val": None, "recipe": TINY, "seed": 0}
    with pytest.raises(InputError, match="batch of 97 is larger than the training set of 96"):
        fit(tiny_model(), tiny_data(), **arguments, batch_size=97)
    five = Split(tiny_data().images, torch.arange(96) % 5)
    with pytest.raises(InputError, match="a label is 4, but the model has scores for 4 classes"):
        fit(tiny_model(), five, **arguments)
    with pytest.raises(InputError, match="needs a CUDA device"):
        fit(tiny_model(), tiny_data(), **arguments, precision="bfloat16")
    with pytest.raises(InputError, match="a label is 4, but the model has scores for 3 classes"):
        fit(ResNet(3, 1, depth=8, width=4), five, **arguments, objective="cross_entropy")
    with pytest.raises(InputError, match="no parameters: there is nothing to train"):
        fit(nn.Flatten(), tiny_data(), **arguments, objective="cross_entropy")
    fit(tiny_model(), tiny_data(), **arguments, epochs=1, run_dir=tmp_path)
    other = Split(255 - tiny_data().images, tiny_data().labels)
    with pytest.raises(InputError, match="other settings, data or code"):
        fit(tiny_model(), other, **arguments, epochs=1, run_dir=tmp_path)
    last = tmp_path / "last.safetensors"
    whole = last.read_bytes()
    for changes in ({"seed": 1}, {"epochs": 2}, {"lr": 0.1}):
        with pytest.raises(InputError, match="other settings, data or code"):
            fit(tiny_model(), tiny_data(), **{**arguments, "epochs": 1, **changes}, run_dir=tmp_path)
    for damage in (whole[:-10], whole[: len(whole) // 2], b"", b"PK\x03\x04" + whole, b"\x80\x04N."):
        last.write_bytes(damage)
        with pytest.raises(InputError, match="not a whole safetensors file"):
            fit(tiny_model(), tiny_data(), **arguments, epochs=1, run_dir=tmp_path)
    files.write_tensors(last, {"x": torch.zeros(1)}, {"format": "other"})
    with pytest.raises(InputError, match="is not a checkpoint of this version"):
        fit(tiny_model(), tiny_data(), **arguments, epochs=1, run_dir=tmp_path)
    assert (
        fit(tiny_model(), tiny_data(), **arguments, epochs=1, run_dir=tmp_path, resume=False).resumed_from
        == 0
    )


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {"val": None, "recipe": TINY, "seed": 0, "run_dir": tmp_path}
    real, calls = files.write_tensors, []

    def full_after_three(path: Any, tensors: Any, header: Any) -> Path:
        calls.append(path)
        if len(calls) > 3:
            raise DiskError(f"cannot write {path}: No space left on device.")
        return real(path, tensors, header)

    monkeypatch.setattr(files, "write_tensors", full_after_three)
    with pytest.raises(DiskError, match="No space left"):
        fit(tiny_model(), tiny_data(), **arguments)
    monkeypatch.undo()
    straight, resumed = tiny_model(), tiny_model(seed=5)
    fit(straight, tiny_data(), val=None, recipe=TINY, seed=0)
    assert fit(resumed, tiny_data(), **arguments).resumed_from == 1
    assert same(straight, resumed)


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_the_checkpoint_before_the_last_steps_in(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {"val": None, "recipe": TINY, "seed": 0}
    straight = tiny_model()
    fit(straight, tiny_data(), **arguments, run_dir=tmp_path)
    last, previous = tmp_path / "last.safetensors", tmp_path / "previous.safetensors"
    epochs = TINY.epochs
    content = bytearray(last.read_bytes())
    content[-1] ^= damage == "flip"
    last.write_bytes(content[:-10] if damage == "cut" else content)
    if damage == "gone":
        last.unlink()
    for name in ("model.safetensors", "train.jsonl"):
        (tmp_path / name).unlink()

    def stop(done: int, total: int, news: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # at once: by then both checkpoints are good again
        fit(tiny_model(), tiny_data(), **arguments, run_dir=tmp_path, progress=stop)
    assert "went on from previous.safetensors, the checkpoint before it" in caplog.text
    assert last.read_bytes() == previous.read_bytes()
    resumed = tiny_model(seed=5)
    history = fit(resumed, tiny_data(), **arguments, run_dir=tmp_path)
    assert (history.resumed_from, len(history.epochs)) == (epochs - 1, epochs)
    assert same(straight, resumed)
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == epochs
    previous.write_bytes(b"")
    last.write_bytes(b"")
    with pytest.raises(InputError, match=r"previous\.safetensors is not a whole safetensors file"):
        fit(tiny_model(), tiny_data(), **arguments, run_dir=tmp_path)


def test_a_run_folder_that_is_moved_away_is_no_run(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"val": None, "recipe": TINY, "seed": 0}
    run, moved = tmp_path / "run", tmp_path / "moved"

    def move(done: int, total: int, news: str) -> None:
        if (run / "last.safetensors").exists():
            run.rename(moved)

    with pytest.raises(DiskError, match="was moved, deleted or replaced during the work"):
        fit(tiny_model(), tiny_data(), **arguments, run_dir=run, progress=move)
    assert not run.exists()
    straight, resumed = tiny_model(), tiny_model(seed=5)
    fit(straight, tiny_data(), **arguments)
    assert fit(resumed, tiny_data(), **arguments, run_dir=moved).resumed_from >= 1
    assert same(straight, resumed)


def test_alarms() -> None:
    def curve(robust: list[float], loss: list[float]) -> list[dict[str, Any]]:
        pairs = enumerate(zip(robust, loss, strict=True))
        return [{"epoch": e, "val_robust_accuracy": r, "loss": value} for e, (r, value) in pairs]

    falling = [1.0 - 0.02 * epoch for epoch in range(20)]
    steady = [0.3 + 0.01 * epoch for epoch in range(20)]
    assert overfitting_alarms(curve(steady, falling)) == []
    peaked = steady[:12] + [0.36] * 8
    assert "robust overfitting" in overfitting_alarms(curve(peaked, falling))[0]
    assert "catastrophic overfitting" in overfitting_alarms(curve([*steady[:5], 0.02], falling[:6]))[0]
    assert overfitting_alarms([{"epoch": 0, "loss": 1.0}]) == []
    still = [{"val_accuracy": value} for value in (0.1, 0.104, 0.1, 0.108, 0.1)]
    assert standstill_alarm(still, 0.1).startswith("nothing is learned: after 5 epochs")
    assert standstill_alarm(still[:4], 0.1) == ""  # too early to say
    assert standstill_alarm([*still, {"val_accuracy": 0.1}], 0.1) == ""  # said once
    assert standstill_alarm([*still[:4], {"val_accuracy": 0.12}], 0.1) == ""


def test_a_start_that_teaches_nothing_is_said() -> None:
    model = tiny_model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # no gradient leads away
    found = fit(model, tiny_data(), val=tiny_data(), recipe="small", epochs=5, seed=0)
    assert any("nothing is learned" in alarm for alarm in found.alarms)


def test_accuracy_restores_modes_and_counts() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))
            self.drop = nn.Dropout(0.5)

        def forward(self, images: Tensor) -> Tensor:
            assert not self.training
            return nn.functional.one_hot(torch.zeros(len(images), dtype=torch.int64), 4).float()

    model = Fixed().train()
    model.drop.eval()
    assert accuracy(model, tiny_data(96), batch_size=7) == 0.25
    assert model.training
    assert not model.drop.training


# As a person runs it.


RESNET = ("--set", "model.width=4", "--set", "model.depth=8")
SLOWLY = (*RESNET, "--set", "train.lr=0.0005")  # so that rounding does not grow


def command(out: Path, *model: str) -> tuple[str, ...]:
    words = (
        "train --data digits --val-fraction 0.5 --device cpu --seed 3 --epochs 3 --batch-size 32 --json --out"
    )
    return (*words.split(), str(out), *(model or RESNET))


def start_pair(out: Path) -> list[Started]:
    """The two processes that `torchrun --nproc-per-node=2` would start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return [start(*command(out, *SLOWLY), variables=variables) for variables in own]


def weights(folder: Path) -> dict[str, Tensor]:
    return files.read_tensors(folder / "model.safetensors")[0]


@pytest.mark.parametrize(
    "model",
    [
        RESNET,
        pytest.param(
            (
                "--model",
                "tanh_ensemble",
                "--set",
                "model.filters=[2,3,4]",
                "--set",
                "model.bit_filters=2",
            ),
            marks=[pytest.mark.slow, pytest.mark.full],
        ),
        pytest.param(
            (
                "--model",
                "resnet",
                *RESNET,
                "--eps",
                "0.1",
                "--attack-steps",
                "2",
                "--set",
                "train.objective=trades",
            ),
            marks=[pytest.mark.slow, pytest.mark.full],
        ),
    ],
    ids=["ecnn", "tanh_ensemble", "trades"],
)
def test_kill_and_resume_on_the_command_line(tmp_path: Path, model: tuple[str, ...]) -> None:
    """tests/test_baselines_training.py stops and resumes the objectives that draw random numbers in one process."""
    straight = run(*command(tmp_path / "straight", *model))
    assert straight.returncode == 0, straight.stderr
    killed = tmp_path / "killed"
    process = start(*command(killed, *model))
    wait_for(killed / "last.safetensors")
    process.kill()
    assert process.wait().returncode == -signal.SIGKILL
    assert not (killed / "DONE").exists()
    moved = killed.rename(tmp_path / "moved")  # a run resumes from a copied folder
    resumed = run(*command(moved, *model))
    assert resumed.returncode == 0, resumed.stderr
    a, b = json.loads(straight.stdout), json.loads(resumed.stdout)
    for key in ("parameters", "epochs", "best_epoch", "val_accuracy", "test_accuracy", "test_images"):
        assert a[key] == b[key]
    first, second = weights(tmp_path / "straight"), weights(moved)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert (moved / "DONE").exists()
    assert not [path for path in moved.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.full
def test_torchrun_starts_two_processes(tmp_path: Path) -> None:
    """They load torch anew; the next test sets what torchrun sets and starts the processes itself."""
    launch = ("--standalone", "--nproc-per-node=2", "-m", "ecnn", *command(tmp_path, *SLOWLY))
    done = run(*launch, program=Path(torch.distributed.__file__).with_name("run.py"))  # as `torchrun`
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["epochs"] == 3


def test_two_processes_match_one_and_resume(tmp_path: Path) -> None:
    """Same global batch: gradients are averaged in another order, so equal to rounding (2e-3 after three epochs)."""
    assert run(*command(tmp_path / "one", *SLOWLY)).returncode == 0
    done = [process.wait() for process in start_pair(tmp_path / "two")]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr[-2000:]
    assert [json.loads(one.stdout)["epochs"] for one in done if one.stdout] == [3]  # one of them speaks
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for key in one:
        assert torch.allclose(one[key], two[key], atol=2e-3), key

    killed = tmp_path / "killed"
    pair = start_pair(killed)
    wait_for(killed / "last.safetensors")
    for process in pair:
        process.kill()
    assert [process.wait().returncode for process in pair] == [-signal.SIGKILL] * 2
    assert not (killed / "DONE").exists()
    for process in start_pair(killed):
        again = process.wait()
        assert again.returncode == 0, again.stderr[-2000:]
    assert all(torch.equal(two[key], value) for key, value in weights(killed).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "shorter", [("--epochs", "12"), pytest.param((), marks=pytest.mark.full)], ids=["12 epochs", "as it is"]
)
def test_digits_reach_96_percent(tmp_path: Path, shorter: tuple[str, ...]) -> None:
    started = time.monotonic()
    done = run(*["train", "--data", "digits", "--device", "cpu", "--json", "--out"], str(tmp_path), *shorter)
    result = json.loads(done.stdout)
    assert result["test_accuracy"] >= 0.96
    assert result["parameters"] == 490_209
    assert time.monotonic() - started < 60


def vector(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().cpu().reshape(-1) for parameter in model.parameters()])


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("adversarial", [False, True])
def test_graph_and_eager_agree_on_cuda(optimizer: str, adversarial: bool) -> None:
    """The same random numbers and the same steps: what differs is rounding, a small part of the way travelled.

    After one epoch: later, rounding has grown to as much between two eager runs (8 % of the way after four epochs).
    """
    attack = (
        PGD(norm="linf", eps=0.1, steps=2, step_size=0.05, loss="cross_entropy", keep="last")
        if adversarial
        else None
    )
    recipe = dataclasses.replace(TINY, epochs=1, optimizer=optimizer, lr=1e-3, precision="float32", ema=None)
    start = vector(tiny_model(batch_norm=True))
    ends = []
    for graph in (True, False):
        model = tiny_model(batch_norm=True).cuda()
        history = fit(model, tiny_data(), val=None, recipe=recipe, seed=0, attack=attack, graph=graph)
        assert history.note == ""
        ends.append(vector(model))
    travelled = (ends[0] - start).norm()
    assert travelled > 0.002
    assert (ends[0] - ends[1]).norm() < 0.01 * travelled


@pytest.mark.gpu
def test_a_resumed_graph_goes_on_where_it_was(tmp_path: Path) -> None:
    """Stopped in its third epoch of four and resumed: the weights of an uninterrupted run, up to rounding."""
    recipe = dataclasses.replace(TINY, lr=1e-3, precision="float32", ema=None)
    start = vector(tiny_model(batch_norm=True))

    def trained(**options: Any) -> Tensor:
        model = tiny_model(batch_norm=True).cuda()
        fit(model, tiny_data(), val=None, recipe=recipe, seed=0, **options)
        return vector(model)

    def stop_in_third_epoch(done: int, total: int, news: str) -> None:
        if done == 2 * 6 + 3:
            raise TimeoutError

    straight = trained()
    with pytest.raises(TimeoutError):
        trained(run_dir=tmp_path, progress=stop_in_third_epoch)
    assert (trained(run_dir=tmp_path) - straight).norm() < 0.1 * (straight - start).norm()
