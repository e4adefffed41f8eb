"""Calls public functions with arguments of wrong types, shapes and sizes: they must answer or raise an InputError."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.naive_bayes import GaussianNB

import ecnn
from campaign.forks import Violation
from campaign.inputs import allowed, one_by_one
from campaign.scene import Scene
from ecnn.attacks import ATTACKS, RandomNoise
from ecnn.auditing import load_audit
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import evaluate, member_flips, model_transfer
from ecnn.spec import attack_options

_BATCH = 60


class _Odd:
    """An object of a type that no function takes."""


def _values() -> list[Any]:
    """Arguments that are wrong for most parameters."""
    ones = torch.ones(2, 1, 8, 8)
    numbers = [
        0, -1, 1, 2, 7, 10**6, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, 0.5, -0.5, 1.5, math.nan, math.inf,
        -math.inf, 1e308, 5e-324, True, 1j, Fraction(1, 3), np.float32(0.1), np.int64(3), np.array(2), np.uint8(255),
    ]  # fmt: skip
    texts = [
        "",
        "x",
        "linf",
        "l2",
        "8/255",
        "1/0",
        "nan",
        "a" * 5000,
        "\0",
        "😀",
        "\ud800",
        b"linf",
        "../..",
        "pgd",
    ]
    things: list[Any] = [
        None, [], {}, (), set(), [[]], [0], {"a": 1}, _Odd(), _Odd, len, lambda *args, **kwargs: None,
        iter([1]), range(3), Path("nowhere"), Path("run"), Path("\0"), Ellipsis, NotImplemented, type,
    ]  # fmt: skip
    tensors = [
        ones, ones[0], ones[:0], ones * 255, ones * math.nan, ones - 2, ones.double(), ones.half(), ones.bfloat16(),
        ones.to(torch.uint8), ones.bool(), ones.to(torch.complex64), torch.ones(2, 3, 8, 8), torch.ones(2, 1, 1, 1),
        torch.zeros(2, 1, 0, 0), torch.ones(2, 1, 8, 8, 8), torch.tensor(3.0), torch.tensor([0, 1]),
        torch.tensor([0, 99]), torch.tensor([-1, 0]), torch.tensor([0.5, 1.0]), torch.tensor([0, 1, 2]),
        torch.empty(0, dtype=torch.int64),
        ones.numpy(), np.zeros((3, 4)), np.array(["a"]), np.array([None]), np.full((3, 3), 7),
        np.zeros((3, 4), dtype=bool), ones.to("meta"), np.eye(3, dtype=np.int64),
        [[0, 1], [1, 0], [1, 1]], [[0, 1], [1]],
    ]  # fmt: skip
    modules = [
        torch.nn.Identity(), torch.nn.Linear(64, 3), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 1)),
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3).double()),
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3).half()), torch.nn.Dropout(), _Raises(),
    ]  # fmt: skip
    return [*numbers, *numbers, *texts, *things, *tensors, *modules]


class _Raises(torch.nn.Module):
    """A model whose forward pass raises an error."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a mistake of the user's")


