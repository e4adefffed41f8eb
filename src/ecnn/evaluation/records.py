"""Outcomes on the disk: finished batches as parts, finished attacks as one file, a summary in eval.json.

    eval.json                     figures and provenance of every finished attack; computed from the files below
    eval/clean.npz                outcomes without an attack
    eval/pgd@8-255.npz            outcomes of a finished attack
    eval/pgd@8-255.parts/*.npz    finished batches of one under way; gone when it is finished
    eval/pgd@8-255.images/*.npz   attacked images, where they were asked for

Each file is written all or nothing, so a kill loses the batch under way and nothing else.
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
    """The name of an attack as a file can have it."""
    return name.replace("/", "-")


def check_names(names: list[str]) -> None:
    """Raises InputError unless each name can be a file's, and no two would be the same file."""
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
        path: of the finished file.
    """

    def __init__(self, run_dir: str | os.PathLike[str], name: str) -> None:
        folder, stem = Path(run_dir) / FOLDER, file_stem(name)
        self.name = name
        self.path = folder / f"{stem}.npz"
        self._parts = folder / f"{stem}.parts"
        self._images = folder / f"{stem}.images"

    def read(self, about: dict[str, Any], fingerprint: Fingerprint) -> list[Outcomes]:
        """Everything finished; InputError if it is damaged, or of another attack, model or image.

        What was made after fewer attacks than now is left out: it is made anew, on what the others leave.
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
        """Keeps a finished batch."""
        part.save(self._parts / f"{_span(part)}.npz")

    def add_images(self, part: Outcomes, images: Tensor) -> None:
        """Keeps the attacked images of a batch, as float32: bytes would round the attack away."""
        arrays = {"index": part.index, "images": images.detach().cpu().numpy().astype(np.float32)}
        files.write_arrays(self._images / f"{_span(part)}.npz", arrays, {"name": self.name})

    def image_positions(self) -> np.ndarray:
        """(image,) positions of the attacked images that are kept."""
        return np.array([position for index, _ in self.image_batches() for position in index], dtype=int)

    def read_images(self) -> tuple[Tensor, Tensor]:
        """Positions (image,) and attacked images (image, channel, height, width) that were kept."""
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
        """Positions (image,) and attacked images (image, channel, height, width), batch by batch."""
        for path in _npz_files(self._images):
            arrays, _ = files.read_arrays(path)
            if set(arrays) != {"index", "images"} or len(arrays["index"]) != len(arrays["images"]):
                raise InputError(f"{path} does not hold attacked images.")
            yield arrays["index"], arrays["images"]

    def finish(self, outcomes: Outcomes, *, is_new: bool) -> None:
        """Replaces the parts by one file of everything known; without parts or anything new the file stays."""
        if is_new or files.exists(self._parts):
            outcomes.save(self.path)
            _remove_folder(self._parts)

    def discard(self) -> None:
        """Removes everything of this attack."""
        files.remove(self.path)
        _remove_folder(self._parts)
        _remove_folder(self._images)


def prepare_folder(run_dir: str | os.PathLike[str], fingerprint: Fingerprint, anew: Sequence[str]) -> None:
    """Discards the attacks that are to be run anew; InputError if others there are of another model or other images.

    To find that out at the end would be late. The clean outcomes stay as long as an attack does that refers to them.
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
    """The evaluation that a run folder holds, from its records alone: no model, no images, no GPU.

    Attacks that were run on different numbers of images are cut to the images that all of them share.
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
                f"{Path(run_dir) / FOLDER} holds outcomes of {name!r} for images of which it has no clean ones: its "
                f"{CLEAN}.npz is of another evaluation."
            )
        common = np.intersect1d(common, outcomes.index)
    cut = {name: outcomes.take(np.isin(outcomes.index, common)) for name, outcomes in every.items()}
    return Evaluation(cut.pop(CLEAN), cut)


def load_images(run_dir: str | os.PathLike[str], name: str) -> tuple[Tensor, Tensor]:
    """Positions and attacked images that `evaluate(..., save_images=True)` kept for one attack."""
    return Records(run_dir, name).read_images()


def read_all(run_dir: str | os.PathLike[str]) -> dict[str, Outcomes]:
    """Every finished attack of a run folder by name, in the order in which they were begun."""
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
    """Writes eval.json anew from the records; what others keep there stays."""
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
    # The worst case and a cascade need the same images for all; an attack's own figures do not.
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
    """The finished files of a folder in order; those being written begin with a dot."""
    return iter(files.matching(folder, "[!.]*.npz"))


def _load(path: Path) -> Outcomes:
    try:
        return Outcomes.load(path)
    except InputError as error:
        raise InputError(f"{error} Delete it to have it computed again.") from error


def _has_grown(before: Any, after: Any) -> bool:
    """Whether a list has everything of an earlier one in the same order, and more."""
    if not isinstance(before, list) or not isinstance(after, list) or len(after) <= len(before):
        return False
    rest = iter(after)
    return all(name in rest for name in before)


def _check_origin(path: Path, outcomes: Outcomes, about: dict[str, Any], fingerprint: Fingerprint) -> None:
    """Raises InputError unless the outcomes are of what `about` says and of the fingerprint's images."""
    answers = outcomes.about.get("answers")
    for key, wanted in about.items():
        kept = outcomes.about.get(key)
        if key == "model" and answers is not None:  # what it answers is compared below
            kept, wanted = _told_apart(kept), _told_apart(wanted)
        if kept != wanted:
            what = "order of attacks" if key == "after" else key
            anew = "" if key == "model" else ", or resume=False (--no-resume) to replace them"
            raise InputError(
                f"{path} holds outcomes of another {what} ({difference(kept, wanted)}): choose another folder "
                f"(--out){anew}."
            )
    labels = fingerprint.split.labels.cpu().numpy()
    known = outcomes.index < len(labels)  # the records may go further than this split
    index = outcomes.index[known]
    hashes = fingerprint.image_hashes(int(index.max(initial=-1)) + 1)
    if not (
        np.array_equal(outcomes.image_hash[known], hashes[index])
        and np.array_equal(outcomes.label[known], labels[index])
    ):
        raise InputError(f"{path} holds outcomes of other images: choose another folder (--out).")
    if not same_answers(answers, fingerprint.answers):
        raise InputError(
            f"{path} holds outcomes of another model (its weights are the same, but it answers otherwise: its code has "
            "changed): choose another folder (--out)."
        )


def _told_apart(model: Any) -> Any:
    """The description of a model without its structure: another torch may print the same layers otherwise."""
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
