"""`OwnAttack`: a user's function as an attack, whose points count only if they lie in the ball."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, Norm
from ecnn.checks import check_choice, check_count, parse_eps
from ecnn.errors import InputError

_KEYWORDS = ("norm", "eps", "seed")
_FORM = "(model, images, labels, *, norm, eps, seed) -> images"
_ROUNDING = 1e-6  # tolerance beyond [0, 1]


@dataclass(frozen=True, kw_only=True)
class OwnAttack:
    """An attack from a user's function(model, images, labels, *, norm, eps, seed) -> images, within one ball.

    In an evaluation the function gets copies of the images (batch, channel, height, width) in [0, 1] and of the labels
    (batch,), and the model in eval mode with gradients enabled. It gets norm, eps and seed if its signature has them.
    Points that leave the ball or [0, 1], or have NaN pixels, are replaced by the clean image; their number is recorded.

    Attributes:
        function: the user's function.
        norm, eps: of the ball.
        seed: passed to the function.
        source: a hash of the function's code, by which records of an older version are refused; computed if empty.
    """

    function: Callable[..., Any]
    norm: Norm
    eps: float | str
    seed: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        parse_eps(self.eps, most=NORMS[self.norm].longest)
        check_count("seed", self.seed, least=0)
        self.keywords()
        if not self.source:
            object.__setattr__(self, "source", hash_code(self.function))

    def keywords(self) -> dict[str, Any]:
        """Those of norm, eps and seed that the function takes, by name; InputError if it cannot be called as an attack.

        If the signature is unknown, all three.
        """
        values = {"norm": self.norm, "eps": parse_eps(self.eps), "seed": self.seed}
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # some functions written in C have no signature
            return values
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        given = {name: values[name] for name in _KEYWORDS if takes_all or name in signature.parameters}
        try:
            signature.bind(None, None, None, **given)
        except TypeError as error:
            raise InputError(
                f"the attack {_name_of(self.function)!r} must be called as {_FORM}: {error}."
            ) from error
        return given

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Any:
        """The function's result, unchecked. Restores the model's parameters if the function changed them."""
        kept = [
            (parameter, parameter._version, parameter.detach().clone()) for parameter in model.parameters()
        ]
        try:
            return self.function(model, images, labels, **self.keywords())
        except InputError:
            raise
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            raise InputError(
                f"the attack {_name_of(self.function)!r} raised {type(error).__name__}: {text}"
            ) from error
        finally:
            with torch.no_grad():
                for parameter, version, value in kept:
                    if parameter._version != version:
                        parameter.copy_(value)

    def judge(self, points: Tensor, images: Tensor) -> tuple[Tensor, int]:
        """The points, cut to [0, 1] and with the clean image for those outside the ball; and how many are outside."""
        flat = points.flatten(1)
        in_range = (flat >= -_ROUNDING).all(dim=1) & (flat <= 1 + _ROUNDING).all(dim=1)  # false for nan
        points = points.clamp(0, 1)
        norm, pixels = NORMS[self.norm], images[0].numel()
        lengths = norm.length((points.double() - images.double()).flatten(1))
        counts = in_range & (lengths <= parse_eps(self.eps) + norm.rounding(pixels))
        return torch.where(per_image(counts, images), points, images), int((~counts).sum())


def hash_code(function: Any) -> str:
    """SHA-256 of the source code of a function or of an object's class; without source code, of the bytecode.

    Of a partial function the inner function counts, of an object without source code the bytecode of its class's
    methods, and of one written in C its type's name.
    """
    while isinstance(function, functools.partial):
        function = function.func
    inner = getattr(function, "__code__", None)
    whole = type(function) if inner is None else function
    try:
        text = inspect.getsource(whole)
    except (TypeError, OSError):
        parts = [part.__code__ for _, part in sorted(vars(whole).items()) if inspect.isfunction(part)]
        parts = parts if inner is None else [inner]
        text = f"{whole.__module__}.{whole.__qualname__} {[_bytecode(part) for part in parts]}"
    return hashlib.sha256(text.encode()).hexdigest()


def _bytecode(code: CodeType) -> list[Any]:
    """Instructions, names and constants as values whose text is the same in every process."""
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            constants.append(_bytecode(value))
        elif isinstance(value, frozenset):  # its order differs from process to process
            constants.append(sorted(map(repr, value)))
        else:
            constants.append(repr(value))
    return [code.co_code, code.co_names, constants]


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
