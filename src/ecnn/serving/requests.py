"""Reads requests from JSON or from a form, and checks them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecnn.checks import build, check_count, check_fields, check_number, shown
from ecnn.errors import InputError
from ecnn.serving.attacking import AttackSettings

#: Names by which a request chooses its model: the served one, or the one that it is compared with.
SERVED, COMPARED = "served", "compared"


class BodyError(InputError):
    """Raised if the body of a request is not of its content type."""


@dataclass(frozen=True, kw_only=True)
class PredictRequest:
    """A request to classify images.

    Attributes:
        images: (name, picture), as in `read_pictures`.
        top: how many classes to name.
        reject: images further than this from every codeword are marked; None marks none.
        details: whether to add the bits of the members and the distances to the codewords.
        model: "served" or "compared".
    """

    images: list[Any]
    top: int = 1
    reject: float | None = None
    details: bool = False
    model: str = SERVED

    def __post_init__(self) -> None:
        check_fields("the request", self)
        check_count("top", self.top)
        if self.reject is not None:
            check_number("reject", self.reject)


@dataclass(frozen=True, kw_only=True)
class AttackRequest:
    """A request to attack an image.

    Attributes:
        image: (name, picture), as in `read_pictures`.
        settings: of the attack.
        model: "served" or "compared".
    """

    image: tuple[str, Any]
    settings: AttackSettings
    model: str = SERVED


def predict_request(fields: Mapping[str, Any]) -> PredictRequest:
    """The request to classify that the fields of JSON or of a form describe; InputError if they are wrong."""
    made = build("the request", PredictRequest, fields)
    named = [_named(image, place) for place, image in enumerate(made.images)]
    return dataclasses.replace(made, images=named)


def attack_request(fields: Mapping[str, Any]) -> AttackRequest:
    """The request to attack that the fields of JSON or of a form describe; InputError if they are wrong.

    The fields are `image`, `model` and those of `AttackSettings`.
    """
    settings = dict(fields)
    image, model = settings.pop("image", None), settings.pop("model", SERVED)
    if image is None:
        raise InputError("the request needs an image, as base64, as numbers or as a file.")
    if not isinstance(model, str):
        raise InputError(f"model must be text, not {shown(model)}.")
    return AttackRequest(
        image=_named(image, None), settings=build("the request", AttackSettings, settings), model=model
    )


def _named(image: Any, place: int | None) -> tuple[str, Any]:
    """(name, picture): an uploaded file has a name of its own; others are named by their position, if there is one."""
    if isinstance(image, tuple):
        return image
    return "the image" if place is None else f"image {place}", image


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in the body of a request, as a dict."""
    try:
        table = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BodyError(f"the body is not JSON: {reason}.") from error
    if not isinstance(table, dict):
        raise InputError(f"the body should be a JSON object, not {shown(table)}.")
    return table


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def parse_form(entries: Sequence[tuple[str, Any]], files_field: str, *, several: bool) -> dict[str, Any]:
    """The fields of a form as `parse_json` gives them; files are (name, bytes).

    Args:
        entries: (field, value) of the form: text, or a file as (name, bytes).
        files_field: the only field that holds files.
        several: whether that field becomes a list of files, instead of one file.
    """
    table: dict[str, Any] = {}
    for name, value in entries:
        if (name == files_field) != isinstance(value, tuple):
            if isinstance(value, tuple):
                raise InputError(
                    f"a file belongs into the field {files_field!r} of the form, not into {shown(name)}."
                )
            raise InputError(f"the field {shown(name)} of a form should hold a file.")
        if name == files_field and several:
            table.setdefault(name, []).append(value)
        elif name in table:
            raise InputError(f"the form has the field {shown(name)} twice.")
        else:
            table[name] = value if isinstance(value, tuple) else _from_text(value)
    return table


def _from_text(text: str) -> Any:
    """A number or a boolean if the text is one in JSON; otherwise the text."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float) else text
