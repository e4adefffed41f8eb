"""How a model is asked so that it stays as it was: copied, in eval mode, in full precision."""

from __future__ import annotations

import copy
import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

from ecnn.checks import check_count, check_kind
from ecnn.errors import InputError

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def in_usual_state(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The function, run as torch starts: gradients on, no inference mode, float32 as the default.

    Afterwards torch's settings are the caller's again, whatever a model has made of them.
    """

    @functools.wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with torch.inference_mode(False), torch.enable_grad(), keeping_settings():
            torch.set_default_dtype(torch.float32)
            return function(*args, **kwargs)

    return run


@contextmanager
def keeping_settings() -> Iterator[None]:
    """Afterwards torch's settings that concern everybody are what they were, whatever a model has made of them."""
    before = settings()
    try:
        yield
    finally:
        if settings() != before:
            default, threads, is_deterministic, only_warns = before
            torch.set_default_dtype(default)
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)


def settings() -> tuple[torch.dtype, int, bool, bool]:
    """Torch's settings that concern everybody: default precision, threads, and whether to be deterministic."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.get_default_dtype(), torch.get_num_threads(), is_deterministic, only_warns


def full_precision(values: Tensor) -> Tensor:
    """The same values in float32 or better: half precision would round scores and losses into ties."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy. Tensors with a history, which torch does not copy, are copied without it.

    Networks hold such where they were pruned, or keep what they computed last. Raises TypeError if the model's own way
    to copy leaves parts in common: what is done to the copy would be done to the model.

    Args:
        memo: as `copy.deepcopy` takes it.
    """
    memo = {} if memo is None else memo
    for module in model.modules():
        for tensor in _tensors_in(vars(module)):
            if not tensor.is_leaf:
                memo.setdefault(id(tensor), tensor.detach().clone())
    copied = copy.deepcopy(model, memo)
    if not set(copied.modules()).isdisjoint(model.modules()):
        raise TypeError("a deep copy of it shares modules with it")
    return copied


def copy_in_double(model: nn.Module) -> nn.Module:
    """A deep copy that computes in float64. What torch says of parameters that are no leaves is not repeated here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return copy_model(model).double()


def _tensors_in(held: Any) -> Iterator[Tensor]:
    """The tensors among the values of dictionaries, lists and tuples within each other."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict | list | tuple):
        for value in held.values() if isinstance(held, dict) else held:
            yield from _tensors_in(value)


def set_eval_mode(model: nn.Module) -> None:
    """Puts a model into eval mode, if it has modes: what torch.export made stays in the one that it was exported in."""
    with suppress(NotImplementedError):
        model.eval()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, every part of it restored afterwards."""
    check_kind("model", model, nn.Module, "a torch module")
    # Frozen TorchScript has no mode.
    modes = {module: module.training for module in model.modules() if hasattr(module, "training")}
    set_eval_mode(model)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards its modes, buffers, gradients and `requires_grad` are what they were.

    Inside, a model whose numbers are all float16 or bfloat16 takes images of any precision and rounds them itself, and
    one with checkpoints of torch's older kind gives gradients of images.
    """
    check_kind("model", model, nn.Module, "a torch module")
    gradients = [
        (parameter, parameter.grad, parameter.requires_grad)
        for parameter in model.parameters()
        if parameter.is_leaf
    ]
    buffers = [
        (module, name, value, value._version, value.clone())
        for module in model.modules()
        for name, value in module._buffers.items()
        if value is not None and not value.is_inference()
    ]
    for parameter, _, _ in gradients:
        parameter.grad = None  # a backward pass inside would add to what is there
    hooks = [] if half_precision_of(model) is None else [model.register_forward_pre_hook(_round_images)]
    try:
        with eval_mode(model), _following_gradients():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient, flag in gradients:
            parameter.grad = gradient
            if parameter.requires_grad != flag:  # those made in inference mode refuse to be told
                parameter.requires_grad_(flag)
        with torch.no_grad():
            for module, name, value, version, kept in buffers:
                module._buffers[name] = value
                if value._version != version or not _are_equal(value, kept):
                    value.copy_(kept)


def _are_equal(value: Tensor, kept: Tensor) -> bool:
    """Whether the numbers are the same: batch norm changes its statistics without a new `_version`."""
    try:
        return torch.equal(value, kept)
    except NotImplementedError:  # sparse and nested tensors, which nothing of torch's changes in that way
        return True


class _Checkpoint:
    """In place of torch's reentrant checkpoints: the same by the other kind, which `torch.autograd.grad` takes."""

    @staticmethod
    def apply(function: Any, preserve: bool, *given: Any) -> Any:
        return checkpoints.checkpoint(function, *given, use_reentrant=False, preserve_rng_state=preserve)


