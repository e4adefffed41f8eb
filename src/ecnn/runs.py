"""Run folders (spec, code, weights, log, results), and the models that come with the package."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ecnn
from ecnn import files
from ecnn.checks import check_choice, check_entries, check_number, difference
from ecnn.codes import CodeMatrix, load_code
from ecnn.data.sources import CLASS_NAMES
from ecnn.errors import InputError
from ecnn.models import build_model, rebuild_model
from ecnn.spec import Spec, load_spec, save_spec
from ecnn.training.checkpoints import load_checkpoint, load_model_tensors, model_tensors
from ecnn.training.loop import BEST, LOG

SPEC, CODE, ENVIRONMENT, RESULTS, DONE = "spec.toml", "code.json", "env.json", "eval.json", "DONE"
CLASSES, CONFIG = "classes.json", "config.json"
_SUMMED = (SPEC, CODE, CLASSES, ENVIRONMENT, BEST, LOG)
_REPAIR = "start the same training again to have it repaired, or delete DONE to use the files as they are"


def describe_model(kind: str, model: nn.Module) -> dict[str, Any]:
    """The [model] table of a spec with every option written out, so that later defaults cannot change an old run."""
    config: dict[str, Any] = getattr(model, "config", {})
    return {
        "kind": kind,
        **{key: value for key, value in config.items() if key not in ("in_channels", "num_classes")},
    }


def start_run(folder: Path, spec: Spec, code: CodeMatrix | None, class_names: Sequence[str]) -> None:
    """Writes the files that are known before training: resolved spec, code, classes, environment. Removes DONE.

    Raises InputError if the folder holds another run.
    """
    # An empty spec.toml is what a fault of the disk left, not another run.
    if files.exists(folder / SPEC) and _identity(folder) and not holds(folder, spec):
        raise InputError(
            f"{folder} holds a run with another spec.toml ({difference(_identity(folder), spec.identity)}): choose "
            "another folder."
        )
    files.remove(folder / DONE)
    save_spec(folder / SPEC, spec)
    if code is not None:
        code.save(folder / CODE)
    files.write_json(folder / CLASSES, list(class_names))
    files.write_json(folder / ENVIRONMENT, environment())


def holds(folder: Path, spec: Spec) -> bool:
    """Whether the folder's spec.toml is this spec, apart from the path of the images."""
    return _identity(folder) == spec.identity


def _identity(folder: Path) -> dict[str, Any]:
    """The tables of the folder's spec.toml as `Spec.identity` gives them; they need not be a valid spec."""
    tables = files.read_toml(folder / SPEC)
    data = tables.get("data")
    if isinstance(data, dict):
        data.pop("path", None)
    return tables


def is_finished(folder: Path, spec: Spec) -> bool:
    """Whether the folder holds a complete and undamaged run of that spec."""
    return (
        all(files.exists(folder / name) for name in (DONE, SPEC, RESULTS))
        and holds(folder, spec)
        and not damaged_files(folder)
    )


def finish_run(folder: Path) -> None:
    """Marks the run as complete: DONE holds the SHA-256 of its files, as `sha256sum -c` reads them."""
    found = [name for name in _SUMMED if files.exists(folder / name) or name not in (CODE, CLASSES)]
    files.write_text(folder / DONE, "".join(f"{files.file_sum(folder / name)}  {name}\n" for name in found))


def damaged_files(folder: Path) -> tuple[str, ...]:
    """Names of the files of a finished run that are missing or changed since it ended; none for an unfinished run."""
    if not files.exists(folder / DONE):
        return ()
    try:
        sums = _read_sums(folder)
    except InputError:
        return (DONE,)
    # Older runs have an empty DONE: of those the weights and the log must be readable.
    return tuple(name for name in sums or (BEST, LOG) if not _is_whole(folder / name, sums.get(name)))


def _is_whole(path: Path, expected: str | None) -> bool:
    try:
        if expected is None and path.name == BEST:
            load_checkpoint(path)
        return files.file_sum(path) == expected or expected is None
    except InputError:
        return False


