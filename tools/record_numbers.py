"""Records weights, outcomes and verdicts of a fixed set of small runs, to check that a change of the code moves none.

Run: python tools/record_numbers.py OUT.json, before and after a change that should move no number, then
python tools/record_numbers.py --compare BEFORE.json AFTER.json. All runs are on the CPU with one thread and fixed
seeds: two recordings by the same code on the same machine are equal, on different machines they need not be. Numbers
are written exactly, arrays as SHA-256 of their values; no time is recorded. Texts for users have keys that begin with
"text.", since they may be reworded although no number changes (--without-text leaves them out).

The shipped models classify noise; the audit of one of them needs CIFAR-10 under data/.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import platform
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ecnn
from ecnn.attacks import (
    APGD,
    ATTACKS,
    BIM,
    FAB,
    FGSM,
    FMN,
    JSMA,
    PGD,
    Attack,
    AutoAttack,
    BlindSpot,
    CarliniWagnerL2,
    DeepFool,
    HopSkipJump,
    MemberCarliniWagner,
    RandomNoise,
    Square,
    Transfer,
)
from ecnn.auditing import Budget, Examples
from ecnn.auditing.subject import Subject
from ecnn.auditing.suite import suite
from ecnn.evaluation import compare, load_evaluation, member_transfer, model_transfer

Numbers = dict[str, Any]
EPS, EPS_L2 = 0.1, 0.6
#: Entries of epochs, outcomes and attacks of an audit that are times.
TIMES = ("seconds", "images_per_second", "started", "finished")


# Names of results in the package: when one changes, only this part needs to change ---------------------------------


def columns_of(outcomes: Any) -> dict[str, np.ndarray]:
    """Every array of the outcomes of an attack, which have one entry per image, by name."""
    fields = {field.name: getattr(outcomes, field.name) for field in dataclasses.fields(outcomes)}
    return {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}


def outcomes_of(evaluation: Any) -> dict[str, Any]:
    """The outcomes of an evaluation by the name of the attack, those without an attack first."""
    return {"clean": evaluation.clean, **evaluation.outcomes}


def figures_of(evaluation: Any) -> dict[str, Any]:
    """The summary of an evaluation, as `ecnn evaluate --json` prints it."""
    values: dict[str, Any] = evaluation.to_json()
    return values


def curve_of(curve: Any) -> dict[str, Any]:
    """Radii, and how many images are right at each: under its own attack, and under all attacks up to that radius."""
    rates = {name: [rate.successes for rate in getattr(curve, name)] for name in ("robust", "cumulative")}
    return {"eps": list(curve.eps), **rates}


def matrix_of(matrix: Any) -> dict[str, Any]:
    """The counts of a transfer matrix, and how many images it was measured on."""
    return {
        "counts": matrix.counts.tolist(),
        "clean_counts": matrix.clean_counts.tolist(),
        "images": matrix.n,
    }


def report_of(audit: Any) -> dict[str, Any]:
    """An audit as `ecnn audit --json` prints it."""
    values: dict[str, Any] = audit.to_dict()
    return values


def stages_of(run_dir: Path) -> dict[str, Any]:
    """The outcomes that an audit has kept in its folder, by attack."""
    return outcomes_of(load_evaluation(run_dir / "audit"))


def surrogates_of(run_dir: Path) -> dict[str, dict[str, Tensor]]:
    """The weights of the surrogate networks that an audit has trained, by name."""
    return {path.stem: load_file(path) for path in sorted((run_dir / "audit").glob("*.safetensors"))}


def suite_of(model: nn.Module, data: Any, eps: float, audited: int) -> dict[str, Attack]:
    """The attacks that an audit in Linf would make on a model, by name.

    Args:
        audited: how many test images count as audited; those after them are the audit's examples.
    """
    images, labels = data.test[audited:]
    examples = Examples(images, labels, are_true=True)
    budget = make_budget("tiny", restarts=1, autoattack=False)
    subject = Subject(model=model, images=images, labels=labels, norm="linf", eps=eps, budget=budget, seed=2)
    return suite(subject, examples=examples, num_classes=model(images[:1]).shape[1], is_random=False)


def history_of(history: Any) -> dict[str, Any]:
    """The history that `fit` returns."""
    return {
        "epochs": list(history.epochs),
        "best_epoch": history.best_epoch,
        "best_accuracy": history.best_accuracy,
    }


def make_budget(name: str, **changes: Any) -> Budget:
    """A small audit budget with these changes."""
    options: dict[str, Any] = {
        "images": 16,
        "steps": 10,
        "restarts": 2,
        "targets": 2,
        "autoattack": True,
        "probe_images": 16,
        "probe_steps": 10,
        "queries": 100,
        "eot": 3,
    }
    return Budget(name=name, **{**options, **changes})


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a run folder."""
    return load_file(folder / "model.safetensors")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """One record per epoch of a run folder."""
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


