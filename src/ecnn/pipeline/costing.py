"""Estimates the cost of runs before they start: images through the network, and minutes of one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ecnn.attacks.views import members_of
from ecnn.auditing import estimate_cost, resolve_budget
from ecnn.checks import check_choice
from ecnn.codes import CodeMatrix, load_code
from ecnn.constructions import random_code
from ecnn.data import NAMES
from ecnn.data.loading import find_folder, resolve_root
from ecnn.data.sources import FORMS
from ecnn.errors import InputError
from ecnn.evaluation.batch import check_attacks
from ecnn.evaluation.transfer import Member
from ecnn.experiment import AUDIT
from ecnn.models import build_model, find_kind
from ecnn.pipeline.reproducing import Task
from ecnn.pipeline.training import SIGNS, AnyPath, load_spec_data, recipe_for, training_attack
from ecnn.spec import CodeTable, Spec, make_attack

#: Operations per second of one H200, where a multiplication with its addition counts as two. Measured for an ECNN of 30
#: members: 9 million training images (200 epochs) took 138 s, the 20 million passes of blind-spot 110 s.
OPERATIONS_PER_SECOND = 2e13
ASSUMPTION = (
    f"Minutes assume {OPERATIONS_PER_SECOND:.0e} operations a second, as measured on one H200 with an ECNN of 30 "
    "members; larger networks are faster. Audits are counted in full, but end early on a network that is easily broken."
)
_SIGNS = 392  # images of `SIGNS`
#: Training on an image costs about three forward passes: one forward, and the gradients in activations and weights.
_PASSES_PER_STEP = 3


@dataclass(frozen=True)
class Part:
    """The cost of one part of a run.

    Attributes:
        name: "train", the name of an attack, or "audit".
        images: how many are attacked or audited; for training, images times epochs.
        passes: of images through a network; a gradient in the pixels counts as another pass.
        operations: floating-point operations of all passes.
    """

    name: str
    images: int
    passes: int
    operations: float

    @property
    def minutes(self) -> float:
        return self.operations / OPERATIONS_PER_SECOND / 60


@dataclass(frozen=True)
class TaskCost:
    """The cost of one run.

    Attributes:
        parts: training, attacks and audit in order, without those in `repeats`; empty if `is_done`.
        is_done: whether there is nothing left to do.
        repeats: names of the parts that an earlier run of the list does for it.
    """

    task: Task
    parts: tuple[Part, ...]
    is_done: bool = False
    repeats: tuple[str, ...] = ()

    @property
    def minutes(self) -> float:
        return sum(part.minutes for part in self.parts)

    @property
    def passes(self) -> int:
        return sum(part.passes for part in self.parts)


def estimate_tasks(
    tasks: Sequence[Task], root: AnyPath = "data", *, sizes: Sizes | None = None
) -> list[TaskCost]:
    """The cost of each run, in the order given.

    Nothing is counted for a finished run, or for parts that an earlier run of the list does too. A run that is only
    partly done counts in full. Each network and the views of its attacks are tried on one image; an InputError names
    the file and the arm that do not work.

    Args:
        root: where dataset files are, for data whose size does not follow from their name.
        sizes: those of an earlier estimate, so that no network is built twice.
    """
    known: set[str] = set()
    sizes = Sizes(root) if sizes is None else sizes
    found = []
    for task in tasks:
        if task.is_done():
            found.append(TaskCost(task, (), is_done=True))
            continue
        network = task.network.content_hash
        try:
            parts = {f"{network} {_key(task, part.name)}": part for part in _parts(task, sizes)}
            _try_attacks(task, sizes)
        except InputError as error:
            owner = task.experiment.file or f"the experiment {task.experiment.name!r}"
            raise InputError(f"{owner}: the arm {task.arm.name!r}: {error}") from error
        repeats = tuple(part.name for key, part in parts.items() if key in known)
        found.append(
            TaskCost(task, tuple(p for key, p in parts.items() if key not in known), repeats=repeats)
        )
        known |= parts.keys()
    return found


def cost_text(costs: Sequence[TaskCost]) -> str:
    """One line per run and one for the total: images trained on, passes of attacks and audit, minutes of one GPU."""
    lines = []
    width = max((len(cost.task.name) for cost in costs), default=0)
    for cost in costs:
        told = "done"
        if not cost.is_done:
            trained = sum(part.images for part in cost.parts if part.name == "train")
            attacked = sum(part.passes for part in cost.parts if part.name not in ("train", AUDIT))
            audited = sum(part.passes for part in cost.parts if part.name == AUDIT)
            told = (
                f"trains on {_millions(trained)} images, attacks {_millions(attacked)} passes, "
                f"audit {_millions(audited)} passes at most: {cost.minutes:.1f} min"
            )
            told += f" ({', '.join(cost.repeats)} from a run before)" if cost.repeats else ""
        lines.append(f"{cost.task.name.ljust(width)}  {told}")
    passes, minutes = sum(cost.passes for cost in costs), sum(cost.minutes for cost in costs)
    left = sum(not cost.is_done for cost in costs)
    lines.append(f"{left} of {len(costs)} runs to do: {_millions(passes)} passes, {minutes:.0f} GPU minutes.")
    return "\n".join([*lines, ASSUMPTION])


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count else "no"


def _key(task: Task, part: str) -> str:
    """Text that is the same for parts of two arms that do the same to their network."""
    table: Any = task.spec.attacks.get(part, task.spec.audit if part == AUDIT else None)
    return f"{part} {table} {task.spec.data.test_limit}"


@dataclass
class Sizes:
    """A cache of the sizes of datasets, the networks with their operations, and the attacks that were tried."""

    root: AnyPath = "data"
    forms: dict[Any, tuple[int, int, tuple[int, int], int, int]] = field(default_factory=dict)
    models: dict[str, tuple[nn.Module, float]] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)

    def form(self, spec: Spec) -> tuple[int, int, tuple[int, int], int, int]:
        """Numbers of classes and channels, (height, width), numbers of training (less validation) and test images."""
        name = spec.data.name
        if name in FORMS and spec.data.image_size is None:
            train, test, classes, channels, side = FORMS[name]
            return classes, channels, (side, side), round(train * (1 - spec.data.val_fraction)), test
        key = name, str(spec.data.image_size), spec.data.val_fraction
        if key not in self.forms:
            data = load_spec_data(spec, self.root)
            size = data.image_size
            self.forms[key] = (data.num_classes, data.in_channels, size, len(data.train), len(data.test))
        return self.forms[key]

    def model(self, spec: Spec) -> tuple[nn.Module, float]:
        """An untrained network of the spec's kind and size, and the floating-point operations of a forward pass."""
        classes, channels, size, _, _ = self.form(spec)
        key = f"{classes} {channels} {size} {spec.model} {spec.code}"
        if key not in self.models:
            options = {name: value for name, value in spec.model.items() if name != "kind"}
            kind = find_kind(spec.model.get("kind", "ecnn"))
            suited = kind.suited_to(channels, size).options
            code = _code(spec.code, classes) if kind.needs_code else None
            mean = torch.zeros(channels, *size)
            made = build_model(
                kind.name,
                code=code,
                num_classes=classes,
                in_channels=channels,
                mean=mean,
                **{**suited, **options},
            ).eval()
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                made(mean[None])
            self.models[key] = (made, float(counter.get_total_flops()))
        return self.models[key]

    def try_attack(self, name: str, table: Mapping[str, Any], spec: Spec) -> None:
        """Raises InputError unless the spec's network has the part that the attack's view reads, and enough members."""
        (model, _), (_, channels, size, _, _) = self.model(spec), self.form(spec)
        key = f"{id(model)} {table}"
        if key in self.tried:
            return
        images = torch.full((1, channels, *size), 0.5)
        if "members" in table:
            _check_members(name, table["members"], model, images)
            model = Member(model, 0)
        check_attacks(model, images, {name: make_attack(table)})
        self.tried.add(key)