def _read_sums(folder: Path) -> dict[str, str]:
    """SHA-256 by file name, from DONE; empty for an unfinished run and for an older one, whose DONE is empty."""
    if not files.exists(folder / DONE):
        return {}
    content = files.read_bytes(folder / DONE, most=files.MAX_JSON_BYTES)
    lines = [line.split("  ") for line in content.decode(errors="replace").splitlines()]
    sums = {line[-1]: line[0] for line in lines if len(line) == 2}
    if lines and (len(sums) != len(lines) or not {SPEC, BEST, LOG} <= {*sums} <= {*_SUMMED}):
        raise InputError(f"{folder / DONE} is damaged: {_REPAIR}.")
    return sums


def _check_whole(folder: Path, *names: str) -> None:
    """Raises InputError if one of these files has changed since the run ended; an unfinished run has no checksums."""
    sums = _read_sums(folder)
    for name in names:
        if name in sums and files.file_sum(folder / name) != sums[name]:
            raise InputError(
                f"{folder / name} was damaged or changed after the run had ended (its SHA-256 is not the one in "
                f"{DONE}): {_REPAIR}."
            )


@contextmanager
def kept_in(folder: str | os.PathLike[str] | None, *, resume: bool = True) -> Iterator[None]:
    """Adds a note to any exception inside, Ctrl-C included: what the folder keeps and how to go on.

    Args:
        folder: where the work writes; None if it keeps nothing.
        resume: whether the same command continues from what it finds there.
    """
    try:
        yield
    except BaseException as error:
        if getattr(error, "__notes__", None):  # a step inside has already said what is kept
            raise
        again = "the same command" if resume else "the same command without --no-resume"
        error.add_note(
            "Nothing is kept: with --out it could go on."
            if folder is None
            else f"What is finished is kept in {folder}: {again} goes on from there."
        )
        raise


def environment() -> dict[str, Any]:
    """Versions and hardware, recorded with a run so that its numbers can be traced."""
    has_cuda = torch.cuda.is_available()
    return {
        "ecnn": ecnn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if has_cuda else platform.processor() or platform.machine(),
        "platform": sys.platform,
    }


