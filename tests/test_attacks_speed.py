"""The copy of a model that searches ask: the same answers up to rounding, and verdicts that are not its own."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecnn.asking import without_tf32
from ecnn.attacks import PGD
from ecnn.attacks.speed.quick_copy import _use_tensor_cores, quick_copy
from ecnn.attacks.speed.replay import Recorder
from ecnn.backbones import ConvUnit, ResNet, without_batch_norms
from ecnn.codes import load_code
from ecnn.model import ECNN
from ecnn.models import MODELS


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_quick_copy_gives_the_same_scores(precision: str) -> None:
    torch.manual_seed(0)
    for model in (ResNet(5, depth=8, width=4), ECNN(load_code("10x10"), depth=8, width=4, batch_norm=True)):
        images = torch.rand(4, 3, 16, 16)
        model(2 * images)
        model.eval()
        assert torch.allclose(quick_copy(model, precision)(images), model(images), rtol=1e-4, atol=1e-5)


SMALL: dict[str, dict[str, Any]] = {
    "adp": {"depth": 8, "width": 4},
    "tanh_ensemble": {"image_size": [8, 8], "filters": [8, 8, 8], "bit_filters": 4, "batch_norm": True},
    "independent_ecoc": {"code": load_code("10x10"), "depth": 8, "width": 4, "batch_norm": True},
    "specialists": {"sets": [[digit, (digit + 1) % 10] for digit in range(10)], "depth": 8, "width": 4},
    "feature_squeezing": {"bits": 4, "window": 2, "depth": 8, "width": 4},
    "empir": {"depth": 8, "width": 4},
    "multiscale": {"width": 4, "hidden": 8},
}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_quick_copy_of_a_baseline(name: str) -> None:
    """EMPIR rounds its weights: merging a batch norm into them would make another network of it."""
    torch.manual_seed(0)
    model = MODELS[name].build(10, 1, mean=0.5, **SMALL[name])
    with torch.no_grad():
        for _ in range(3):
            model(torch.rand(16, 1, 8, 8))
        model.eval()
        images = torch.rand(8, 1, 8, 8)
        assert torch.allclose(quick_copy(model, "float32")(images), model(images), rtol=1e-4, atol=1e-4)


def test_a_quick_copy_is_asked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU's caches hold at once; the images and what they cost are those of one batch."""
    torch.manual_seed(0)
    model = ECNN(load_code("10x10"), depth=8, width=4).double().eval()
    images = torch.rand(50, 3, 12, 12, dtype=torch.float64)
    labels = model(images).argmax(1)
    asked: list[int] = []
    forward = ECNN.forward

    def count(module: ECNN, points: Tensor) -> Tensor:
        asked.append(len(points))
        return forward(module, points)

    monkeypatch.setattr(ECNN, "forward", count)
    attack = PGD(norm="linf", eps=0.1, steps=5, step_size=0.03, targets=2, keep="best", quick=True)
    whole = attack.run(model, images, labels, seed=1)
    assert max(asked) == 50
    asked.clear()
    monkeypatch.setattr("ecnn.attacks.speed.replay._PIXELS_AT_ONCE", 20 * images[0].numel())
    pieces = attack.run(model, images, labels, seed=1)
    assert sorted(set(asked))[-2:] == [17, 50]  # 17, 17 and 16; the model's own verdicts stay whole
    assert torch.equal(pieces.success, whole.success)
    assert torch.equal(pieces.forwards, whole.forwards)
    assert torch.allclose(pieces.images, whole.images, atol=1e-12)


class _Stream:
    """In place of a CUDA stream where there is none."""

    def wait_stream(self, other: Any) -> None: ...


@contextmanager
def _nothing(*given: Any, **options: Any) -> Iterator[None]:
    yield