@contextmanager
def _following_gradients() -> Iterator[None]:
    """While this lasts, checkpoints made with use_reentrant=True, which give no gradient of images alone, do."""
    before: Any = checkpoints.CheckpointFunction
    setattr(checkpoints, "CheckpointFunction", _Checkpoint)  # noqa: B010 mypy knows its type
    try:
        yield
    finally:
        setattr(checkpoints, "CheckpointFunction", before)  # noqa: B010


def half_precision_of(model: nn.Module) -> torch.dtype | None:
    """float16 or bfloat16 if all floating parameters and buffers of the model are of that type; None otherwise."""
    kinds = {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 and kinds <= {torch.float16, torch.bfloat16} else None


def _round_images(model: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    # A copy in float64 has this hook too, so that the precision is that of the moment.
    own = next(tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point())
    return given[0].to(own.dtype), *given[1:]


#: A question to a model about images: what it says of them, or what its members say.
Question = Callable[[nn.Module, Tensor], Any]


class Around(nn.Module, ABC):
    """A model that is asked otherwise than as it is. Derive from this and say how in `ask`.

    What attacks look for in a model is there if the model has it: its code and decoder, and what its members say, asked
    in the same way. Otherwise a wrapper would hide it from them.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def ask(self, question: Question, images: Tensor) -> Any:
        """What the question gives, asked of the model in this way."""

    def forward(self, images: Tensor) -> Any:
        return self.ask(_call, images)

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_modules", {}).get("model")
        if model is not None and name in _PARTS:
            return getattr(model, name)
        if model is not None and name in _QUESTIONS and hasattr(model, name):
            return functools.partial(self.ask, functools.partial(_call, what=name))
        return super().__getattr__(name)


_PARTS = ("code", "code_symbols", "decode")
_QUESTIONS = ("member_logits", "member_scores")


def _call(model: nn.Module, images: Tensor, what: str = "") -> Any:
    return getattr(model, what)(images) if what else model(images)


class InFixedBatches(Around):
    """A model that takes so many images, no more and no fewer, asked about any number of them.

    Exported and traced networks are often made for one size of batch. The last batch is filled up with copies of its
    last image, and what is said of those is left out.

    Args:
        model: the model.
        size: how many images it takes.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__(model)
        check_count("size", size)
        self.size = size

    def ask(self, question: Question, images: Tensor) -> Any:
        lacking = -len(images) % self.size if len(images) else self.size
        filling = images[-1:] if len(images) else images.new_zeros(1, *images.shape[1:])
        whole = torch.cat([images, filling.expand(lacking, *images.shape[1:])])
        said = torch.cat([question(self.model, part.contiguous()) for part in torch.split(whole, self.size)])
        return said[: len(images)]


#: How many images a model may have been made for, the usual numbers first.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 10, 20, 50, 100, 200, 250, 500, 1000, 1024)
_MOST_PIXELS = 2**24  # values of the images of one question, so that large ones do not fill the memory


def find_fixed_batch(model: nn.Module, images: Tensor) -> int | None:
    """The size of batch that a model needs: the only one of the usual sizes that it takes.

    None if it takes none of these or several: then something else is the matter with it.
    """
    taken = []
    for size in (size for size in _SIZES if size * images[0].numel() <= _MOST_PIXELS):
        repeated = images[torch.arange(size, device=images.device) % len(images)]
        with suppress(Exception), undisturbed(model):
            read_model(model, repeated)
            taken.append(size)
        if len(taken) > 1:
            return None
    return taken[0] if taken else None


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, CUDA multiplies float32 as float32: TF32 would round to ten bits, which can change a verdict."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def read_model(model: nn.Module, images: Tensor) -> Tensor:
    """(batch, class) the model's scores in float32 or better, without a gradient or a caller's autocast."""
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        scores = model(images)
    if not _are_scores(scores, len(images)) or scores.shape[1] < 2:
        came = type(scores).__name__
        if isinstance(scores, Tensor):
            kind = "" if scores.layout == torch.strided and not scores.is_complex() else f" {_kind(scores)}"
            came = f"shape {tuple(scores.shape)}{kind}"
        where = _find_scores(scores, len(images))
        advice = f": wrap it in a module that returns model(images){where}" if where else ""
        if not where and (maker := _find_numbers(scores, len(images))):
            advice = f": wrap it in a module that returns {maker}(model(images))"
            if maker != "torch.stack":  # through which gradients pass
                advice += ", or have it compute with torch throughout, as attacks that follow gradients need"
        if isinstance(scores, Tensor) and scores.is_floating_point() and scores.numel() == len(images):
            advice = (
                ": one output z for two classes, as it is before a sigmoid, is wrapped in a module that returns "
                "torch.stack([-z, z], dim=1) of z.flatten()"
            )
        raise InputError(
            f"the model must return scores (batch, class) for at least 2 classes, but {len(images)} images gave "
            f"{came}{advice}."
        )
    return full_precision(scores.detach())  # a model may ask for gradients of what it says


def _are_scores(said: Any, batch: int) -> bool:
    """Whether it is a dense tensor of real numbers (batch, class)."""
    is_matrix = isinstance(said, Tensor) and said.ndim == 2 and len(said) == batch
    return is_matrix and said.layout == torch.strided and not said.is_complex()


def _kind(values: Tensor) -> str:
    """What sets such numbers apart from a score."""
    return "of complex numbers" if values.is_complex() else "in a sparse layout"


def _find_numbers(said: Any, batch: int) -> str:
    """What makes a tensor (batch, class) of an array, of lists of numbers, or of a tensor per image; or nothing."""
    if not isinstance(said, np.ndarray | list | tuple):
        return ""
    of_list: Any = torch.stack if any(isinstance(part, Tensor) for part in said) else torch.tensor
    maker: Any = torch.from_numpy if isinstance(said, np.ndarray) else of_list
    with suppress(Exception):
        return f"torch.{maker.__name__}" if _are_scores(maker(said), batch) else ""
    return ""


def _find_scores(said: Any, batch: int) -> str:
    """How to write the scores in what a model said: an index, a key or an attribute; empty if they are not found."""
    if isinstance(said, Tensor):
        if said.layout != torch.strided:
            return ".to_dense()" if said.ndim == 2 and not said.is_complex() else ""
        is_map = said.ndim > 2 and len(said) == batch and said[0].numel() == said.shape[1]
        return ".flatten(1)" if is_map and not said.is_complex() else ""
    if isinstance(said, Mapping):
        parts = {f"[{key!r}]": value for key, value in said.items()}
    elif hasattr(said, "_fields"):  # a named tuple
        parts = {f".{name}": getattr(said, name) for name in said._fields}
    elif isinstance(said, list | tuple):
        parts = {f"[{index}]": value for index, value in enumerate(said)}
    else:
        parts = {f".{name}": value for name, value in getattr(said, "__dict__", {}).items()}
    return next((where for where, value in parts.items() if _are_scores(value, batch)), "")
