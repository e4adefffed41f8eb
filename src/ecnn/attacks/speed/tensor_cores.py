"""A float32 convolution on tensor cores, for searches. Importing it needs Triton, which CUDA builds of torch include.

Tensor cores multiply in TF32, with ten bits of fraction. Three such products, of the leading and trailing halves of
both factors (3xTF32), nearly restore float32's precision: the gradients of a ResNet-20 differ from those in float64 by
7e-7 of their length, with cuDNN's float32 by 3e-7. For narrow networks they take half the time (docs/log.md).
"""

# ruff: noqa: N803 by Triton's convention compile-time constants are in capitals
from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_MOST_CHANNELS = 64  # per group; with more, cuDNN's float32 is as fast
_LEAST_GROUPED = 8  # channels per group if there are several; with fewer, most of a tile is padding
_PLACES, _DEPTH = 128, 16  # size of a tile: positions, and input channels per product
_WARPS, _STAGES = 4, 4
_LARGEST_INDEX = 2**31 - 1

#: Kernels to compile: what makes Triton compile a new one, to the arguments that compile it.
_Kernels = dict[tuple[Any, ...], tuple[tuple[int, ...], dict[str, Any]]]
#: Kernels that `compile_ahead` has handled in this process.
_known: set[tuple[Any, ...]] = set()