# Exact values --------------------------------------------------------------------------------------------------------


def hash_values(values: np.ndarray | Tensor) -> str:
    """SHA-256 of shape and values; the same for arrays of different width, such as float32 and float64."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    wide = {"f": "float64", "u": "uint64", "i": "int64", "b": "int64"}[array.dtype.kind]
    digest = hashlib.sha256(str(array.shape).encode())
    digest.update(np.ascontiguousarray(array.astype(wide)).tobytes())
    return digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all tensors, names included, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {hash_values(tensors[name])}\n".encode())
    return digest.hexdigest()


def as_json(value: Any) -> Any:
    """The value in types that JSON can hold exactly; NaN and infinities become text."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def flatten(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """(key, value) of everything nested in the value, without times; a list of plain values stays one value."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name not in TIMES:
                yield from flatten(item, f"{key}.{name}")
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for position, item in enumerate(value):
            yield from flatten(item, f"{key}.{position}")
    else:
        yield key, as_json(value)


def is_text(value: Any) -> bool:
    """Whether a plain value is text, or a list with text in it."""
    return any(isinstance(item, str) for item in (value if isinstance(value, list) else [value]))


class Book:
    """The values recorded so far, by key."""

    def __init__(self) -> None:
        self.numbers: Numbers = {}

    def add(self, key: str, value: Any) -> None:
        """Records a value and everything nested in it; ValueError if a key is used twice."""
        for name, item in flatten(value, key):
            if name in self.numbers:
                raise ValueError(f"{name} is recorded twice.")
            self.numbers[name] = item

    def add_apart(self, key: str, value: Any) -> None:
        """As `add`, but text gets a key that begins with "text."."""
        for name, item in flatten(value, key):
            self.add(f"text.{name}" if is_text(item) else name, item)

    def add_model(self, key: str, model: Any, images: Tensor) -> None:
        """Records a model's scores for some images, and its member logits if it has any."""
        with torch.no_grad():
            self.add(f"{key}.scores", hash_values(model(images)))
            if hasattr(model, "member_logits"):
                self.add(f"{key}.member_logits", hash_values(model.member_logits(images)))

    def add_evaluation(self, key: str, evaluation: Any) -> None:
        """Records all outcomes of an evaluation per image, and their summary."""
        self.add_outcomes(key, outcomes_of(evaluation))
        self.add_figures(key, figures_of(evaluation))

    def add_outcomes(self, key: str, outcomes: Mapping[str, Any]) -> None:
        """Records hashes of the outcomes per image of each attack."""
        for name, found in outcomes.items():
            for column, values in columns_of(found).items():
                self.add(f"{key}.{name}.{column}", hash_values(values))

    def add_figures(self, key: str, figures: Mapping[str, Any]) -> None:
        """Records the accuracies of an evaluation."""
        self.add(f"{key}.images_sha256", figures["images_sha256"])
        names = ("accuracy", "accuracy_after", "interval", "calibration", "disagreements", "eps", "seed")
        for name, found in {"clean": figures["clean"], **figures["attacks"]}.items():
            self.add(f"{key}.{name}", {entry: found[entry] for entry in names})
        worst = figures["worst_case"]
        self.add(f"{key}.worst_case", {entry: worst[entry] for entry in ("accuracy", "interval")})

    def add_audit(self, key: str, report: Mapping[str, Any], run_dir: Path) -> None:
        """Records an audit: verdict, findings, and the outcomes per image of its attacks."""
        self.add_outcomes(f"{key}.outcomes", stages_of(run_dir))
        for name, tensors in surrogates_of(run_dir).items():
            self.add(f"{key}.surrogate.{name}", hash_tensors(tensors))
        facts = (
            "verdict exit_code claimed min_accuracy accuracy interval clean_accuracy plain_accuracy images norm eps "
            "budget seed is_random stages broken_by"
        )
        for name in facts.split():
            self.add(f"{key}.{name}", report[name])
        self.add(f"{key}.robust", hash_values(np.array(report["broken_by"]) == -1))
        self.add(f"text.{key}.reason", report["reason"])
        self.add(f"{key}.findings", [finding["name"] for finding in report["findings"]])
        for finding in report["findings"]:
            name = f"{key}.finding.{finding['name']}"
            self.add(f"{name}.level", finding["level"])
            self.add_apart(f"{name}.evidence", finding["evidence"])
            for words in ("claim", "advice", "source"):
                self.add(f"text.{name}.{words}", finding[words])


