"""From what is to be audited to a verdict."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ecnn import files, runs
from ecnn.auditing import Audit, Cost, audit, estimate_cost, resolve_budget
from ecnn.data import NAMES, Split, load_data
from ecnn.errors import InputError
from ecnn.evaluation.batch import BATCH_SIZE, check_request
from ecnn.pipeline.threads import suitable_threads
from ecnn.pipeline.training import AnyPath, load_test_images
from ecnn.plots import plot_audit
from ecnn.progress import Progress
from ecnn.spec import AuditTable

PICTURE = "audit.png"


@dataclass(frozen=True)
class AuditPlan:
    """An audit that is ready to run, and what it will ask at most.

    Attributes:
        table: what is audited.
        images: how many, the first of the split.
    """

    table: AuditTable
    model: nn.Module
    split: Split
    images: int
    cost: Cost


def plan_audit(
    table: AuditTable,
    *,
    source: str | None = None,
    module: str | None = None,
    data: str | None = None,
    root: AnyPath = "data",
    image_size: int | None = None,
    device: str = "auto",
) -> AuditPlan:
    """Loads model and images, tries the model on one of them, and counts what the suite will ask.

    Args:
        source: a run folder or the name of a shipped model; None when a module is given.
        module: "file.py:name", as `load_module` takes it.
        data: None for what the table says, or else the data that the model was trained on.
        root: where dataset files are.
        image_size: of a folder of images, for a module; a saved model knows its own.
    """
    if (source is None) == (module is None):
        raise InputError("give either a run folder or the name of a model, or --module file.py:name.")
    place = runs.find_device(device)
    if source is not None:
        spec = runs.read_spec(source)
        model = runs.load_model(source, device=place)
        split, num_classes = load_test_images(spec, root, data or table.data), spec.data.num_classes
    elif data is None:
        raise InputError("a module of your own needs --data: the name of a dataset or a folder of images.")
    else:
        model = load_module(str(module)).to(place).eval()
        found = load_data(data, root, image_size=None if data in NAMES else image_size)
        split, num_classes = found.test, found.num_classes
    budget = resolve_budget(table.budget)
    assert num_classes is not None  # a saved model has it written down
    limit = budget.images if table.limit is None else table.limit
    images = len(check_request(model, split, limit, BATCH_SIZE))
    cost = estimate_cost(model, budget, images, num_classes, norm=table.norm)  # type: ignore[arg-type]
    return AuditPlan(table, model, split, images, cost)


def audit_run(
    made: AuditPlan, *, out: AnyPath | None = None, resume: bool = True, progress: Progress | None = None
) -> Audit:
    """Audits what was planned.

    Args:
        out: where records, audit.json, audit.md and audit.png go; None keeps nothing.
        resume: goes on with what an earlier audit left there.
    """
    options: dict[str, Any] = {**asdict(made.table), "limit": made.images, "run_dir": out, "resume": resume}
    del options["data"]  # those are in made.split
    lock = nullcontext() if out is None else files.locked(out, "audit")
    with runs.kept_in(out, resume=resume), lock, suitable_threads(made.model, made.split):
        found = audit(made.model, made.split, progress=progress, **options)
        if out is not None:
            plot_audit(found, Path(out) / PICTURE)
    return found


class _Answers(nn.Module):
    """A function of images, or an object that can be called with them, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images)


def load_module(source: str) -> nn.Module:
    """The classifier that a Python file holds, given as "file.py:name"; runs the file's code.

    The name is that of a torch module; of something else that takes images; or of a function, or class, without
    arguments that returns one of these.
    """
    path, colon, name = source.rpartition(":")
    if not colon or not Path(path).is_file():
        raise InputError(f"--module takes file.py:name, the path of a file that exists, not {source!r}.")
    spec = importlib.util.spec_from_file_location(f"_audited_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look for it
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"{path} has no function or model called {name!r}.")
    if not isinstance(found, nn.Module):
        if not _needs_arguments(found):
            found = found()
        elif isinstance(found, type):
            raise InputError(
                f"the class {name} in {path} needs arguments: name a function that makes the model."
            )
    if not callable(found):
        raise InputError(f"{name} in {path} must return a torch module, not {type(found).__name__}.")
    return found if isinstance(found, nn.Module) else _Answers(found)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    """Whether it cannot be called with nothing, as what takes images cannot."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # made by C++, which does not say
        return not isinstance(function, type)
    return False
