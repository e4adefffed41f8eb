"""AutoAttack beside pyautoattack: the same or fewer images survive, distances are no longer, projections are equal."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 the name everybody knows
from conftest import DATA
from torch import Tensor, nn

import ecnn
from ecnn.attacks.apgd import APGD
from ecnn.attacks.auto import AutoAttack, examine
from ecnn.attacks.base import Target
from ecnn.attacks.fab import FAB
from ecnn.attacks.gradient import PGD
from ecnn.attacks.norms import NORMS, Norm
from ecnn.attacks.randomness import Draws
from ecnn.attacks.square import Square

pytestmark = pytest.mark.peer
PEER_NORM = {"linf": "Linf", "l2": "L2", "l1": "L1"}
ORDER = {"linf": float("inf"), "l2": 2.0, "l1": 1.0}


@cache
def robust_digits() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network trained on attacked digits, and 200 that it has not seen."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    attack = PGD(norm="linf", eps=0.1, steps=5, step_size=0.04, loss="cross_entropy", keep="last")
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        for rows in torch.split(torch.randperm(1500, generator=generator), 100):
            points = attack(model, images[rows], labels[rows], generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(model(points), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval(), images[1500:1700], labels[1500:1700]


def count_survivors(model: nn.Module, points: Tensor, images: Tensor, labels: Tensor) -> int:
    """Images that are right before and after."""
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels) & (model(points).argmax(dim=1) == labels)
    return int(right.sum())


def peer_points(
    model: nn.Module, images: Tensor, labels: Tensor, norm: Norm, eps: float, *names: str, seed: int = 0
) -> Tensor:
    peer = pytest.importorskip("pyautoattack")
    suite = peer.AutoAttack(model, norm=PEER_NORM[norm], eps=eps, seed=seed, version="standard")
    suite.attacks_to_run = list(names) or suite.attacks_to_run
    points, _ = suite.run_standard_evaluation(images, labels, batch_size=len(images))
    crafted: Tensor = points
    return crafted


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.12), ("l2", 0.5), ("l1", 2.0)])
@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t", "fab-t", "square"])
def test_no_attack_leaves_more_survivors_or_costs_more(name: Any, norm: Norm, eps: float) -> None:
    model, images, labels = robust_digits()
    asked = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal asked
        asked += len(inputs[0])

    with model.register_forward_pre_hook(count):
        theirs = count_survivors(model, peer_points(model, images, labels, norm, eps, name), images, labels)
    ours = AutoAttack(norm=norm, eps=eps, version=name).run(model, images, labels)
    left = int((~ours.success).sum())
    assert 20 < theirs < 180
    assert int(ours.forwards.sum()) <= asked
    # Square is a random search: its two runs differ by chance, the others hardly.
    assert left <= theirs + (3 if name == "square" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_verdicts_in_l1_are_the_same(seed: int) -> None:
    """The standard suite on 200 digits: at most one image on which the two programs disagree."""
    model, images, labels = robust_digits()
    theirs = model(peer_points(model, images, labels, "l1", 2.0, seed=seed)).argmax(dim=1) != labels
    ours = AutoAttack(norm="l1", eps=2.0).run(model, images, labels, seed=seed).success
    assert 20 < int((~theirs).sum()) < 180
    assert int((ours != theirs).sum()) <= 1


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_fab_distances_are_no_longer(norm: Norm) -> None:
    fab = pytest.importorskip("pyautoattack.fab_pt")
    model, images, labels = robust_digits()
    images, labels = images[:40], labels[:40]
    eps = 1.0 if norm == "linf" else 10.0  # beyond 1 no pixel can go
    peer = fab.FABAttack_PT(
        model, norm=PEER_NORM[norm], n_iter=50, eps=eps, seed=0, targeted=True, n_target_classes=1
    )
    peer.n_restarts = 1
    theirs = (peer.perturb(images, labels) - images).flatten(1)
    result = FAB(norm=norm, eps=eps, steps=50, targets=1, early_exit=False).run(model, images, labels)
    ours = (result.images - images).flatten(1)
    with torch.no_grad():
        right = model(images).argmax(dim=1) == labels
    ratio = (ours.norm(ORDER[norm], dim=1) / theirs.norm(ORDER[norm], dim=1))[right]
    assert len(ratio) > 30
    assert ratio.max() < 1.001
    assert ratio.mean() < 1


def test_projections_to_ball_and_box_are_equal() -> None:
    """In L1; in the other norms their program scales and cuts."""
    peer = pytest.importorskip("pyautoattack.autopgd_base")
    draws = Draws.of(0, torch.arange(50))
    images = (draws.uniform(200) * 1.4 - 0.2).clamp(0, 1)
    moves = draws.fold(1).normal(200)
    theirs = images + moves + peer.L1_projection(images, moves, 5.0)
    assert torch.allclose(NORMS["l1"].project(images + moves, images, 5.0), theirs, atol=1e-5)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_projections_are_equal(norm: Norm) -> None:
    peer = pytest.importorskip("pyautoattack.fab_projections")
    draws = Draws.of(0, torch.arange(50))
    points = (draws.uniform(200, dtype=torch.float64) * 1.4 - 0.2).clamp(0, 1)
    normals = draws.fold(1).normal(200, dtype=torch.float64)
    offsets = 20 * draws.fold(2).normal(dtype=torch.float64)
    theirs = getattr(peer, f"projection_{norm}")(points, normals, (normals * points).sum(dim=1) - offsets)
    assert torch.allclose(NORMS[norm].move_to_hyperplane(points, normals, offsets), theirs, atol=1e-9)


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.1), ("l2", 0.5), ("l1", 2.0)])
def test_apgd_reaches_higher_losses(norm: Norm, eps: float) -> None:
    apgd = pytest.importorskip("pyautoattack.autopgd_base")
    model, images, labels = robust_digits()
    peer = apgd.APGDAttack(model, norm=PEER_NORM[norm], eps=eps, n_iter=50, loss="ce", seed=0)
    theirs = peer.perturb(images, labels, best_loss=True)
    attack = APGD(norm=norm, eps=eps, steps=50, loss="cross_entropy", keep="last", wide_start=False)
    ours = attack.run(model, images, labels).images
    with torch.no_grad():
        losses = [F.cross_entropy(model(points), labels) for points in (ours, theirs)]
    assert losses[0] >= losses[1] * 0.999


@pytest.mark.slow
@pytest.mark.data("cifar-10-batches-py")
def test_a_shipped_model_keeps_no_more() -> None:
    """The whole suite on an adversarially trained network, at 8/255."""
    model = ecnn.load_model("cifar10-resnet20-at").eval()
    images, labels = ecnn.load_data("cifar10", root=DATA).test[:60]
    theirs = count_survivors(model, peer_points(model, images, labels, "linf", 8 / 255), images, labels)
    _, warnings = examine(Target(model, len(images), images.device), images)
    assert warnings == ()
    attacked = AutoAttack(norm="linf", eps="8/255").run(model, images, labels)
    assert int((~attacked.success).sum()) <= theirs + 1


class FarBorder(nn.Module):
    """Two classes, scores linear in the pixels and so far apart that no move in the ball breaks an image."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        normal = Draws.of(2, torch.arange(1)).normal(pixels)[0]
        self.normal = nn.Parameter(normal / normal.norm())

    def forward(self, images: Tensor) -> Tensor:
        gains = (images.flatten(1) - 0.5) @ self.normal
        return torch.stack([torch.full_like(gains, 10), gains], dim=1)


def test_l2_squares_on_a_linear_model() -> None:
    """The published moves end far from the optimum, 1 here, in both programs and with any queries; turns come near."""
    square = pytest.importorskip("pyautoattack.square")
    model, labels = FarBorder(75), torch.zeros(20, dtype=torch.int64)
    images = torch.full((20, 3, 5, 5), 0.5)

    def gain(points: Tensor) -> Tensor:
        gains: Tensor = model(points)[:, 1].detach() / 0.5
        return gains

    def ours(l2_moves: Any) -> Tensor:
        attack = Square(norm="l2", eps=0.5, queries=4000, l2_moves=l2_moves, keep="last")
        return gain(attack(model, images, labels))

    theirs = []
    for queries in (1000, 4000):
        peer = square.SquareAttack(model, norm="L2", n_queries=queries, eps=0.5, seed=0)
        peer.init_hyperparam(images)
        theirs.append(gain(peer.attack_single_run(images, labels)[1]))
    assert theirs[1].max() < 0.8
    assert theirs[1].mean() < theirs[0].mean() + 0.05
    assert theirs[1].mean() < ours("bumps").mean() < 0.75
    assert ours("turns").min() > 0.95
