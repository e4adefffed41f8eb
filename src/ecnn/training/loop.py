"""`fit`: epochs with validation, checkpoints, and alarms about overfitting."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecnn import files
from ecnn.asking import eval_mode, in_usual_state, without_tf32
from ecnn.checks import build, check_count, check_entries, check_fields, check_kind
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.models import describe_model, objective_of, resolve_recipe
from ecnn.objectives import Objective, predicted_classes
from ecnn.progress import Milestone, Progress
from ecnn.recipes import Recipe
from ecnn.training.alarms import few_steps_alarm, overfitting_alarms, standstill_alarm
from ecnn.training.board import Board
from ecnn.training.checkpoints import (
    load_checkpoint,
    load_model_tensors,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    save_checkpoint,
)
from ecnn.training.engine import Craft, Engine, craft

LAST, PREVIOUS, BEST, LOG = "last.safetensors", "previous.safetensors", "model.safetensors", "train.jsonl"
_ROBUST_VAL_IMAGES = 1000
_logger = logging.getLogger("ecnn")


class TrainingError(RuntimeError):
    """Training went wrong in a way that other settings can avoid; the last good checkpoint is kept."""


@dataclass(frozen=True)
class History:
    """The record of a training.

    Attributes:
        epochs: one dict per epoch: epoch, loss, lr, val_accuracy, val_robust_accuracy, images_per_second, seconds.
        best_epoch: the epoch whose weights the model has now (-1 when nothing was trained).
        best_accuracy: its validation accuracy (under attack when there is one), None without validation data.
        alarms: sentences about robust or catastrophic overfitting, first epochs without progress, very few steps.
        note: why the step ran eagerly although a graph was wanted, or which checkpoint could not be read; empty
            otherwise.
        resumed_from: how many epochs were already done in the checkpoint that the training resumed from.
    """

    epochs: tuple[dict[str, Any], ...]
    best_epoch: int
    best_accuracy: float | None
    alarms: tuple[str, ...] = ()
    note: str = ""
    resumed_from: int = 0


@dataclass
class _LoopState:
    """State of the loop, stored in checkpoints beside the tensors."""

    epochs: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = -1
    best_accuracy: float | None = None
    alarms: list[str] = field(default_factory=list)


@in_usual_state
def fit(
    model: nn.Module,
    train: Split,
    *,
    val: Split | None,
    recipe: str | Recipe = "paper",
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    optimizer: str | None = None,
    diversity_weight: float | None = None,
    objective: str | Objective | None = None,
    attack: Craft | None = None,
    val_attack: Craft | None = None,
    adversarial_ratio: float | None = None,
    ema: float | None = None,
    precision: str | None = None,
    seed: int,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = True,
    graph: bool | None = None,
    compile_parts: bool = False,
    progress: Progress | None = None,
) -> History:
    """Trains the model on its device and leaves it in eval mode, with the weights of the best validated epoch.

    Args:
        val: validation images, split from the training data, to choose the best epoch by its accuracy. With an attack
            it is the accuracy on the first 1,000 of them, attacked. None keeps the last epoch.
        recipe: a name of `RECIPES` or a `Recipe`; every option below that is not None replaces its entry.
        objective: a name, or any callable (model, images, labels) -> scalar. If it has an argument `generator`, it
            gets the random generator of this run.
        attack: any callable (model, images, labels) -> images, for adversarial training.
        val_attack: attack on the validation images, in place of `attack`: for objectives that attack the model
            themselves, such as TRADES, or to choose by a stronger attack than one can train with.
        run_dir: folder for checkpoints and train.jsonl; a run found there is continued unless resume is False.
        graph: capture the step in a CUDA graph; by default on CUDA with one process.
        compile_parts: also run the model's parts through torch.compile: a start of some 15 s, then faster steps.
        progress: called with (steps done, steps in all, results so far as text).

    Under torchrun every process calls `fit` with the same arguments; each takes a part of the batch, and gradients are
    averaged.
    """
    check_count("seed", seed, least=0)
    name = objective if isinstance(objective, str) else None
    settings = resolve_recipe(
        recipe,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
        optimizer=optimizer,
        diversity_weight=diversity_weight,
        objective=name,
        adversarial_ratio=adversarial_ratio,
        ema=ema,
        precision=precision,
    )
    loss = objective if callable(objective) else objective_of(settings)
    num_classes = _check_labels(model, train, val)
    device = next(model.parameters()).device
    engine = Engine(
        model,
        train,
        settings,
        loss,
        attack,
        seed,
        use_graph=_wants_graph(graph, device),
        compile_parts=compile_parts,
    )
    val_attack = attack if val_attack is None else val_attack
    folder = None if run_dir is None else Path(run_dir)
    loop = _Loop(engine, val, settings, val_attack, folder, progress)
    loop.about = {"model": describe_model(model, num_classes, train.images.shape[1:])}
    fingerprint = _fingerprint(model, train, settings, loss, (attack, val_attack), seed)
    with nullcontext() if folder is None or engine.rank else files.locked(folder, "training"):
        return loop.run(resume=resume, fingerprint=fingerprint)


def accuracy(
    model: nn.Module,
    split: Split,
    *,
    attack: Craft | None = None,
    batch_size: int = 1000,
    autocast: AbstractContextManager[Any] | None = None,
) -> float:
    """Share of correctly classified images in eval mode, optionally of attacked images.

    Computed in float32 without TF32, or under `autocast`. It is good enough to compare epochs, not for a verdict.
    """
    device = next(model.parameters()).device
    correct = torch.zeros((), dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(0)  # the attack draws the same numbers in every epoch
    with without_tf32(), eval_mode(model), torch.no_grad(), autocast or nullcontext():
        for start in range(0, len(split), batch_size):
            images, labels = (tensor.to(device) for tensor in split[start : start + batch_size])
            if attack is not None:
                images = craft(attack, model, images, labels, generator)
            correct += (predicted_classes(model(images)) == labels).sum()
    return float(correct) / max(1, len(split))


class _Loop:
    """Epochs with validation, checkpoints and alarms around an engine."""

    def __init__(
        self,
        engine: Engine,
        val: Split | None,
        settings: Recipe,
        val_attack: Craft | None,
        run_dir: Path | None,
        progress: Progress | None,
    ) -> None:
        self.engine, self.settings, self.val_attack, self.run_dir = engine, settings, val_attack, run_dir
        self.val = val.to(engine.device) if val is not None and len(val) else None
        self.progress = progress if engine.rank == 0 else None
        self.state = _LoopState()
        self.best: dict[str, Tensor] | None = None
        self.news, self.note = "", ""
        self.best_is_new = False
        self.about: dict[str, Any] = {}  # further facts for the file of the best weights
        self.writer = ThreadPoolExecutor(max_workers=1)
        self.writing: Future[None] | None = None
        self.board = None if run_dir is None else Board(run_dir)

    def run(self, *, resume: bool, fingerprint: str) -> History:
        start = self._resume(fingerprint) if resume else 0
        self._warn(few_steps_alarm(self.engine.steps_per_epoch, self.settings))
        try:
            for epoch in range(start, self.settings.epochs):
                self._one_epoch(epoch)
                self._save(fingerprint)
                if epoch == start:
                    gc.freeze()  # garbage collection need not search what compilation left in memory
        finally:
            gc.unfreeze()
            try:
                self._wait_for_writer()
            finally:
                self.writer.shutdown()
                if self.board is not None:
                    self.board.close()
        self._finish()
        return History(
            epochs=tuple(self.state.epochs),
            best_epoch=self.state.best_epoch,
            best_accuracy=self.state.best_accuracy,
            alarms=tuple(self.state.alarms),
            note=" ".join(filter(None, (self.note, self.engine.note))),
            resumed_from=start,
        )

    def _one_epoch(self, epoch: int) -> None:
        started = time.monotonic()
        losses = self.engine.run_epoch(epoch, lambda step: self._report(epoch, step)).cpu()
        seconds = time.monotonic() - started
        self._stop_if_diverged(epoch, losses)
        record = {
            "epoch": epoch,
            "loss": float(losses.mean()),
            "lr": self.settings.lr_at(epoch / self.settings.epochs),
            "images_per_second": len(losses) * self.settings.batch_size / seconds,
            "seconds": seconds,
            **self._validate(),
        }
        self.state.epochs.append(record)
        self._keep_best(record)
        self._raise_alarms()
        shown = [f"loss {record['loss']:.4f}"]
        for key, title in (("val_accuracy", "validation"), ("val_robust_accuracy", "under attack")):
            if key in record:
                shown.append(f"{title} {100 * record[key]:.1f} %")
        self.news = f"{record['images_per_second']:,.0f} images/s, " + ", ".join(shown)
        self._report(epoch, self.engine.steps_per_epoch, is_end=True)

    def _validate(self) -> dict[str, float]:
        if self.val is None:
            return {}
        model = self.engine.final_model()
        values = {"val_accuracy": accuracy(model, self.val, batch_size=5000, autocast=self.engine.autocast())}
        if self.val_attack is not None:
            values["val_robust_accuracy"] = accuracy(
                model,
                self.val.take(_ROBUST_VAL_IMAGES),
                attack=self.val_attack,
                autocast=self.engine.autocast(),
            )
        return values

    def _keep_best(self, record: dict[str, Any]) -> None:
        value = record.get("val_robust_accuracy", record.get("val_accuracy"))
        # Ties, which are common with few validation images, go to the later epoch: its learning rate is lower.
        if value is None or self.state.best_accuracy is None or value >= self.state.best_accuracy:
            self.state.best_epoch, self.state.best_accuracy = record["epoch"], value
            self.best = model_tensors(self.engine.final_model())
            self.best_is_new = True

    def _stop_if_diverged(self, epoch: int, losses: Tensor) -> None:
        first = abs(self.state.epochs[0]["loss"]) if self.state.epochs else abs(float(losses[0]))
        bad = torch.nonzero(~torch.isfinite(losses) | (losses.abs() > 1000 * max(first, 1.0)))
        if len(bad):
            step = int(bad[0])
            is_saved = self.run_dir and epoch
            kept = f"the checkpoint after epoch {epoch - 1} is kept" if is_saved else "nothing was saved"
            advice = f"Lower lr (now {self.settings.lr})."
            if self.engine.is_half:
                # The same command has diverged in its first epoch, and trained well when it was started again.
                advice = (
                    f"Start it again (a GPU adds in no fixed order), lower lr (now {self.settings.lr}), or use "
                    "precision='float32'."
                )
            raise TrainingError(
                f"training diverged in epoch {epoch}, step {step} (loss {float(losses[step]):.4g}); {kept}. {advice}"
            )

    def _raise_alarms(self) -> None:
        for alarm in overfitting_alarms(self.state.epochs):
            self._warn(alarm)
        if self.val is not None:
            most = int(self.val.labels.bincount().max())
            self._warn(standstill_alarm(self.state.epochs, most / len(self.val)))

    def _warn(self, alarm: str) -> None:
        if alarm and alarm not in self.state.alarms:
            self.state.alarms.append(alarm)
            _logger.warning(alarm)

    def _report(self, epoch: int, step: int, *, is_end: bool = False) -> None:
        if self.progress:
            total, epochs = self.engine.steps_per_epoch, self.settings.epochs
            news = Milestone(f"epoch {epoch + 1} of {epochs}: {self.news}") if is_end else self.news
            self.progress(epoch * total + step, epochs * total, news)

    def _save(self, fingerprint: str) -> None:
        """Copies the state and writes it while the next epoch runs, once the previous epoch's state is on disk."""
        if self.run_dir is None or self.board is None or self.engine.rank != 0:
            return
        engine = self.engine
        tensors = {**model_tensors(engine.model, "model."), **optimizer_tensors(engine.optimizer)}
        if engine.averaged is not None:
            tensors |= model_tensors(engine.averaged, "averaged.")
        if self.best is not None:
            tensors |= {f"best.{key}": value for key, value in self.best.items()}
        state = {**vars(self.state), "epochs": [*self.state.epochs], "alarms": [*self.state.alarms]}
        facts = {"fingerprint": fingerprint, **state}
        best = self.best if self.best_is_new else None
        self.best_is_new = False
        self._wait_for_writer()
        self.writing = self.writer.submit(_write, self.run_dir, tensors, facts, best, self.about, self.board)

    def _wait_for_writer(self) -> None:
        if self.writing is not None:
            writing, self.writing = self.writing, None
            writing.result()

    def _resume(self, fingerprint: str) -> int:
        """Restores the state from the run folder's checkpoint; returns how many epochs are done, 0 without one."""
        if self.run_dir is None or not any(files.exists(self.run_dir / name) for name in (LAST, PREVIOUS)):
            return 0
        path, tensors, facts = self._read_checkpoint(self.run_dir)
        if facts.get("fingerprint") != fingerprint:
            raise InputError(
                f"{path} belongs to a run with other settings, data or code: choose another folder, or resume=False."
            )
        load_model_tensors(self.engine.model, tensors, path, "model.")
        if self.engine.averaged is not None:
            load_model_tensors(self.engine.averaged, tensors, path, "averaged.")
        try:
            load_optimizer(self.engine.optimizer, tensors)
        except (ValueError, KeyError, RuntimeError) as error:
            raise InputError(f"{path} was made with another optimizer: choose another folder.") from error
        state = {name: value for name, value in facts.items() if name != "fingerprint"}
        self.state = build(str(path), _LoopState, state)
        check_fields(str(path), self.state)
        for record in self.state.epochs:
            check_entries(f"{path}: an epoch", record, {"epoch": int, "loss": float})
        best = {key.removeprefix("best."): value for key, value in tensors.items() if key.startswith("best.")}
        self.best = best or None
        if self.engine.rank == 0:  # these files may have been lost or changed since
            if path.name == PREVIOUS:
                files.keep(path, self.run_dir / LAST)
            _write_products(self.run_dir, vars(self.state), self.best, self.about)
        return len(self.state.epochs)

    def _read_checkpoint(self, run_dir: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
        """The last checkpoint (path, tensors, facts), or the one before it if the last cannot be read."""
        path, previous = run_dir / LAST, run_dir / PREVIOUS
        try:
            return path, *load_checkpoint(path)
        except InputError as error:
            if not files.exists(previous):
                raise InputError(f"{error} Move it away to begin anew.") from error
            tensors, facts = load_checkpoint(previous)
            self.note = f"{error} Training went on from {PREVIOUS}, the checkpoint before it."
            _logger.warning(self.note)
            return previous, tensors, facts

    def _finish(self) -> None:
        model = self.engine.model
        best = self.best if self.best is not None else model_tensors(self.engine.final_model())
        model.load_state_dict(best)
        model.eval()


def _write(
    run_dir: Path,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    best: dict[str, Tensor] | None,
    about: dict[str, Any],
    board: Board,
) -> None:
    _write_products(run_dir, facts, best, about)
    if len(facts["epochs"]) > 1:  # otherwise the file there belongs to another run
        files.keep(run_dir / LAST, run_dir / PREVIOUS)
    else:
        files.remove(run_dir / PREVIOUS)
    save_checkpoint(run_dir / LAST, tensors, facts)
    board.show(facts["epochs"][-1])


def _write_products(
    run_dir: Path, facts: dict[str, Any], best: dict[str, Tensor] | None, about: dict[str, Any]
) -> None:
    """Writes the files that are made from a checkpoint: the best weights, if given, and the log."""
    if best is not None:
        own = {key: facts[key] for key in ("best_epoch", "best_accuracy")}
        save_checkpoint(run_dir / BEST, best, {**own, **about})
    files.write_text(run_dir / LOG, "".join(json.dumps(record) + "\n" for record in facts["epochs"]))


def _wants_graph(graph: bool | None, device: torch.device) -> bool:
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return device.type == "cuda" and alone and graph is not False


def _check_labels(model: nn.Module, train: Split, val: Split | None) -> int:
    """Number of classes that the model scores, found on one image; InputError if there is no score for a label."""
    for name, split in (("train", train), ("val", val)):
        if split is not None or name == "train":
            check_kind(name, split, Split, "a Split such as data.train")
    if not len(train):
        raise InputError("the training set is empty.")
    if train.is_float:
        raise InputError(
            "training images must be bytes (torch.uint8): float32 images are for evaluation alone."
        )
    with eval_mode(model), torch.no_grad():
        first = next(model.parameters(), None)
        if first is None:
            raise InputError("the model has no parameters: there is nothing to train.")
        num_classes = model(train[:1][0].to(first.device)).shape[1]
    highest = max(int(split.labels.max()) for split in (train, val) if split is not None and len(split))
    if highest >= num_classes:
        raise InputError(
            f"a label is {highest}, but the model has scores for {num_classes} classes (0 to {num_classes - 1}): use "
            "a code or a head for as many classes as the data has."
        )
    return int(num_classes)


def _fingerprint(
    model: Any,
    train: Split,
    settings: Recipe,
    objective: Objective,
    attacks: tuple[Craft | None, Craft | None],
    seed: int,
) -> str:
    """A hash of everything that decides the run. A checkpoint with another hash belongs to another run."""
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
    code = getattr(model, "code", None)
    facts = {
        "recipe": dataclasses.asdict(settings),
        "objective": _described(objective),
        "attacks": [_described(attack) for attack in attacks],
        "seed": seed,
        "shapes": shapes,
        "code": code.content_hash if code is not None else None,
        "data": [
            hashlib.sha256(part.cpu().numpy().tobytes()).hexdigest() for part in (train.images, train.labels)
        ],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _described(function: Any) -> str:
    """An objective or attack as text: a dataclass with its settings, anything else by its class."""
    return repr(function) if dataclasses.is_dataclass(function) else str(type(function))
