"""Descriptions of every route for /openapi.json. The docstrings of the classes here are shown to users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ecnn.attacks import NORMS
from ecnn.attacks.views import VIEWS
from ecnn.serving.answers import Answer
from ecnn.serving.attacking import EFFORTS, AttackResult
from ecnn.serving.requests import COMPARED, SERVED
from ecnn.serving.subject import AuditFacts


@dataclass(frozen=True)
class Error:
    """Why there is no answer, in one sentence."""

    error: str


@dataclass(frozen=True)
class Health:
    """The server works."""

    status: str


@dataclass(frozen=True)
class Example:
    """A test image: its class, and a PNG as base64."""

    label: int
    name: str
    image: str


@dataclass(frozen=True)
class Examples:
    """Test images: the first of each class, then the second of each."""

    examples: list[Example]


@dataclass(frozen=True)
class ModelFacts:
    """A model: its classes, its code (class, task) if it has one, the form of its images, its audit if there is one.

    `classes` names every score: `num_classes` classes first, then codewords that no class has, if there are any.
    """

    name: str
    kind: str
    data: str
    classes: list[str]
    num_classes: int
    in_channels: int
    height: int
    width: int
    code: list[list[int]] | None
    audit: AuditFacts | None


@dataclass(frozen=True)
class AttackFacts:
    """An attack that is offered: whether it takes eps and steps, and which parts of the model `on` can name."""

    name: str
    has_eps: bool
    has_steps: bool
    on: list[str]


@dataclass(frozen=True)
class About:
    """The model that is served, the one it is compared with, and the attacks, norms and limits of requests."""

    model: ModelFacts
    compared: ModelFacts | None
    attacks: list[AttackFacts]
    norms: list[str]
    limits: dict[str, float]
    version: str


@dataclass(frozen=True)
class Predictions:
    """One answer per image, in their order."""

    model: str
    predictions: list[Answer]


@dataclass(frozen=True, kw_only=True)
class AttackAnswer(AttackResult):
    """The settings of the attack, and its result."""

    model: str
    attack: str
    norm: str
    eps: float | str | None
    steps: int | None
    on: str
    seed: int


_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAC0lEQVR4nGNgoBwAAABIAAE6aPyyAAAAAElFTkSuQmCC"  # 8 x 8, black
_NUMBER = {"type": "number", "minimum": 0, "maximum": 1}
_ROWS = {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": _NUMBER}}
_IMAGE = {
    "description": "Base64 of a PNG, JPEG, WebP, BMP or GIF file; or numbers in [0, 1]: (height, width) or (channel, "
    "height, width).",
    "anyOf": [
        {"type": "string", "contentEncoding": "base64"},
        _ROWS,
        {"type": "array", "minItems": 1, "maxItems": 4, "items": _ROWS},
    ],
    "examples": [_PNG],
}
_IMAGES = {
    "type": "array",
    "minItems": 1,
    "items": _IMAGE,
    "examples": [[_PNG]],
    "description": "Each is base64 of a PNG, JPEG, WebP, BMP or GIF file, or numbers in [0, 1] in nested lists.",
}
_MODEL = {
    "type": "string",
    "enum": [SERVED, COMPARED],
    "default": SERVED,
    "description": "The model that is served, or the one of --compare.",
}
_TOP = {"type": "integer", "minimum": 1, "default": 1, "description": "How many classes to name."}
_REJECT = {
    "type": ["number", "null"],
    "minimum": 0,
    "description": "Mark images further than this from every codeword.",
}
_DETAILS = {
    "type": "boolean",
    "default": False,
    "description": "Also every member's bit, every class's probability and distance.",
}
_PREDICT = {"top": _TOP, "reject": _REJECT, "details": _DETAILS, "model": _MODEL}
_SETTINGS = {
    "attack": {"type": "string", "enum": list(EFFORTS), "description": "Which one; see docs/attacks.md."},
    "norm": {
        "type": "string",
        "enum": list(NORMS),
        "default": "linf",
        "description": "Of the ball, or of the distance to be made small.",
    },
    "eps": {
        "type": ["number", "string"],
        "minimum": 0,
        "description": 'Radius on the [0, 1] scale, or a fraction such as "8/255"; of attacks with a ball.',
        "examples": ["8/255"],
    },
    "steps": {
        "type": "integer",
        "minimum": 1,
        "description": "Steps, queries or samples; of all attacks but fgsm.",
        "examples": [20],
    },
    "on": {
        "type": "string",
        "enum": list(VIEWS),
        "default": "scores",
        "description": "Where the attack looks.",
    },
    "seed": {
        "type": "integer",
        "minimum": 0,
        "maximum": 2**63 - 1,
        "default": 0,
        "description": "Same seed, same attack.",
    },
    "model": _MODEL,
}
_FILE = {"type": "string", "format": "binary"}


def _body(required: list[str], in_json: dict[str, Any], in_form: dict[str, Any]) -> dict[str, Any]:
    """The description of a request body that may be JSON or a form."""
    table = {"type": "object", "required": required, "additionalProperties": False}
    content = {
        "application/json": {"schema": {**table, "properties": in_json}},
        "multipart/form-data": {"schema": {**table, "properties": in_form}},
    }
    return {"requestBody": {"required": True, "content": content}}


_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": meaning}
    for status, meaning in (
        (400, "The body is not what its content type says."),
        (403, "The request comes from another site."),
        (408, "The body did not arrive in time."),
        (413, "The body is too large."),
        (415, "The body is neither JSON nor a form."),
        (422, "An image or a setting cannot be used."),
        (429, "Too many requests are under way."),
        (503, "It took too long, or too many are connected."),
    )
}


def _route(model: type, refusals: dict[int | str, dict[str, Any]], **extra: Any) -> dict[str, Any]:
    return {"responses": {200: {"model": model, "description": model.__doc__}, **refusals}, **extra}


_OF_ALL: dict[int | str, dict[str, Any]] = {status: _REFUSALS[status] for status in (403, 503)}
HEALTH = _route(Health, _OF_ALL)
MODEL = _route(About, _OF_ALL)
EXAMPLES = _route(Examples, _OF_ALL)
PREDICT = _route(
    Predictions,
    _REFUSALS,
    openapi_extra=_body(
        ["images"],
        {"images": _IMAGES, **_PREDICT},
        {"images": {"type": "array", "minItems": 1, "items": _FILE}, **_PREDICT},
    ),
)
ATTACK = _route(
    AttackAnswer,
    _REFUSALS,
    openapi_extra=_body(["image", "attack"], {"image": _IMAGE, **_SETTINGS}, {"image": _FILE, **_SETTINGS}),
)
