"""More baselines: votes against loops, squeezers against scipy and Pillow, quantisers by hand."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from toys import RING, SMALL, count, shake

from ecnn import files
from ecnn.backbones import ResNet
from ecnn.baselines import (
    EMPIR,
    EMPIRObjective,
    FeatureSqueezing,
    Specialists,
    SpecialistsObjective,
    confusion_sets,
    count_confusions,
    log_mean_probs,
    majority_scores,
    majority_vote,
    output_code_baseline,
    quantise_activations,
    quantise_resnet,
    quantise_weights,
    reduce_bits,
    smooth_by_median,
    specialist_vote,
)
from ecnn.baselines.empir import QuantisedConv
from ecnn.codes import CodeMatrix, load_code
from ecnn.constructions import random_code
from ecnn.errors import InputError
from ecnn.models import MODELS
from ecnn.objectives import score_cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")

SETS = [[0, 1], [1, 2], [0, 2, 3], [3]]


@pytest.mark.parametrize(
    ("name", "channels", "options", "parameters"),
    [
        ("specialists", 3, {"sets": RING}, 21 * 273_066),
        ("specialists", 3, {"sets": RING}, 5_734_386),
        ("specialists", 1, {"sets": RING}, 5_728_338),
        # 32 5x5 filters, 64, 128; 7 * 32 maps of 4x4 to 256 units; 10 classes.
        (
            "multiscale",
            3,
            {},
            75 * 32 + 32 + 25 * 32 * 64 + 64 + 25 * 64 * 128 + 128 + 3584 * 256 + 256 + 2570,
        ),
        ("empir", 3, {}, 819_198),
        ("empir", 1, {}, 818_334),
        ("feature_squeezing", 3, {"bits": 5, "window": 2}, 273_066),
        ("feature_squeezing", 1, {"bits": 1, "window": 2}, 272_778),
    ],
)
def test_parameter_counts(name: str, channels: int, options: dict[str, Any], parameters: int) -> None:
    with torch.device("meta"):
        assert count(MODELS[name].build(10, channels, mean=None, **options)) == parameters


# Specialists: who knows what


def test_sets_are_a_class_and_the_majority_of_its_mistakes() -> None:
    confusion = [
        [9, 6, 3, 1],  # 6 of 10 are a majority
        [5, 0, 5, 0],  # 5 of 10 are not; equal ones in order
        [1, 1, 7, 1],  # one class must be left for the complement
        [0, 2, 0, 0],
    ]
    expected = ({0, 1}, {1, 0, 2}, {2, 0, 1}, {3, 1})
    assert confusion_sets(confusion) == tuple(frozenset(one) for one in expected)
    assert confusion_sets(confusion, share=0.0) == tuple(map(frozenset, ({0, 1}, {0, 1}, {0, 2}, {1, 3})))
    assert confusion_sets(confusion, share=0.6) == tuple(
        map(frozenset, ({0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {1, 3}))
    )
    assert confusion_sets(confusion, share=0.95)[2] == {0, 1, 2}
    assert confusion_sets(np.array(confusion) * 1000, share=0.5) == confusion_sets(confusion)
    alternating = np.tile(np.arange(40) % 2, (40, 1))
    assert confusion_sets(alternating)[0] == {0, *range(1, 22, 2)}  # 11 of 20, the first ones


def test_counting_confusions_by_hand() -> None:
    """The class is the place of the largest pixel; the attack moves every image one place on, except class 2."""

    class Largest(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1)

    labels = torch.tensor([0, 0, 1, 2, 2, 2, 0])
    images = F.one_hot(labels, 3).float().view(7, 1, 1, 3)
    images[6] = images[2]  # said to be class 1 before any attack: not counted
    seen: list[int] = []

    def attack(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        assert not model.training
        seen.append(len(images))
        return torch.where((labels == 2)[:, None, None, None], images, images.roll(1, dims=3))

    model = Largest().train()
    found = count_confusions(model, images, labels, attack, batch_size=3)
    assert found.tolist() == [[0, 2, 0], [0, 0, 1], [0, 0, 3]]
    assert seen == [3, 3, 1]
    assert model.training


def test_every_class_has_as_many_experts() -> None:
    model = Specialists(4, sets=SETS, **SMALL)
    assert model.knows.shape == (9, 4)
    assert model.knows.sum(dim=0).tolist() == [5] * 4
    assert torch.equal(model.knows[:4], ~model.knows[4:8])
    assert model.knows[8].all()
    scores = model.eval().member_scores(torch.rand(5, 3, 8, 8))
    probs = torch.softmax(scores, dim=2)
    assert (probs[:, ~model.knows] == 0).all()
    assert (probs[:, model.knows] > 0).all()
    assert (probs[:, 3, 3] == 1).all()  # it knows nothing else


# Specialists: the vote


def vote_by_loop(probs: np.ndarray, knows: np.ndarray) -> np.ndarray:
    """The appendix's rule, one image at a time, on probabilities."""
    results = []
    for said in probs:
        votes = said.argmax(axis=1)
        chosen = list(range(len(said)))
        for one in range(said.shape[1]):
            experts = [member for member in chosen if knows[member, one]]
            if all(votes[member] == one for member in experts):
                results.append(said[experts].mean(axis=0))
                break
        else:
            results.append(said.mean(axis=0))
    return np.array(results)