# The command line ----------------------------------------------------------------------------------------------------


def run_command(*arguments: str | Path) -> tuple[int, Any]:
    """Exit status of `python -m ecnn ...` and the JSON that it printed; RuntimeError for status 2, a wrong request."""
    words, out, err = ["ecnn", *map(str, arguments)], io.StringIO(), io.StringIO()
    status = 0
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out):
        try:
            with contextlib.redirect_stderr(err):
                runpy.run_module("ecnn", run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    if status == 2:
        raise RuntimeError(f"{' '.join(words)}: {err.getvalue()}")
    return status, json.loads(out.getvalue())


# Training ------------------------------------------------------------------------------------------------------------

_SMALL = "--set model.depth=8 --set model.width=4"
_CODED = f"{_SMALL} --model ecnn --code 10x15 --set model.feature_dim=16"
_CE = "--set train.objective=member_cross_entropy"
_AT = f"--eps {EPS} --attack-steps 4"
_SETS = "[" + ",".join(f"[{i},{(i + 1) % 10},{(i + 3) % 10}]" for i in range(10)) + "]"
#: Name of the run -> options of `ecnn train`. The audited runs have more than two epochs.
RUNS = {
    "ecnn-hinge": f"{_CODED} --epochs 12 --set train.lr=0.01",
    "ecnn-q2": f"{_CODED} --epochs 12 --set train.lr=0.01 --set model.member_output=symbols",
    "ecnn-ce": f"{_CODED} --epochs 10 --set train.lr=0.01 {_CE}",
    "ecnn-at": f"{_CODED} --epochs 12 --set train.lr=0.005 {_CE} {_AT} --attack-on members "
    "--set model.batch_norm=true --seed 1",
    "resnet": f"{_SMALL} --model resnet --epochs 8 --set train.lr=0.01",
    "resnet-at": f"{_SMALL} --model resnet --epochs 8 --set train.lr=0.01 {_AT}",
    "resnet-trades": f"{_SMALL} --model resnet --epochs 2 {_AT} --set train.objective=trades --set objective.beta=3",
    "resnet-half": f"{_SMALL} --model resnet --epochs 2 {_AT} --set train.adversarial_ratio=0.5",
    "resnet-paper": f"{_SMALL} --model resnet --epochs 2 --recipe paper",
    "resnet-onecycle": f"{_SMALL} --model resnet --epochs 2 --recipe onecycle --batch-size 64",
    "resnet-robust": f"{_SMALL} --model resnet --epochs 2 --recipe robust --batch-size 64 --val-fraction 0",
    "ecnn-default": "--epochs 1",
    "ecnn-q3": f"{_CODED} --code 10x30-q3 --set model.member_output=symbols --epochs 2",
    "ecnn-trades": f"{_CODED} --epochs 2 {_AT} --set train.objective=trades",
    "ecnn-scores": f"{_CODED} --epochs 2 --set train.objective=cross_entropy --set model.decoder=linear",
    "ecnn-residual": f"{_CODED} --epochs 2 --recipe paper --set model.branch=residual "
    "--set train.entropy_unit=nats --set model.share_head=false",
    "ecnn-linear": f"{_CODED} --epochs 2 {_CE} --set model.branch=linear --set model.batch_norm=true "
    "--set train.diversity_weight=0.1",
    "adp": f"{_SMALL} --model adp --epochs 6 --set train.lr=0.01",
    "adp-at": f"{_SMALL} --model adp --epochs 2 --recipe adp --batch-size 32 {_AT}",
    "tanh_ensemble": "--model tanh_ensemble --epochs 3",
    "independent_ecoc": f"{_SMALL} --model independent_ecoc --code 10x10 --epochs 2 --set train.lr=0.01",
    "specialists": f"{_SMALL} --model specialists --epochs 3 --set model.sets={_SETS}",
    "feature_squeezing": f"{_SMALL} --model feature_squeezing --epochs 6 --set train.lr=0.01",
    "empir": f"{_SMALL} --model empir --epochs 6 --set train.lr=0.01",
}


def record_training(book: Book, folder: Path, images: Tensor) -> None:
    """Trains all of `RUNS` by the command, with a run folder for each; records weights, logs and scores."""
    for name, options in RUNS.items():
        common = ["--data", "digits", "--device", "cpu", "--out", str(folder / name), "--json"]
        status, result = run_command("train", *common, *options.split(" "))
        key = f"train.{name}"
        book.add(f"{key}.status", status)
        entries = ("test_accuracy", "val_accuracy", "best_epoch", "epochs", "parameters", "test_images")
        book.add(key, {entry: result[entry] for entry in entries})
        book.add(f"{key}.log", read_log(folder / name))
        book.add(f"{key}.weights", hash_tensors(load_weights(folder / name)))
        book.add(f"text.{key}.spec", (folder / name / "spec.toml").read_text())
        book.add_model(key, ecnn.load_model(folder / name), images)


def dense(width: int = 48) -> nn.Sequential:
    """A network with one hidden layer for the digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class Rounded(nn.Module):
    """A network on pixels rounded to four levels, which has a gradient only in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.network = dense()

    def forward(self, images: Tensor) -> Tensor:
        rounded = (images * 3).round() / 3
        scores: Tensor = self.network(images + (rounded - images).detach() if self.training else rounded)
        return scores


class Saturated(nn.Module):
    """A network with a softmax of very large scores, whose gradient vanishes; in training mode without the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.network = dense()

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images)
        return scores if self.training else torch.softmax(200 * scores, dim=1)


class Noisy(nn.Module):
    """A network that adds fresh noise to the pixels in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.network = dense()

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.network(images + 0.1 * torch.randn_like(images))
        return scores


def squared_error(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """An objective that is not one of the package's: the squared error of the scores."""
    wanted = torch.nn.functional.one_hot(labels, 10).float()
    scores: Tensor = model(images)
    return (scores - wanted).square().sum(dim=1).mean()


def record_fits(book: Book, data: Any) -> dict[str, nn.Module]:
    """Trains models with `ecnn.fit`, with objectives and attacks given in different ways; returns them by name."""
    walk: dict[str, Any] = {"norm": "linf", "eps": EPS, "steps": 3, "step_size": 0.05}
    runs: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
        "rounded": (Rounded, {"objective": "cross_entropy", "epochs": 8, "lr": 0.01}),
        "saturated": (Saturated, {"objective": "cross_entropy", "epochs": 8, "lr": 0.01}),
        "noisy": (Noisy, {"objective": "cross_entropy", "epochs": 8, "lr": 0.01}),
        "own-objective": (Rounded, {"objective": squared_error, "epochs": 2, "val": None}),
        "own-attack": (
            Saturated,
            {
                "objective": "cross_entropy",
                "epochs": 2,
                "optimizer": "sgd",
                "weight_decay": 1e-3,
                "attack": FGSM(norm="linf", eps=EPS),
                "val_attack": PGD(**walk, loss="cross_entropy", keep="last"),
            },
        ),
    }
    models = {}
    for name, (kind, options) in runs.items():
        torch.manual_seed(0)
        model = kind()
        options = {"val": data.val, **options}
        history = ecnn.fit(model, data.train, recipe="small", seed=3, **options)
        book.add(f"fit.{name}", history_of(history))
        book.add(f"fit.{name}.weights", hash_tensors(model.state_dict()))
        models[name] = model.eval()
    return models


def record_codes(book: Book) -> None:
    """Records codes that the command designs, with both objectives."""
    sizes = {"energy": "10 12 2", "distance": "10 12 2", "energy-q3": "8 10 3", "distance-q3": "8 10 3"}
    for name, size in sizes.items():
        classes, length, arity = size.split()
        words = ["--classes", classes, "--length", length, "--arity", arity, "--steps", "40000", "--json"]
        status, found = run_command("code", *words, "--objective", name.split("-")[0], "--seed", "5")
        symbols = hash_values(np.array(found.pop("symbols")))
        book.add(f"code.{name}", {**found, "status": status, "symbols": symbols})


def record_shipped(book: Book) -> None:
    """Records the scores of the shipped models for noise."""
    _, found = run_command("models", "--json")
    book.add("models", found)
    for name, entry in found.items():
        shape = (1, 28, 28) if entry["data"] == "mnist" else (3, 32, 32)
        noise = torch.rand(6, *shape, generator=torch.Generator().manual_seed(7))
        book.add_model(f"models.{name}", ecnn.load_model(name), noise)


# Evaluation ----------------------------------------------------------------------------------------------------------


def lead_of_mean(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """A view that is not one of the package's: the mean of all scores minus the label's score."""
    scores: Tensor = model(images)
    return scores.mean(dim=1) - scores.gather(1, labels[:, None]).squeeze(1)


def attacks_on_scores(source: nn.Module) -> dict[str, Attack]:
    """Every attack that needs no members, in Linf and L2 if it has both; `source` is the model to transfer from."""
    linf: dict[str, Any] = {"norm": "linf", "eps": EPS}
    l2: dict[str, Any] = {"norm": "l2", "eps": EPS_L2}
    walk: dict[str, Any] = {**linf, "steps": 10, "step_size": 0.03}
    walk_l2: dict[str, Any] = {**l2, "steps": 10, "step_size": 0.15}
    descent: dict[str, Any] = {"steps": 25, "search_steps": 3, "initial_constant": 0.1, "lr": 0.05}
    return {
        "fgsm-linf": FGSM(**linf),
        "fgsm-l2": FGSM(**l2, keep="last"),
        "bim-linf": BIM(**walk, keep="last"),
        "bim-l2": BIM(**walk_l2, loss="margin"),
        "pgd-linf": PGD(**walk),
        "pgd-linf-last": PGD(**walk, loss="cross_entropy", keep="last"),
        "pgd-linf-odi": PGD(**walk, loss="dlr", start="odi", restarts=2),
        "pgd-linf-targets": PGD(**walk, targets=3, schedule="cosine", early_exit=False),
        "pgd-linf-slack": PGD(**walk, loss_slack=0.5, start="image", schedule="linear", keep="last"),
        "pgd-linf-predicted": PGD(**walk, labels="predicted", keep="last"),
        "pgd-linf-quick": PGD(**walk, quick=True, early_exit=False),
        "pgd-linf-own-view": PGD(**walk, on=lead_of_mean),
        "pgd-l2": PGD(**walk_l2, loss="dlr"),
        "pgd-l2-last": PGD(**walk_l2, loss="cross_entropy", keep="last", quick=True),
        "apgd-linf": APGD(**linf, steps=12, loss="cross_entropy"),
        "apgd-linf-targets": APGD(**linf, steps=8, loss="dlr", targets=3, restarts=2),
        "apgd-linf-last": APGD(**linf, steps=12, loss="margin", keep="last"),
        "apgd-l2": APGD(**l2, steps=12, loss="dlr", early_exit=False),
        "apgd-l2-quick": APGD(**l2, steps=12, loss="margin", quick=True),
        "fab-linf": FAB(**linf, steps=6, targets=3),
        "fab-l2": FAB(**l2, steps=6, targets=2, restarts=2, early_exit=False),
        "square-linf": Square(**linf, queries=80),
        "square-linf-restarts": Square(
            **linf, queries=40, loss="cross_entropy", restarts=2, early_exit=False
        ),
        "square-l2": Square(**l2, queries=80, rescale=False),
        "square-l2-turns": Square(**l2, queries=80, l2_moves="turns", quick=True),
        "autoattack-l2-square": AutoAttack(norm="l2", eps=1.0, version="square", quick=True),
        "cw": CarliniWagnerL2(**descent),
        "cw-published": CarliniWagnerL2(
            **descent, pull_steps=0, abort_early=False, confidence=0.3, quick=True
        ),
        "blindspot": BlindSpot(**descent, shrink=0.7),
        "jsma": JSMA(max_pixel_fraction=0.2),
        "jsma-one": JSMA(max_pixel_fraction=0.15, pixels="one", goal="next", keep="last"),
        "jsma-down": JSMA(max_pixel_fraction=0.1, goal="each", theta=-0.7, early_exit=False),
        "jsma-least": JSMA(max_pixel_fraction=0.15, goal="least", theta=0.5, quick=True),
        "deepfool-l2": DeepFool(norm="l2", steps=8),
        "deepfool-linf": DeepFool(norm="linf", steps=8, num_candidates=4, overshoot=0.05),
        "fmn-l2": FMN(norm="l2", steps=15),
        "fmn-linf": FMN(norm="linf", steps=15, step_size=(0.5, 0.02)),
        "hopskipjump-l2": HopSkipJump(norm="l2", steps=3, samples=16),
        "hopskipjump-linf": HopSkipJump(norm="linf", steps=2, samples=16, max_batch=100),
        "noise-linf": RandomNoise(**linf, samples=8),
        "noise-corners": RandomNoise(**linf, samples=8, kind="corners", early_exit=False),
        "noise-l2": RandomNoise(**l2, samples=8, keep="last"),
        "transfer": Transfer(source=source, attack=PGD(**walk, keep="last")),
    }


def attacks_on_members() -> dict[str, Attack]:
    """Attacks on members, by each view of them."""
    linf: dict[str, Any] = {"norm": "linf", "eps": EPS}
    l2: dict[str, Any] = {"norm": "l2", "eps": EPS_L2}
    walk: dict[str, Any] = {**linf, "steps": 10, "step_size": 0.03}
    descent: dict[str, Any] = {"steps": 25, "search_steps": 3, "initial_constant": 0.1}
    return {
        "pgd-members": PGD(**walk, on="members"),
        "pgd-members-last": PGD(**walk, on="members", loss="cross_entropy", keep="last", quick=True),
        "pgd-members-targets": PGD(**walk, on="members", loss="cross_entropy", targets=2, loss_slack=1.0),
        "pgd-members-slack": PGD(**walk, on="members", targets=2, loss_slack=0.5),
        "pgd-linear": PGD(**walk, on="linear", loss="dlr", targets=2),
        "pgd-tempered": PGD(**walk, on="tempered", loss="cross_entropy"),
        "apgd-members": APGD(**l2, steps=10, loss="margin", on="members"),
        "apgd-linear": APGD(**linf, steps=10, loss="margin", on="linear", targets=2),
        "apgd-tempered": APGD(**linf, steps=10, loss="dlr", on="tempered"),
        "fab-linear": FAB(**linf, steps=5, targets=2, on="linear"),
        "square-linear": Square(**linf, queries=50, on="linear"),
        "cw-linear": CarliniWagnerL2(**descent, on="linear"),
        "cw-tempered": CarliniWagnerL2(**descent, on="tempered", quick=True),
        "member_cw": MemberCarliniWagner(**descent, targets=2),
        "member_cw-sure": MemberCarliniWagner(**descent, confidence=0.2, quick=True),
        "jsma-linear": JSMA(max_pixel_fraction=0.2, goal="next", on="linear"),
        "deepfool-linear": DeepFool(norm="l2", steps=6, on="linear"),
        "deepfool-tempered": DeepFool(norm="linf", steps=6, on="tempered"),
        "fmn-linear": FMN(norm="linf", steps=10, on="linear"),
        "fmn-tempered": FMN(norm="l2", steps=10, on="tempered"),
    }


def record_evaluations(book: Book, folder: Path, data: Any) -> None:
    """Records outcomes of every attack on three of the runs, and of a few attacks on all others."""
    models = {name: ecnn.load_model(folder / name) for name in RUNS}
    whole: dict[str, AutoAttack] = {
        "ecnn-hinge": AutoAttack(norm="linf", eps=EPS, on="linear"),
        "resnet": AutoAttack(norm="l2", eps=EPS_L2),
        "ecnn-at": AutoAttack(norm="linf", eps=EPS, quick=True),
    }
    made: set[type[Attack]] = set()
    for name, auto in whole.items():
        source = models["ecnn-ce" if name == "resnet" else "resnet"]
        attacks = {**attacks_on_scores(source), "autoattack": auto}
        if name != "resnet":
            attacks |= attacks_on_members()
        made |= {type(attack) for attack in attacks.values()}
        found = ecnn.evaluate(models[name], data.test, attacks, limit=24, seed=11)
        book.add_evaluation(f"evaluate.{name}", found)
        radii = ecnn.evaluate(
            models[name], data.test, _for_curves(), limit=24, seed=2, eps=[0.02, "8/255", 0.1]
        )
        book.add_evaluation(f"curves.{name}", radii)
        for attack in _for_curves():
            book.add(f"curves.{name}.{attack}", curve_of(radii.curve(attack)))
        near = found.curve_by_distance("deepfool-l2", norm="l2", eps=[0.1, "1/4", 0.5])
        book.add(f"curves.{name}.by_distance", curve_of(near))
    book.add("attacks_left_out", sorted(kind.__name__ for kind in set(ATTACKS.values()) - made))
    on_scores, on_members = attacks_on_scores(models["resnet"]), attacks_on_members()
    for name in sorted(set(RUNS) - set(whole)):
        chosen = {entry: on_scores[entry] for entry in ("pgd-linf", "pgd-l2", "pgd-linf-quick", "apgd-linf")}
        if hasattr(models[name], "member_logits"):
            views = ["pgd-members", "pgd-members-targets", "pgd-linear", "apgd-members", "member_cw"]
            views += ["pgd-tempered"] if hasattr(models[name], "decode") else []
            chosen |= {entry: on_members[entry] for entry in views}
        found = ecnn.evaluate(models[name], data.test, chosen, limit=24, seed=12, batch_size=16)
        book.add_evaluation(f"evaluate.{name}", found)
    record_transfer(book, models, data)
    record_commands(book, folder)


def _for_curves() -> dict[str, Attack]:
    return {
        "pgd": PGD(norm="linf", eps=EPS, steps=8, step_size=0.02, loss="cross_entropy"),
        "apgd": APGD(norm="linf", eps=EPS, steps=8, loss="margin", restarts=2),
    }


def record_transfer(book: Book, models: Mapping[str, nn.Module], data: Any) -> None:
    """Records transfer matrices between members and between models, and a paired comparison of two models."""
    attack = PGD(norm="linf", eps=EPS, steps=10, step_size=0.03, keep="last")
    for name in ("ecnn-hinge", "ecnn-q2", "ecnn-at"):
        found = member_transfer(models[name], data.test, attack, limit=40, seed=4, members=[0, 2, 5, 9])
        book.add(f"transfer.{name}", matrix_of(found))
    chosen = {
        name: models[name] for name in ("resnet", "resnet-at", "ecnn-hinge", "ecnn-at", "tanh_ensemble")
    }
    book.add("transfer.models", matrix_of(model_transfer(chosen, data.test, attack, limit=40, seed=4)))
    pair = [
        ecnn.evaluate(models[name], data.test, {"pgd": attack}, limit=40).outcomes["pgd"]
        for name in ("resnet-at", "resnet")
    ]
    book.add("paired", vars(compare(*pair)))


def record_commands(book: Book, folder: Path) -> None:
    """Records evaluations by the command, whose attacks search on a quick copy of the model."""
    requests = {
        "walks": f"ecnn-hinge --attack pgd --attack apgd --attack fgsm --eps {EPS} --steps 10 --step-size 0.03 "
        "--loss cross_entropy",
        "members": f"ecnn-at --attack pgd --eps {EPS} --steps 10 --step-size 0.03 --on members --keep last",
        "radii": "resnet-at --attack pgd --attack noise --eps 2/255 --eps 0.05 --eps 0.1 --steps 5 "
        "--step-size 0.02 --set attack.samples=4 --norm l2",
        "nearest": "tanh_ensemble --attack deepfool --attack fmn --attack hopskipjump --steps 4 --norm l2 "
        "--set attack.samples=10",
        "square": f"specialists --attack square --eps {EPS} --set attack.queries=40",
    }
    for name, request in requests.items():
        run, *words = request.split()
        kept = folder / f"{name}.npz"
        common = ["--limit", "24", "--seed", "3", "--device", "cpu", "--save-images", str(kept), "--json"]
        status, figures = run_command("evaluate", folder / run, *words, *common)
        book.add(f"command.{name}.status", status)
        book.add_figures(f"command.{name}", figures)
        with np.load(kept) as arrays:
            for array in sorted(arrays.files):
                if arrays[array].dtype.kind in "fiub":
                    book.add(f"command.{name}.saved.{array}", hash_values(arrays[array]))


# Audits --------------------------------------------------------------------------------------------------------------


#: Model -> radius and claim. The radii are small, so that images are left for the later attacks.
AUDITS: dict[str, tuple[float, float | None]] = {
    "resnet": (0.06, None),
    "ecnn-q2": (0.06, None),
    "ecnn-ce": (0.06, 0.9),
    "ecnn-at": (EPS, 0.2),
    "rounded": (EPS, 0.6),
    "saturated": (EPS, None),
    "noisy": (EPS, 0.7),
}


def record_suites(book: Book, folder: Path, fitted: Mapping[str, nn.Module], data: Any) -> None:
    """Records the attacks of an audit, each on all images: in an audit the early ones leave few for the others."""
    for name in ("ecnn-q2", "ecnn-ce", "ecnn-at", "adp", "tanh_ensemble", "empir", "rounded", "saturated"):
        model = fitted[name] if name in fitted else ecnn.load_model(folder / name)
        attacks = suite_of(model, data, EPS, 16)
        book.add_evaluation(f"suite.{name}", ecnn.evaluate(model, data.test, attacks, limit=16, seed=8))


def record_audits(book: Book, folder: Path, fitted: Mapping[str, nn.Module], data: Any) -> None:
    """Records audits of models that are robust, not robust, without gradients, or random."""
    for name, (eps, claim) in AUDITS.items():
        model = fitted[name] if name in fitted else ecnn.load_model(folder / name)
        options: dict[str, Any] = {"claim": claim, "limit": 16 if name == "noisy" else 32, "budget": "quick"}
        _record_audit(book, name, folder, model, data, norm="linf", eps=eps, seed=5, **options)
    model, budget = ecnn.load_model(folder / "resnet-at"), make_budget("tiny")
    _record_audit(book, "resnet-at-l2", folder, model, data, norm="l2", eps=EPS_L2, seed=6, budget=budget)
    words = ["--eps", "0.06", "--limit", "16", "--data", "digits"]
    _record_audit_command(book, "command", folder, str(folder / "empir"), words)


def _record_audit(book: Book, name: str, folder: Path, model: nn.Module, data: Any, **options: Any) -> None:
    run_dir = folder / f"audit-of-{name}"
    torch.manual_seed(0)
    found = ecnn.audit(model, data.test, run_dir=run_dir, **options)
    book.add_audit(f"audit.{name}", report_of(found), run_dir)


def _record_audit_command(book: Book, name: str, folder: Path, model: str, words: list[str]) -> None:
    run_dir = folder / f"audit-of-{name}"
    common = ["--budget", "quick", "--device", "cpu", "--out", str(run_dir), "--json"]
    status, report = run_command("audit", model, *words, *common)
    book.add_audit(f"audit.{name}", report, run_dir)
    book.add(f"audit.{name}.status", status)


def record_shipped_audit(book: Book, folder: Path) -> None:
    """Records the audit of a shipped model; only a note if CIFAR-10 is not under data/."""
    if not Path("data", "cifar-10-batches-py").is_dir():
        book.add("audit.shipped", "left out: CIFAR-10 is not under data/")
        return
    words = ["--eps", "0.04", "--claim", "0.75", "--limit", "10", "--root", "data"]
    _record_audit_command(book, "shipped", folder, "cifar10-ecnn30-q2", words)


# The script ----------------------------------------------------------------------------------------------------------


def record() -> Numbers:
    """Makes all runs, and returns the recorded values by key."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    book = Book()
    book.add(
        "machine",
        {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
        },
    )
    data: Any = ecnn.load_data("digits")
    book.add(
        "data.digits", {part: hash_values(getattr(data, part).images) for part in ("train", "val", "test")}
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with reported("codes"):
            record_codes(book)
        with reported("shipped models"):
            record_shipped(book)
        with reported("training"):
            record_training(book, folder, data.test[:40][0])
            fitted = record_fits(book, data)
        with reported("evaluation"):
            record_evaluations(book, folder, data)
        with reported("attacks of audits"):
            record_suites(book, folder, fitted, data)
        with reported("audits"):
            record_audits(book, folder, fitted, data)
            record_shipped_audit(book, folder)
    return book.numbers


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Prints on standard error how long the block took."""
    started = time.monotonic()
    yield
    sys.stderr.write(f"{what}: {time.monotonic() - started:.0f} s\n")
    sys.stderr.flush()


def differences(before: Numbers, after: Numbers, *, with_text: bool = True) -> list[str]:
    """One line for each key whose values differ, or that only one of the two records has."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if key.startswith("text.") and not with_text:
            continue
        values = [json.dumps(part[key]) if key in part else "(nothing)" for part in (before, after)]
        if values[0] != values[1]:
            lines.append(f"{key}: {_shortened(values[0])} -> {_shortened(values[1])}")
    return lines


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Record weights, outcomes and verdicts, or compare two records."
    )
    parser.add_argument("out", nargs="?", type=Path, help="write the record there")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="print what differs"
    )
    parser.add_argument("--without-text", action="store_true", help="compare no sentences")
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.compare is None):
        parser.error("give either a file to write or --compare BEFORE AFTER.")
    if options.compare is not None:
        before, after = (json.loads(path.read_text()) for path in options.compare)
        lines = differences(before, after, with_text=not options.without_text)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.write(f"{len(lines)} of {len(before.keys() | after.keys())} keys differ\n")
        return 1 if lines else 0
    numbers = record()
    options.out.write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{len(numbers)} keys in {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
