"""Outcomes on the disk: a file per finished batch, then one per finished attack, and a summary in eval.json.

    eval.json                     figures and provenance of every finished attack; computed from the files below
    eval/clean.npz                outcomes without an attack
    eval/pgd@8-255.npz            outcomes of a finished attack
    eval/pgd@8-255.parts/*.npz    finished batches of an attack under way; deleted when it is finished
    eval/pgd@8-255.images/*.npz   attacked images, if they are kept

Files are written atomically, so a kill loses only the batch under way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecnn import files
from ecnn.checks import difference
from ecnn.errors import InputError
from ecnn.evaluation.outcomes import IDENTITY, Outcomes
from ecnn.evaluation.provenance import Fingerprint, same_answers
from ecnn.evaluation.results import CLEAN, Evaluation, summarise_outcomes

SUMMARY, FOLDER = "eval.json", "eval"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.,+=@/-]*")


def file_stem(name: str) -> str:
    """The attack's name as a file name, with "-" for "/"."""
    return name.replace("/", "-")


def check_names(names: list[str]) -> None:
    """Raises InputError unless each name can name a file, and all files differ, also if case is ignored."""
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 100:
            raise InputError(
                f"an attack's name must be letters, digits and any of _ . , + = @ / -, not {name!r}: it names a file."
            )
    stems = [file_stem(name).casefold() for name in names]
    for name, stem in zip(names, stems, strict=True):
        if stem == CLEAN or stems.count(stem) > 1:
            raise InputError(
                f"the name {name!r} is taken: give every attack, and every eps, a name of its own."
            )


