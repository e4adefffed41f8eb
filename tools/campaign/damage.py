"""Damages, exchanges or replaces files: readers must refuse or repair them, and never accept them as whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import ecnn
from campaign.forks import Violation, command, in_child
from campaign.inputs import HOSTILE_VALUES, one_by_one
from campaign.scene import Scene, content, same_output, snapshot
from ecnn import files, runs
from ecnn.auditing import load_audit
from ecnn.codes import load_code
from ecnn.errors import InputError
from ecnn.evaluation import load_evaluation
from ecnn.experiment import load_experiment
from ecnn.pipeline.recording import read_record
from ecnn.training.checkpoints import load_checkpoint

Inputs = Iterator[tuple[str, list[Violation]]]
_BATCH = 40

#: Functions that read a file, by a pattern for the end of its path. They take the folder and return a value to compare
#: with that of the whole file; None is not compared, because users may write such a file themselves.
_READ: dict[str, dict[str, Callable[[Path], Any]]] = {}


def _reads(*ends: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    def register(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        for end in ends:
            _READ.setdefault(end, {})[function.__name__] = function
        return function

    return register


@_reads("run/model.safetensors", "run/code.json", "run/spec.toml")
def load_model(folder: Path) -> Any:
    return _values(runs.load_model(folder / "run").state_dict())


@_reads("run/last.safetensors")
def load_last(folder: Path) -> Any:
    return _values(load_checkpoint(folder / "run" / "last.safetensors")[0])


def _values(tensors: dict[str, Tensor]) -> Any:
    return {
        name: (str(value.dtype), value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        for name, value in tensors.items()
    }


@_reads("run/eval.json", "run/spec.toml", "run/model.safetensors")
def describe_run(folder: Path) -> Any:
    runs.describe_run(folder / "run")


@_reads("code.json", "run/code.json")
def load_codes(folder: Path) -> Any:
    return [load_code(folder / name).symbols.tolist() for name in ("code.json", "run/code.json")]


@_reads("run/spec.toml")
def load_spec(folder: Path) -> Any:
    ecnn.load_spec(folder / "run/spec.toml")


def _columns(folder: Path) -> Any:
    return {
        name: [values.tobytes() for values in outcomes.columns.values()]
        for name, outcomes in load_evaluation(folder).outcomes.items()
    }


@_reads("run/eval/*.npz")
def evaluation(folder: Path) -> Any:
    return _columns(folder / "run")


@_reads("run/audit/eval/*.npz")
def audit_records(folder: Path) -> Any:
    return _columns(folder / "run/audit")


@_reads("run/audit.json")
def audit_result(folder: Path) -> Any:
    load_audit(folder / "run/audit.json")


@_reads("table/*/*/*/record.json", "table/*/*/*/outcomes.npz")
def record(folder: Path) -> Any:
    found = read_record(folder / "table/table/one/0")
    return None if found is None else {name: values.tobytes() for name, values in found.arrays.items()}


@_reads("table.toml")
def experiment(folder: Path) -> Any:
    load_experiment(str(folder / "table.toml"))


@_reads("pictures/*/*/*.png")
def pictures(folder: Path) -> Any:
    ecnn.load_data(folder / "pictures")


def try_damage(scene: Scene, number: int, rng: random.Random) -> Inputs:
    """Damages many files, each read by its functions in Python; every seventh case uses commands instead."""
    if number % 7 == 0:
        yield from _try_commands(scene, rng)
        return
    with scene.folder_from(scene.done) as folder:
        if rng.random() < 0.3:
            shutil.copytree(scene.pictures, folder / "pictures")
        whole = _readable_files(folder)
        chosen = [(rng.choice(whole), rng.choice(_WAYS), rng.random()) for _ in range(_BATCH)]

        def work(start: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
            reads = {name: read for path in whole for name, read in _readers_of(path, folder).items()}
            known = {name: read(folder) for name, read in reads.items()}
            for path, way, draw in chosen[start:]:
                yield _try_one(folder, path, way, random.Random(draw), known)

        names = [f"{path.relative_to(folder)}: {way.__name__.strip('_')}" for path, way, _ in chosen]

        def mend(number: int) -> None:
            path = chosen[number][0]
            from_where = scene.pictures.parent if "pictures" in path.parts else scene.done
            _put_back(path, (from_where / path.relative_to(folder)).read_bytes())

        yield from one_by_one(work, names, folder, mend)


def _readable_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and _readers_of(path, folder))


def _readers_of(path: Path, folder: Path) -> dict[str, Callable[[Path], Any]]:
    relative, found = path.relative_to(folder), {}
    for pattern, reads in _READ.items():
        if relative.match(pattern) and len(relative.parts) == len(Path(pattern).parts):
            found.update(reads)
    return found


def _try_one(
    folder: Path, path: Path, way: Way, rng: random.Random, known: dict[str, Any]
) -> tuple[str, list[tuple[str, str]]]:
    """Damages a file, reads it and restores it; returns what was done, and the violations of its readers."""
    before, said = path.read_bytes(), content(path)
    found = []
    try:
        done = way(path, folder, rng)
        is_same = done is None or content(path) == said
        for name, read in _readers_of(path, folder).items():
            try:
                value = read(folder)
            except Exception as error:  # what a user would see as a traceback
                if not isinstance(error, InputError):
                    found.append(("traceback", f"{name}: {type(error).__name__}: {error}"))
                continue
            if value is not None and not is_same and value != known[name] and not _by_hand(path, way):
                found.append(("silent", f"{name} gives something else"))
    finally:
        _put_back(path, before)
    return f"{path.relative_to(folder)}: {way.__name__.strip('_')} {done or ''}", found


def _by_hand(path: Path, way: Way) -> bool:
    """Whether a reader may accept the file: another value in a text file, missing outcomes, an exchanged checkpoint.

    That last.safetensors is of another run is only noticed when training goes on from it, which the commands try.
    """
    return (
        (way is _edit and path.suffix in (".json", ".toml"))
        or (way is _remove and path.suffix == ".npz")
        or (way is _exchange and path.name == "last.safetensors")
    )


def _put_back(path: Path, before: bytes) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(before)


# Ways to damage a file: each returns what it did, or None if it does not apply to the file.
Way = Callable[[Path, Path, random.Random], str | None]


def _flip_bit(path: Path, folder: Path, rng: random.Random) -> str | None:
    raw = bytearray(path.read_bytes())
    if not raw:
        return None
    # The first bytes are preferred: headers are there, and most of a file of weights is weights.
    place = rng.randrange(min(len(raw), 400) if rng.random() < 0.3 else len(raw))
    raw[place] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)
    return f"bit of byte {place}"


def _truncate(path: Path, folder: Path, rng: random.Random) -> str | None:
    raw = path.read_bytes()
    size = rng.randrange(len(raw)) if raw else 0
    path.write_bytes(raw[:size])
    return f"to {size} of {len(raw)} bytes"


def _empty(path: Path, folder: Path, rng: random.Random) -> str | None:
    path.write_bytes(b"")
    return "to nothing"


def _append(path: Path, folder: Path, rng: random.Random) -> str | None:
    extra = rng.choice((b"\0" * 64, b"{}", b"\xff" * 7, rng.randbytes(200)))
    path.write_bytes(path.read_bytes() + extra)
    return f"{extra[:4]!r}"


def _blank(path: Path, folder: Path, rng: random.Random) -> str | None:
    """Fills a block with zeros, as some file systems leave it after a loss of power."""
    raw = bytearray(path.read_bytes())
    start = rng.randrange(len(raw)) if raw else 0
    raw[start : start + 512] = bytes(len(raw[start : start + 512]))
    path.write_bytes(raw)
    return f"from byte {start}"


def _exchange(path: Path, folder: Path, rng: random.Random) -> str | None:
    other = rng.choice([one for one in _readable_files(folder) if one != path])
    path.write_bytes(other.read_bytes())
    return f"for {other.relative_to(folder)}"


def _noise(path: Path, folder: Path, rng: random.Random) -> str | None:
    path.write_bytes(rng.randbytes(rng.randrange(1, 3000)))
    return "bytes"


def _edit(path: Path, folder: Path, rng: random.Random) -> str | None:
    """Replaces or removes one value of a JSON or TOML file, or of the header of a safetensors file."""
    try:
        if path.suffix == ".json":
            value = json.loads(path.read_text())
        elif path.suffix == ".toml":
            value = tomllib.loads(path.read_text())
        elif path.suffix == ".safetensors":
            return _edit_header(path, rng)
        else:
            return None
    except ValueError:
        return None
    where = _change_leaf(value, rng)
    if path.suffix == ".json":
        path.write_text(json.dumps(value))
    else:
        try:
            path.write_text("\n".join(files.toml_lines(value)))
        except (TypeError, ValueError, AttributeError):
            return None
    return where


def _edit_header(path: Path, rng: random.Random) -> str:
    """Changes a fact, a type, a shape or an offset in the header of a safetensors file, which stays well-formed."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    facts = header.get("__metadata__", {})
    inner = [key for key, value in facts.items() if value[:1] == "{"]
    if inner and rng.random() < 0.5:
        table = json.loads(facts[inner[0]])
        where = _change_leaf(table, rng)
        facts[inner[0]] = json.dumps(table)
    elif rng.random() < 0.5:
        name = rng.choice([key for key in header if key != "__metadata__"])
        kinds = {"F32": ["I32", "U32"], "I64": ["F64", "U64"]}
        header[name]["dtype"] = rng.choice([*kinds.get(header[name]["dtype"], ["U8"]), "F16", "BF16", "BOOL"])
        where = f"{name} as {header[name]['dtype']}"
    else:
        where = _change_leaf(header, rng)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    return where


