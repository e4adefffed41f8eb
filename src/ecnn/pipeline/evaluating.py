"""From a spec's attacks to outcomes, image by image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ecnn import files, runs
from ecnn.attacks import Attack, Transfer
from ecnn.attacks.base import Cost
from ecnn.checks import did_you_mean
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import Evaluation, evaluate, load_images
from ecnn.evaluation.batch import BATCH_SIZE, check_request
from ecnn.pipeline.threads import suitable_threads
from ecnn.pipeline.training import AnyPath, load_test_images
from ecnn.progress import Progress
from ecnn.spec import Spec, attack_options, make_attack


def attack_tables(
    kinds: Sequence[str], options: Mapping[str, Any], eps: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """The [attacks] of a spec for several kinds with common options; each takes those it has.

    They search on a quick copy of the model, and in Linf, unless the options say otherwise. Several radii repeat each
    attack that has one.
    """
    known = {kind: attack_options(kind) for kind in kinds}
    every = sorted({name for names in known.values() for name in names})
    for name in options:
        if name not in every:
            raise InputError(f"none of {', '.join(kinds)} has an option {name!r}{did_you_mean(name, every)}")
    common = {"quick": True, "norm": "linf", **options}
    if eps:
        common["eps"] = eps[0] if len(eps) == 1 else list(eps)
    return {
        kind: {"kind": kind, **{name: value for name, value in common.items() if name in names}}
        for kind, names in known.items()
    }


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """An evaluation that is ready to run: the model has classified one image, and every attack is made.

    Attributes:
        split: the test images.
        attacks: by how many images they see and by the radii they are repeated at (None: their own).
        cost: what the attacks ask at most, so far as they can say.
    """

    model: nn.Module
    split: Split
    attacks: Mapping[tuple[int | None, tuple[float | str, ...] | None], Mapping[str, Attack]]
    cost: Cost


def plan_evaluation(
    source: str, spec: Spec, *, data: str | None = None, root: AnyPath = "data", device: str = "auto"
) -> EvaluationPlan:
    """Loads model and images, makes the spec's attacks, and tries the model on one image.

    Args:
        source: a run folder or the name of a shipped model.
        spec: the run's own, with the attacks to be made.
        data: another dataset than the model was trained on, or "optprojtran".
    """
    place = runs.find_device(device)
    model, split = runs.load_model(source, device=place), load_test_images(spec, root, data)
    attacks, cost = _groups(spec, place), Cost(0, 0)
    for (limit, eps), group in attacks.items():
        images = len(check_request(model, split, limit, BATCH_SIZE))
        for attack in group.values():
            cost += attack.cost(spec.data.num_classes or 0) * (images * len(eps or (None,)))
    return EvaluationPlan(model, split, attacks, cost)


def evaluate_run(
    made: EvaluationPlan,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    out: AnyPath | None = None,
    save_images: AnyPath | None = None,
    resume: bool = True,
    progress: Progress | None = None,
) -> Evaluation:
    """Makes the attacks that were planned, on the first `data.test_limit` test images.

    Args:
        out: where outcomes are kept, image by image; None keeps nothing.
        save_images: an .npz to write the attacked images to.
    """
    with (
        runs.kept_in(out, resume=resume),
        _folder_for(out, save_images) as folder,
        suitable_threads(made.model, made.split),
    ):
        parts = [
            evaluate(
                made.model,
                made.split,
                attacks,
                limit=limit,
                seed=seed,
                eps=eps,
                run_dir=folder,
                resume=resume,
                save_images=save_images is not None,
                batch_size=BATCH_SIZE if batch_size is None else batch_size,
                progress=progress,
            )
            for (limit, eps), attacks in made.attacks.items()
        ]
        result = _join(parts)
        if save_images is not None and folder is not None:
            _write_images(save_images, folder, result)
    return result


def _groups(
    spec: Spec, device: torch.device
) -> dict[tuple[int | None, tuple[float | str, ...] | None], dict[str, Attack]]:
    """The spec's attacks by how many images they see and by the radii they are repeated at (None: their own)."""
    groups: dict[Any, dict[str, Attack]] = {}
    for name, table in spec.attacks.items():
        radii = table.get("eps")
        several = tuple(radii) if isinstance(radii, list) else None
        one = {} if not several else {"eps": several[0]}
        key = (table.get("limit", spec.data.test_limit), several)
        groups.setdefault(key, {})[name] = _attack({"kind": name, **table, **one}, device)
    return groups or {(spec.data.test_limit, None): {}}


def _attack(table: Mapping[str, Any], device: torch.device) -> Attack:
    """What a table asks for; with a source it is crafted on that model and shown to the one at hand."""
    attack = make_attack(table)
    if "source" not in table:
        return attack
    source = runs.load_model(table["source"], device=device)
    return Transfer(source=source, attack=attack, keep=attack.keep, labels=attack.labels)


def _join(parts: Sequence[Evaluation]) -> Evaluation:
    """One evaluation of the images that all parts share, the first ones of the fewest."""
    rows = slice(min(len(part) for part in parts))
    outcomes = {name: found.take(rows) for part in parts for name, found in part.outcomes.items()}
    return Evaluation(parts[0].clean.take(rows), outcomes)


@contextmanager
def _folder_for(out: AnyPath | None, save_images: AnyPath | None) -> Iterator[Path | None]:
    """Where outcomes go: the folder asked for, one for the moment if only images are wanted, or none."""
    if out is not None:
        with files.locked(out, "evaluation"):
            yield Path(out)
        return
    if save_images is None:
        yield None
        return
    files.check_writable(save_images)
    with files.temporary_folder(save_images) as folder:
        yield folder


def _write_images(path: AnyPath, folder: Path, found: Evaluation) -> None:
    """One array of images per attack, with positions, labels and predictions beside them."""
    arrays = {"index": found.clean.index, "label": found.clean.label}
    for name, outcomes in found.outcomes.items():
        position, images = load_images(folder, name)
        if not np.array_equal(position.numpy(), outcomes.index):
            raise InputError(f"the attacked images of {name!r} in {folder} are not those of its outcomes.")
        arrays[f"{name}.images"] = images.numpy()
        arrays[f"{name}.prediction"] = outcomes.prediction
    files.write_arrays(path, arrays, {"what": "attacked images in [0, 1]"})
