"""`Spec`: everything that decides a result, as tables that TOML can hold.

The command line fills one in, Python passes it, an experiment file holds several, and a run folder keeps its own in
spec.toml with every choice written out. Keys are the keyword arguments of the functions that use them:

    seed = 0
    [data]         name, val_fraction, test_limit: which images
    [code]         name of a shipped code or file, or code_length and other options of `design_code`
    [model]        kind, a name of `ecnn.models.MODELS`, and options of that kind
    [train]        recipe, a name of `ecnn.models.RECIPES`, and entries that replace its own; attack, val_attack
    [attacks.NAME] kind, a name of `ecnn.attacks.ATTACKS`, and options of that kind; limit: number of images; data:
                   images in place of the test images; source: the model that it is made on, to be tried on ours;
                   members: made on each of the first so many members, to be tried on all of them
    [audit]        norm, eps, claim, min_accuracy, limit, budget, seed: arguments of `ecnn.audit`; data: as for attacks
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ecnn import files
from ecnn.annealing.design import CodeObjective
from ecnn.attacks import ATTACKS, Attack
from ecnn.attacks.norms import NORMS
from ecnn.checks import (
    build,
    check_choice,
    check_count,
    check_entries,
    check_fields,
    check_kind,
    check_number,
    check_options,
    check_shares,
    is_needed,
    parse_eps,
    shown,
)
from ecnn.data import Dataset
from ecnn.errors import InputError
from ecnn.models import find_kind
from ecnn.recipes import Recipe

_ATTACK_KEYS = ("kind", "limit", "data", "source", "members")
_DEEPEST = 8
_TRAIN_KEYS = ("recipe", "attack", "val_attack", *(entry.name for entry in dataclasses.fields(Recipe)))


@dataclass(frozen=True, kw_only=True)
class DataTable:
    """Which images. A run records the last five entries; whoever uses the run later must match them, except the path.

    Attributes:
        name: of a dataset, or a folder of images by class.
        val_fraction: share of the training images held out to choose the best epoch.
        test_limit: how many test images are attacked, from the first; None for all. The test images of a folder are
            ordered so that the first ones are spread evenly over the classes.
        image_size: [height, width]; images of a folder are resized to it.
        num_classes, in_channels: of the dataset.
        fingerprint: checksum of all its images and labels.
        path: where a folder of images was. It is looked for there first, then by its name.
    """

    name: str
    val_fraction: float = 0.1
    test_limit: int | None = None
    image_size: int | list[int] | None = None
    num_classes: int | None = None
    in_channels: int | None = None
    fingerprint: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        check_fields("[data]", self)
        check_number("data.val_fraction", self.val_fraction, most=1, below=True)
        for name in ("test_limit", "num_classes", "in_channels"):
            if getattr(self, name) is not None:
                check_count(f"data.{name}", getattr(self, name))
        if isinstance(self.image_size, list) and len(self.image_size) != 2:
            raise InputError(f"data.image_size must be [height, width], not {shown(self.image_size)}.")

    def check_shape(self, data: Dataset) -> None:
        """Raises InputError unless the dataset has the number of classes, channels and pixels recorded here."""
        size = [self.image_size] * 2 if isinstance(self.image_size, int) else self.image_size
        for name, known, came in (
            ("num_classes", self.num_classes, data.num_classes),
            ("in_channels", self.in_channels, data.in_channels),
            ("image_size", size, list(data.image_size)),
        ):
            if known is not None and known != came:
                raise InputError(f"the model was trained on {name} = {known}, and {data.name} has {came}.")


@dataclass(frozen=True, kw_only=True)
class CodeTable:
    """Which code: one that has a name, or one to be designed.

    Attributes:
        name: of a shipped code, or the path of a code file.
        code_length, arity, objective, steps, seed: arguments of `design_code`, for a code without a name. By default
            the arity is 2, the objective "distance" and the seed the spec's.
        doubled: every task twice, the second time complemented (the paper's M').
        content_hash: of the code; a run records it.
    """

    name: str | None = None
    code_length: int | None = None
    arity: int | None = None
    objective: str | None = None
    steps: int | None = None
    seed: int | None = None
    doubled: bool | None = None
    content_hash: str | None = None

    def __post_init__(self) -> None:
        check_fields("[code]", self)
        if (self.name is None) == (self.code_length is None):
            raise InputError(
                "[code] takes either the name of a code or the code_length of one to be designed."
            )
        if self.name is not None and (self.arity, self.objective, self.steps, self.seed) != (None,) * 4:
            raise InputError(
                "[code] with a name takes no arity, objective, steps or seed: those are for a code to be designed."
            )
        if self.objective is not None:
            check_choice("code.objective", self.objective, typing.get_args(CodeObjective))
        for name, least in (("steps", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                check_count(f"code.{name}", getattr(self, name), least=least)


@dataclass(frozen=True, kw_only=True)
class AuditTable:
    """Arguments of `ecnn.audit`, which explains them, and the images to audit.

    Attributes:
        data: a dataset whose test images are audited, or "optprojtran"; None for the model's own.
    """

    norm: str = "linf"
    eps: float | str
    claim: float | None = None
    min_accuracy: float | None = None
    limit: int | None = None
    budget: str = "standard"
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        check_fields("[audit]", self)
        check_choice("norm", self.norm, NORMS)
        parse_eps(self.eps, most=NORMS[self.norm].longest)
        check_shares(claim=self.claim, min_accuracy=self.min_accuracy)
        if self.limit is not None:
            check_count("limit", self.limit)
        check_count("seed", self.seed, least=0)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is trained, attacked and audited; the head of this file lists its keys.

    An unknown key is an InputError that suggests the nearest known one. Do not change the tables in place: `changed`
    makes another spec.
    """

    seed: int = 0
    data: DataTable
    code: CodeTable | None = None
    model: Mapping[str, Any] = field(default_factory=lambda: {"kind": "ecnn"})
    train: Mapping[str, Any] = field(default_factory=dict)
    attacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    audit: AuditTable | None = None

    def __post_init__(self) -> None:
        check_count("seed", self.seed, least=0)
        for name in ("model", "train", "attacks"):
            _check_is_table(name, getattr(self, name))
            _check_plain(name, getattr(self, name))
        kind = find_kind(self.model.get("kind", "ecnn"))
        kind.check([name for name in self.model if name != "kind"])
        check_options("[train]", self.train, _TRAIN_KEYS)
        check_entries("[train]", self.train, {"recipe": str | None, "objective_options": dict | None})
        for name in ("attack", "val_attack"):
            if self.train.get(name) is not None:
                check_attack(f"train.{name}", self.train[name])
        for name, attack in self.attacks.items():
            check_attack(f"attacks.{name}", {"kind": name, **_checked_table(f"attacks.{name}", attack)})

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> Spec:
        """The spec that these nested tables describe."""
        check_kind("a spec", tables, Mapping, "a table")
        check_options("a spec", tables, [entry.name for entry in dataclasses.fields(cls)])
        if "data" not in tables:
            raise InputError("a spec needs the table [data] with a name.")
        made: dict[str, Any] = dict(tables)
        for name, kind in (("data", DataTable), ("code", CodeTable), ("audit", AuditTable)):
            if name in tables:
                made[name] = build(f"[{name}]", kind, _checked_table(name, tables[name]))
        return cls(**made)

    def to_dict(self) -> dict[str, Any]:
        """The spec as nested tables of plain values, as TOML holds them; None and empty tables are left out."""
        plain = _plain(dataclasses.asdict(self))
        return {name: value for name, value in plain.items() if value != {}}

    @property
    def content_hash(self) -> str:
        """SHA-256 of everything that decides the result."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        """The tables that decide the result: all but the path of the images, which may be moved."""
        return dataclasses.replace(self, data=dataclasses.replace(self.data, path=None)).to_dict()

    def changed(self, values: Mapping[str, Any]) -> Spec:
        """A new spec with entries replaced or added by dotted name: `{"train.lr": 0.1}`. None changes nothing."""
        return Spec.from_dict(with_values(self.to_dict(), values))


def load_spec(path: str | os.PathLike[str]) -> Spec:
    """The spec in a TOML file; whatever is wrong with it is an InputError that names the file."""
    tables = files.read_toml(path)
    try:
        return Spec.from_dict(tables)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def save_spec(path: str | os.PathLike[str], spec: Spec) -> None:
    """Writes the spec as TOML."""
    files.write_toml(path, spec.to_dict())


def with_values(tables: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """New tables with entries replaced or added by their dotted names; values that are None are skipped."""
    result = dict(tables)
    for name, value in values.items():
        if value is None:
            continue
        first, dot, rest = name.partition(".")
        inner = result.get(first, {})
        if dot and not isinstance(inner, Mapping):
            raise InputError(f"{first} is a value, not a table: {name} cannot be set.")
        result[first] = with_values(inner, {rest: value}) if dot else value
    return result


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """`["train.lr=0.1"]` as {"train.lr": 0.1}. Values are parsed as TOML; what is no TOML is taken as text."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.partition(".")[2]:
            raise InputError(f"--set takes TABLE.NAME=VALUE such as train.lr=0.1, not {setting!r}.")
        try:
            values[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            values[name.strip()] = text
    return values


def parse_settings_of(table: str, settings: Iterable[str]) -> dict[str, Any]:
    """`parse_settings` for a command with a single table: `["attack.steps=5"]` as {"steps": 5}."""
    values = parse_settings(settings)
    for name in values:
        if not name.startswith(f"{table}."):
            raise InputError(f"--set takes {table}.NAME=VALUE here, not {name!r}.")
    return {name.removeprefix(f"{table}."): value for name, value in values.items()}


def check_attack(owner: str, table: Any) -> None:
    """Raises InputError unless the table names a kind of attack and only options that it has."""
    options = _checked_table(owner, table)
    check_choice(f"{owner}.kind", options.get("kind", "pgd"), ATTACKS)
    known = attack_options(options.get("kind", "pgd"))
    check_options(f"[{owner}]", options, [*_ATTACK_KEYS, *known])
    for name in ("limit", "members"):
        if name in options:
            check_count(f"{owner}.{name}", options[name])
    check_entries(f"[{owner}]", options, {"data": str | None, "source": str | None})


def attack_options(kind: str) -> list[str]:
    """Names of the options that an attack of that kind has."""
    check_choice("attack", kind, ATTACKS)
    return [entry.name for entry in dataclasses.fields(ATTACKS[kind]) if entry.init]


def needed_options(kind: str) -> list[str]:
    """Names of the options that have no default."""
    check_choice("attack", kind, ATTACKS)
    return [entry.name for entry in dataclasses.fields(ATTACKS[kind]) if is_needed(entry)]


def make_attack(table: Mapping[str, Any]) -> Attack:
    """The attack that a table describes by its kind and options."""
    kind = table.get("kind", "pgd")
    check_choice("attack", kind, ATTACKS)
    options = {name: value for name, value in table.items() if name not in _ATTACK_KEYS}
    return build(f"the attack {kind!r}", ATTACKS[kind], options)


def _check_is_table(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise InputError(f"[{name}] must be a table, not {shown(value)}.")


def _check_plain(name: str, value: Any, depth: int = 0) -> None:
    """Raises InputError unless the value is text, a number, true or false, or a list or table of such."""
    if depth > _DEEPEST:
        raise InputError(f"{name} is nested more than {_DEEPEST} levels deep, which nothing in a spec is.")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(f"{name}.{key}", item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(name, item, depth + 1)
    elif value is not None:
        check_entries("a spec", {name: value}, {name: str | bool | int | float})


def _checked_table(name: str, value: Any) -> dict[str, Any]:
    _check_is_table(name, value)
    return dict(value)


def _plain(value: Any) -> Any:
    """The value as TOML would return it: without entries that are None, with lists for tuples."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
