"""Checks of public arguments: numbers, names, radii, arrays, and options given by name.

Every check raises `InputError` with one sentence: what was expected, what came and, for a name, the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from numbers import Integral, Real
from typing import Any, TypeVar

from ecnn.errors import InputError

Built = TypeVar("Built")
#: The largest whole number that TOML, torch and NumPy all hold.
MOST = 2**63 - 1


def check_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Raises InputError unless the value is a whole number from `least` to `most`."""
    is_whole = _is_whole(value)
    top = MOST if most is None else most
    if not is_whole or not least <= value <= top:
        limit = f"to {top}" if most is not None or (is_whole and value > top) else "up"
        raise InputError(f"{name} must be a whole number from {least} {limit}, not {shown(value)}.")


def check_counts(owner: Any, *names: str) -> None:
    """Raises InputError unless these attributes of the owner are whole numbers from 1 up."""
    for name in names:
        check_count(name, getattr(owner, name))


def check_number(
    name: str,
    value: Any,
    *,
    least: float = 0.0,
    most: float = math.inf,
    above: bool = False,
    below: bool = False,
) -> None:
    """Raises InputError unless the value is a finite number from `least` to `most`.

    Args:
        above: `least` itself is refused too.
        below: `most` itself is refused too.
    """
    is_number = _is_finite(value)
    at_open_end = (above and value == least) or (below and value == most)
    if not is_number or not least <= value <= most or at_open_end:
        span = f"above {least:g}" if above else f"from {least:g} up"
        if most < math.inf:
            start, end = (f"above {least:g} and", "up to ") if above else (f"from {least:g} to", "")
            span = f"{start} {'below ' if below else end}{most:g}"
        raise InputError(f"{name} must be a number {span}, not {shown(value)}.")


def check_entries(owner: str, table: Any, kinds: Mapping[str, Any]) -> None:
    """Raises InputError unless the value is a mapping whose entries have these types, as read from a file of ours.

    Args:
        owner: what the error message calls the mapping, such as the path of a file.
        kinds: the type of each entry by its name: str, bool, int, float (finite, or a whole number), list or dict, with
            a type of their elements if need be (`list[int]`); a Literal; or a union (`int | None`). An entry that may
            be None may be missing. Entries without a type here are not checked.
    """
    if not isinstance(table, Mapping):
        raise InputError(f"{owner} must hold a table, not {shown(table)}.")
    for name, kind in kinds.items():
        if not _fits(table.get(name), kind):
            found = f", not {shown(table[name])}" if name in table else ", which is missing"
            size = f" of at most {MOST} in size" if _is_too_large(table.get(name), kind) else ""
            raise InputError(f"{owner}: {name} must be {_in_words(kind)}{size}{found}.")


def check_fields(owner: str, made: Any) -> None:
    """Raises InputError unless every field of a dataclass has its declared type."""
    kinds = typing.get_type_hints(type(made))
    check_entries(owner, {name: getattr(made, name) for name in kinds}, kinds)


_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number", list: "a list"}
_WORDS |= {dict: "a table", type(None): "nothing"}
_SEVERAL = {
    int: "whole numbers",
    float: "finite numbers",
    list: "lists",
    dict: "tables",
}  # plurals; other types as in _WORDS


def _in_words(kind: Any, words: Mapping[Any, str] = _WORDS) -> str:
    """A type in words, with the type of the elements of a list or table: "a list of whole numbers"."""
    whole, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if whole is typing.Literal:
        return either(map(str, parts))
    if whole is types.UnionType:
        return " or ".join(_in_words(part, words) for part in parts if part is not type(None))
    elements = f" of {_in_words(parts[-1], {**_WORDS, **_SEVERAL})}" if parts and parts[-1] is not Any else ""
    return words.get(whole, "a table") + elements


def _fits(value: Any, kind: Any) -> bool:
    whole, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if whole is typing.Literal:
        return value in parts
    if whole is types.UnionType:
        return any(_fits(value, part) for part in parts)
    if whole is int:
        return _is_whole(value) and -MOST <= int(value) <= MOST
    if whole is float:
        return _is_finite(value)
    if whole is Any or not isinstance(value, whole):
        return whole is Any
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return not parts or all(_fits(item, parts[-1]) for item in items)


def plain(value: Any) -> Any:
    """The value with NumPy's numbers as Python's and tuples as lists, at every level, so that JSON can hold it."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _is_too_large(value: Any, kind: Any) -> bool:
    """Whether a refused value is of the right type, whole number, so that only its size can be wrong."""
    return _is_whole(value) and kind in (int, int | None)


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def shown(value: Any) -> str:
    """The value's repr for an error message, cut short after 200 characters."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."


def printable(text: str) -> str:
    """The text on one line: a question mark replaces every character that cannot be printed, such as a line break."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def difference(old: Any, new: Any) -> str:
    """The first difference of two nested tables or lists, in words: its key, the old value "there", the new "here"."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *old]:
            if old.get(key) != new.get(key):
                return f"{key}: {difference(old.get(key), new.get(key))}"
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        pairs = zip_longest(old, new, fillvalue="nothing")
        return next((difference(*pair) for pair in pairs if pair[0] != pair[1]), "another kind of list")
    there, here = (text if len(text) <= 40 else f"{text[:12]}..." for text in (str(old), str(new)))
    return f"{there} there, {here} here"


