"""Tables as JSON and TOML that people can read; our JSON tables carry a checksum."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecnn.errors import InputError
from ecnn.files.disk import (
    MAX_JSON_BYTES,
    AnyPath,
    exists,
    file_sum,
    read_bytes,
    write_text,
    write_together,
)

_SUM, _WEIGHTS_SUM = "sha256", "weights_sha256"


def write_json(path: AnyPath, value: Any) -> Path:
    """Writes strict JSON, all or nothing; see `json_text`."""
    return write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Strict JSON (no NaN); lists of numbers stay on one line so that people can read them.

    A table gets an entry "sha256", the checksum of all others, which `read_json` checks and removes.
    """
    if isinstance(value, dict):
        value = {**value, _SUM: _sum_of_table(json.loads(json.dumps(value, allow_nan=False)))}
    text = json.dumps(value, indent=1, allow_nan=False)
    text = re.sub(
        r"\[\s+([-\d][^\[\]{}\"]*?)\s+\]", lambda found: "[" + re.sub(r"\s+", "", found[1]) + "]", text
    )
    return text + "\n"


def _sum_of_table(table: Mapping[str, Any]) -> str:
    """SHA-256 of the table's entries, independent of their order and layout in the file."""
    others = {key: value for key, value in table.items() if key != _SUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def read_json(path: AnyPath) -> Any:
    """The content of a JSON file; InputError of one sentence if it cannot be read, has an entry twice or is no JSON.

    A table that has a checksum must match it. Older files have none.
    """
    content = read_bytes(path, most=MAX_JSON_BYTES)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        for key in table if len(table) < len(pairs) else ():
            if [name for name, _ in pairs].count(key) > 1:
                raise InputError(f"{path} has the entry {key!r} twice: remove one.")
        return table

    try:
        # Some editors begin a file with a byte order mark, which utf-8-sig skips.
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file (byte {error.start} is not UTF-8).") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error.msg} at line {error.lineno}.") from error
    except ValueError as error:
        raise InputError(f"{path} holds a number of too many digits to be a JSON file of ours.") from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a JSON file of ours.") from error
    if isinstance(value, dict) and _SUM in value and value.pop(_SUM) != _sum_of_table(value):
        raise InputError(
            f'{path} was damaged or changed after it was written: move it away, or remove its entry "{_SUM}" to '
            "accept it as it is."
        )
    return value


def check_replaceable(folder: AnyPath, config: str, kind: str, names: Sequence[str]) -> None:
    """Raises InputError if a folder has files of these names but is not one that we saved with this format.

    So a save can replace an earlier save, and nothing else.

    Args:
        config: name of the JSON file whose entry "format" states the format of the folder.
        kind: the format that it must have.
        names: of the files that would be replaced.
    """
    there = [name for name in names if exists(Path(folder) / name)]
    if not there:
        return
    try:
        found = read_json(Path(folder) / config)
    except InputError:
        found = None
    if not isinstance(found, dict) or found.get("format") != kind:
        raise InputError(
            f"{Path(folder) / there[0]} would be replaced, and it was not saved in this form: choose another folder."
        )


def write_described(
    folder: AnyPath,
    weights: tuple[str, bytes],
    config: tuple[str, Mapping[str, Any]],
    texts: Mapping[str, str] | None = None,
) -> None:
    """Writes a file of weights, the JSON that describes it, and texts beside them, so that they stay consistent.

    The JSON gets an entry "weights_sha256", and the weights are written last. A full disk leaves the old files. A kill
    leaves the old files, the new files, or a mixture that `check_described` refuses and the next save replaces.

    Args:
        weights, config: name and content of each file.
        texts: contents by file name.
    """
    described = {**config[1], _WEIGHTS_SUM: hashlib.sha256(weights[1]).hexdigest()}
    contents = {config[0]: json_text(described), **(texts or {})}
    parts = {Path(folder) / name: text.encode() for name, text in contents.items()}
    write_together({**parts, Path(folder) / weights[0]: weights[1]})


def check_described(config: AnyPath, table: Mapping[str, Any], weights: AnyPath) -> None:
    """Raises InputError unless the weights match the checksum in their JSON file; older JSON files have none.

    Args:
        config: path of the JSON file.
        table: its content.
        weights: path of the file of weights.
    """
    expected = table.get(_WEIGHTS_SUM)
    if expected is not None and file_sum(weights) != expected:
        raise InputError(
            f"{weights} and {config} do not belong together: a save was cut short, or one of them was replaced; save "
            "the model again."
        )


def write_toml(path: AnyPath, tables: Mapping[str, Any]) -> Path:
    """Writes nested tables of numbers, strings and lists as TOML, all or nothing; None is left out."""
    return write_text(path, "\n".join(toml_lines(tables)).strip() + "\n")


def toml_lines(table: Mapping[str, Any], name: str = "") -> list[str]:
    """Lines of TOML for a table: its header [name], its own entries, then the tables inside it."""
    own = [(key, value) for key, value in table.items() if value is not None and not isinstance(value, dict)]
    inner = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = ["", f"[{name}]"] if name and (own or not inner) else []
    lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in own]
    for key, value in inner.items():
        lines += toml_lines(value, f"{name}.{_toml_key(key)}" if name else _toml_key(key))
    return lines


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_text(key)


def _toml_text(text: str) -> str:
    """A string in TOML: as in JSON, but letters beyond ASCII are not escaped, and DEL is."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError(f"{text!r} is not UTF-8, so that TOML cannot hold it: rename what it names.")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        entries = ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
        return f"{{ {entries} }}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return _toml_text(value)
    # Numbers and booleans are written alike in JSON and TOML.
    return json.dumps(value, allow_nan=False)


def read_toml(path: AnyPath) -> dict[str, Any]:
    """The content of a TOML file; InputError of one sentence if it cannot be read or is no TOML."""
    content = read_bytes(path, most=MAX_JSON_BYTES)
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply to be a TOML file of ours.") from error
    except ValueError as error:  # no UTF-8, no TOML, or a number of thousands of digits
        raise InputError(f"{path} is not TOML: {str(error).splitlines()[0]}.") from error
