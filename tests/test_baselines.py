"""Baselines: published counts and formulas, equality with loops over members, independence."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from torch import Tensor, nn
from torch.func import functional_call
from toys import SMALL, Counting, count, half_spaces, shake

from ecnn.backbones import ResNet
from ecnn.baselines import (
    TANH_SIZES,
    ADPObjective,
    Ensemble,
    TanhEnsemble,
    TanhEnsembleObjective,
    TRADESObjective,
    ensemble_diversity,
    ensemble_entropy,
    independent_ecoc,
    kl_divergence,
    log_mean_probs,
    tanh_code,
)
from ecnn.baselines.tanh_ensemble import shift_and_turn
from ecnn.codes import CodeMatrix, load_code
from ecnn.constructions import random_code
from ecnn.errors import InputError
from ecnn.models import MODELS
from ecnn.objectives import MemberObjective, ScoreObjective

pytestmark = pytest.mark.usefixtures("one_thread")

CODE = random_code(4, 5, seed=0)
SMALL_TANH: dict[str, Any] = {"image_size": (8, 12), "filters": (2, 3, 4), "bit_filters": 2}


def with_labels(model: nn.Module, batch: int = 6, size: tuple[int, int] = (8, 12)) -> tuple[Tensor, Tensor]:
    channels: Any = model.in_channels
    images = torch.rand(batch, channels, *size, dtype=next(model.parameters()).dtype)
    return images, torch.arange(batch) % 4


# Exact sizes


@pytest.mark.parametrize(
    ("name", "channels", "options", "parameters"),
    [
        ("adp", 3, {}, 819_198),
        ("adp", 1, {}, 818_334),
        ("adp", 3, {"num_members": 1}, 273_066),
        ("adp", 1, {"num_members": 1}, 272_778),
        ("tanh_ensemble", 3, {}, 2_313_104),
        ("tanh_ensemble", 3, TANH_SIZES["cifar10"], 2_313_104),
        ("tanh_ensemble", 1, TANH_SIZES["mnist"], 401_168),
        ("independent_ecoc", 3, {"code": load_code("10x30")}, 30 * 206_993),
        ("independent_ecoc", 3, {"code": load_code("10x30"), "branch": "conv"}, 6_209_790),
        ("independent_ecoc", 3, {"code": load_code("10x30"), "branch": "residual"}, 8_194_590),
    ],
)
def test_parameter_counts(name: str, channels: int, options: dict[str, Any], parameters: int) -> None:
    with torch.device("meta"):
        assert count(MODELS[name].build(10, channels, mean=None, **options)) == parameters


@pytest.mark.parametrize(("channels", "parameters"), [(3, 273_066), (1, 272_778)])
def test_one_member_of_adp_is_a_resnet20(channels: int, parameters: int) -> None:
    with torch.device("meta"):
        assert count(ResNet(10, channels, depth=20)) == parameters


# Members at once


def single_resnets(model: Ensemble) -> list[ResNet]:
    """The ensemble's members as networks of their own, with the same weights."""
    options = {key: model.config[key] for key in ("depth", "width", "batch_norm", "activation")}
    state, members = model.state_dict(), []
    for index in range(model.num_members):
        single = ResNet(
            model.config["num_classes"], model.in_channels, mean=model.centre.mean, **options
        ).double()
        own = {
            name: values if values.ndim == 0 else values.chunk(model.num_members)[index]
            for name, values in state.items()
            if name.startswith("trunk.")
        }
        own |= {
            "centre.mean": state["centre.mean"],
            "head.weight": state["head.weight"][index].T,
            "head.bias": state["head.bias"][index],
        }
        single.load_state_dict(own)
        members.append(single.train(model.training))
    return members


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"batch_norm": False, "activation": "silu"}, {"num_members": 1}])
def test_an_ensemble_equals_a_loop_over_its_members(options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    model = Ensemble(5, 3, mean=torch.rand(3, 8, 12), **SMALL, **options).double()
    shake(model)
    model.train(training)
    images, labels = with_labels(model)
    singles = single_resnets(copy.deepcopy(model))
    expected = torch.stack([single(images) for single in singles], dim=1)
    found = model.member_scores(images)
    assert found.shape == (6, model.num_members, 5)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    mean_probs = torch.softmax(expected, dim=2).mean(dim=1)
    scores = model(images)
    torch.testing.assert_close(scores, mean_probs.log(), atol=1e-10, rtol=0)
    torch.testing.assert_close(torch.softmax(scores, dim=1), mean_probs, atol=1e-12, rtol=0)
    torch.autograd.backward(ADPObjective()(model, images, labels))
    torch.autograd.backward(ADPObjective()(_Looped(singles), images, labels))
    stem: Any = model.trunk.stem
    for index, single in enumerate(singles):
        theirs: Any = single.trunk.stem
        own = stem.conv.weight.grad.chunk(model.num_members)[index]
        torch.testing.assert_close(own, theirs.conv.weight.grad, atol=1e-9, rtol=0)


class _Looped:
    """What ADP's objective needs, one member after the other."""

    def __init__(self, members: list[ResNet]) -> None:
        self.members = members

    def member_scores(self, images: Tensor) -> Tensor:
        return torch.stack([member(images) for member in self.members], dim=1)


def loop_over_bits(model: TanhEnsemble, images: Tensor) -> Tensor:
    """(batch, bit) logits the slow way, from the text of the architecture: chunks, then bits, one at a time."""
    config, state = model.config, model.state_dict()
    order, chunks = config["order"], config["num_chunks"]
    centred = images - 0.5
    if config["in_channels"] == 1:
        grey = centred
    else:
        red, green, blue = (float(np.float32(weight)) for weight in (0.2989, 0.5870, 0.1140))
        grey = red * centred[:, :1] + green * centred[:, 1:2] + blue * centred[:, 2:]
    logits = []
    for bit in range(order):
        chunk = bit // (order // chunks)
        maps, place = centred, 0
        for layer in range(9):
            weight, bias = (
                state[f"chunks.{place}.conv.{kind}"].chunk(chunks)[chunk] for kind in ("weight", "bias")
            )
            assert weight.shape[2] == (5 if layer < 2 else 3)
            stride = 2 if layer % 3 == 2 else 1
            maps = F.elu(torch.conv2d(maps, weight, bias, padding=weight.shape[2] // 2, stride=stride))
            place += 1
            if config["batch_norm"] and layer < 8:
                own = {
                    kind: state[f"chunks.{place}.{kind}"].chunk(chunks)[chunk]
                    for kind in ("running_mean", "running_var", "weight", "bias")
                }
                maps = F.batch_norm(maps, **own, training=model.training)
                place += 1
        assert f"chunks.{place}.conv.weight" not in state
        side = grey
        for layer in range(3):
            weight, bias = (
                state[f"bits.grey.{layer}.conv.{kind}"].chunk(order)[bit] for kind in ("weight", "bias")
            )
            side = F.elu(torch.conv2d(side, weight, bias, padding=weight.shape[2] // 2, stride=2))
        joined = torch.cat(
            [state[f"bits.from_{part}.weight"].chunk(order)[bit] for part in ("chunk", "grey")], dim=1
        )
        both = F.pad(torch.cat([maps, side], dim=1), (0, 1, 0, 1))
        both = F.elu(torch.conv2d(both, joined, state["bits.from_chunk.bias"].chunk(order)[bit]))
        weight, bias = (state[f"bits.mix.{kind}"].chunk(order)[bit] for kind in ("weight", "bias"))
        features = F.elu(torch.conv2d(F.pad(both, (0, 1, 0, 1)), weight, bias)).flatten(1)
        for layer in range(5):
            features = (
                features @ state[f"bits.dense.{layer}.weight"][bit] + state[f"bits.dense.{layer}.bias"][bit]
            )
            if layer < 3:
                features = F.elu(features)
        logits.append(features[:, 0])
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"batch_norm": False, "in_channels": 1}, {"order": 8, "num_chunks": 2}]
)
def test_a_tanh_ensemble_equals_a_loop_over_its_bits(options: dict[str, Any], training: bool) -> None:
    torch.manual_seed(0)
    model = TanhEnsemble(**{"num_classes": 7, **SMALL_TANH, **options}).double()
    shake(model)
    model.train(training)
    images, _ = with_labels(model)
    expected = loop_over_bits(copy.deepcopy(model), images)
    found = model.member_logits(images)
    assert found.shape == (6, model.config["order"])
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert found.std(dim=1).min() > 1e-6  # members differ, so a mix-up would show


def calls_of(model: nn.Module, objective: Any) -> Counter[str]:
    images, labels = with_labels(model)
    counting = Counting()
    with counting:
        torch.autograd.backward(objective(model, images, labels))
    return counting.calls


def test_no_loop_over_members() -> None:
    few, many = (calls_of(Ensemble(5, num_members=k, **SMALL), ScoreObjective()) for k in (2, 5))
    assert few == many
    objective = TanhEnsembleObjective(noise=0.1, blend=0.1)
    few, many = (
        calls_of(TanhEnsemble(5, order=order, num_chunks=chunks, **SMALL_TANH), objective)
        for order, chunks in ((8, 2), (16, 4))
    )
    assert few == many
    assert few["aten.convolution.default"] == 9 + 3 + 3


@pytest.mark.parametrize(
    ("model", "objective"),
    [
        (Ensemble(5, **SMALL), ADPObjective()),
        (TanhEnsemble(5, **SMALL_TANH), TanhEnsembleObjective(noise=0.1, blend=0.1, rotation=15)),
        (ResNet(5, **SMALL), TRADESObjective(eps=0.1, steps=2, step_size=0.05)),
    ],
    ids=["adp", "tanh_ensemble", "trades"],
)
def test_objectives_never_wait_for_the_device(model: nn.Module, objective: Any) -> None:
    """Neither a value on the host nor a shape that depends on one: a CUDA graph could not hold it."""
    words = ("_local_scalar", "nonzero", "item", "randperm", "linalg_lu", "slogdet")
    assert not [call for call in calls_of(model, objective) if any(word in call for word in words)]


# ADP


def softmax_by_numpy(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def adp_by_numpy(
    member_scores: np.ndarray, labels: np.ndarray, alpha: float, beta: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """The published formula image by image: loss, entropies of the mean, logarithms of the diversity."""
    losses, entropies, diversities = [], [], []
    for scores, label in zip(member_scores, labels, strict=True):
        probs = softmax_by_numpy(scores)  # (member, class)
        mean = probs.mean(axis=0)
        entropies.append(-(mean * np.log(mean)).sum())
        wrong = np.delete(probs, label, axis=1)
        wrong = wrong / np.linalg.norm(wrong, axis=1, keepdims=True)
        diversities.append(np.log(np.linalg.det(wrong @ wrong.T + 1e-6 * np.eye(len(wrong)))))
        losses.append(-np.log(probs[:, label]).sum() - alpha * entropies[-1] - beta * diversities[-1])
    return float(np.mean(losses)), np.array(entropies), np.array(diversities)


@pytest.mark.parametrize(("members", "classes"), [(3, 10), (2, 3), (5, 43), (3, 4)])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_adp_equals_its_published_formula(members: int, classes: int, scale: float) -> None:
    rng = np.random.default_rng(0)
    scores = scale * rng.standard_normal((20, members, classes))
    labels = rng.integers(classes, size=20)
    loss, entropies, diversities = adp_by_numpy(scores, labels, 2.0, 0.5)
    ours, ours_labels = torch.from_numpy(scores), torch.from_numpy(labels)
    np.testing.assert_allclose(ensemble_entropy(ours).numpy(), entropies, atol=1e-12)
    np.testing.assert_allclose(ensemble_diversity(ours, ours_labels).numpy(), diversities, atol=1e-8)

    class Fixed:
        def member_scores(self, images: Tensor) -> Tensor:
            return images

    assert float(ADPObjective()(Fixed(), ours, ours_labels)) == pytest.approx(loss, abs=1e-8)
    other = adp_by_numpy(scores, labels, 0.7, 0.1)[0]
    assert float(ADPObjective(alpha=0.7, beta=0.1)(Fixed(), ours, ours_labels)) == pytest.approx(other)


def test_adp_has_the_right_gradient() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 3, 1])

    def loss(member_scores: Tensor) -> Tensor:
        class Fixed:
            def member_scores(self, images: Tensor) -> Tensor:
                return images

        return ADPObjective()(Fixed(), member_scores, labels)

    scores = torch.randn(3, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, scores)
    assert torch.autograd.gradcheck(lambda values: ensemble_diversity(values, labels), scores)
    assert torch.autograd.gradcheck(ensemble_entropy, scores)


def test_diversity_is_zero_for_orthogonal_members_and_bounded_for_equal_ones() -> None:
    far = torch.full((1, 3, 10), -200.0)
    for member in range(3):
        far[0, member, 1 + 3 * member : 4 + 3 * member] = 0.0
    assert float(ensemble_diversity(far, torch.tensor([0]))) == pytest.approx(3e-6, rel=1e-3)
    same = torch.randn(1, 1, 10).expand(2, 3, 10)
    floor = math.log((3 + 1e-6) * 1e-12)
    assert ensemble_diversity(same, torch.tensor([0, 1])).tolist() == pytest.approx([floor] * 2, abs=1e-4)


def test_adp_stays_finite_and_exact_for_confident_members() -> None:
    """In float32 the wrong classes of a sure member round to 0; their ratios must not."""
    torch.manual_seed(0)
    scores = torch.randn(4, 3, 10)
    labels = torch.tensor([0, 1, 2, 9])
    expected = ensemble_diversity(scores.double(), labels)
    sure = scores.clone()
    sure[torch.arange(4), :, labels] = 300.0
    sure.requires_grad_(True)
    found = ensemble_diversity(sure, labels)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum() + ensemble_entropy(sure).sum(), sure)
    assert gradient.isfinite().all()
    assert gradient.abs().sum(dim=(1, 2)).min() > 0.1


def test_mean_probabilities_survive_far_scores() -> None:
    scores = torch.tensor([[[1000.0, 0.0, -1000.0], [0.0, 1000.0, -1000.0]]])
    np.testing.assert_allclose(log_mean_probs(scores)[0, :2], [math.log(0.5)] * 2, rtol=1e-6)
    assert torch.isfinite(log_mean_probs(scores)).all()


# TanhEns


def test_the_code_is_that_of_the_authors_program() -> None:
    signs = scipy.linalg.hadamard(16)
    signs[np.arange(0, 16, 2), 0] = -1
    rng = np.random.RandomState(59)
    rng.shuffle(signs)
    signs = signs[:, rng.permutation(16)]
    code = tanh_code()
    assert np.array_equal(code.signed, signs)
    assert code.min_row_distance == 8
    assert code.min_column_distance == 0
    pairs = [(i, j) for i, j in itertools.combinations(range(16), 2) if (signs[:, i] == -signs[:, j]).all()]
    assert len(pairs) == 1
    plain = tanh_code(seed=None).signed
    assert plain[:, 0].tolist() == [-1, 1] * 8
    assert np.array_equal(plain[:, 1:], scipy.linalg.hadamard(16)[:, 1:])


def test_probabilities_are_p_nu_over_all_sixteen_codewords() -> None:
    torch.manual_seed(0)
    model = TanhEnsemble(10, **SMALL_TANH).double()
    logits = torch.randn(30, 16, dtype=torch.float64)
    signs = model.code.signed.astype(np.float64)
    shares = np.maximum(np.tanh(logits.numpy()) @ signs.T, 0) + 1e-6
    expected = shares / shares.sum(axis=1, keepdims=True)
    scores = model.decode(logits)
    np.testing.assert_allclose(torch.softmax(scores, dim=1).numpy(), expected, rtol=1e-12)
    images, _ = with_labels(model)
    assert torch.equal(model(images), model.decode(model.member_logits(images)))


def test_a_phantom_class_can_win() -> None:
    model = TanhEnsemble(10, **SMALL_TANH)
    codewords = 3 * torch.from_numpy(model.code.signed.astype(np.float32))
    assert model.decode(codewords).argmax(dim=1).tolist() == list(range(16))


@pytest.mark.parametrize(("height", "width"), [(6, 6), (5, 8)])
def test_shifts_and_turns(height: int, width: int) -> None:
    images = torch.rand(1, 2, height, width)
    still = torch.zeros(1)
    moved = shift_and_turn(images, torch.tensor([[2.0, -1.0]]), still)
    expected = torch.zeros_like(images)
    expected[:, :, :-1, 2:] = images[:, :, 1:, :-2]
    assert torch.equal(moved, expected)
    half = shift_and_turn(images, torch.zeros(1, 2), torch.tensor([math.pi]))
    assert torch.equal(half, images.flip(2, 3))
    if height == width:
        quarter = shift_and_turn(images, torch.zeros(1, 2), torch.tensor([math.pi / 2]))
        assert torch.equal(quarter, torch.rot90(images, 1, (2, 3)))
        both = shift_and_turn(images, torch.tensor([[2.0, -1.0]]), torch.tensor([math.pi / 2]))
        assert torch.equal(both, torch.rot90(expected, 1, (2, 3)))


def test_an_oblong_image_is_turned_without_being_stretched() -> None:
    dots = torch.zeros(1, 1, 5, 9)
    dots[0, 0, 2, 6] = 1  # two to the right of the middle
    turned = shift_and_turn(dots, torch.zeros(1, 2), torch.tensor([math.pi / 2]))
    assert turned.nonzero().tolist() == [[0, 0, 0, 4]]  # two above it


def test_noise_has_the_deviation_asked_for() -> None:
    images = torch.full((50, 1, 20, 20), 0.5)
    generator = torch.Generator().manual_seed(0)
    found = TanhEnsembleObjective(noise=0.05, blend=0.0).disturb(images, generator=generator)
    assert float((found - 0.5).std()) == pytest.approx(0.05, rel=0.02)
    assert abs(float((found - 0.5).mean())) < 0.002
    wild = TanhEnsembleObjective(noise=3.0, blend=0.3).disturb(images, generator=generator)
    assert [float(wild.min()), float(wild.max())] == [0, 1]


def test_blending_mixes_in_another_image() -> None:
    """Even images: each becomes (1 - b) of itself and b of another one, or of mid-grey where that one ends."""
    levels = torch.linspace(0.1, 0.9, 40)
    images = levels[:, None, None, None].expand(40, 1, 9, 9)
    generator = torch.Generator().manual_seed(0)
    blended = TanhEnsembleObjective(noise=0.0, blend=0.25).disturb(images, generator=generator)
    partners = (blended - 0.75 * images) / 0.25
    middle = partners[:, 0, 4, 4]  # a shift of 4 and any turn leave the middle inside, or on the border
    inside = (partners - middle[:, None, None, None]).abs() < 1e-5
    assert torch.where(inside, 0.5, partners).sub(0.5).abs().max() < 1e-5
    known = (middle[:, None] - levels).abs().min(dim=1).values < 1e-5
    assert known.float().mean() > 0.8
    whole = inside.flatten(1).all(dim=1)
    assert not whole.all()  # some were moved or turned so that grey came in
    assert len(set(middle[known].mul(1e4).round().tolist())) == int(
        known.sum()
    )  # a permutation: nobody twice


def test_the_objective_is_the_hinge_of_disturbed_images() -> None:
    torch.manual_seed(0)
    model = TanhEnsemble(10, **SMALL_TANH).double()
    images, labels = with_labels(model)
    plain = MemberObjective("hinge")(model, images, labels)  # type: ignore[arg-type]
    torch.testing.assert_close(TanhEnsembleObjective(noise=0, blend=0)(model, images, labels), plain)
    objective = TanhEnsembleObjective(noise=0.1, blend=0.2, rotation=15.0)
    disturbed = objective.disturb(images, generator=torch.Generator().manual_seed(3))
    assert disturbed.shape == images.shape
    targets = model.code.signed[labels.numpy()]
    hinge = np.maximum(1 - targets * model.member_logits(disturbed).detach().numpy(), 0).mean()
    found = objective(model, images, labels, generator=torch.Generator().manual_seed(3))
    assert float(found.detach()) == pytest.approx(hinge)
    torch.manual_seed(5)
    first = objective(model, images, labels)
    torch.manual_seed(5)
    assert torch.equal(objective(model, images, labels), first)
    assert not torch.equal(objective(model, images, labels), first)


# Independent members


@pytest.mark.parametrize("branch", ["conv", "residual"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_members_loss_touches_only_its_own_weights(branch: str, batch_norm: bool) -> None:
    torch.manual_seed(0)
    model = independent_ecoc(CODE, branch=branch, batch_norm=batch_norm, **SMALL).double()
    images, labels = with_labels(model)
    logits = model.member_logits(images)
    targets = torch.from_numpy(CODE.signed.astype(np.float64))[labels]
    torch.autograd.backward(F.softplus(-targets * logits)[:, 2].mean())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        used = [bool(piece.any()) for piece in parameter.grad.chunk(5)]
        assert used in ([False, False, True, False, False], [False] * 5), name
    assert model.head.weight.grad is not None
    assert model.head.weight.grad[2].any()  # type: ignore[index]


@pytest.mark.parametrize("kind", ["hinge", "cross_entropy"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_joint_training_is_independent_training(kind: Any, batch_norm: bool) -> None:
    """Five members at once, and member 3 alone from the same start on the same data: the same weights."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_norm": batch_norm, "branch": "residual", **SMALL}
    together = independent_ecoc(CODE, **options).double()
    column = CodeMatrix(CODE.symbols[:, 3:4], allow_equal_rows=True)
    alone = independent_ecoc(column, **options).double()

    def share(state: dict[str, Tensor]) -> dict[str, Tensor]:
        shared = ("centre.mean",)
        return {
            name: values if values.ndim == 0 or name in shared else values.chunk(5)[3]
            for name, values in state.items()
        }

    alone.load_state_dict(share(together.state_dict()))
    start = copy.deepcopy(alone.state_dict())
    # The loss is a mean over members, so that with five of them each counts for a fifth.
    for model, scale in ((together, 5.0), (alone, 1.0)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        objective = MemberObjective(kind, 0.1, scale=scale)
        for _ in range(4):
            images, labels = with_labels(model)
            optimizer.zero_grad()
            torch.autograd.backward(objective(model, images, labels))
            optimizer.step()
    trained = share(together.state_dict())
    for name, values in alone.state_dict().items():
        torch.testing.assert_close(trained[name], values, atol=1e-10, rtol=0)
    head = "head.weight"
    assert (alone.state_dict()[head] - start[head]).abs().max() > 1e-3


# TRADES


def test_kl_equals_scipy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 50, 7)) * 4
    expected = scipy.special.rel_entr(softmax_by_numpy(a), softmax_by_numpy(b)).sum(axis=1)
    found = kl_divergence(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert np.abs(kl_divergence(torch.from_numpy(a), torch.from_numpy(a + 5.0)).numpy()).max() < 1e-12


def test_crafting_reaches_a_corner_of_the_ball_on_a_linear_model() -> None:
    """KL from the image's own answer grows with |w . move| on either side: the maximum is a corner."""
    torch.manual_seed(0)
    weight = torch.randn(12)
    images = 0.3 + 0.4 * torch.rand(40, 3, 2, 2)
    objective = TRADESObjective(eps=0.125, steps=5, step_size=0.0625)
    moves = (objective.craft(half_spaces(weight, middle=0), images) - images).flatten(1)
    signs = torch.sign(moves * weight)
    assert (moves.abs() - 0.125).abs().max() < 1e-6
    assert (signs == signs[:, :1]).all()


@pytest.mark.parametrize("eps", ["8/255", 0.3])
def test_crafting_stays_in_the_ball_and_leaves_the_model_alone(eps: Any) -> None:
    torch.manual_seed(0)
    model = ResNet(5, activation="silu", **SMALL)  # no pixel without a gradient
    shake(model)
    model.train()
    model.head.eval()
    images, labels = with_labels(model)
    images[0], images[1] = 0.0, 1.0
    before, given = copy.deepcopy(model.state_dict()), images.clone()
    objective = TRADESObjective(eps=eps, steps=4, step_size=0.2)
    points = objective.craft(model, images)
    radius = 8 / 255 if eps == "8/255" else eps
    assert (points - images).abs().max() <= radius + 1e-6
    assert (points - images).abs().amax(dim=(1, 2, 3)).min() > 0.9 * radius
    assert points.min() >= 0
    assert points.max() <= 1
    assert not points.requires_grad
    assert torch.equal(images, given)
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.trunk.training
    assert not model.head.training
    divergence = kl_divergence(copy.deepcopy(model).eval()(images), copy.deepcopy(model).eval()(points))
    nearby = TRADESObjective(eps=eps, steps=0, step_size=0.2).craft(model, images)
    little = kl_divergence(copy.deepcopy(model).eval()(images), copy.deepcopy(model).eval()(nearby))
    assert (divergence > little).all()
    loss = objective(model, images, labels)
    torch.autograd.backward(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_trades_equals_its_formula_and_has_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    images, points = torch.rand(2, 6, 3, 2, 2, dtype=torch.float64)
    labels = torch.arange(6) % 4
    monkeypatch.setattr(TRADESObjective, "craft", lambda self, model, images, **options: points)
    objective = TRADESObjective(eps=0.1, steps=1, step_size=0.1)
    clean, attacked = (softmax_by_numpy(model(batch).detach().numpy()) for batch in (images, points))
    natural = -np.log(clean[np.arange(6), labels.numpy()]).mean()
    expected = natural + 6.0 * (clean * np.log(clean / attacked)).sum(axis=1).mean()
    found = objective(model, images, labels).detach()
    assert float(found) == pytest.approx(expected, rel=1e-12)
    names = [name for name, _ in model.named_parameters()]

    def loss(*weights: Tensor) -> Tensor:
        held = dict(zip(names, weights, strict=True))
        return objective(lambda batch: functional_call(model, held, (batch,)), images, labels)

    weights = tuple(values.detach().clone().requires_grad_(True) for values in model.parameters())
    assert torch.autograd.gradcheck(loss, weights)


def test_without_weight_trades_is_cross_entropy() -> None:
    torch.manual_seed(0)
    model = independent_ecoc(CODE, **SMALL).double()
    images, labels = with_labels(model)
    plain = TRADESObjective(eps=0.1, steps=3, step_size=0.1, beta=0)(model, images, labels)
    assert torch.equal(plain, ScoreObjective()(model, images, labels))
    assert TRADESObjective(eps=0.1, steps=3, step_size=0.1)(model, images, labels) > plain
    nowhere = TRADESObjective(eps=0, steps=3, step_size=0.1)(model, images, labels)
    torch.testing.assert_close(nowhere, plain)


# By name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adp", SMALL),
        ("adp", {"num_members": 2, "batch_norm": False, "activation": "silu", **SMALL}),
        ("tanh_ensemble", SMALL_TANH),
        ("tanh_ensemble", {**SMALL_TANH, "order": 8, "num_chunks": 1, "code_seed": 3, "batch_norm": False}),
        ("independent_ecoc", {"code": CODE, **SMALL}),
        ("independent_ecoc", {"code": CODE, "branch": "residual", "batch_norm": True, **SMALL}),
    ],
)
def test_config_and_weights_bring_a_baseline_back(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model: Any = MODELS[name].build(4, 3, mean=torch.rand(3, 8, 12), **options)
    shake(model)
    config = json.loads(json.dumps(model.config))
    for key in ("num_classes", "in_channels"):  # a run folder knows them from its data
        config.pop(key, None)
    if name == "independent_ecoc":
        config["code"] = CODE
    back: Any = MODELS[name].build(4, 3, mean=torch.zeros(3, 8, 12), **config)
    assert back.config == model.config
    assert back.state_dict().keys() == model.state_dict().keys()
    back.load_state_dict(model.state_dict(), strict=True)
    images, _ = with_labels(model)
    assert torch.equal(back.eval()(images), model.eval()(images))
    assert torch.equal(copy.deepcopy(model)(images), model(images))


def test_a_mean_image_tells_the_tanh_ensemble_its_size() -> None:
    model: Any = MODELS["tanh_ensemble"].build(
        10, 1, mean=torch.rand(1, 8, 12), filters=(2, 2, 2), bit_filters=1
    )
    assert model.config["image_size"] == [8, 12]
    assert float(model.centre.mean) == 0.5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Ensemble(10, num_members=0), "num_members must be a whole number from 1 up"),
        (lambda: Ensemble(1), "num_classes must be a whole number from 2 up"),
        (lambda: Ensemble(10, 0), "in_channels must be a whole number from 1"),
        (lambda: Ensemble(10, widht=8), "an Ensemble has no option 'widht'; .* did you mean 'width'"),
        (lambda: Ensemble(10, num_units=3), "an Ensemble has no option 'num_units'"),
        (lambda: TanhEnsemble(17), "no codewords for 17 classes"),
        (lambda: TanhEnsemble(10, 2), "1 or 3 channels"),
        (lambda: TanhEnsemble(num_chunks=3), "cannot be dealt equally to 3 chunks"),
        (lambda: TanhEnsemble(filters=(1, 2)), "filters three"),
        (lambda: TanhEnsemble(bit_filters=0), "whole number from 1 up"),
        (lambda: TanhEnsemble(10, 1, **SMALL_TANH)(torch.rand(2, 1, 8, 8)), r"images of \(8, 12\)"),
        (lambda: tanh_code(12), "power of two"),
        (lambda: independent_ecoc(CODE, share_trunk=True), "share nothing"),
        (lambda: MODELS["independent_ecoc"].build(4, 3, mean=None), "needs a code"),
        (lambda: MODELS["independent_ecoc"].build(5, 3, mean=None, code=CODE), "has 4 classes, but 5"),
        (lambda: ADPObjective(beta=-1), "beta must be a number from 0 up"),
        (
            lambda: ADPObjective()(ResNet(4, **SMALL), torch.rand(1, 3, 8, 8), torch.tensor([0])),
            "member_scores",
        ),
        (lambda: TanhEnsembleObjective(noise=math.nan, blend=0), "noise must be a number"),
        (lambda: TanhEnsembleObjective(noise=0, blend=1.5), "blend must be a number from 0 to 1"),
        (
            lambda: TanhEnsembleObjective(noise=0, blend=0)(
                ResNet(4, **SMALL), torch.rand(1, 3, 8, 8), torch.tensor([0])
            ),
            "needs a model with the attribute code_symbols",
        ),
        (lambda: TRADESObjective(eps="8/x", steps=1, step_size=0.1), "fraction"),
        (lambda: TRADESObjective(eps=-1, steps=1, step_size=0.1), "eps must be a number from 0 up"),
        (lambda: TRADESObjective(eps=0.1, steps=1.5, step_size=0.1), "steps must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_refusals(build: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build()
