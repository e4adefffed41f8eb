"""From a spec's attacks to outcomes, image by image."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ecnn import files, runs
from ecnn.attacks import Attack, Transfer
from ecnn.checks import did_you_mean
from ecnn.errors import InputError
from ecnn.evaluation import Evaluation, evaluate, load_images
from ecnn.evaluation.batch import BATCH_SIZE
from ecnn.pipeline.devices import find_device, suitable_threads
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


def evaluate_run(
    source: str,
    spec: Spec,
    *,
    data: str | None = None,
    root: AnyPath = "data",
    seed: int = 0,
    batch_size: int | None = None,
    out: AnyPath | None = None,
    save_images: AnyPath | None = None,
    device: str = "auto",
    resume: bool = True,
    progress: Progress | None = None,
) -> Evaluation:
    """Makes the spec's attacks on a saved model, on the first `data.test_limit` test images.

    Args:
        source: a run folder or the name of a shipped model.
        spec: the run's own, with the attacks to be made.
        data: another dataset than the model was trained on, or "optprojtran".
        out: where outcomes are kept, image by image; None keeps nothing.
        save_images: an .npz to write the attacked images to.
    """
    place = find_device(device)
    model = runs.load_model(source, device=place)
    images = load_test_images(spec, root, data)
    with _folder_for(out, save_images) as folder, suitable_threads(model, images):
        parts = [
            evaluate(
                model,
                images,
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
            for (limit, eps), attacks in _groups(spec, place).items()
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
    if save_images is None or out is not None:
        yield None if out is None else Path(out)
        return
    files.check_writable(save_images)
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


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
