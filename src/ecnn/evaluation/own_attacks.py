"""An attack of the user's own: a function that is called as it asks, and whose points count only inside the ball."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecnn.attacks.images import per_image
from ecnn.attacks.norms import NORMS, Norm
from ecnn.checks import check_choice, check_count, parse_eps
from ecnn.errors import InputError

_KEYWORDS = ("norm", "eps", "seed")
_FORM = "(model, images, labels, *, norm, eps, seed) -> images"
_ROUNDING = 1e-6  # beyond [0, 1]


@dataclass(frozen=True, kw_only=True)
class OwnAttack:
    """A function(model, images, labels, *, norm, eps, seed) -> images, in one ball.

    It gets copies of the images (batch, channel, height, width) in [0, 1] and of the labels (batch,), and the model in
    eval mode, gradients allowed. Of norm, eps and seed it is given those that it takes. Points that leave the ball or
    [0, 1], or are no numbers, do not count: the clean image stands in their place, and they are counted.

    Attributes:
        function: what the user wrote.
        norm, eps: of the ball.
        seed: given to the function.
        source: what tells its code from another's, so that records of an older one are refused.
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
        """What of norm, eps and seed the function takes; InputError if it cannot be called as an attack."""
        values = {"norm": self.norm, "eps": parse_eps(self.eps), "seed": self.seed}
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # made by C, which does not say
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
        """What the function returns, unchecked; the model's weights are put back if it changed them."""
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
        """The points that count, clean images in place of the others; and how many those are."""
        flat = points.flatten(1)
        in_range = (flat >= -_ROUNDING).all(dim=1) & (flat <= 1 + _ROUNDING).all(dim=1)  # false for nan
        points = points.clamp(0, 1)
        norm, pixels = NORMS[self.norm], images[0].numel()
        lengths = norm.length((points.double() - images.double()).flatten(1))
        counts = in_range & (lengths <= parse_eps(self.eps) + norm.rounding(pixels))
        return torch.where(per_image(counts, images), points, images), int((~counts).sum())


def hash_code(function: Any) -> str:
    """SHA-256 of the source of a function, or of an object's class; of the bytecode where no source is known."""
    inner = getattr(function, "__code__", None)
    try:
        text = inspect.getsource(type(function) if inner is None else function)
    except (TypeError, OSError):
        text = "" if inner is None else f"{inner.co_code!r} {inner.co_names!r}"
    return hashlib.sha256(text.encode()).hexdigest()


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