class Records:
    """The outcomes of one attack in a run folder.

    Attributes:
        name: of the attack.
        path: of the file with the outcomes of the finished attack.
    """

    def __init__(self, run_dir: str | os.PathLike[str], name: str) -> None:
        folder, stem = Path(run_dir) / FOLDER, file_stem(name)
        self.name = name
        self.path = folder / f"{stem}.npz"
        self._parts = folder / f"{stem}.parts"
        self._images = folder / f"{stem}.images"

    def read(self, about: dict[str, Any], fingerprint: Fingerprint) -> list[Outcomes]:
        """All finished outcomes; InputError if a file is damaged, or is of another attack, seed, model or images.

        In a cascade, outcomes made after fewer attacks than now are left out, so that the attack runs again.
        """
        found = []
        for path in (self.path, *_npz_files(self._parts)):
            if files.exists(path):
                outcomes = _load(path)
                wanted = {key: about.get(key) for key in IDENTITY}
                is_early = _has_grown(outcomes.about.get("after"), wanted.get("after"))
                kept = {"after": outcomes.about["after"]} if is_early else {}
                _check_origin(path, outcomes, {**wanted, **kept}, fingerprint)
                found += [] if is_early else [outcomes]
        return found

    def add_part(self, part: Outcomes) -> None:
        """Writes the outcomes of a finished batch."""
        part.save(self._parts / f"{_span(part)}.npz")

    def add_images(self, part: Outcomes, images: Tensor) -> None:
        """Writes the attacked images of a batch, as float32: rounding to bytes could undo the attack."""
        arrays = {"index": part.index, "images": images.detach().cpu().numpy().astype(np.float32)}
        files.write_arrays(self._images / f"{_span(part)}.npz", arrays, {"name": self.name})

    def image_positions(self) -> np.ndarray:
        """(image,) positions of the attacked images on the disk."""
        return np.array([position for index, _ in self.image_batches() for position in index], dtype=int)

    def read_images(self) -> tuple[Tensor, Tensor]:
        """Positions (image,) and attacked images (image, channel, height, width), in order; InputError if none."""
        kept: dict[int, np.ndarray] = {}
        for index, images in self.image_batches():
            kept.update(zip(index.tolist(), images, strict=True))
        if not kept:
            raise InputError(
                f"no attacked images of {self.name!r} were kept: evaluate with save_images=True."
            )
        order = sorted(kept)
        return torch.tensor(order, device="cpu"), torch.from_numpy(
            np.stack([kept[position] for position in order])
        )

    def image_batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields positions (image,) and attacked images (image, channel, height, width), batch by batch."""
        for path in _npz_files(self._images):
            arrays, _ = files.read_arrays(path)
            if set(arrays) != {"index", "images"} or len(arrays["index"]) != len(arrays["images"]):
                raise InputError(f"{path} does not hold attacked images.")
            yield arrays["index"], arrays["images"]

    def finish(self, outcomes: Outcomes, *, is_new: bool) -> None:
        """Writes all outcomes to one file and removes the parts. Does nothing without parts and `is_new`."""
        if is_new or files.exists(self._parts):
            outcomes.save(self.path)
            _remove_folder(self._parts)

    def discard(self) -> None:
        """Removes all files of this attack."""
        files.remove(self.path)
        _remove_folder(self._parts)
        _remove_folder(self._images)


def prepare_folder(run_dir: str | os.PathLike[str], fingerprint: Fingerprint, anew: Sequence[str]) -> None:
    """Prepares a folder for an evaluation: removes the outcomes of the attacks that are to be computed again.

    Raises InputError, before any attack runs, if the remaining outcomes are of another model or other images. The clean
    outcomes are removed too if no other attack remains that needs them.

    Args:
        anew: names of the attacks that are to be computed again.
    """
    folder = Path(run_dir) / FOLDER
    files.check_writable(folder / f"{CLEAN}.npz")
    stems = {file_stem(name) for name in anew}
    staying = [path for path in _npz_files(folder) if path.stem not in stems]
    if anew and [path.stem for path in staying] == [CLEAN]:
        stems.add(CLEAN)
        staying = []
    for path in staying:
        _check_origin(path, _load(path), {"model": fingerprint.model}, fingerprint)
    for stem in sorted(stems):
        Records(run_dir, stem).discard()


def load_evaluation(run_dir: str | os.PathLike[str]) -> Evaluation:
    """The evaluation in a run folder, read from its records alone: no model, no images, no GPU.

    If attacks were run on different numbers of images, only the images that all of them share are included.
    """
    return _evaluation_of(run_dir, read_all(run_dir))


def _evaluation_of(run_dir: str | os.PathLike[str], every: Mapping[str, Outcomes]) -> Evaluation:
    if CLEAN not in every:
        raise InputError(
            f"{Path(run_dir) / FOLDER} holds no evaluation: run evaluate(..., run_dir=...) first."
        )
    common = every[CLEAN].index
    for name, outcomes in every.items():
        if not np.isin(outcomes.index, every[CLEAN].index).all():
            raise InputError(
                f"{Path(run_dir) / FOLDER} holds outcomes of {name!r} for images that are not in its {CLEAN}.npz: that "
                "file belongs to another evaluation."
            )
        common = np.intersect1d(common, outcomes.index)
    cut = {name: outcomes.take(np.isin(outcomes.index, common)) for name, outcomes in every.items()}
    return Evaluation(cut.pop(CLEAN), cut)


def load_images(run_dir: str | os.PathLike[str], name: str) -> tuple[Tensor, Tensor]:
    """Positions (image,) and attacked images that `evaluate(..., save_images=True)` kept for one attack."""
    return Records(run_dir, name).read_images()


def read_all(run_dir: str | os.PathLike[str]) -> dict[str, Outcomes]:
    """Outcomes of every finished attack of a run folder, and the clean ones, by name, in the order of their start."""
    paths = list(_npz_files(Path(run_dir) / FOLDER))
    loaded = [_load(path) for path in paths]
    for path, outcomes in zip(paths, loaded, strict=True):
        if path.stem != file_stem(outcomes.name):
            raise InputError(f"{path} was renamed: it holds outcomes of {outcomes.name!r}.")
    if len({repr(_told_apart(outcomes.about.get("model"))) for outcomes in loaded}) > 1:
        raise InputError(f"{Path(run_dir) / FOLDER} holds outcomes of more than one model.")
    loaded.sort(key=lambda outcomes: str(outcomes.about.get("started", "")))
    return {outcomes.name: outcomes for outcomes in loaded}


def write_summary(run_dir: str | os.PathLike[str]) -> None:
    """Writes the "evaluation" entry of eval.json from the records; other entries stay."""
    path = Path(run_dir) / SUMMARY
    try:
        before = files.read_json(path) if files.exists(path) else {}
    except InputError as error:
        raise InputError(f"{error} Delete it: it is written again from the outcomes.") from error
    if not isinstance(before, dict):
        raise InputError(f"{path} is not a table: move it away.")
    every = read_all(run_dir)
    shared = _evaluation_of(run_dir, every)
    summary = shared.to_json()
    # The worst case and a cascade need the same images for all attacks; an attack's own figures do not.
    summary[CLEAN] = summarise_outcomes(every[CLEAN])
    summary["attacks"] = {
        name: {
            "file": f"{FOLDER}/{file_stem(name)}.npz",
            **(shared.summarise(name) if "after" in outcomes.about else summarise_outcomes(outcomes)),
        }
        for name, outcomes in every.items()
        if name != CLEAN
    }
    files.write_json(path, {**before, "evaluation": summary})


def _npz_files(folder: Path) -> Iterator[Path]:
    """The finished .npz files of a folder, sorted; names of unfinished files begin with a dot."""
    return iter(files.matching(folder, "[!.]*.npz"))


def _load(path: Path) -> Outcomes:
    try:
        return Outcomes.load(path)
    except InputError as error:
        raise InputError(f"{error} Delete it to have it computed again.") from error


def _has_grown(before: Any, after: Any) -> bool:
    """Whether both are lists, and `after` holds everything of `before` in the same order, and more."""
    if not isinstance(before, list) or not isinstance(after, list) or len(after) <= len(before):
        return False
    rest = iter(after)
    return all(name in rest for name in before)


def _check_origin(path: Path, outcomes: Outcomes, about: dict[str, Any], fingerprint: Fingerprint) -> None:
    """Raises InputError unless the outcomes match the entries of `about`, and the fingerprint's images and answers."""
    answers = outcomes.about.get("answers")
    for key, wanted in about.items():
        kept = outcomes.about.get(key)
        if key == "model" and answers is not None:  # answers, which are compared below, replace the structure
            kept, wanted = _told_apart(kept), _told_apart(wanted)
        if kept != wanted:
            what = "order of attacks" if key == "after" else key
            anew = "" if key == "model" else ", or resume=False (--no-resume) to replace them"
            raise InputError(
                f"{path} holds outcomes of another {what} ({difference(kept, wanted)}): choose another folder "
                f"(--out){anew}."
            )
    labels = fingerprint.split.labels.cpu().numpy()
    known = outcomes.index < len(labels)  # the records may hold more images than this split
    index = outcomes.index[known]
    hashes = fingerprint.image_hashes(int(index.max(initial=-1)) + 1)
    if not (
        np.array_equal(outcomes.image_hash[known], hashes[index])
        and np.array_equal(outcomes.label[known], labels[index])
    ):
        raise InputError(f"{path} holds outcomes of other images: choose another folder (--out).")
    if not same_answers(answers, fingerprint.answers):
        raise InputError(
            f"{path} holds outcomes of another model (its weights are the same, but its answers differ: its code has "
            "changed): choose another folder (--out)."
        )


def _told_apart(model: Any) -> Any:
    """The description of a model without its structure: another torch version may print the same layers differently."""
    return (
        {key: value for key, value in model.items() if key != "structure"}
        if isinstance(model, dict)
        else model
    )


def _span(part: Outcomes) -> str:
    return f"{part.index[0]:08d}-{part.index[-1]:08d}"


def _remove_folder(folder: Path) -> None:
    with files.naming(folder, "remove"):
        if files.is_folder(folder):
            for path in files.entries(folder):
                files.remove(path)
            folder.rmdir()
