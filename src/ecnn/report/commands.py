"""The commands that repeat what a report shows."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from typing import Any

from ecnn import files
from ecnn.attacks import ATTACKS
from ecnn.auditing import BUDGETS, Audit
from ecnn.checks import eps_text, is_needed, parse_eps
from ecnn.evaluation import Outcomes
from ecnn.evaluation.provenance import describe
from ecnn.report.contents import RunContents, radius_of

#: Options of `ecnn evaluate` that have a flag of their own; others go through --set.
_FLAGS = ("norm", "eps", "steps", "step_size", "loss", "on", "keep")
_KIND_OF = {f"{made.__module__}.{made.__qualname__}": name for name, made in ATTACKS.items()}


def commands_of(contents: RunContents) -> list[str]:
    """Commands that train, attack and audit as in the run, one line each; a comment for an attack made in Python."""
    spec = (
        f"{contents.source}/spec.toml"
        if files.is_folder(contents.source)
        else str(contents.folder / "spec.toml")
    )
    lines = [
        _line(
            "train",
            "--spec",
            spec,
            "--out",
            f"{contents.source}-again" if files.is_folder(contents.source) else f"runs/{contents.source}",
        )
    ]
    if contents.evaluation is not None:
        lines += [_evaluate(contents.source, found) for found in contents.evaluation.outcomes.values()]
    if contents.audit is not None:
        lines.append(_audit(contents.source, contents.audit))
    return lines


def audit_command(contents: RunContents) -> str:
    """The command that audits a run which was not audited yet."""
    norm, eps = radius_of(contents)
    place = contents.source if files.is_folder(contents.source) else f"runs/{contents.source}-audit"
    return _line("audit", contents.source, "--norm", norm, "--eps", eps_text(eps), "--out", place)


def _line(*words: Any) -> str:
    return shlex.join(["ecnn", *map(str, words)])


def _evaluate(source: str, found: Outcomes) -> str:
    attack, kind = found.about.get("attack"), _kind_of(found)
    # An attack, or a view, of the user's own has no name that a command could take.
    if kind is None or not isinstance(attack, Mapping) or isinstance(attack.get("on"), Mapping):
        return f"# {found.name}: was made in Python"
    words: list[Any] = ["evaluate", source, "--attack", kind]
    for name, value in _settings(kind, attack).items():
        if name in _FLAGS:
            words += [f"--{name.replace('_', '-')}", eps_text(parse_eps(value)) if name == "eps" else value]
        else:
            # Records hold infinity as the text inf, and TOML wants it without quotes.
            text = value if value in ("inf", "-inf") else json.dumps(value)
            words += ["--set", f"attack.{name}={text}"]
    return _line(*words, "--limit", len(found), "--seed", found.about.get("seed") or 0)


def _kind_of(found: Outcomes) -> str | None:
    """The name in `ATTACKS` of a recorded attack; None if it has none.

    The record's `kind` is the attack's class. An attack with a setting called `kind` overwrites it, and is found by the
    name under which it was run.
    """
    attack, base = found.about.get("attack"), found.about.get("base")
    if not isinstance(attack, Mapping):
        return None
    if attack.get("kind") in _KIND_OF:
        return _KIND_OF[attack["kind"]]
    own = {entry.name for entry in dataclasses.fields(ATTACKS[base])} if base in ATTACKS else set()
    return base if "kind" in own and {*attack} <= own else None


def _settings(kind: str, attack: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ from the defaults of `ecnn evaluate`: those of the attack, but with `quick` on."""
    told = {}
    for entry in dataclasses.fields(ATTACKS[kind]):
        if not entry.init or attack.get(entry.name) is None:
            continue
        usual = True if entry.name == "quick" else None if is_needed(entry) else describe(entry.default)
        if attack[entry.name] != usual:
            told[entry.name] = attack[entry.name]
    return told


def _audit(source: str, audit: Audit) -> str:
    words: list[Any] = ["audit", source, "--norm", audit.norm, "--eps", eps_text(audit.eps)]
    if audit.claimed is not None:
        words += ["--claim", audit.claimed]
    if audit.min_accuracy is not None:
        words += ["--min-accuracy", audit.min_accuracy]
    if audit.budget in BUDGETS:
        words += ["--budget", audit.budget]
    return _line(*words, "--limit", audit.images, "--seed", audit.seed, "--out", f"{source}-audited")