@triton.jit(do_not_specialize=["total"])  # it differs for every batch size
def _convolve(  # type: ignore[no-untyped-def]
    source,  # (image, y, x, group, in channel)
    outputs,  # of the ReLU whose output gradient the source is, same shape; any tensor when not MASKED
    weight,  # (group, tap, in channel, out channel)
    bias,  # (group, out channel); any tensor when not HAS_BIAS
    result,  # (image, y, x, group, out channel)
    total,  # rows of the result: one per image and position
    height,
    width,  # of the result
    source_height,
    source_width,
    GROUPS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Computes all output channels of one group at ROWS positions, as a product over taps and input channels."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    x = rows % width
    y = (rows // width) % height
    image = rows // (width * height)
    parts: tl.constexpr = (IN + DEPTH - 1) // DEPTH
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for part in range(KERNEL * KERNEL * parts):
        tap = part // parts
        channels = (part % parts) * DEPTH + tl.arange(0, DEPTH)
        if TRANSPOSED:
            down = y + PADDING - tap // KERNEL
            across = x + PADDING - tap % KERNEL
            inside = (down % STRIDE == 0) & (across % STRIDE == 0) & (down >= 0) & (across >= 0)
            down = down // STRIDE
            across = across // STRIDE
        else:
            down = y * STRIDE + tap // KERNEL - PADDING
            across = x * STRIDE + tap % KERNEL - PADDING
            inside = (down >= 0) & (across >= 0)
        inside = inside & (down < source_height) & (across < source_width) & (rows < total)
        pixels = (image * source_height + down) * source_width + across
        places = (pixels * GROUPS + group)[:, None] * IN + channels[None, :]
        known = inside[:, None] & (channels < IN)[None, :]
        values = tl.load(source + places, mask=known, other=0.0)
        if MASKED:
            values = tl.where(tl.load(outputs + places, mask=known, other=0.0) > 0, values, 0.0)
        factors = tl.load(
            weight + ((group * KERNEL * KERNEL + tap) * IN + channels)[:, None] * OUT + columns[None, :],
            mask=(channels < IN)[:, None] & (columns < OUT)[None, :],
            other=0.0,
        )
        sums = tl.dot(values, factors, sums, input_precision="tf32x3")
    if HAS_BIAS:
        sums += tl.load(bias + group * OUT + columns, mask=columns < OUT, other=0.0)[None, :]
    if RELU:
        sums = tl.maximum(sums, 0.0)
    tl.store(
        result + (rows * GROUPS + group)[:, None] * OUT + columns[None, :],
        sums,
        mask=(rows < total)[:, None] & (columns < OUT)[None, :],
    )


def compile_ahead(model: nn.Module, images: Tensor) -> int:
    """Compiles the kernels for passes over these images and their gradients, in parallel. Returns how many were new.

    Compiled one by one at their first launch, they take most of a second each, and a ResNet-20 has twenty. Triton
    caches them on disk for later processes. A kernel that fails to compile here is compiled by the launch that needs
    it.

    Args:
        model: the quick copy, with its `QuickConvolution` modules.
        images: the first batch of the search.
    """
    new = {key: kernel for key, kernel in _kernels_of(model, images[:1]).items() if key not in _known}
    _known.update(new)
    if len(new) > 1:
        with ThreadPoolExecutor(min(len(new), os.cpu_count() or 1)) as pool:
            list(pool.map(lambda kernel: _compile(images.device, *kernel), new.values()))
    return len(new)


def _kernels_of(model: nn.Module, images: Tensor) -> _Kernels:
    """The kernels of a pass and its gradient, found by a dry run that notes kernels instead of launching them."""
    found: _Kernels = {}
    layers = [module for module in model.modules() if isinstance(module, QuickConvolution)]
    for layer in layers:  # set on the layers: a thread-local setting would not reach autograd's thread
        layer.noted = found
    try:
        with suppress(Exception), torch.enable_grad():  # the search itself will raise the model's errors
            points = images.detach().clone().requires_grad_(True)
            torch.autograd.grad(model(points).float().sum(), points)
    finally:
        for layer in layers:
            layer.noted = None
    return found


def _compile(device: torch.device, numbers: tuple[int, ...], options: dict[str, Any]) -> None:
    with suppress(Exception), torch.cuda.device(device):
        tables = [torch.float32] * 5
        _convolve.warmup(*tables, *numbers, grid=(1,), **options)


class QuickConvolution(nn.Module):
    """A convolution, with the ReLU after it if `relu`, that gives gradients for its input only. Weights are copied.

    Args:
        convolution: one that `fits`.
        relu: whether to apply a ReLU to the result.

    Attributes:
        noted: for a dry run, where launches note their kernel instead of launching it; None launches kernels.
    """

    noted: _Kernels | None = None

    def __init__(self, convolution: nn.Conv2d, *, relu: bool) -> None:
        super().__init__()
        groups = convolution.groups
        weight = torch.unflatten(
            convolution.weight.detach(), 0, (groups, -1)
        )  # (group, out, in, down, across)
        self.channels = weight.shape[1:3]
        self.shape = {
            "GROUPS": groups,
            "KERNEL": convolution.kernel_size[0],
            "STRIDE": convolution.stride[0],
            "PADDING": int(convolution.padding[0]),
        }
        self.relu = relu
        self.forward_weight = weight.permute(0, 3, 4, 2, 1).contiguous()
        self.backward_weight = weight.permute(0, 3, 4, 1, 2).contiguous()
        self.bias = None if convolution.bias is None else convolution.bias.detach().clone()

    @staticmethod
    def fits(convolution: nn.Module) -> bool:
        """Whether the module is a supported convolution, and narrow enough to become faster."""
        if type(convolution) is not nn.Conv2d:
            return False
        groups = convolution.groups
        widths = convolution.in_channels // groups, convolution.out_channels // groups
        return (
            max(widths) <= _MOST_CHANNELS
            and (groups == 1 or min(widths) >= _LEAST_GROUPED)
            and convolution.weight.dtype == torch.float32
            and convolution.weight.is_cuda
            and convolution.dilation == (1, 1)
            and convolution.padding_mode == "zeros"
            and not isinstance(convolution.padding, str)
            and all(
                len(set(pair)) == 1
                for pair in (convolution.kernel_size, convolution.stride, convolution.padding)
            )
        )

    def forward(self, maps: Tensor) -> Tensor:
        result: Tensor = _Convolution.apply(maps, self)  # type: ignore[no-untyped-call]
        return result

    def launch(
        self, source: Tensor, size: tuple[int, int], outputs: Tensor | None, *, transposed: bool
    ) -> Tensor:
        """(batch, channel, *size) the convolution of `source`, or its transpose (the gradient of its input).

        Args:
            source: the input, or for the transpose the gradient of the output.
            size: height and width of the result.
            outputs: of the ReLU; the gradient is set to 0 where they are not positive. None leaves it.
            transposed: whether to compute the transpose.
        """
        source = source.contiguous(memory_format=torch.channels_last)
        weight = self.backward_weight if transposed else self.forward_weight
        bias = None if transposed else self.bias
        in_channels, out_channels = self.channels if transposed else self.channels[::-1]
        groups = self.shape["GROUPS"]
        result = torch.empty(
            (len(source), groups * out_channels, *size),
            device=source.device,
            dtype=source.dtype,
            memory_format=torch.channels_last,
        )
        if max(source.numel(), result.numel()) > _LARGEST_INDEX:
            raise torch.cuda.OutOfMemoryError(
                "more than 2^31 values at once"
            )  # the batch is halved, as for memory
        columns = max(16, triton.next_power_of_2(out_channels))  # tensor cores need at least 16
        total = len(source) * size[0] * size[1]
        grid = (triton.cdiv(total, _PLACES), groups)
        options: dict[str, Any] = {
            **self.shape,
            "TRANSPOSED": transposed,
            "MASKED": outputs is not None,
            "HAS_BIAS": bias is not None,
            "RELU": self.relu and not transposed,
            "ROWS": _PLACES,
            "COLUMNS": columns,
            "DEPTH": _DEPTH,
            "num_warps": _WARPS,
            "num_stages": _STAGES,
        }
        options |= {"IN": in_channels, "OUT": out_channels}
        numbers = (total, *size, *source.shape[2:])
        if self.noted is not None:
            # Triton compiles a separate kernel for arguments that equal 1 and for multiples of 16.
            kinds = tuple((number == 1, number % 16 == 0) for number in numbers[1:])
            self.noted[(source.device, kinds, *options.items())] = (numbers, options)
            return result.zero_()
        anything = source
        _convolve[grid](
            source,
            anything if outputs is None else outputs,
            weight,
            anything if bias is None else bias,
            result,
            *numbers,
            **options,
        )
        return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Tensor, module: QuickConvolution) -> Tensor:
        kernel, stride, padding = (module.shape[name] for name in ("KERNEL", "STRIDE", "PADDING"))
        height, width = ((length + 2 * padding - kernel) // stride + 1 for length in maps.shape[2:])
        result = module.launch(maps, (height, width), None, transposed=False)
        ctx.module, ctx.size = module, maps.shape[2:]
        if module.relu:
            ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        outputs = ctx.saved_tensors[0] if ctx.module.relu else None
        return ctx.module.launch(gradient, tuple(ctx.size), outputs, transposed=True), None