#: Two classes 0 and 1 have the experts {0}, {1} and the generalist; class 2 is known by member 1 and the generalist.
KNOWS = torch.tensor([[True, False, False], [False, True, True], [True, True, True]])


@pytest.mark.parametrize(
    ("probs", "expected"),
    [
        # Both experts of class 1 vote for it: member 0, which can only say 0, is not asked.
        ([[1, 0, 0], [0, 0.8, 0.2], [0.1, 0.6, 0.3]], [0.05, 0.7, 0.25]),
        # Both experts of class 0 vote for it.
        ([[1, 0, 0], [0, 0.5, 0.5], [0.6, 0.2, 0.2]], [0.8, 0.1, 0.1]),
        # The generalist says 2, member 1 says 1: nobody has all votes, all are averaged.
        ([[1, 0, 0], [0, 0.6, 0.4], [0.2, 0.2, 0.6]], [0.4, 0.8 / 3, 1 / 3]),
        # Member 1 is undecided and votes for the first: class 1 has all votes, class 2 has not.
        ([[1, 0, 0], [0, 0.5, 0.5], [0.2, 0.5, 0.3]], [0.1, 0.5, 0.4]),
        ([[1, 0, 0], [0, 0.5, 0.5], [0.2, 0.3, 0.5]], [0.4, 0.8 / 3, 1 / 3]),
    ],
)
def test_the_vote_by_hand(probs: Any, expected: list[float]) -> None:
    scores = torch.tensor(probs, dtype=torch.float64)[None].clamp_min(1e-300).log()
    found = specialist_vote(scores, KNOWS)
    np.testing.assert_allclose(found.exp().numpy(), [expected], rtol=1e-12)


def test_the_vote_equals_its_loop() -> None:
    rng = np.random.default_rng(0)
    both = 0
    for _ in range(20):
        known = rng.random((4, 4)) < 0.5
        known[0], known[1] = [True, False, False, False], [True, True, True, False]
        knows = np.concatenate([known, ~known, np.ones((1, 4), dtype=bool)])
        leaning = 2.5 * np.eye(4)[rng.integers(4, size=40)][:, None]
        scores = torch.from_numpy(rng.standard_normal((40, 9, 4)) + leaning)
        probs = (
            torch.softmax(scores.masked_fill(~torch.from_numpy(knows), -math.inf), dim=2)
            .nan_to_num(0.0)
            .numpy()
        )
        if not knows.any(axis=1).all():
            continue
        found = specialist_vote(scores, torch.from_numpy(knows)).exp().numpy()
        np.testing.assert_allclose(found, vote_by_loop(probs, knows), rtol=1e-10)
        jumps = np.abs(found - probs.mean(axis=1)).max(axis=1) > 1e-9
        both += int(jumps.any() and not jumps.all())
    assert both > 5


