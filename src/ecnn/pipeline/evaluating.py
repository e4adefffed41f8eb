"""Plans and runs the attacks of a spec on one model, with outcomes per image."""

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

#: Options of attacks that are flags of `ecnn evaluate`; the others need --set.
_FLAGS = ("norm", "eps", "steps", "step_size", "loss", "on", "keep")


def presets_for(
    kinds: Sequence[str], options: Mapping[str, Any], eps: Sequence[str] = ()
) -> dict[str, Preset]:
    """Presets by kind of attack, for the kinds to which no option but the norm applies, and no radius."""
    found = {}
    for kind in kinds:
        given = {name for name in attack_options(kind) if name in options} - {"norm"}
        if not given and not (eps and "eps" in attack_options(kind)):
            found[kind] = find_preset(kind, options.get("norm", "linf"))
    return found


def attack_tables(
    kinds: Sequence[str], options: Mapping[str, Any], eps: Sequence[str] = (), *, with_own: bool = False
) -> dict[str, dict[str, Any]]:
    """The [attacks] tables of a spec, for several kinds of attack that share options; each takes those that it has.

    Attacks search on a quick copy of the model, and in Linf, unless the options say otherwise. With several radii each
    attack that has a radius is repeated. An attack that gets no option takes its preset. One that gets some options,
    but not all that it needs, is an InputError with the usual values.

    Args:
        kinds: names of attacks.
        options: common options by name.
        eps: radii.
        with_own: there are attacks of the user's own beside these, so that a norm is allowed even if no kind takes one.
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
    """Raises InputError, with the usual values, if the table lacks an option that has no default."""
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
    """The user's own attacks by name, each given as "file.py:function", within the first radius; runs their files."""
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
    """The spec of a saved model, or of a module (source None) and its dataset, with these attacks."""
    if source is None:
        return Spec(data=DataTable(name=data or "", test_limit=limit), attacks=attacks)
    return runs.read_spec(source).changed({"attacks": dict(attacks), "data.test_limit": limit})


@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """An evaluation that is ready to run: every attack is made, and was tried with the model on one image.

    Attributes:
        split: the test images.
        attacks: attacks by name, grouped by two things: how many images they get (None: all), and the radii at which
            they are repeated (None: each at its own radius).
        cost: the most passes that the attacks can take, without those of the user's own attacks.
        classes: numbers of the classes whose images are used; None for all.
        presets: name of the preset of each attack that was made from one.
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
    """Makes the spec's attacks, and tries the model and the view of each attack on one image.

    Args:
        spec: of the run, or any for a module, with the attacks to make; see `evaluation_spec`.
        opened: the model and its images, by `open_model`.
        classes: "3,5,7" or names: only images of these.
        own: the user's own attacks, by name.
        eps: radii at which the user's own attacks are repeated; one or none leaves each at its own radius.
        presets: those from which attacks of the spec were made, by kind.
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
    """Runs the planned attacks, and returns their outcomes on the images that all of them got.

    Args:
        seed: of the attacks.
        out: folder for the outcomes per image; None keeps nothing.
        save_images: an .npz to write the attacked images to.
        resume: goes on with what an earlier evaluation left in the folder.
        cluster: as in `ecnn.evaluate`.
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
    """The spec's attacks, grouped as in `EvaluationPlan.attacks`."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, table in spec.attacks.items():
        radii = table.get("eps")
        several = tuple(radii) if isinstance(radii, list) else None
        one = {} if not several else {"eps": several[0]}
        key = (table.get("limit", spec.data.test_limit), several)
        groups.setdefault(key, {})[name] = _attack({"kind": name, **table, **one}, device)
    return groups


def _write_presets(folder: Path, presets: Mapping[str, str]) -> None:
    """Adds the names of the presets, by attack, to the folder's eval.json."""
    path = folder / SUMMARY
    kept = files.read_json(path)
    wanted = {**kept, "presets": {**kept.get("presets", {}), **presets}}
    if kept != wanted:
        files.write_json(path, wanted)


def _attack(table: Mapping[str, Any], device: torch.device) -> Attack:
    """The attack that a table describes; with a `source`, it is crafted on that model and tested on the other."""
    attack = make_attack(table)
    if "source" not in table:
        return attack
    source = runs.load_model(table["source"], device=device)
    return Transfer(source=source, attack=attack, keep=attack.keep, labels=attack.labels)


def _join(parts: Sequence[Evaluation]) -> Evaluation:
    """All attacks in one evaluation, on as many of the first images as the smallest part has."""
    rows = slice(min(len(part) for part in parts))
    outcomes = {name: found.take(rows) for part in parts for name, found in part.outcomes.items()}
    return Evaluation(parts[0].clean.take(rows), outcomes)


@contextmanager
def _folder_for(out: AnyPath | None, save_images: AnyPath | None) -> Iterator[Path | None]:
    """The folder for outcomes: `out`, or a temporary one if only images are to be saved, or None."""
    if save_images is not None:
        files.check_writable(save_images)
        if Path(os.path.realpath(save_images)).suffix.lower() != ".npz":  # for a link, its target's suffix
            raise InputError(
                f"attacked images are written to an .npz file, and {save_images} is not one: name it images.npz."
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
    """Writes an .npz with the images and predictions of each attack, and the positions and labels of the images."""
    arrays = {"index": found.clean.index, "label": found.clean.label}
    for name, outcomes in found.outcomes.items():
        position, images = load_images(folder, name)
        if not np.array_equal(position.numpy(), outcomes.index):
            raise InputError(f"the attacked images of {name!r} in {folder} are not those of its outcomes.")
        arrays[f"{name}.images"] = images.numpy()
        arrays[f"{name}.prediction"] = outcomes.prediction
    files.write_arrays(path, arrays, {"what": "attacked images in [0, 1]"})
