"""From a request to evaluate to outcomes, image by image."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ecnn import files, runs
from ecnn.attacks import ATTACKS, Attack
from ecnn.data import load_data
from ecnn.errors import InputError
from ecnn.evaluation import Evaluation, evaluate, load_images
from ecnn.evaluation.batch import BATCH_SIZE
from ecnn.pipeline.common import check_shape, find_device
from ecnn.progress import Progress


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """What `ecnn evaluate` was asked for; None means: as the model's run has it, or as the attack has it.

    Attributes:
        model: a run folder or the name of a shipped model.
        attacks: names of `ATTACKS`.
        options: of all attacks, by the names of their fields; an attack takes those it has.
        eps: radii; several repeat each attack that has one.
        out: where outcomes are kept, image by image; None keeps nothing.
        save_images: an .npz to write the attacked images to.
    """

    model: str
    attacks: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    eps: tuple[str, ...] = ()
    data: str | None = None
    root: Path = Path("data")
    limit: int | None = None
    seed: int = 0
    batch_size: int | None = None
    out: Path | None = None
    save_images: Path | None = None
    device: str = "auto"
    resume: bool = True


def make_attack(name: str, options: dict[str, Any], *, strict: bool = True) -> Attack:
    """The attack of that name with those options; not strict, options that it does not have are left out."""
    known = _options_of(name)
    kind = ATTACKS[name]
    unknown = sorted(set(options) - known)
    if unknown and strict:
        raise InputError(f"{name} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}.")
    needed = {entry.name for entry in dataclasses.fields(kind) if entry.default is dataclasses.MISSING}
    missing = sorted(needed - set(options))
    if missing:
        raise InputError(f"{name} needs {', '.join(missing)}, which decide its result and have no default.")
    return kind(**{key: value for key, value in options.items() if key in known})


def evaluate_run(request: EvaluateRequest, *, progress: Progress | None = None) -> Evaluation:
    """Attacks a saved model on the test images of its data."""
    device = find_device(request.device)
    spec = files.read_toml(runs.run_folder(request.model) / runs.SPEC)
    model = runs.load_model(request.model, device=device)
    data = load_data(request.data or spec["data"]["name"], request.root, val_fraction=0.1)
    check_shape(spec, data)
    options = {"quick": True, "norm": "linf", **request.options}
    if request.eps:
        options["eps"] = request.eps[0]
    unheard = sorted(set(request.options) - set().union(*map(_options_of, request.attacks)))
    if unheard:
        raise InputError(f"none of {', '.join(request.attacks)} has an option {unheard[0]!r}.")
    attacks = {name: make_attack(name, options, strict=False) for name in request.attacks}
    with _folder_for(request) as folder:
        found = evaluate(
            model,
            data.test,
            attacks,
            limit=request.limit,
            seed=request.seed,
            eps=request.eps if len(request.eps) > 1 else None,
            run_dir=folder,
            resume=request.resume,
            save_images=request.save_images is not None,
            batch_size=BATCH_SIZE if request.batch_size is None else request.batch_size,
            progress=progress,
        )
        if request.save_images is not None and folder is not None:
            _write_images(request.save_images, folder, found)
    return found


def _options_of(name: str) -> set[str]:
    if name not in ATTACKS:
        raise InputError(f"no attack is called {name!r}; known: {', '.join(ATTACKS)}.")
    return {entry.name for entry in dataclasses.fields(ATTACKS[name]) if entry.init}


@contextmanager
def _folder_for(request: EvaluateRequest) -> Iterator[Path | None]:
    """Where outcomes go: the folder asked for, one for the moment if only images are wanted, or none."""
    if request.save_images is None or request.out is not None:
        yield request.out
        return
    files.check_writable(request.save_images)
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _write_images(path: Path, folder: Path, found: Evaluation) -> None:
    """One array of images per attack, with positions, labels and predictions beside them."""
    arrays = {"index": found.clean.index, "label": found.clean.label}
    for name, outcomes in found.outcomes.items():
        position, images = load_images(folder, name)
        if not np.array_equal(position.numpy(), outcomes.index):
            raise InputError(f"the attacked images of {name!r} in {folder} are not those of its outcomes.")
        arrays[f"{name}.images"] = images.numpy()
        arrays[f"{name}.prediction"] = outcomes.prediction
    files.write_arrays(path, arrays, {"what": "attacked images in [0, 1]"})