def check_shares(**shares: float | None) -> None:
    """Raises InputError unless each is None or a share from 0 to 1; percentages are a common mistake."""
    for name, share in shares.items():
        if share is not None:
            check_number(f"{name} (such as 0.72 for 72 %)", share, most=1.0)


def check_kind(name: str, value: Any, kind: type, words: str) -> None:
    """Raises InputError unless the value is of that class; `words` describes the class in the message."""
    if not isinstance(value, kind):
        raise InputError(f"{name} must be {words}, not {kind_of(value)}.")


def kind_of(value: Any) -> str:
    """The name of the value's class with its article, such as "a list" or "an int"; "None" for None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises InputError unless the value is one of the names; the message lists them and suggests the nearest."""
    known = list(known)
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{name} must be {either(known)}, not {shown(value)}{did_you_mean(value, known)}")


def check_options(owner: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raises InputError if one of the options is unknown to its owner; the message lists the known ones."""
    known = list(known)
    for option in options:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InputError(f"{owner} has no option {shown(option)}; {has}{did_you_mean(option, known)}")


def check_array(name: str, value: Any, *axes: str | int, dtype: str | tuple[str, ...] | None = None) -> None:
    """Raises InputError unless the value is a NumPy array or a torch tensor of this form.

    Args:
        axes: the name of an axis that may have any size, or the size that it must have.
        dtype: the dtype that it must have: "uint8" for an array of bytes, "torch.uint8" for a tensor of bytes, "whole
            numbers" for any integers; a tuple if several will do; None for any.
    """
    shape: Any = getattr(value, "shape", None)
    fits = shape is not None and len(shape) == len(axes)
    fits = fits and all(isinstance(axis, str) or axis == size for axis, size in zip(axes, shape, strict=True))
    kind = str(getattr(value, "dtype", type(value).__name__))
    is_whole = kind.removeprefix("torch.").startswith(("int", "uint"))
    wanted = (dtype,) if isinstance(dtype, str) else dtype or ()
    is_wanted = kind in wanted or ("whole numbers" in wanted and is_whole)
    if fits and (is_wanted or not wanted):
        return
    form = f"({', '.join(map(str, axes))}{',' if len(axes) == 1 else ''})"
    found = kind if shape is None else f"{'' if is_wanted else f'{kind} '}of shape {tuple(shape)}"
    raise InputError(f"{name} must be {f'{either(wanted)} ' if wanted else ''}of shape {form}, not {found}.")


def check_has(owner: str, model: Any, attribute: str) -> None:
    """Raises InputError unless the model has the attribute that the owner, such as an objective, needs."""
    if not hasattr(model, attribute):
        raise InputError(
            f"{owner} needs a model with the attribute {attribute}, which {type(model).__name__} lacks."
        )


def parse_eps(value: float | str, name: str = "eps", *, most: float = math.inf) -> float:
    """A length on the [0, 1] scale of pixels, as a float. Text such as "0.03", "8/255" or "0.5/255" is accepted.

    Args:
        name: what the error message calls it.
        most: the largest length; a larger one is an InputError that suggests to divide by 255.
    """
    try:
        above, slash, below = value.partition("/") if isinstance(value, str) else (value, "", "")
        length = math.nan if isinstance(value, bool) else float(above) / (float(below) if slash else 1.0)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise InputError(
            f'{name} must be a number or a fraction such as "8/255", not {shown(value)}.'
        ) from None
    if not 0 <= length < math.inf:
        raise InputError(f"{name} must be a number from 0 up, not {shown(value)}.")
    if length > most:
        raise InputError(
            f'{name}={shown(value)}: lengths are on the [0, 1] scale of pixels; did you mean "{length:g}/255"?'
        )
    return length


def eps_text(eps: float) -> str:
    """A length as text that `parse_eps` reads: "8/255" if it is a whole number of 255ths, else such as "0.12"."""
    steps = round(255 * eps)
    return (
        f"{steps}/255"
        if steps % 255 and abs(255 * eps - steps) < 1e-6
        else repr(float(eps)).removesuffix(".0")
    )


def build(
    owner: str, kind: type[Built], options: Mapping[str, Any], *, fixed: Mapping[str, Any] | None = None
) -> Built:
    """Makes a dataclass from options. Unknown and missing options are an InputError that names them.

    Args:
        owner: what the error message calls it, such as "the attack 'pgd'".
        kind: the dataclass.
        options: values by the names of the fields.
        fixed: values of further fields, which are not accepted as options.
    """
    given = dict(fixed or {})
    entries: Any = [entry for entry in dataclasses.fields(kind) if entry.name not in given]  # type: ignore[arg-type]
    check_options(owner, options, [entry.name for entry in entries if entry.init])
    missing = [entry.name for entry in entries if is_needed(entry) and entry.name not in options]
    if missing:
        raise InputError(
            f"{owner} needs {', '.join(missing)}: settings that decide a result have no default."
        )
    return kind(**given, **options)


def is_needed(entry: dataclasses.Field[Any]) -> bool:
    """Whether this field of a dataclass must be given, having no default."""
    missing = dataclasses.MISSING
    return entry.init and entry.default is missing and entry.default_factory is missing


def either(names: Iterable[str]) -> str:
    """The names as a sentence lists them: "a", "a or b", "one of a, b, c"."""
    names = list(names)
    return " or ".join(names) if len(names) < 3 else f"one of {', '.join(names)}"


def did_you_mean(value: Any, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "; did you mean ...?" if a known name is similar, else "."."""
    by_lower = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(str(value).lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[nearest[0]]!r}?" if nearest else "."