@pytest.fixture
def recordable(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """CUDA's streams and graphs as far as `Recorder` asks for them; a graph that is replayed does nothing."""
    for name, stand_in in {
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": _nothing,
        "graph": _nothing,
        "graph_pool_handle": object,
        "set_stream": lambda stream: None,
        "synchronize": lambda: None,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return monkeypatch


def test_nothing_is_collected_while_passes_are_recorded(recordable: pytest.MonkeyPatch) -> None:
    """An older graph that the collector frees in between would spoil the recording."""
    seen: list[bool] = []

    def double(values: Tensor) -> tuple[Tensor]:
        seen.append(gc.isenabled())
        return (2 * values,)

    recorder = Recorder()
    for _ in range(5):
        (found,) = recorder("double", double, torch.ones(3))
        assert found is not None
        assert found.tolist() == [2, 2, 2]
    # Three ordinary passes, one that sets libraries up, the recorded one, and then replays.
    assert seen == [True, True, True, True, False]
    assert gc.isenabled()


def test_passes_that_cannot_be_recorded_stay_ordinary(recordable: pytest.MonkeyPatch) -> None:
    """As those of a model that looks at a number on the way, which no recording can repeat."""

    @contextmanager
    def fails(*given: Any, **options: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing")

    left_on: list[Any] = []
    recordable.setattr(torch.cuda, "graph", fails)
    recordable.setattr(torch.cuda, "set_stream", left_on.append)
    recorder = Recorder()
    for number in range(8):
        values = torch.full((3,), float(number))
        (found,) = recorder("double", lambda some: (2 * some,), values)
        assert found is not None
        assert torch.equal(found, 2 * values)
    assert (
        len(left_on) == 1
    )  # torch does not leave the stream of a recording that fails, and nothing is tried twice
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_forgotten_recording_does_not_spoil_the_next() -> None:
    """A graph in a circle of references is freed by the collector, whenever that runs."""

    def forget() -> None:
        recorder = Recorder()
        for _ in range(5):
            recorder("double", lambda some: (2 * some,), torch.ones(3, device="cuda"))
        recorder._circle = recorder  # type: ignore[attr-defined]

    def collect(values: Tensor) -> tuple[Tensor]:
        filler = [[] for _ in range(10_000)]  # type: ignore[var-annotated] # enough for the collector to want to run
        return (2 * values + len(filler),)

    for _ in range(3):
        forget()
        recorder = Recorder()
        for _ in range(5):
            (found,) = recorder("more", collect, torch.ones(3, device="cuda"))
            assert found is not None
            assert found.tolist() == [10_002] * 3
        assert not recorder._gives_up


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "size", "groups"),
    [
        ((3, 16), 3, 1, (32, 32), 1),
        ((16, 16), 3, 1, (32, 32), 1),
        ((16, 32), 3, 2, (32, 32), 1),
        ((16, 32), 1, 2, (32, 32), 1),
        ((64, 64), 3, 1, (8, 8), 1),
        ((5, 20), 5, 2, (9, 13), 1),
        ((48, 96), 3, 2, (9, 13), 3),
        ((256, 256), 3, 1, (8, 8), 4),
    ],
)
@pytest.mark.parametrize("relu", [True, False])
def test_tensor_cores_convolve_in_float32(
    channels: Any, kernel: int, stride: int, size: Any, groups: int, relu: bool
) -> None:
    from ecnn.attacks.speed.tensor_cores import QuickConvolution

    torch.manual_seed(0)
    before, after = channels
    plain = nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, groups=groups).cuda()
    assert QuickConvolution.fits(plain)
    images = torch.randn(7, before, *size, device="cuda", requires_grad=True)
    exact = copy.deepcopy(plain).double()(images.double())
    exact = exact.relu() if relu else exact
    upstream = torch.randn_like(exact)
    (exact_gradient,) = torch.autograd.grad(exact, images, upstream)
    found = QuickConvolution(plain, relu=relu)(images)
    (gradient,) = torch.autograd.grad(found, images, upstream.float())
    assert relative(found, exact) < 2e-6
    assert relative(gradient, exact_gradient.double()) < 2e-6


@pytest.mark.gpu
def test_other_convolutions_stay() -> None:
    from ecnn.attacks.speed.tensor_cores import QuickConvolution

    refused = (
        nn.Conv2d(16, 16, 3, groups=4),
        nn.Conv2d(512, 512, 3, groups=2),
        nn.Conv2d(16, 16, 3, dilation=2),
        nn.Conv2d(16, 16, 3, padding="same"),
        nn.Conv2d(16, 16, (3, 1)),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(16, 128, 3),
        nn.Conv2d(16, 16, 3).double(),
    )
    assert not any(QuickConvolution.fits(module.cuda()) for module in refused)
    assert not QuickConvolution.fits(nn.Conv2d(16, 16, 3))


