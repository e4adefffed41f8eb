"""Experiments as data: one TOML file per table or figure of the paper. It lists specs, called arms.

    title = "White-box attacks on CIFAR-10"
    paper = "tab:adv_cifar10"                # the paper's label
    rows = ["clean", "pgd", "cw"]            # rows of the table: names of attacks, and "clean"

    [spec]                                   # a `Spec` that all arms share
    [audited]                                # row -> "audit", or the attacks whose worst case is printed beside it;
                                             # attacks that an arm does not make are left out
    [[arms]]                                 # name, title, seeds, paper = { row = per cent, parameters = count }
    [arms.spec]                              # the arm's changes to the shared spec, table by table

The `source` of an attack names another arm. The attack is made on the network of that arm's first seed.

The files in the package can be loaded by their names, which `experiments` lists.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ecnn import files
from ecnn.checks import (
    build,
    check_choice,
    check_count,
    check_entries,
    check_number,
    check_options,
    did_you_mean,
    shown,
)
from ecnn.codes import load_code
from ecnn.errors import InputError
from ecnn.evaluation.records import check_names
from ecnn.models import find_kind
from ecnn.spec import Spec, make_attack

# Types of the entries of a file; every entry may be missing.
_TEXT_KINDS: dict[str, Any] = dict.fromkeys(("name", "title", "note"), str | None)
_ARM_KINDS = {**_TEXT_KINDS, "spec": dict | None, "seeds": list[int] | None, "paper": dict[str, float] | None}
_EXPERIMENT_KINDS = {
    **_TEXT_KINDS,
    **dict.fromkeys(("rows", "remarks"), list[str] | None),
    "paper": str | None,
    "spec": dict | None,
    "arms": list[dict[str, Any]] | None,
    "audited": dict[str, str | list[str]] | None,
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.,+=@-]*")
_LONGEST_NAME = 100  # as for names of attacks; file systems allow 255 bytes
CLEAN, AUDIT, PARAMETERS = "clean", "audit", "parameters"
#: What `quick_form` changes in every spec: the dataset; sizes of the network, for options that it has; training; upper
#: limits for options of attacks; the audit.
_QUICK_DATA = {"name": "digits", "test_limit": 4}
_QUICK_MODEL: dict[str, Any] = {"depth": 8, "width": 4, "filters": [4, 4, 4], "bit_filters": 2, "hidden": 8}
_QUICK_TRAIN: dict[str, Any] = {"epochs": 1, "batch_size": 128}
_QUICK_MOST: dict[str, float] = {
    "steps": 2,
    "search_steps": 1,
    "targets": 1,
    "transformations": 2,
    "max_pixel_fraction": 0.03,
    "members": 3,
}
_QUICK_AUDIT = {"budget": "quick", "limit": 2}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One column of a table: a spec, run once per seed.

    Attributes:
        name: of the arm, and of its folder.
        title: head of its column in the table.
        spec: what is trained and attacked; its seed is replaced by each of `seeds`.
        seeds: one run each. A seed decides training, and the code if one is designed without a seed of its own.
        paper: the paper's values: per cent by row, and the number of parameters under "parameters".
        note: what the reader must know, such as a shortened schedule.
    """

    name: str
    title: str
    spec: Spec
    seeds: tuple[int, ...] = (0,)
    paper: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    def spec_for(self, seed: int) -> Spec:
        """The spec of one run."""
        return dataclasses.replace(self.spec, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The runs behind one table or figure of the paper.

    Attributes:
        name: of the experiment, and of its folder.
        title: of the table.
        paper: the paper's LaTeX label.
        rows: rows of the table, in order: "clean" and names of attacks.
        audited: for some rows, the attacks whose worst case is printed as audited value beside the row's own; or
            ("audit",) for the audited accuracy. In each arm, attacks that the arm does not make are left out.
        arms: columns of the table.
        note: what the reader must know about all arms.
        file: name of the file that it came from, for error messages; empty if there is none.
        remarks: paragraphs that discuss the numbers, such as why they differ from the paper's.
    """

    name: str
    title: str
    paper: str
    rows: tuple[str, ...]
    arms: tuple[Arm, ...]
    audited: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    note: str = ""
    remarks: tuple[str, ...] = ()
    file: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"an experiment must have a name of letters, digits and any of _ . , + = @ -, not {self.name!r}: it "
                "names a folder."
            )
        if not self.arms:
            raise InputError(
                f"the experiment {self.name!r} has no arms: give it [[arms]], one for each column."
            )
        named: dict[str, Arm] = {}
        for arm in self.arms:
            if (first := named.setdefault(arm.name.casefold(), arm)) is not arm:
                raise InputError(
                    f"two arms are called {first.name!r} and {arm.name!r}: give each a name of its own, whatever the "
                    "case of its letters."
                )
            self._check(arm)
        for row in self.rows:
            if self.rows.count(row) > 1:
                raise InputError(f"rows must differ, but {row!r} is there {self.rows.count(row)} times.")
        check_options("[audited]", self.audited, self.rows)
        made = {name: None for arm in self.arms for name in arm.spec.attacks}
        for row in self.rows:
            check_choice("a row", row, [CLEAN, *made])
        for row, sources in self.audited.items():
            for source in sources:
                check_choice(f"audited.{row}", source, [AUDIT, *made])
            for arm in self.arms:
                others = [name for name in self.audited_by(row, arm) if name != AUDIT]
                if len({arm.spec.attacks[name].get("data") for name in others}) > 1:
                    raise InputError(f"audited.{row}: {', '.join(others)} are made on different images.")

    def _check(self, arm: Arm) -> None:
        owner = f"the arm {arm.name!r}"
        known = [CLEAN, *arm.spec.attacks]
        if not _NAME.fullmatch(arm.name) or len(arm.name) > _LONGEST_NAME:
            raise InputError(
                f"{owner} must have a name of at most {_LONGEST_NAME} letters, digits and any of _ . , + = @ -: it "
                "names a folder."
            )
        for seed in arm.seeds:
            check_count(f"{owner}: a seed", seed, least=0)
        if not arm.seeds or len(set(arm.seeds)) != len(arm.seeds):
            raise InputError(f"{owner} needs seeds, each once, not {shown(list(arm.seeds))}.")
        check_options(f"{owner}: paper", arm.paper, [PARAMETERS, *self.rows])
        for row, value in arm.paper.items():
            check_number(f"{owner}: paper.{row}", value, most=math.inf if row == PARAMETERS else 100)
        check_names(list(arm.spec.attacks))
        if taken := {AUDIT, "network", "train"} & set(arm.spec.attacks):
            raise InputError(f"{owner}: an attack cannot be called {taken.pop()!r}: give it another name.")
        for name, table in arm.spec.attacks.items():
            if isinstance(table.get("eps"), list):
                raise InputError(
                    f"{owner}: attacks.{name}.eps is a list: in an experiment each radius is an attack, and a row, of "
                    "its own."
                )
            try:
                make_attack({"kind": name, **table})
            except InputError as error:
                raise InputError(f"{owner}: attacks.{name}: {error}") from error
        for name, table in arm.spec.attacks.items():
            if "source" in table:
                check_choice(
                    f"{owner}: attacks.{name}.source", table["source"], [arm.name for arm in self.arms]
                )
        for row in (row for row in arm.paper if row != PARAMETERS):
            check_choice(f"{owner}: a row with a value", row, known)

    def audited_by(self, row: str, arm: Arm) -> tuple[str, ...]:
        """The attacks (or "audit") from which the audited value of a row is computed in this arm."""
        return tuple(name for name in self.audited.get(row, ()) if name == AUDIT or name in arm.spec.attacks)

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        by_name = {arm.name: arm for arm in self.arms}
        check_choice("arm", name, by_name)
        return by_name[name]


# In the order of the paper's tables, which the page of results keeps.
_SHIPPED = (
    "mnist_whitebox",
    "cifar10_whitebox",
    "cifar100",
    "cifar100_clean",
    "adversarial_training",
    "gtsrb",
    "diversity",
    "member_transfer",
    "sharing",
    "members",
    "doubled_code",
    "qary",
    "batch_norm",
)


def experiments() -> tuple[str, ...]:
    """Names of the experiments that come with the package, in the order of the paper."""
    return _SHIPPED


def load_experiment(source: str) -> Experiment:
    """An experiment of the package by its name, or one from a TOML file. Raises InputError if anything is wrong."""
    path = Path(source)
    if source in experiments():
        path = Path(str(resources.files("ecnn") / "experiments" / f"{source}.toml"))
    elif path.suffix != ".toml":
        known = experiments()
        raise InputError(
            f"no experiment is called {source!r}; there are {', '.join(known)}{did_you_mean(source, known)}"
        )
    try:
        return dataclasses.replace(from_tables(path.stem, files.read_toml(path)), file=path.name)
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from error


def from_tables(name: str, tables: Mapping[str, Any]) -> Experiment:
    """The experiment that the tables of a file describe."""
    check_entries(f"the experiment {name!r}", tables, _EXPERIMENT_KINDS)
    whole = dict(tables)
    shared = whole.pop("spec", {})
    arms = tuple(_arm(shared, table) for table in whole.pop("arms", ()))
    audited = {
        row: (sources,) if isinstance(sources, str) else tuple(sources)
        for row, sources in whole.pop("audited", {}).items()
    }
    whole |= {name: tuple(whole[name]) for name in ("rows", "remarks") if name in whole}
    fixed = {"name": name, "arms": arms, "audited": audited, "file": ""}
    return build(f"the experiment {name!r}", Experiment, whole, fixed=fixed)


def _arm(shared: Mapping[str, Any], table: Mapping[str, Any]) -> Arm:
    named = isinstance(table.get("name"), str)
    owner = f"the arm {table['name']!r}" if named else "an arm"
    check_entries(owner, table, _ARM_KINDS)
    own = dict(table)
    merged = merge(shared, own.pop("spec", {}))
    if "seed" in merged:
        raise InputError(f"{owner}: a spec of an experiment has no seed: give the arm seeds = [...].")
    try:
        spec = Spec.from_dict(merged)
    except InputError as error:
        raise InputError(f"{owner}: {error}") from error
    if "seeds" in own:
        own["seeds"] = tuple(own["seeds"])
    return build(owner, Arm, own, fixed={"spec": spec})


def quick_form(experiment: Experiment) -> Experiment:
    """A small form of the experiment, to test that all of it works: it runs on a CPU in minutes.

    It has the same arms, attacks and audits, on digits. Its numbers mean nothing. Codes are a third as long, but have
    at least 6 tasks; each arm has one seed; the name ends in "-quick".
    """
    arms = [
        dataclasses.replace(arm, spec=_quick_spec(arm.spec), seeds=arm.seeds[:1], paper={})
        for arm in experiment.arms
    ]
    return dataclasses.replace(experiment, name=f"{experiment.name}-quick", arms=tuple(arms))


def _quick_spec(spec: Spec) -> Spec:
    tables = spec.to_dict()
    kind = find_kind(spec.model.get("kind", "ecnn"))
    tables["data"] = _QUICK_DATA
    tables["model"] |= {name: value for name, value in _QUICK_MODEL.items() if name in kind.options}
    tables["train"] = {**tables.get("train", {}), **_QUICK_TRAIN}
    for name in ("attack", "val_attack"):
        if name in tables["train"]:
            tables["train"][name] = _shortened(tables["train"][name])
    tables["attacks"] = {name: _shortened(table) for name, table in tables.get("attacks", {}).items()}
    for table in tables["attacks"].values():
        table.pop("data", None)
        table.pop("limit", None)
    if spec.audit is not None:
        tables["audit"] = {"norm": spec.audit.norm, "eps": spec.audit.eps, **_QUICK_AUDIT}
    if spec.code is not None:
        own = spec.code if spec.code.name is None else load_code(spec.code.name)
        tables["code"] = {
            "code_length": max(6, (own.code_length or 0) // 3),
            "arity": own.arity or 2,
            "objective": "energy",  # the quicker one
            "steps": 2000,
            "doubled": spec.code.doubled,
        }
    return Spec.from_dict(tables)


def _shortened(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: min(value, _QUICK_MOST[name])
        if name in _QUICK_MOST and isinstance(value, (int, float))
        else value
        for name, value in table.items()
    }


def merge(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The shared tables with an arm's own entries merged in. `false` removes a table; [code] is replaced as a whole."""
    result = dict(shared)
    for name, value in own.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        if value is False and isinstance(result.get(name), Mapping):
            del result[name]
        else:
            result[name] = merge(result[name], value) if both and name != "code" else value
    return result
