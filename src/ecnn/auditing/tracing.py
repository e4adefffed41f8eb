"""Turns a model into a `Program`, by calling it on an image that records every operation applied to it.

Operations are recorded in torch's dispatcher, below Python. Each is either in the table of `operations` or ends the
trace, so that none is overlooked. A model that rounds, draws random numbers, uses NumPy or branches on a value cannot
be traced.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ecnn.auditing.operations import OPERATIONS
from ecnn.auditing.programs import Program
from ecnn.auditing.traced import Recorder, Traced, UnknownStepError


def trace(model: nn.Module, images: Tensor) -> Program:
    """The program of a model for one image; raises `UnknownStepError` if the model cannot be traced.

    It is traced on two different images. So a constant that depends on the image, on the time or on random numbers
    from outside torch is noticed.

    Args:
        model: in eval mode.
        images: (batch, channel, height, width) in [0, 1]; only the first is used.
    """
    first = _trace(model, images[:1])
    second = _trace(model, 1 - images[:1] / 2)
    if not first.is_same(second):
        raise UnknownStepError("its operations differ from image to image")
    return first


def _trace(model: nn.Module, image: Tensor) -> Program:
    recorder = Recorder(image.shape, OPERATIONS)
    try:
        with torch.no_grad():
            scores = model(Traced(image.detach(), recorder, 0))
    except UnknownStepError:
        raise
    except Exception as error:  # a model may do anything with what is not a plain tensor
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnknownStepError(f"it cannot be traced ({reason[:120]})") from error
    if recorder.has_left_its_thread:
        raise UnknownStepError("it computes in another thread")
    if not isinstance(scores, Traced) or scores.number is None:
        raise UnknownStepError("its scores do not come from known operations on the image")
    if scores.number != len(recorder.steps) or scores.ndim != 2:
        raise UnknownStepError("it does not end with its scores")
    if scores.number == 0:
        raise UnknownStepError("it does nothing with the image")
    return Program(
        steps=tuple(recorder.steps),
        result=scores.number,
        shapes=tuple(recorder.shapes),
        least_margin=recorder.least_margin,
        constants=tuple(recorder.constants),
        device=image.device,
    )