def find_device(name: str | torch.device) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails on "meta", which has no values
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise InputError(
            f"the device {str(name)!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return device


def load_model(
    source: str | os.PathLike[str], *, module: nn.Module | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """The best weights of a run directory or of a shipped model (see `models`), in eval mode.

    Args:
        source: a run folder that `ecnn train` or `fit(run_dir=)` wrote, or the name of a shipped model.
        module: gets the weights and is returned; needed for a network or trunk of your own, which no file describes.
        device: of the returned model; "auto" is CUDA where there is one.
    """
    folder = run_folder(source)
    model = module
    if model is None:
        has_spec = files.exists(folder / SPEC) or not any(
            files.exists(folder / name) for name in (BEST, CONFIG)
        )
        model = _model_of_spec(folder) if has_spec else _model_of_weights(folder)
    if not any(files.exists(folder / name) for name in (BEST, DONE)):
        raise InputError(
            f"{folder} has no weights yet: its training was stopped, or is under way, before the first epoch had ended."
        )
    _check_whole(folder, BEST)
    tensors, _ = load_checkpoint(folder / BEST)
    load_model_tensors(model, tensors, folder / BEST)
    return model.to(find_device(device)).eval()


def _model_of_weights(folder: Path) -> nn.Module:
    """The model that the file of weights from `fit` describes, with random weights."""
    tensors, facts = load_checkpoint(folder / BEST)
    if facts.get("model") is None:
        raise InputError(
            f"{folder} holds weights of a network that ecnn cannot build: build it yourself and pass it as module=."
        )
    return model_for(str(folder / BEST), facts["model"], tensors)


def model_for(owner: str, described: Any, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model of that description, with random weights and with a mean of the shape that these tensors have.

    Args:
        owner: what an error message calls the description.
    """
    means = [value for name, value in tensors.items() if name.endswith("centre.mean")]
    return rebuild_model(owner, described, torch.zeros_like(means[0]) if means else 0.0)


def _model_of_spec(folder: Path) -> nn.Module:
    """The model that spec.toml describes, with random weights."""
    spec = read_spec(folder)
    facts = spec.data
    if facts.num_classes is None or facts.in_channels is None or not isinstance(facts.image_size, list):
        raise InputError(
            f"{folder / SPEC} does not say num_classes, in_channels and image_size of its [data]."
        )
    _check_whole(folder, CODE)
    options = dict(spec.model)
    return build_model(
        str(options.pop("kind", "ecnn")),
        code=load_code(folder / CODE) if files.exists(folder / CODE) else None,
        num_classes=facts.num_classes,
        in_channels=facts.in_channels,
        mean=torch.zeros(facts.in_channels, *facts.image_size),  # the true mean is loaded with the weights
        **options,
    )


def read_spec(source: str | os.PathLike[str]) -> Spec:
    """The spec of a run folder or of a shipped model."""
    folder = run_folder(source)
    _check_whole(folder, SPEC)
    if not files.exists(folder / SPEC) and files.exists(folder / CONFIG):
        raise InputError(
            f"{folder} is a folder for the Hugging Face hub, without the {SPEC} of its run: ecnn predict takes it, and "
            f"ecnn audit --module file.py:model, where that file says model = ecnn.load_model({str(folder)!r})."
        )
    if not files.exists(folder / SPEC):
        below = (path for depth in ("*", "*/*", "*/*/*") for path in sorted(folder.glob(f"{depth}/{SPEC}")))
        nearest = next(below, None)
        hint = "give one that `ecnn train` made." if nearest is None else f"did you mean {nearest.parent}?"
        raise InputError(f"{folder} has no {SPEC}, which every run folder has: {hint}")
    return load_spec(folder / SPEC)


def class_names(source: str | os.PathLike[str]) -> tuple[str, ...]:
    """Names of the classes of a run or of a shipped model, in the order of its scores.

    Older runs do not list theirs. They get the names of a dataset with known classes, or else numbers.
    """
    folder = run_folder(source)
    facts = read_spec(folder).data
    if not files.exists(folder / CLASSES):
        return CLASS_NAMES.get(facts.name, tuple(map(str, range(facts.num_classes or 0))))
    _check_whole(folder, CLASSES)
    names = files.read_json(folder / CLASSES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{folder / CLASSES} should hold a list of class names.")
    if len(names) != facts.num_classes:
        raise InputError(f"{folder / CLASSES} should name {facts.num_classes} classes, not {len(names)}.")
    return tuple(names)


def check_same_model(folder: str | os.PathLike[str], model: nn.Module) -> None:
    """Raises InputError if a folder is the run of another model: results put there would be taken for that model's."""
    path = Path(folder)
    if not files.exists(path / SPEC) or not files.exists(path / BEST):
        return
    theirs, mine = load_checkpoint(path / BEST)[0], model_tensors(model)
    if theirs.keys() != mine.keys() or not all(
        torch.equal(value.to(mine[name].dtype), mine[name]) for name, value in theirs.items()
    ):
        raise InputError(f"{folder} is the run folder of another model: choose another folder for this one.")


def run_folder(source: str | os.PathLike[str]) -> Path:
    """The folder of a run, given as such or by the name of a shipped model."""
    if files.is_folder(source):
        return Path(source)
    check_choice(f"there is no folder {str(source)!r}, and a model by name", str(source), models())
    return zoo_folder(str(source))


def zoo_folder(name: str) -> Path:
    """The folder of a shipped model."""
    return Path(str(resources.files("ecnn") / "zoo" / name))


def describe_run(folder: Path) -> dict[str, Any]:
    """A run's kind, dataset, radius of adversarial training, best epoch and test accuracy, for lists of models."""
    spec = read_spec(folder)
    attack = spec.train.get("attack") or spec.train.get("val_attack") or {}
    result = read_results(folder) if files.exists(folder / RESULTS) else {}
    _, facts = load_checkpoint(folder / BEST)
    return {
        "kind": spec.model.get("kind", "ecnn"),
        "data": spec.data.name,
        "adversarial": attack.get("eps"),
        "best_epoch": facts.get("best_epoch"),
        "test_accuracy": result.get("test_accuracy"),
    }


def read_results(folder: Path) -> dict[str, Any]:
    """The content of eval.json of a finished run; InputError unless it has a test accuracy and a number of images."""
    result: dict[str, Any] = files.read_json(folder / RESULTS)
    check_entries(str(folder / RESULTS), result, {"test_accuracy": float, "images": int})
    check_number(f"{folder / RESULTS}: test_accuracy", result["test_accuracy"], most=1)
    return result


def models() -> tuple[str, ...]:
    """Names of the shipped models."""
    zoo = resources.files("ecnn") / "zoo"
    if not zoo.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in zoo.iterdir() if (entry / SPEC).is_file()))