def _calls(scene: Scene) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public callables by name, each with arguments that work and are small enough for thousands of calls."""
    data = ecnn.load_data(scene.pictures)
    code = ecnn.load_code(scene.done / "code.json")
    model: Any = ecnn.load_model(scene.done / "run")
    images, labels = data.test[:4]
    split = Split(data.test.images[:4], data.test.labels[:4])
    small: dict[str, Any] = {"in_channels": 1, "width": 2, "depth": 8}
    noise = RandomNoise(norm="linf", eps=0.1, samples=1)
    evaluated = evaluate(model, split, {"noise": noise}, limit=2)
    rows, classes = np.arange(36.0).reshape(9, 4), np.array(["a", "b", "c"] * 3)
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "CodeMatrix": (ecnn.CodeMatrix, {"symbols": code.symbols, "arity": 2, "provenance": {}}),
        "CodeMatrix.from_dict": (ecnn.CodeMatrix.from_dict, {"value": code.to_dict()}),
        "CodeMatrix.energy": (code.energy, {"column_weight": 1.0}),
        "CodeMatrix.report": (code.report, {"column_weight": 1.0}),
        "ECNN": (
            ecnn.ECNN,
            {"code": code, **small, "feature_dim": 4, "mean": data.mean_image, "share_trunk": True,
             "activation": "relu"},
        ),
        "ECNN.forward": (model, {"images": images}),
        "ECNN.member_logits": (model.member_logits, {"images": images}),
        "Normalized": (ecnn.Normalized, {"model": torch.nn.Identity(), "mean": [0.5], "std": [0.5]}),
        "ResNet": (ecnn.ResNet, {"num_classes": 3, **small}),
        "Spec.from_dict": (ecnn.Spec.from_dict, {"tables": ecnn.load_spec(scene.done / "run/spec.toml").to_dict()}),
        "audit": (
            ecnn.audit,
            {"model": model, "split": split, "norm": "linf", "eps": 0.1, "claim": 0.5, "limit": 2, "budget": "quick",
             "seed": 0},
        ),
        "design_code": (
            ecnn.design_code,
            {"num_classes": 3, "code_length": 4, "arity": 2, "objective": "energy", "column_weight": 1.0, "chains": 1,
             "steps": 20, "seconds": 1.0, "seed": 0, "init": None, "progress": None},
        ),
        "evaluate": (
            ecnn.evaluate,
            {"model": model, "split": split, "attacks": {"noise": noise},
             "limit": 2, "seed": 0, "eps": None, "cascade": False, "batch_size": 2, "run_dir": None, "progress": None},
        ),
        "exhaustive_code": (ecnn.exhaustive_code, {"num_classes": 3, "code_length": 2}),
        "fit": (
            ecnn.fit,
            {"model": ecnn.ResNet(3, **small), "train": split, "val": split, "recipe": "small", "epochs": 1,
             "batch_size": 4, "lr": 0.1, "weight_decay": 0.0, "optimizer": "sgd", "seed": 0,
             "objective": "cross_entropy", "attack": None, "run_dir": None, "ema": None, "precision": "float32",
             "adversarial_ratio": 1.0, "diversity_weight": 0.0},
        ),
        "load_code": (ecnn.load_code, {"source": "10x30"}),
        "load_data": (
            ecnn.load_data,
            {"name": str(scene.pictures), "root": "nowhere", "val_fraction": 0.1, "seed": 0, "image_size": 8},
        ),
        "load_classifier": (ecnn.load_classifier, {"source": str(scene.done / "run"), "device": "cpu"}),
        "load_classifier.predict": (
            ecnn.load_classifier(scene.done / "run").predict,
            {"images": images, "top": 1, "reject": None, "keep_going": False, "batch_size": 2},
        ),
        "load_model": (ecnn.load_model, {"source": str(scene.done / "run"), "device": "cpu"}),
        "load_spec": (ecnn.load_spec, {"path": str(scene.done / "run/spec.toml")}),
        "plot_code": (ecnn.plot_code, {"code": code, "path": "x.png"}),
        "plot_curve": (ecnn.plot_curve, {"evaluation": evaluated, "path": "x.png"}),
        "plot_members": (
            ecnn.plot_members,
            {"flips": member_flips(model, images, images, labels), "path": "x.png", "class_names": None},
        ),
        "plot_transfer": (
            ecnn.plot_transfer,
            {"matrix": model_transfer({"a": model}, split, noise, limit=2), "path": "x.png", "title": "x"},
        ),
        "progress_bar": (ecnn.progress_bar, {"title": "x"}),
        "ECNNClassifier.fit": (
            _fit_estimator,
            {"kind": ecnn.ECNNClassifier, "X": rows, "y": classes, "code_length": 4, "image_shape": None,
             "pixel_range": None, "width": 4, "depth": 8, "epochs": 1, "batch_size": 4, "lr": 0.1, "random_state": 0},
        ),
        "ErrorCorrectingClassifier.fit": (
            _fit_estimator,
            {"kind": ecnn.ErrorCorrectingClassifier, "X": rows, "y": classes, "estimator": GaussianNB(),
             "code_size": 1.5, "random_state": 0},
        ),
        "codebook": (ecnn.codebook, {}),
        "InputError": (InputError, {"text": "x"}),
    }  # fmt: skip
    if (scene.done / "run/audit.json").exists():
        audited = load_audit(scene.done / "run/audit.json")
        calls["plot_audit"] = (ecnn.plot_audit, {"audit": audited, "path": "x.png"})
    for name, attack in ATTACKS.items():
        settings = {key: value for key, value in _SETTINGS.items() if key in attack_options(name)}
        if name == "fmn":
            settings["step_size"] = (0.1, 0.01)
        count = 1 if name == "autoattack" else 4  # AutoAttack has no setting that makes it shorter
        calls[f"attacks.{name}"] = (
            _attack,
            {"model": model, "kind": attack, "images": images[:count], "labels": labels[:count], **settings},
        )
    return calls


#: Settings of attacks; each takes those that it has. They are all that any attack needs, and mean little work.
_SETTINGS: dict[str, Any] = {
    "norm": "linf", "eps": 0.1, "steps": 1, "step_size": 0.1, "samples": 2, "pairs": 1, "queries": 10, "restarts": 1,
    "loss": "margin", "search_steps": 1, "initial_constant": 0.1, "max_pixel_fraction": 0.1, "lr": 0.1,
}  # fmt: skip


def _fit_estimator(*, kind: Any, X: Any, y: Any, **settings: Any) -> Any:  # noqa: N803, as scikit-learn has it
    return kind(**settings).fit(X, y).predict(X)


def _attack(*, kind: Any, model: Any, images: Any, labels: Any, **settings: Any) -> Any:
    return kind(**settings)(model, images, labels)


def try_misuse(scene: Scene, number: int, rng: random.Random) -> Iterator[tuple[str, list[Violation]]]:
    """Makes many calls in one child, each with one or two arguments replaced; case 0 also makes each one unchanged."""
    draws = [rng.random() for _ in range(_BATCH)]
    if number == 0:
        yield from _try_unchanged(scene)
    with scene.folder_from(scene.done) as folder:

        def work(start: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
            calls = _calls(scene)
            for draw in draws[start:]:
                yield _try_one(calls, random.Random(draw))

        yield from one_by_one(work, [f"input {place}" for place in range(len(draws))], folder)


def _try_unchanged(scene: Scene) -> Iterator[tuple[str, list[Violation]]]:
    """Makes every call with its own arguments, which must succeed; otherwise replacing arguments would show nothing."""

    def work(start: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        for name, (function, given) in list(_calls(scene).items())[start:]:
            error = _error_of(name, function, dict(given))
            yield name, [] if error is None else [("status", f"fails as it is meant: {error!r}")]

    calls = list(_calls(scene))
    if "audit" in scene.workflows:  # else there is no audit to plot
        covered = {name.partition(".")[0] for name in calls}
        for name in ecnn.__all__:
            if callable(getattr(ecnn, name)) and name not in covered:
                yield name, [Violation("status", "no call of it is tried")]
    with scene.folder_from(scene.done) as folder:
        yield from one_by_one(work, calls, folder)


def _error_of(name: str, function: Callable[..., Any], given: dict[str, Any]) -> Exception | None:
    positional = [given.pop(key) for key in list(given)[:1]] if name in _POSITIONAL else []
    try:
        function(*positional, **given)
    except Exception as error:  # any error that a caller would get
        return error
    return None


def _try_one(
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]], rng: random.Random
) -> tuple[str, list[tuple[str, str]]]:
    name = rng.choice(sorted(calls))
    function, works = calls[name]
    given = dict(works)
    changed = rng.sample(sorted(given), min(len(given), rng.choice((1, 1, 2))))
    for key in changed:
        if key != "kind":
            given[key] = rng.choice([one for one in _values() if not (key in _WORK and _is_much(one))])
    described = f"{name}({', '.join(f'{key}={_short(given[key])}' for key in changed)})"
    error = _error_of(name, function, dict(given))
    is_scikit_learns = function is _fit_estimator and isinstance(error, ValueError | OverflowError)
    if error is None or allowed(error) or _is_of_the_model(name, error, given) or is_scikit_learns:
        return described, []
    kind = "memory" if isinstance(error, MemoryError) or "allocate" in str(error) else "traceback"
    return described, [(kind, f"{type(error).__name__}: {str(error)[:150]}")]


def _is_of_the_model(name: str, error: Exception, given: dict[str, Any]) -> bool:
    """Whether the error may come from the model itself: a RuntimeError, as for images of a wrong size or precision."""
    is_asked = isinstance(given.get("model"), torch.nn.Module) or name.startswith("ECNN.")
    return is_asked and isinstance(error, RuntimeError)


#: Arguments that decide how much work is done: a large value is no mistake, but takes long.
_WORK = ("steps", "search_steps", "restarts", "queries", "samples", "pairs", "epochs", "chains", "seconds")


def _is_much(value: Any) -> bool:
    return isinstance(value, int) and 100 < value < 2**63


_POSITIONAL = (
    "ECNN.forward", "ECNN.member_logits", "CodeMatrix.from_dict", "InputError", "progress_bar", "Spec.from_dict",
    "Normalized", "load_code", "load_model", "load_spec", "plot_code", "plot_audit",
    "plot_curve", "plot_members", "plot_transfer", "audit",
    "evaluate", "fit", "load_classifier", "load_classifier.predict",
)  # fmt: skip


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return ascii(value)[:50].replace("\n", " ")