@pytest.mark.gpu
def test_gradients_of_a_quick_copy_are_float32_gradients() -> None:
    torch.manual_seed(0)
    model = ResNet(10).cuda().eval()
    images = torch.rand(64, 3, 32, 32, device="cuda")
    quick = quick_copy(model, "float32")
    assert not any(type(unit.conv) is nn.Conv2d for unit in quick.modules() if isinstance(unit, ConvUnit))

    def gradient_of(network: nn.Module, points: Tensor) -> Tensor:
        points = points.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(network(points).square().sum(), points)
        return gradient

    def error_of(network: nn.Module) -> float:
        """The median: where a ReLU is at its corner, one image may go the other way."""
        lengths = (gradient_of(network, images) - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        return float(lengths.median())

    with without_tf32():
        exact = gradient_of(copy.deepcopy(model).double(), images.double())
        own, quick_own = error_of(model), error_of(quick)
    assert quick_own < 5 * own, (quick_own, own)  # TF32 alone would be a thousand times as far
    assert quick_own < 1e-5


@pytest.mark.gpu
def test_a_quick_attack_finds_what_an_ordinary_one_finds() -> None:
    torch.manual_seed(0)
    model = ResNet(10).cuda().eval()
    images = torch.rand(128, 3, 32, 32, device="cuda")
    labels = model(images).argmax(dim=1)
    found = [
        PGD(norm="linf", eps="2/255", steps=10, step_size="0.5/255", quick=quick).run(model, images, labels)
        for quick in (False, True)
    ]
    assert float((found[0].success == found[1].success).double().mean()) > 0.97
    assert torch.equal(model(found[1].images).argmax(dim=1) != labels, found[1].success)


class StubKernel:
    """Stands in for a kernel of Triton's: notes what is compiled ahead and what is started."""

    def __init__(self) -> None:
        self.ahead: list[Any] = []
        self.started: list[Any] = []

    def warmup(self, *arguments: Any, grid: Any, **options: Any) -> None:
        self.ahead.append(self.compiled_for(arguments, options))

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.started.append(self.compiled_for(arguments, options))

    @staticmethod
    def compiled_for(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Triton compiles for options, for numbers that are 1 and for those that 16 divides; not for `total`."""
        numbers = arguments[6:]
        return tuple((number == 1, number % 16 == 0) for number in numbers), tuple(sorted(options.items()))


def test_kernels_are_compiled_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that a pass and its gradient start has been compiled ahead, once, and nothing else. Triton is a stub."""
    kernel, name = StubKernel(), "ecnn.attacks.speed.tensor_cores"
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    stubs: dict[str, Any] = {
        "jit": lambda **options: lambda function: kernel,
        "cdiv": lambda one, other: -(-one // other),
        "next_power_of_2": lambda number: 1 << (number - 1).bit_length(),
        "language": language,
    }
    for key, value in stubs.items():
        setattr(triton, key, value)
    language.constexpr = int  # type: ignore[attr-defined]
    for module in (triton, language):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, name)
    tensor_cores = importlib.import_module(name)
    monkeypatch.setattr(tensor_cores.QuickConvolution, "fits", lambda layer: type(layer) is nn.Conv2d)
    model = without_batch_norms(ResNet(5, depth=14, width=4).eval())
    _use_tensor_cores(model)
    images = torch.rand(3, 3, 16, 16)
    count = tensor_cores.compile_ahead(model, images)
    assert count == len(kernel.ahead) == len(set(kernel.ahead)) > 10
    assert not kernel.started
    assert tensor_cores.compile_ahead(model, images) == 0
    points = images.requires_grad_(True)
    torch.autograd.grad(model(points).sum(), points)
    assert len(kernel.started) > count
    assert set(kernel.started) == set(kernel.ahead)


@pytest.mark.gpu
def test_later_passes_compile_nothing() -> None:
    """After the kernels were compiled ahead, batches of several sizes start no compiler."""
    tensor_cores = pytest.importorskip("ecnn.attacks.speed.tensor_cores")
    model = quick_copy(ResNet(5, depth=8, width=8).cuda().eval(), "float32")
    images = torch.rand(37, 3, 28, 28, device="cuda")
    tensor_cores.compile_ahead(model, images)
    caches = tensor_cores._convolve.device_caches[torch.cuda.current_device()]
    before = len(caches[0])
    for rows in (37, 16, 5, 1):
        points = images[:rows].clone().requires_grad_(True)
        torch.autograd.grad(model(points).sum(), points)
    assert len(caches[0]) == before > 0
