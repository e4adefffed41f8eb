"""From a spec's attacks to outcomes, image by image."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ecnn import files, runs
from ecnn.attacks import Attack, Transfer
from ecnn.attacks.base import Cost
from ecnn.attacks.presets import USUAL_EPS, Preset, find_preset
from ecnn.checks import did_you_mean
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation import Evaluation, OwnAttack, evaluate, load_images, read_images
from ecnn.evaluation.batch import BATCH_SIZE, check_attacks, check_request
from ecnn.evaluation.records import SUMMARY
from ecnn.pipeline.opening import Opened, load_attacks
from ecnn.pipeline.threads import suitable_threads
from ecnn.pipeline.training import AnyPath
from ecnn.progress import Progress
from ecnn.spec import DataTable, Spec, attack_options, make_attack, needed_options

#: Options of attacks that are flags of `ecnn evaluate`; the others are given with --set.
_FLAGS = ("norm", "eps", "steps", "step_size", "loss", "on", "keep")


def presets_for(
    kinds: Sequence[str], options: Mapping[str, Any], eps: Sequence[str] = ()
) -> dict[str, Preset]:
    """The presets that attacks are made with for which nothing is asked but, perhaps, a norm."""
    found = {}
    for kind in kinds:
        given = {name for name in attack_options(kind) if name in options} - {"norm"}
        if not given and not (eps and "eps" in attack_options(kind)):
            found[kind] = find_preset(kind, options.get("norm", "linf"))
    return found


def attack_tables(
    kinds: Sequence[str], options: Mapping[str, Any], eps: Sequence[str] = (), *, with_own: bool = False
) -> dict[str, dict[str, Any]]:
    """The [attacks] of a spec for several kinds with common options; each takes those it has.

    They search on a quick copy of the model, and in Linf, unless the options say otherwise. Several radii repeat each
    attack that has one. An attack that gets no option takes its preset; one that gets too few is an InputError with the
    usual values. Attacks of the user's beside them (`with_own`) take a norm too.
    """
    known = {kind: attack_options(kind) for kind in kinds}
    every = sorted({name for names in known.values() for name in names})
    for name in options:
        if name not in every and not (with_own and name == "norm"):
            asked = ", ".join(kinds) or "these attacks"
            raise InputError(f"none of {asked} has an option {name!r}{did_you_mean(name, every)}")
    common = {"quick": True, "norm": "linf", **options}
    if eps:
        common["eps"] = eps[0] if len(eps) == 1 else list(eps)
    presets, tables = presets_for(kinds, options, eps), {}
    for kind, names in known.items():
        usual = presets[kind].options if kind in presets else {}
        table = {"kind": kind, **usual, **{name: value for name, value in common.items() if name in names}}
        _check_complete(kind, table, eps[0] if eps else None)
        tables[kind] = table
    return tables


def _check_complete(kind: str, table: Mapping[str, Any], eps: str | None) -> None:
    """Raises InputError with the usual values if the table lacks options that have no default."""
    missing = [name for name in needed_options(kind) if name not in table]
    if not missing:
        return
    usual = find_preset(kind, str(table.get("norm", "linf")), eps).options
    flags = [
        f"--{name.replace('_', '-')} {usual[name]}"
        if name in _FLAGS
        else f"--set attack.{name}={usual[name]}"
        for name in missing
    ]
    words = " and ".join([", ".join(flags[:-1]), flags[-1]]) if len(flags) > 1 else flags[0]
    raise InputError(
        f"the attack {kind!r} needs {', '.join(missing)}, which decide its result and have no default: {words} "
        f"{'is' if len(flags) == 1 else 'are'} usual; without any option it takes a preset."
    )


def own_attacks(
    sources: Sequence[str], norm: str, eps: Sequence[float | str], seed: int
) -> dict[str, OwnAttack]:
    """Attacks of the user's, each "file.py:function", in the first of these balls."""
    if sources and not eps:
        raise InputError(
            f"an attack of your own needs --eps, the radius of the ball: --eps {USUAL_EPS.get(norm, '8/255')} is usual."
        )
    made: Any = {"norm": norm, "eps": eps[0] if eps else 0.0, "seed": seed}
    return {
        one.name: OwnAttack(function=one.function, source=one.source, **made) for one in load_attacks(sources)
    }


