"""A faster copy of a model, for searches only; the model itself makes the verdicts."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from ecnn.backbones import ConvUnit, without_batch_norms


def quick_copy(model: nn.Module, precision: str) -> nn.Module:
    """A faster copy of a model. In eval mode its scores differ from the model's by rounding only.

    Batch norms are merged into convolutions. On a CPU and in bfloat16 the memory layout is channels-last. In float32 on
    CUDA narrow convolutions run on tensor cores (see `tensor_cores`) if Triton is installed. Merging and tensor cores
    work on `ConvUnit` modules only, because their order of layers is known.
    """
    quick = without_batch_norms(model)
    on_cuda = any(parameter.is_cuda for parameter in model.parameters())
    if precision == "bfloat16" or not on_cuda:
        quick.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    elif importlib.util.find_spec("triton") is not None:
        _use_tensor_cores(quick)
    return quick


def prepare(model: nn.Module, images: Tensor) -> None:
    """Compiles the Triton kernels of a quick copy in advance, so that its first passes are as fast as later ones."""
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
