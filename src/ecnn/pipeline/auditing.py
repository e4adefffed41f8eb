"""From a request to audit to a verdict."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ecnn import files, runs
from ecnn.attacks.norms import NORMS
from ecnn.auditing import Audit, Cost, audit, estimate_cost, resolve_budget
from ecnn.checks import check_choice
from ecnn.data import NAMES, Split, load_data
from ecnn.errors import InputError
from ecnn.pipeline.common import check_shape, find_device
from ecnn.plots import plot_audit
from ecnn.progress import Progress


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """What `ecnn audit` was asked for; arguments as in `ecnn.audit`.

    Attributes:
        model: a run folder or the name of a shipped model; None when a module is given.
        module: "file.py:function", a function without arguments that returns a torch module.
        data: None for the data that the model was trained on.
        out: where records, audit.json, audit.md and audit.png go; None keeps nothing.
    """

    model: str | None = None
    module: str | None = None
    data: str | None = None
    root: Path = Path("data")
    image_size: int | None = None
    norm: str = "linf"
    eps: str
    claim: float | None = None
    limit: int | None = None
    budget: str = "standard"
    seed: int = 0
    out: Path | None = None
    device: str = "auto"
    resume: bool = True


@dataclass(frozen=True)
class AuditPlan:
    """An audit that is ready to run, and what it will ask at most."""

    model: nn.Module
    split: Split
    images: int
    cost: Cost


def plan_audit(request: AuditRequest) -> AuditPlan:
    """Loads model and images, and counts what the suite will ask of them."""
    if (request.model is None) == (request.module is None):
        raise InputError("give either a run folder or the name of a model, or --module file.py:function.")
    device, spec = find_device(request.device), None
    if request.module is not None:
        if request.data is None:
            raise InputError(
                "a module of your own needs --data: the name of a dataset or a folder of images."
            )
        model = load_module(request.module).to(device).eval()
    else:
        spec = files.read_toml(runs.run_folder(str(request.model)) / runs.SPEC)
        model = runs.load_model(str(request.model), device=device)
    size = request.image_size if spec is None else tuple(spec["data"]["image_size"])
    name = request.data or (spec["data"]["name"] if spec else "")
    data = load_data(name, request.root, image_size=None if name in NAMES else size)
    if spec is not None:
        check_shape(spec, data)
    budget = resolve_budget(request.budget)
    images = min(len(data.test), budget.images if request.limit is None else request.limit)
    return AuditPlan(model, data.test, images, estimate_cost(model, budget, images, data.num_classes))


def audit_run(request: AuditRequest, made: AuditPlan, *, progress: Progress | None = None) -> Audit:
    """Audits what was planned; with `out` the page and the picture are written there too."""
    check_choice("norm", request.norm, NORMS)
    found = audit(
        made.model,
        made.split,
        norm=request.norm,  # type: ignore[arg-type]
        eps=request.eps,
        claim=request.claim,
        limit=made.images,
        budget=request.budget,
        seed=request.seed,
        run_dir=request.out,
        resume=request.resume,
        progress=progress,
    )
    if request.out is not None:
        plot_audit(found, request.out / "audit.png")
    return found


def load_module(source: str) -> nn.Module:
    """What a function in a Python file returns, which must be a torch module: "file.py:function"."""
    path, colon, name = source.rpartition(":")
    if not colon or not Path(path).is_file():
        raise InputError(f"--module takes file.py:function, the path of a file that exists, not {source!r}.")
    spec = importlib.util.spec_from_file_location(f"_audited_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{path} has no function called {name!r}.")
    model = function()
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} in {path} must return a torch module, not {type(model).__name__}.")
    return model