def evaluation_spec(
    source: str | None, attacks: Mapping[str, Mapping[str, Any]], *, data: str | None, limit: int | None
) -> Spec:
    """The spec of a saved model, or of a module (source None) on these data, with the attacks to be made."""
    if source is None:
        return Spec(data=DataTable(name=data or "", test_limit=limit), attacks=attacks)
    return runs.read_spec(source).changed({"attacks": dict(attacks), "data.test_limit": limit})


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """An evaluation that is ready to run: the model has classified one image, and every attack is made.

    Attributes:
        split: the test images.
        attacks: by how many images they see and by the radii they are repeated at (None: their own).
        cost: what the attacks ask at most, so far as they can say.
        classes: only images of these; None for all.
        presets: names of the presets that attacks were made with, by attack.
    """

    model: nn.Module
    split: Split
    attacks: Mapping[tuple[int | None, tuple[float | str, ...] | None], Mapping[str, Attack | OwnAttack]]
    cost: Cost
    classes: Sequence[int] | None = None
    presets: Mapping[str, str] = field(default_factory=dict)


def plan_evaluation(
    spec: Spec,
    opened: Opened,
    *,
    classes: str | None = None,
    own: Mapping[str, OwnAttack] | None = None,
    eps: Sequence[str] = (),
    presets: Mapping[str, Preset] | None = None,
) -> EvaluationPlan:
    """Makes the spec's attacks, and tries the model, and where each attack looks, on one image.

    Args:
        spec: the run's own, or any for a module, with the attacks to be made; see `evaluation_spec`.
        opened: the model and its images, by `open_model`.
        classes: "3,5,7" or names: only images of these.
        own: attacks of the user's, by name.
        eps: radii that these are repeated at, if there are several.
        presets: those that attacks of the spec were made with.
    """
    groups, cost = _groups(spec, opened.device), Cost(0, 0)
    for name, attack in (own or {}).items():
        key = (spec.data.test_limit, tuple(eps) if len(eps) > 1 else None)
        groups.setdefault(key, {})[name] = attack
    groups = groups or {(spec.data.test_limit, None): {}}
    chosen = opened.find_classes(classes)
    for (most, radii), group in groups.items():
        images = len(check_request(opened.model, read_images(opened.split, classes=chosen), most, BATCH_SIZE))
        check_attacks(opened.model, opened.split[0][0], group)
        for attack in group.values():
            if isinstance(attack, Attack):
                cost += attack.cost(opened.num_classes) * (images * len(radii or (None,)))
    names = {kind: preset.name for kind, preset in (presets or {}).items()}
    return EvaluationPlan(opened.model, opened.split, groups, cost, chosen, names)


def evaluate_run(
    made: EvaluationPlan,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    out: AnyPath | None = None,
    save_images: AnyPath | None = None,
    resume: bool = True,
    cluster: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Makes the attacks that were planned, on the first `data.test_limit` test images.

    Args:
        out: where outcomes are kept, image by image; None keeps nothing.
        save_images: an .npz to write the attacked images to.
        cluster: as `ecnn.evaluate` takes it.
    """
    if out is not None:
        runs.check_same_model(out, made.model)
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
                classes=made.classes,
                seed=seed,
                eps=eps,
                run_dir=folder,
                resume=resume,
                save_images=save_images is not None,
                batch_size=BATCH_SIZE if batch_size is None else batch_size,
                cluster=cluster,
                progress=progress,
            )
            for (limit, eps), attacks in made.attacks.items()
        ]
        result = _join(parts)
        if folder is not None and made.presets:
            _write_presets(folder, made.presets)
        if save_images is not None and folder is not None:
            _write_images(save_images, folder, result)
    return result


def _groups(
    spec: Spec, device: torch.device
) -> dict[tuple[int | None, tuple[float | str, ...] | None], dict[str, Any]]:
    """The spec's attacks by how many images they see and by the radii they are repeated at (None: their own)."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, table in spec.attacks.items():
        radii = table.get("eps")
        several = tuple(radii) if isinstance(radii, list) else None
        one = {} if not several else {"eps": several[0]}
        key = (table.get("limit", spec.data.test_limit), several)
        groups.setdefault(key, {})[name] = _attack({"kind": name, **table, **one}, device)
    return groups


def _write_presets(folder: Path, presets: Mapping[str, str]) -> None:
    """Writes the presets' names into eval.json, beside the settings that every record has."""
    path = folder / SUMMARY
    kept = files.read_json(path)
    wanted = {**kept, "presets": {**kept.get("presets", {}), **presets}}
    if kept != wanted:
        files.write_json(path, wanted)


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
    if save_images is not None:
        files.check_writable(save_images)
        if Path(os.path.realpath(save_images)).suffix.lower() != ".npz":  # of a link: what it leads to
            raise InputError(
                f"attacked images are written to an .npz, and {save_images} is none: name it images.npz."
            )
    if out is not None:
        with files.locked(out, "evaluation"):
            yield Path(out)
        return
    if save_images is None:
        yield None
        return
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