def _check_members(name: str, asked: int, model: nn.Module, images: Tensor) -> None:
    """Raises InputError if the model has fewer members than `asked`, or none."""
    try:
        with torch.no_grad():
            there = members_of(model, images)[1].shape[1]
    except InputError:
        raise InputError(
            f"attacks.{name}.members needs a model that has members, and {type(model).__name__} has none: leave it out."
        ) from None
    if asked > there:
        raise InputError(f"attacks.{name}.members must be at most {there}, all of the model's, not {asked}.")


def _try_attacks(task: Task, sizes: Sizes) -> None:
    """Tries the view of each attack, those used in training included, on the network that it is crafted on."""
    spec = task.spec
    tables = {f"train.{name}": spec.train.get(name) for name in ("attack", "val_attack")}
    for name, table in tables.items():
        if table:
            sizes.try_attack(name, training_attack(table), spec)
    for name, table in spec.attacks.items():
        asked = spec if "source" not in table else task.source(table["source"]).spec
        sizes.try_attack(name, {"kind": name, **table}, asked)


def _check_other_data(name: str, spec: Spec, sizes: Sizes) -> None:
    """Raises InputError unless the network takes the images of that dataset; a folder of images is not checked."""
    known = [*NAMES, SIGNS]
    if name not in known and find_folder(name, resolve_root(sizes.root)) is not None:
        return
    check_choice("data", name, known)
    classes, channels, size, _, _ = sizes.form(spec)
    form = FORMS["gtsrb" if name == SIGNS else name]
    for what, own, came in (
        ("num_classes", classes, classes if name == SIGNS else form.num_classes),
        ("in_channels", channels, form.in_channels),
        ("image_size", size, (form.side, form.side)),
    ):
        if own != came:
            raise InputError(
                f"the model has {what} = {own}, and the data {name!r}, which it would see, {came}."
            )