def _change_leaf(value: Any, rng: random.Random) -> str:
    """Replaces or removes a random entry of nested tables and lists, in place; returns which."""
    where = ""
    while isinstance(value, dict | list) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        where += f".{key}"
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.1:
            if rng.random() < 0.15:
                del value[key]
                return f"without {where}"
            value[key] = rng.choice(HOSTILE_VALUES)
            return f"{where} = {str(value[key])[:40]}"
        value = inner
    return where


def _other_types(path: Path, folder: Path, rng: random.Random) -> str | None:
    """Changes the type of one array in a .safetensors or .npz file, which stays well-formed."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            tensors, header = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        kind = rng.choice((torch.float16, torch.float64, torch.int64, torch.bfloat16, torch.bool))
        name = rng.choice(sorted(tensors))
        save_file({**tensors, name: tensors[name].to(kind)}, path, header)
        return f"{name} {kind}"
    if path.suffix == ".npz":
        with np.load(path) as loaded:
            arrays = dict(loaded)
        name = rng.choice(sorted(arrays))
        other = rng.choice(("float16", "float64", "int8", "uint64", "bool", "U4", "complex64"))
        with path.open("wb") as file:
            np.savez_compressed(file, **{**arrays, name: arrays[name].astype(other)})
        return f"{name} {other}"
    return None


def _fifo(path: Path, folder: Path, rng: random.Random) -> str | None:
    path.unlink()
    os.mkfifo(path)
    return "that nobody writes to"


def _folder(path: Path, folder: Path, rng: random.Random) -> str | None:
    path.unlink()
    path.mkdir()
    return ""


def _link(path: Path, folder: Path, rng: random.Random) -> str | None:
    path.unlink()
    target = rng.choice((path, Path("/dev/zero"), Path("/dev/null"), folder, folder / "nowhere"))
    path.symlink_to(target)
    return f"to {target}"


def _remove(path: Path, folder: Path, rng: random.Random) -> str | None:
    path.unlink()
    return ""


_WAYS: tuple[Way, ...] = (
    _flip_bit, _flip_bit, _flip_bit, _truncate, _truncate, _empty, _append, _blank, _exchange, _noise, _edit, _edit,
    _edit, _other_types, _fifo, _folder, _link, _remove,
)  # fmt: skip


def _try_commands(scene: Scene, rng: random.Random) -> Inputs:
    """Three times: damages one file, and runs one command that may read it."""
    commands = {
        "train": scene.workflows["train anew"].words[:-1],
        "evaluate": scene.workflows["evaluate"].words,
        "code": ("code", "--show", "code.json"),
    }
    if "audit" in scene.workflows:
        commands["audit"] = scene.workflows["audit"].words
        commands["table"] = ("reproduce", "table.toml", "--out", "table", "--table")
    peace = {}
    for _ in range(3):
        name = rng.choice(list(commands))
        if name not in peace:
            with scene.folder_from(scene.done) as folder:
                peace[name] = in_child(command(*commands[name]), folder=folder), snapshot(folder)
        yield _try_command(scene, commands[name], *peace[name], rng)


def _try_command(
    scene: Scene, words: tuple[str, ...], peace: Any, whole: dict[str, str], rng: random.Random
) -> tuple[str, list[Violation]]:
    with scene.folder_from(scene.done) as folder:
        own = {"code": "code.json", "reproduce": "table"}.get(words[0], "run")
        every = [
            path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix not in (".png", ".md")
        ]
        path = rng.choice([one for one in every if str(one.relative_to(folder)).startswith(own)])
        way = rng.choice(_WAYS)
        name = str(path.relative_to(folder))
        done = way(path, folder, rng)
        harmless = done is None or content(path) == whole[name] or _by_hand(path, way)
        ended = in_child(command(*words), folder=folder)
        found = ended.violations()
        if ended.status in (0, 1, 3) and not harmless and not found:
            # A run that is trained again may print more about its training than one that is found finished.
            said, wanted = (
                one.out.splitlines()[:1] if words[0] == "train" else [one.out] for one in (ended, peace)
            )
            if ended.status != peace.status or not same_output("".join(said), "".join(wanted)):
                found.append(Violation("silent", f"says {ended.out[:100]!r}, not {peace.out[:100]!r}"))
            elif words[0] == "train" and content(path) != whole[name] and name in _OF_TRAINING:
                found.append(Violation("silent", "success, and the file stays as it is"))
    return f"ecnn {words[0]} with {name}: {way.__name__.strip('_')} {done or ''}", found


#: Files of a finished run that training it again must check or repair; it does not need the last checkpoint.
_OF_TRAINING = {
    f"run/{name}" for name in ("spec.toml", "code.json", "model.safetensors", "train.jsonl", "DONE")
}
