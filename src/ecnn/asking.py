"""Calling a model without changing it: copies, eval mode, restored state, scores in full precision."""

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
    """Decorator: the function runs with gradients on, inference mode off and float32 as the default type.

    Afterwards the caller's settings of torch are restored, even if a model has changed them.
    """

    @functools.wraps(function)
    def run(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with torch.inference_mode(False), torch.enable_grad(), keeping_settings():
            torch.set_default_dtype(torch.float32)
            return function(*args, **kwargs)

    return run


@contextmanager
def keeping_settings() -> Iterator[None]:
    """Restores torch's global `settings` afterwards, even if a model has changed them."""
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
    """Torch's global settings: default type, threads, deterministic algorithms or not, and whether those only warn."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.get_default_dtype(), torch.get_num_threads(), is_deterministic, only_warns


def full_precision(values: Tensor) -> Tensor:
    """The same values in float32, or float64 if they are: in half precision different scores would round to ties."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of the model. Tensors that are not leaves of the autograd graph are detached in the copy.

    `copy.deepcopy` alone refuses them. Pruned networks hold such tensors, and so do networks that store their last
    output. Raises TypeError if the copy shares modules with the model, because changing the copy would then change the
    model. A model with its own `__deepcopy__` can do that.

    Args:
        memo: as in `copy.deepcopy`.
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
    """A deep copy that computes in float64, made without torch's warnings about tensors that are not leaves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return copy_model(model).double()


def _tensors_in(held: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries, lists and tuples."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict | list | tuple):
        for value in held.values() if isinstance(held, dict) else held:
            yield from _tensors_in(value)


def set_eval_mode(model: nn.Module) -> None:
    """Puts a model into eval mode. A program made by torch.export cannot be switched and stays as it is."""
    with suppress(NotImplementedError):
        model.eval()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval mode inside; afterwards every module has the mode that it had before."""
    check_kind("model", model, nn.Module, "a torch module")
    # Modules of frozen TorchScript have no attribute `training`.
    modes = {module: module.training for module in model.modules() if hasattr(module, "training")}
    set_eval_mode(model)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval mode inside; afterwards restores its modes, buffers, gradients and `requires_grad`.

    Inside, all `.grad` are None. A model whose parameters and buffers are all float16 or bfloat16 accepts images of any
    precision, which are rounded to its own. Reentrant checkpoints (use_reentrant=True) give gradients with respect to
    the images.
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
        parameter.grad = None  # a backward pass inside would add to the caller's gradient in place
    hooks = [] if half_precision_of(model) is None else [model.register_forward_pre_hook(_round_images)]
    try:
        with eval_mode(model), _following_gradients():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient, flag in gradients:
            parameter.grad = gradient
            if parameter.requires_grad != flag:  # parameters made in inference mode refuse the call
                parameter.requires_grad_(flag)
        with torch.no_grad():
            for module, name, value, version, kept in buffers:
                module._buffers[name] = value
                if value._version != version or not _are_equal(value, kept):
                    value.copy_(kept)


def _are_equal(value: Tensor, kept: Tensor) -> bool:
    """Whether a buffer still has the kept numbers; needed as batch norm changes statistics without a new `_version`."""
    try:
        return torch.equal(value, kept)
    except NotImplementedError:  # sparse and nested tensors: torch always gives them a new `_version`
        return True


class _Checkpoint:
    """Replaces torch's reentrant checkpoints by the other kind, which supports `torch.autograd.grad`."""

    @staticmethod
    def apply(function: Any, preserve: bool, *given: Any) -> Any:
        return checkpoints.checkpoint(function, *given, use_reentrant=False, preserve_rng_state=preserve)


@contextmanager
def _following_gradients() -> Iterator[None]:
    """Inside, checkpoints with use_reentrant=True, which otherwise refuse it, give gradients with respect to images."""
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
    # The type is read at each call: a copy of the model that is converted to float64 keeps this hook.
    own = next(tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point())
    return given[0].to(own.dtype), *given[1:]


#: A function (model, images) -> result, such as a forward pass or the members' logits.
Question = Callable[[nn.Module, Tensor], Any]


class Around(nn.Module, ABC):
    """Base of wrappers that change how a model is called, for instance in batches of another size.

    A subclass defines `ask`. The attributes that attacks look for (code, decoder, member outputs) are passed through if
    the model has them, so that the wrapper does not hide them. Member outputs are computed by `ask` too.

    Args:
        model: the model that is wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @abstractmethod
    def ask(self, question: Question, images: Tensor) -> Any:
        """The result of question(model, images), computed in the wrapper's way."""

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
    """Lets a model that only accepts batches of one fixed size be called with any number of images.

    Exported and traced networks are often made for one batch size. The last batch is filled up with copies of the last
    image, and the results for these copies are dropped.

    Args:
        model: the model that is wrapped.
        size: the batch size that it accepts.
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


#: Batch sizes that a model may have been made for, the usual ones first.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 10, 20, 50, 100, 200, 250, 500, 1000, 1024)
_MOST_PIXELS = 2**24  # most pixel values in one trial batch, so that large images do not fill the memory


def find_fixed_batch(model: nn.Module, images: Tensor) -> int | None:
    """The batch size that a model is fixed to: the only one of the usual sizes that it accepts.

    None if it accepts several, or none: then a fixed batch size is not why it failed, or it cannot be found.
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
    """Turns TF32 off inside, on CUDA: it would round float32 factors to ten bits, which can change a verdict."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def read_model(model: nn.Module, images: Tensor) -> Tensor:
    """(batch, class) the model's scores in float32 or better, computed without gradients and without autocast.

    Raises InputError, with advice how to wrap the model, unless it returns a dense real tensor (batch, class) with at
    least two classes.
    """
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        scores = model(images)
    if not _are_scores(scores, len(images)) or scores.shape[1] < 2:
        came, kind = type(scores).__name__, ""
        if isinstance(scores, Tensor):
            kind = "" if scores.layout == torch.strided and not scores.is_complex() else f" {_kind(scores)}"
            came = f"shape {tuple(scores.shape)}{kind}"
        where = _find_scores(scores, len(images))
        advice = f": wrap it in a module that returns model(images){where}" if where else ""
        if not where and (maker := _find_numbers(scores, len(images))):
            advice = f": wrap it in a module that returns {maker}(model(images))"
            if maker != "torch.stack":  # which keeps the gradients of the tensors in the list
                advice += ", or have it compute with torch throughout, as attacks that follow gradients need"
        if isinstance(scores, Tensor) and scores.is_floating_point() and scores.numel() == len(images):
            advice = (
                ": wrap a model with one output z for two classes, as before a sigmoid, in a module that returns "
                "torch.stack([-z, z], dim=1) of z.flatten()"
            )
        elif isinstance(scores, Tensor) and not kind and scores.numel() == len(images):
            advice = (
                ": wrap a model that returns classes in a module that returns "
                "torch.nn.functional.one_hot(model(images).flatten().long(), num_classes).float()"
            )
        few = f"{len(images)} image{'s' if len(images) > 1 else ''}"
        raise InputError(
            f"the model must return scores (batch, class) for at least 2 classes, but {few} gave {came}{advice}."
        )
    return full_precision(scores.detach())  # a model may turn gradients on by itself


def _are_scores(said: Any, batch: int) -> bool:
    """Whether a model's output is a dense tensor of real numbers (batch, class)."""
    is_matrix = isinstance(said, Tensor) and said.ndim == 2 and len(said) == batch
    return is_matrix and said.layout == torch.strided and not said.is_complex()


def _kind(values: Tensor) -> str:
    """Why a complex or sparse tensor is no score, in words for an error message."""
    return "of complex numbers" if values.is_complex() else "in a sparse layout"


def _find_numbers(said: Any, batch: int) -> str:
    """Name of the torch function that turns an array or a list into scores (batch, class); empty if none does."""
    if not isinstance(said, np.ndarray | list | tuple):
        return ""
    of_list: Any = torch.stack if any(isinstance(part, Tensor) for part in said) else torch.tensor
    maker: Any = torch.from_numpy if isinstance(said, np.ndarray) else of_list
    with suppress(Exception):
        return f"torch.{maker.__name__}" if _are_scores(maker(said), batch) else ""
    return ""


def _find_scores(said: Any, batch: int) -> str:
    """Python text that picks the scores out of a model's output, such as `[0]` or `.logits`; empty if it finds none."""
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