def _code(table: CodeTable | None, classes: int) -> CodeMatrix:
    """A code of the size that the table asks for; its symbols make no difference to the cost."""
    if table is not None and table.name is not None:
        return load_code(table.name)
    length = 30 if table is None else (table.code_length or 0) * (2 if table.doubled else 1)
    return random_code(classes, length, arity=2 if table is None else table.arity or 2, seed=0)


def _parts(task: Task, sizes: Sizes) -> list[Part]:
    spec = task.spec
    classes, channels, size, train, test = sizes.form(spec)
    model, operations = sizes.model(spec)
    recipe = recipe_for(
        spec,
        in_channels=channels,
        image_size=size,
        num_images=train,
        is_own=spec.data.name not in NAMES,
        may_be_mirrored=True,
    )
    audited_on = None if spec.audit is None else spec.audit.data
    for other in (audited_on, *(table.get("data") for table in spec.attacks.values())):
        if other is not None:
            _check_other_data(other, spec, sizes)
    passes = float(_PASSES_PER_STEP)
    if spec.train.get("attack"):
        cost = make_attack(training_attack(spec.train["attack"])).cost(classes)
        passes += recipe.adversarial_ratio * (cost.forwards + cost.backwards)
    images = recipe.epochs * train
    parts = [Part("train", images, round(images * passes), images * passes * operations)]
    for name, table in spec.attacks.items():
        limit = table.get("limit", spec.data.test_limit)
        most = _SIGNS if table.get("data") == SIGNS else test
        count = most if limit is None else min(limit, most)
        radii = table.get("eps")
        one = {"eps": radii[0]} if isinstance(radii, list) else {}
        cost = make_attack({"kind": name, **table, **one}).cost(classes)
        times = table.get("members", 1) * (len(radii) if isinstance(radii, list) else 1)
        per_image = times * (cost.forwards + cost.backwards)
        asked = operations if "source" not in table else sizes.model(task.source(table["source"]).spec)[1]
        parts.append(Part(name, count, count * per_image, float(count) * per_image * asked))
    if spec.audit is not None:
        budget = resolve_budget(spec.audit.budget)
        most = _SIGNS if spec.audit.data == SIGNS else test
        count = min(most, budget.images if spec.audit.limit is None else spec.audit.limit)
        cost = estimate_cost(model, budget, count, classes, norm=spec.audit.norm)  # type: ignore[arg-type]
        asked_passes = cost.forwards + cost.backwards
        parts.append(Part(AUDIT, count, asked_passes, asked_passes * operations))
    return parts