def test_scores_jump_where_an_expert_joins_and_the_mean_does_not() -> None:
    def scores(lead: float) -> Tensor:
        rows = [[0.0, 0, 0], [0, 2, 0], [0, lead, 0]]
        return torch.tensor([rows], dtype=torch.float64)

    below, above = specialist_vote(scores(-1e-6), KNOWS), specialist_vote(scores(1e-6), KNOWS)
    assert (below - above).abs().max() > 0.1
    masked = [scores(lead).masked_fill(~KNOWS, -1e9) for lead in (-1e-6, 1e-6)]
    assert (log_mean_probs(masked[0]) - log_mean_probs(masked[1])).abs().max() < 1e-5


def test_a_specialist_learns_its_own_classes_only() -> None:
    torch.manual_seed(0)
    model = Specialists(4, sets=SETS, **SMALL).double()
    shake(model)
    images = torch.rand(6, 3, 8, 8, dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    torch.autograd.backward(SpecialistsObjective()(model, images, labels))
    grads = model.head.weight.grad
    assert grads is not None
    learns = [bool(one.any()) for one in grads]
    # Members 3 and 6 know one class alone, member 4 neither of the classes that came.
    expected = [bool(row[:2].any()) and int(row.sum()) > 1 for row in model.knows]
    assert learns == expected
    assert expected.count(False) == 3
    assert not grads.transpose(1, 2)[~model.knows].any()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_the_objective_equals_training_each_alone() -> None:
    torch.manual_seed(0)
    model = Specialists(4, sets=SETS, **SMALL).double().eval()
    shake(model)
    images, labels = torch.rand(9, 3, 8, 8, dtype=torch.float64), torch.arange(9) % 4
    scores, expected = model.member_scores(images).detach(), 0.0
    for member, knows in enumerate(model.knows):
        classes = knows.nonzero().squeeze(1).tolist()
        rows = [row for row in range(9) if int(labels[row]) in classes]
        own = torch.tensor([classes.index(int(labels[row])) for row in rows])
        expected += float(F.cross_entropy(scores[rows, member][:, classes], own))
    assert float(SpecialistsObjective()(model, images, labels).detach()) == pytest.approx(expected, rel=1e-10)


# Squeezers


@pytest.mark.parametrize("bits", range(1, 9))
def test_reducing_bits_equals_fractions_and_pillow(bits: int) -> None:
    """Every byte to its nearest level, computed without rounding errors, and through a Pillow look-up table."""
    levels = 2**bits - 1
    places = [round(Fraction(byte * levels, 255)) for byte in range(256)]
    pixels = torch.arange(256, dtype=torch.float64) / 255
    found = reduce_bits(pixels, bits)
    assert (found * levels).round().int().tolist() == places
    assert (found - torch.tensor(places, dtype=torch.float64) / levels).abs().max() < 1e-15
    image = Image.frombytes("L", (16, 16), bytes(range(256)))
    table = [round(Fraction(255 * place, levels)) for place in places]
    shown = (255 * reduce_bits(pixels.float().view(16, 16), bits)).round().to(torch.uint8).numpy()
    assert np.array_equal(shown, np.asarray(image.point(table)))
    assert torch.equal(reduce_bits(found, bits), found)
    assert len(set(found.tolist())) == 2**bits


def test_reducing_bits_by_hand() -> None:
    values = torch.tensor([0.0, 0.49, 0.5, 0.51, 1.0, 1 / 6, 0.17], requires_grad=True)
    assert reduce_bits(values, 1).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    result = reduce_bits(values, 2)
    assert torch.equal(result[[0, 3, 4, 6]] * 3, torch.tensor([0.0, 2.0, 3.0, 1.0]))
    (gradient,) = torch.autograd.grad((result * torch.arange(7.0)).sum(), values)
    assert torch.equal(gradient, torch.arange(7.0))


@pytest.mark.parametrize("window", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [(8, 11), (2, 3), (1, 1)])
def test_the_median_equals_scipy(window: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    images = torch.rand(3, 2, *size)
    expected = scipy.ndimage.median_filter(images.numpy(), size=(1, 1, window, window), mode="reflect")
    given = images.clone()
    assert np.array_equal(smooth_by_median(images, window).numpy(), expected)
    assert torch.equal(images, given)


def test_the_median_equals_pillow_and_has_gradients() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(256, (13, 9), dtype=torch.uint8)
    expected = np.asarray(Image.fromarray(pixels.numpy()).filter(ImageFilter.MedianFilter(3)))
    found = smooth_by_median(pixels[None, None].double(), 3)[0, 0]
    assert np.array_equal(found.numpy(), expected)
    images = torch.rand(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: smooth_by_median(values, 2), images)


class Brightness(nn.Module):
    """Two classes: probability of the first is the mean of all pixels, held away from 0 and 1."""

    def forward(self, images: Tensor) -> Tensor:
        bright = (0.1 + 0.8 * images.flatten(1).mean(dim=1)).clamp(1e-6, 1 - 1e-6)
        return torch.stack([bright, 1 - bright], dim=1).log()


def test_detection_by_hand() -> None:
    """Rounding 0.4 to 0 moves the first probability by 0.32, and both of them that far: an L1 distance of 0.64."""
    images = torch.zeros(4, 1, 3, 3)
    images[1] = 0.4
    images[2, 0, 1, 1] = 1.0  # removed by the median: 1/9 of the mean
    images[3] = 1.0
    detector = FeatureSqueezing(Brightness(), bits=1, window=3, threshold=0.5)
    found = detector.detect(images)
    np.testing.assert_allclose(found.distance.numpy(), [0, 0.64, 1.6 / 9, 0], atol=1e-6)
    assert found.flagged.tolist() == [False, True, False, False] == detector.flags(images).tolist()
    assert torch.equal(found.scores, Brightness()(images))
    assert torch.equal(found.distance, detector.distances(images))
    strict = FeatureSqueezing(Brightness(), bits=1, window=3, threshold=0.1)
    assert strict.flags(images).tolist() == [False, True, True, False]


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.07, 0.29, 0.5, 0.99, 0.058])
def test_a_threshold_has_the_rate_that_was_asked(rate: float) -> None:
    torch.manual_seed(0)
    images = torch.rand(100, 1, 4, 4)
    detector = FeatureSqueezing(Brightness(), bits=2, window=2)
    returned = detector.fit_threshold(images, rate, batch_size=7)
    assert returned == float(detector.threshold)
    wanted = {0.058: 5}.get(rate, round(100 * rate))
    assert int(detector.flags(images).sum()) == wanted
    other = FeatureSqueezing(Brightness(), bits=2, window=2)
    other.load_state_dict(detector.state_dict())
    assert torch.equal(other.flags(images), detector.flags(images))


