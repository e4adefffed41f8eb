"""Opens the models and attacks that a command line names: run folders, shipped models, and the user's own files."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ecnn import files, runs
from ecnn.asking import InFixedBatches, set_eval_mode
from ecnn.checks import did_you_mean
from ecnn.data import NAMES, Split, load_data
from ecnn.data.sources import note_on_order
from ecnn.errors import InputError
from ecnn.evaluation.batch import fill_batches
from ecnn.pipeline.training import AnyPath, load_test_images
from ecnn.spec import Spec

#: Modules made from the user's files, by path and checksum of the file.
_RAN: dict[tuple[str, str], ModuleType] = {}


@dataclass(frozen=True, eq=False)
class Opened:
    """A model in eval mode on its device, and the images to evaluate it on.

    Attributes:
        split: the test images.
        class_names: in the order of the scores.
        device: where the model is.
        note: a remark for the user on the order of classes or on batch sizes; None if there is none.
    """

    model: nn.Module
    split: Split
    class_names: tuple[str, ...]
    device: torch.device
    note: str | None = None

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def find_classes(self, asked: str | None) -> list[int] | None:
        """Sorted numbers of the classes in a text such as "3,5,7" or "cat,dog"; None for None."""
        if asked is None:
            return None
        found = []
        for word in (part.strip() for part in asked.split(",")):
            if word in self.class_names:
                found.append(self.class_names.index(word))
            elif word.isdecimal() and len(word) < 10 and int(word) < self.num_classes:
                found.append(int(word))
            else:
                raise InputError(
                    f"--classes takes numbers from 0 to {self.num_classes - 1}, or names, with commas between them; "
                    f"{word!r} is neither{did_you_mean(word, self.class_names)}"
                )
        return sorted(set(found))


def open_model(
    source: str | None = None,
    *,
    module: str | None = None,
    spec: Spec | None = None,
    data: str | None = None,
    root: AnyPath = "data",
    image_size: int | None = None,
    device: str = "auto",
) -> Opened:
    """A saved model, or one of the user's own, with the test images to evaluate it on.

    Args:
        source: a run folder or the name of a shipped model; None when a module is given.
        module: "file.py:name", as in `load_module`.
        spec: tells which test images to load for a saved model; None for the spec in its folder.
        data: name of a dataset or a folder of images; None for the data that a saved model was trained on. A module
            needs one.
        root: where dataset files are.
        image_size: pixels per side to which a folder of images is resized for a module; a saved model knows its own.
        device: auto, cpu, cuda, mps.
    """
    if (source is None) == (module is None):
        raise InputError("give either a run folder or the name of a model, or --module file.py:name.")
    place = runs.find_device(device)
    if source is not None:
        spec = runs.read_spec(source) if spec is None else spec
        model = runs.load_model(source, device=place)
        names = runs.class_names(source)
        return Opened(model, load_test_images(spec, root, data, names), names, place)
    if data is None:
        raise InputError("a module of your own needs --data: the name of a dataset or a folder of images.")
    model = load_module(str(module)).to(place)
    set_eval_mode(model)
    found = load_data(data, root, image_size=None if data in NAMES else image_size)
    notes = [None if found.folder is None else note_on_order(found.class_names)]
    model = fill_batches(model, found.test)
    if isinstance(model, InFixedBatches):
        notes.append(f"The model takes {model.size} images at a time: smaller batches are filled up.")
    return Opened(model, found.test, found.class_names, place, "\n".join(filter(None, notes)) or None)


class _Answers(nn.Module):
    """A torch module around a function, or another callable, from images to scores; error messages use its name."""

    def __init__(self, function: Callable[[Tensor], Any], name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, images: Tensor) -> Tensor:
        scores = self.function(images)
        if isinstance(scores, nn.Module):
            raise InputError(
                f"{self.name} was given images and returned a model: a function that makes one must need no arguments."
            )
        answer: Tensor = scores
        return answer


def load_module(source: str) -> nn.Module:
    """The classifier that "file.py:name" stands for, as a torch module; runs the file's code.

    The name is that of a torch module, of another callable from images to scores, or of a function or class that needs
    no arguments and returns one of these.
    """
    path, name, found = _find(source, "--module", "model")
    if not isinstance(found, nn.Module):
        if not _needs_arguments(found):
            found = found()
        elif isinstance(found, type):
            raise InputError(
                f"the class {name} in {path} needs arguments: name a function that makes the model."
            )
    if not callable(found):
        raise InputError(f"{name} in {path} must return a torch module, not {type(found).__name__}.")
    return found if isinstance(found, nn.Module) else _Answers(found, f"{name} in {path}")


@dataclass(frozen=True)
class OwnFunction:
    """A function from a file of the user's.

    Attributes:
        name: its name in results, such as "own-mine".
        source: SHA-256 of the file.
    """

    name: str
    function: Callable[..., Any]
    source: str


def is_own(attack: str) -> bool:
    """Whether an attack is given as "file.py:function" instead of by a name of ours."""
    return ":" in attack or attack.endswith(".py")


def load_attacks(sources: Sequence[str]) -> list[OwnFunction]:
    """The functions that the sources, each "file.py:function", name; runs the files' code."""
    found: list[OwnFunction] = []
    for source in sources:
        path, name, function = _find(source, "--attack", "attack")
        title = f"own-{name}"
        if title in [one.name for one in found]:
            title = f"own-{Path(path).stem}-{name}"
        found.append(OwnFunction(title, function, files.file_sum(path)))
    return found


def _find(source: str, option: str, what: str) -> tuple[str, str, Any]:
    """The path and the name in "file.py:name", and the callable of that name in the file."""
    path, colon, name = source.rpartition(":")
    if not colon or not files.is_file(path):
        raise InputError(f"{option} takes file.py:name, the path of a file that exists, not {source!r}.")
    module = _run_file(path)
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise InputError(f"{path} has no function or {what} called {name!r}{did_you_mean(name, names)}")
    return path, name, found


def _run_file(path: str) -> ModuleType:
    """The module made from a Python file, which is run only once: a model and an attack of one file share its state.

    Its folder is added to `sys.path` for good, so that the file can import the files beside it, also later.
    """
    key = (str(Path(path).resolve()), files.file_sum(path))
    if key not in _RAN:
        spec = importlib.util.spec_from_file_location(f"_audited_{Path(path).stem}", path)
        if spec is None or spec.loader is None:
            raise InputError(f"{path} is not a Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look it up there
        folder = str(Path(path).resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec.loader.exec_module(module)
        _RAN[key] = module
    return _RAN[key]


def _needs_arguments(function: Callable[..., Any]) -> bool:
    """Whether it cannot be called without arguments; a function of images cannot."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # written in C or C++, without a signature
        return not isinstance(function, type)
    return False
