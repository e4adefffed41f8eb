"""A copy of a model that answers the same questions sooner, for the search; verdicts are the model's own."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from ecnn.backbones import ConvUnit, without_batch_norms


def quick_copy(model: nn.Module, precision: str) -> nn.Module:
    """A copy whose scores differ from the model's, in eval mode, by rounding.

    Batch norms are merged into convolutions; on a CPU and in bfloat16 channels come last; in float32 on CUDA narrow
    convolutions run on tensor cores (see `tensor_cores`) where Triton is installed. Merging and tensor cores need a
    `ConvUnit`, whose order of layers is known.
    """
    quick = without_batch_norms(model)
    on_cuda = any(parameter.is_cuda for parameter in model.parameters())
    if precision == "bfloat16" or not on_cuda:
        quick.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif importlib.util.find_spec("triton") is not None:
        _use_tensor_cores(quick)
    return quick


def prepare(model: nn.Module, images: Tensor) -> None:
    """Makes the first passes over a quick copy as fast as later ones: kernels are compiled before they are needed."""
    if any(type(module).__name__ == "QuickConvolution" for module in model.modules()):
        from ecnn.attacks.speed.tensor_cores import compile_ahead

        compile_ahead(model, images)


def _use_tensor_cores(model: nn.Module) -> None:
    from ecnn.attacks.speed.tensor_cores import QuickConvolution

    for unit in model.modules():
        if isinstance(unit, ConvUnit) and QuickConvolution.fits(unit.conv):
            relu = isinstance(unit.activation, nn.ReLU) and unit.norm is None
            unit.conv = QuickConvolution(unit.conv, relu=relu)  # type: ignore[assignment]
            if relu:
                unit.activation = None