def test_ties_never_raise_the_rate() -> None:
    """Half of the images have one and the same distance: flagging them would be too many, so none is flagged."""
    images = torch.zeros(20, 1, 4, 4)
    images[:10] = 0.4
    detector = FeatureSqueezing(Brightness(), bits=1, window=2)
    detector.fit_threshold(images, 0.25)
    assert int(detector.flags(images).sum()) == 0
    detector.fit_threshold(images, 0.5)
    assert detector.flags(images).tolist() == [True] * 10 + [False] * 10


def test_a_threshold_is_fitted_in_eval_mode_and_the_mode_comes_back() -> None:
    torch.manual_seed(0)
    model = ResNet(4, 1, **SMALL).double()
    shake(model)
    detector = FeatureSqueezing(model, bits=3, window=2).train()
    before = copy.deepcopy(model.state_dict())
    detector.fit_threshold(torch.rand(40, 1, 8, 8, dtype=torch.float64), 0.1)
    assert detector.training
    assert model.training
    assert detector.threshold.dtype == torch.float64
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


# EMPIR: quantisers


def test_weights_by_hand() -> None:
    """Two bits: -1, -1/3, 1/3 and 1. Written by their arctangents, so that tanh(w) / max is a round number."""
    shares = torch.tensor([1.0, -1.0, 0.5, 0.0, -0.5, 0.7, -0.1], dtype=torch.float64)
    found = quantise_weights(torch.atanh(0.8 * shares), 2)
    # 0 is half way between -1/3 and 1/3; of their numbers 1 and 2 the even one is taken.
    expected = torch.tensor([3.0, -3, 1, 1, -1, 3, -1], dtype=torch.float64) / 3
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert len(set(quantise_weights(torch.randn(10_000), 4).tolist())) == 16
    assert quantise_weights(torch.zeros(3), 2).isfinite().all()


def test_weights_have_the_gradient_of_the_formula_without_rounding() -> None:
    torch.manual_seed(0)
    weights = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(3, 4, dtype=torch.float64)
    (found,) = torch.autograd.grad((quantise_weights(weights, 2) * pull).sum(), weights)
    bent = torch.tanh(weights)
    (expected,) = torch.autograd.grad((bent / bent.abs().max() * pull).sum(), weights)
    torch.testing.assert_close(found, expected)


def compares(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether the function or its gradient asks which numbers are equal."""
    gradient = make_fx(lambda values: torch.autograd.grad(function(values).sum(), values))
    nodes = gradient(torch.randn(3, 4, requires_grad=True)).graph.nodes
    return any("aten.eq" in str(node.target) for node in nodes)


def test_no_maximum_is_searched_for_by_equality() -> None:
    """Compiled code computes in float32 what it keeps in bfloat16, so that nothing would equal the maximum."""
    assert compares(lambda values: values / values.abs().amax())
    assert not compares(lambda values: quantise_weights(values, 4))


@pytest.mark.slow
@pytest.mark.full
def test_compiled_bfloat16_weights_have_a_gradient() -> None:
    """What the test above is for, with a compiler."""
    torch.manual_seed(0)
    weights = (0.3 * torch.randn(8, 8, 3, 3)).bfloat16().requires_grad_(True)
    pull = torch.randn(8, 8, 3, 3).bfloat16()
    compiled = torch.compile(lambda values: quantise_weights(values, 4), dynamic=False)
    (found,) = torch.autograd.grad((compiled(weights) * pull).sum(), weights)
    (expected,) = torch.autograd.grad((quantise_weights(weights, 4) * pull).sum(), weights)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)


def test_activations_by_hand_and_straight_through() -> None:
    values = torch.tensor([-0.3, 0.0, 0.16, 0.17, 0.5, 0.51, 0.9, 1.0, 1.4], requires_grad=True)
    found = quantise_activations(values, 2)
    torch.testing.assert_close(found, torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3]) / 3.0)
    pull = torch.arange(1.0, 10.0)
    (gradient,) = torch.autograd.grad((found * pull).sum(), values)
    inside = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 0])
    assert torch.equal(gradient, pull * inside)


def test_all_but_the_first_and_last_layer_are_quantised() -> None:
    torch.manual_seed(0)
    plain = ResNet(4, **SMALL).eval()
    shake(plain)
    network = quantise_resnet(copy.deepcopy(plain), activation_bits=2, weight_bits=4)
    assert network.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(values, plain.state_dict()[name]) for name, values in network.state_dict().items())
    read: dict[str, Tensor] = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(
                lambda module, given, result, name=name: read.update({name: given[0]})
            )
    network(torch.rand(2, 3, 8, 8))

    def on_levels(maps: Tensor) -> bool:
        return bool(
            ((3 * maps - (3 * maps).round()).abs() < 1e-6).all() and maps.min() >= 0 and maps.max() <= 1
        )

    quantised = {name for name, module in network.named_modules() if isinstance(module, QuantisedConv)}
    assert set(read) - quantised == {"trunk.stem.conv", "head"}
    assert {name for name, maps in read.items() if on_levels(maps)} == quantised
    assert len(quantised) == 3 * 2 + 2
    twelfths = 12 * read["head"]  # means of four pixels: what they would be if the last maps were rounded
    assert (twelfths - twelfths.round()).abs().max() > 0.1
    unchanged = quantise_resnet(copy.deepcopy(plain), activation_bits=32, weight_bits=32)
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(unchanged(images), plain(images))


def test_a_quantised_convolution_runs_with_quantised_kernels() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2).double()
    maps = torch.rand(2, 4, 7, 7, dtype=torch.float64)
    bent = np.tanh(plain.weight.detach().numpy())
    kernels = 2 * np.rint((bent / (2 * np.abs(bent).max()) + 0.5) * 15) / 15 - 1
    expected = F.conv2d(maps, torch.from_numpy(kernels), plain.bias, stride=2, padding=1, groups=2)
    torch.testing.assert_close(QuantisedConv(plain, 4)(maps), expected, atol=1e-12, rtol=0)


# EMPIR: the vote


@pytest.mark.parametrize(
    ("best", "winner"),
    [
        ((2, 2, 2), 2),
        ((0, 1, 1), 1),  # the full-precision member is outvoted
        ((1, 0, 1), 1),
        ((2, 2, 0), 2),
        ((2, 0, 1), 2),  # all differ: the full-precision member decides
        ((1, 2, 0), 1),
    ],
)
def test_the_majority_by_hand(best: tuple[int, ...], winner: int) -> None:
    # Outvoted members are very sure, which a mean of probabilities would follow.
    sure = torch.tensor([1.0 if one == winner else 30.0 for one in best])
    scores = (F.one_hot(torch.tensor(best), 3) * sure[:, None])[None].requires_grad_(True)
    assert majority_vote(scores).tolist() == [winner]
    found = majority_scores(scores)
    in_majority = [index for index, one in enumerate(best) if one == winner]
    expected = torch.softmax(scores[0, in_majority], dim=1).mean(dim=0)
    torch.testing.assert_close(found[0].exp(), expected)
    (gradient,) = torch.autograd.grad(score_cross_entropy(found, torch.tensor([winner])).sum(), scores)
    assert [bool(row.any()) for row in gradient[0]] == [one == winner for one in best]


def test_argmax_is_the_vote_whatever_rounding_does() -> None:
    """Scores one rounding step apart, and large ones whose differences vanish in a sum."""
    torch.manual_seed(0)
    coarse = torch.randint(3, (20_000, 3, 4)).float()
    ulp = torch.randint(-2, 3, (20_000, 3, 4)).float() * 2**-22
    for scores in (coarse, 1 + ulp, 100 * coarse + ulp, ulp / 16, 1000 * coarse, torch.randn(20_000, 3, 4)):
        assert torch.equal(majority_scores(scores).argmax(dim=1), majority_vote(scores))
        assert torch.equal(majority_scores(scores.double()).argmax(dim=1), majority_vote(scores))
    assert majority_vote(torch.randn(50, 5, 7)).shape == (50,)


def test_majority_equals_counting() -> None:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((300, 5, 4))
    for said, winner in zip(
        scores.argmax(axis=2), majority_vote(torch.from_numpy(scores)).tolist(), strict=True
    ):
        most = np.bincount(said).max()
        assert winner == next(one for one in said if np.bincount(said)[one] == most)


def test_members_of_empir_share_nothing_and_differ() -> None:
    torch.manual_seed(0)
    model = EMPIR(4, 3, **SMALL).eval()
    images = torch.rand(3, 3, 8, 8)
    scores = model.member_scores(images)
    assert scores.shape == (3, 3, 4)
    for index, member in enumerate(model.members):
        assert torch.equal(scores[:, index], member(images))
    assert torch.equal(model.mean_scores(images), log_mean_probs(scores))
    state = model.members[0].state_dict()
    model.members[1].load_state_dict(state)
    model.members[2].load_state_dict(state)
    same = model.member_scores(images)  # now precision alone tells them apart
    assert (same[:, 0] - same[:, 1]).abs().max() > 1e-3
    assert (same[:, 1] - same[:, 2]).abs().max() > 1e-3
    labels = torch.tensor([0, 1, 2])
    expected = sum(F.cross_entropy(same[:, index], labels) for index in range(3))
    torch.testing.assert_close(EMPIRObjective()(model, images, labels), expected)


# Output codes on features


def clusters(seed: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(120) % 6
    return 5 * np.eye(6)[labels] + spread * rng.standard_normal((120, 6)), labels


def test_output_codes_solve_clusters_and_fail_on_noise() -> None:
    code = random_code(6, 9, seed=0)
    train, test = clusters(0, 0.3), clusters(1, 0.3)
    easy = output_code_baseline(*train, *test, code=code, seed=0)
    assert easy.random_code >= 0.95
    assert easy.own_code == 1.0
    blind = output_code_baseline(np.zeros((120, 6)), train[1], *test, code=code, seed=0)
    assert blind.random_code == blind.own_code == pytest.approx(1 / 6)  # one class for all
    ternary = CodeMatrix(np.array([[0, 0], [0, 1], [1, 1], [1, 2], [2, 2], [2, 0]]), arity=3)
    assert output_code_baseline(*train, *test, code=ternary, seed=0).own_code == 1.0


def test_a_wrong_column_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of 10x30 that answer at random for four of 30 tasks change no class: its distance allows more."""
    from sklearn.linear_model import LogisticRegression

    code, rng = load_code("10x30"), np.random.default_rng(0)
    assert code.min_row_distance > 8
    labels = np.arange(100) % 10
    calls = 0

    def predict(self: Any, features: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        own = code.symbols[labels, (calls - 1) % 30]
        return rng.integers(2, size=100) if calls <= 4 else own

    fits, fit_one = [], LogisticRegression.fit

    def counted_fit(self: Any, features: np.ndarray, targets: np.ndarray) -> Any:
        fits.append(set(targets))
        return fit_one(self, features, targets)

    monkeypatch.setattr(LogisticRegression, "predict", predict)
    monkeypatch.setattr(LogisticRegression, "fit", counted_fit)
    features = 5 * np.eye(10)[labels]
    assert output_code_baseline(features, labels, features, labels, code=code, seed=0).own_code == 1.0
    assert calls == 30
    assert len(fits) == 60  # as many random columns as columns of ours


# By name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("specialists", {"sets": [frozenset(one) for one in SETS], **SMALL}),
        ("specialists", {"sets": SETS, "batch_norm": False, "activation": "silu", **SMALL}),
        ("feature_squeezing", {"bits": 5, "window": 3, **SMALL}),
        ("empir", SMALL),
        ("multiscale", {"width": 4, "hidden": 8}),
        ("empir", {"precisions": [(3, 32), (32, 5)], **SMALL}),
    ],
)
def test_config_and_weights_bring_a_baseline_back(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = MODELS[name].build(4, 3, mean=torch.rand(3, 8, 12), **options)
    shake(model)
    if name == "feature_squeezing":
        model.fit_threshold(torch.rand(20, 3, 8, 12))
    files.write_toml(tmp_path / "spec.toml", {"model": json.loads(json.dumps(model.config))})
    config = files.read_toml(tmp_path / "spec.toml")["model"]
    for key in ("num_classes", "in_channels"):  # a run folder knows them from its data
        config.pop(key)
    back: Any = MODELS[name].build(4, 3, mean=torch.zeros(3, 8, 12), **config)
    assert back.config == model.config
    back.load_state_dict(model.state_dict(), strict=True)
    images = torch.rand(6, 3, 8, 12)
    assert torch.equal(back.eval()(images), model.eval()(images))
    assert torch.equal(copy.deepcopy(model)(images), model(images))
    if name == "feature_squeezing":
        assert torch.equal(back.flags(images), model.flags(images))
        assert torch.equal(model(images), model.model(images))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: confusion_sets([[0, 1], [1, 0]]), "at least 3 classes"),
        (lambda: confusion_sets(np.ones((3, 4))), r"\(3, 4\)"),
        (lambda: confusion_sets(-np.ones((3, 3))), "counts from 0 up"),
        (lambda: confusion_sets(np.eye(3)), "class 0 was never mistaken"),
        (lambda: confusion_sets(np.ones((3, 3)), share=1), "share must be"),
        (lambda: Specialists(4, sets=SETS[:3], **SMALL), "one for each of the 4 classes, not 3"),
        (lambda: Specialists(4, sets=[*SETS[:3], [4]], **SMALL), "from 0 to 3, not 4"),
        (lambda: Specialists(4, sets=[*SETS[:3], range(4)], **SMALL), "set 3 must leave out"),
        (lambda: Specialists(4, sets=[*SETS[:3], []], **SMALL), "set 3 must leave out"),
        (lambda: MODELS["specialists"].build(4, 3, mean=None), "needs sets"),
        (
            lambda: SpecialistsObjective()(ResNet(4, **SMALL), torch.rand(1, 3, 8, 8), torch.tensor([0])),
            "Specialists needs a model with the attribute knows",
        ),
        (
            lambda: count_confusions(Brightness(), torch.rand(0, 1, 2, 2), torch.zeros(0), lambda m, x, y: x),
            "not on 0 images",
        ),
        (
            lambda: FeatureSqueezing(Brightness(), bits=0, window=2),
            "bits must be a whole number from 1 to 16",
        ),
        (lambda: FeatureSqueezing(Brightness(), bits=1, window=1), "window must be a whole number from 2 up"),
        (lambda: FeatureSqueezing(Brightness(), bits=1, window=2, threshold=-1), "threshold must be"),
        (
            lambda: FeatureSqueezing(Brightness(), bits=1, window=2).flags(torch.rand(1, 1, 4, 4)),
            "fit_threshold",
        ),
        (
            lambda: FeatureSqueezing(Brightness(), bits=1, window=2).fit_threshold(
                torch.rand(2, 1, 4, 4), 1.0
            ),
            "below 1",
        ),
        (
            lambda: FeatureSqueezing(Brightness(), bits=1, window=2).fit_threshold(torch.rand(0, 1, 4, 4)),
            "at least one image",
        ),
        (lambda: quantise_weights(torch.rand(3), 1), "from 2 to 16"),
        (lambda: quantise_activations(torch.rand(3), 17), "from 1 to 16"),
        (lambda: EMPIR(4, precisions=[], **SMALL), "pairs"),
        (lambda: EMPIR(4, precisions=[(2, 2, 2)], **SMALL), "pairs"),
        (lambda: EMPIR(4, precisions=[(2, 1)], **SMALL), "weight_bits must be a whole number from 2"),
        (
            lambda: EMPIRObjective()(ResNet(4, **SMALL), torch.rand(1, 3, 8, 8), torch.tensor([0])),
            "member_scores",
        ),
        (
            lambda: output_code_baseline(
                np.zeros((2, 3)),
                np.array([0, 1]),
                np.zeros((1, 3)),
                np.array([0]),
                code=load_code("10x10"),
                seed=0,
            ),
            "all 10 classes",
        ),
        (
            lambda: output_code_baseline(
                np.zeros((2, 3)),
                np.array([0]),
                np.zeros((1, 3)),
                np.array([0]),
                code=load_code("10x10"),
                seed=0,
            ),
            "one label each",
        ),
    ],
)
def test_refusals(build: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()
