"""The paper's lemmas and slips as numerical experiments: docs/theory.md and docs/errata.md say what they mean.

Each lemma is tried where its condition holds and where it does not, with features drawn at random as its assumption
asks. Sizes are small and the statements exact, up to rounding in float64.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize_scalar

from ecnn import bounds, load_code
from ecnn.attacks import BIM, FGSM
from ecnn.attacks.views import score_loss
from ecnn.codes import CodeMatrix
from ecnn.constructions import doubled
from ecnn.decoders import make_decoder
from ecnn.objectives import (
    member_cross_entropy,
    member_entropy,
    member_hinge,
    stationary_confidence,
    stationary_logit,
)

FEATURES = 32  # the paper's F
#: Of each dataset: classes, members, training images.
PAPER = {
    "mnist": (10, 30, 60_000),
    "cifar10": (10, 30, 50_000),
    "gtsrb": (43, 30, 39_209),
    "cifar100": (100, 80, 50_000),
}


def solve(features: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, float]:
    """The head (feature,) that is nearest to giving features (row, feature) these logits (row,); its largest error."""
    head = np.linalg.lstsq(features, logits, rcond=None)[0]
    return head, float(np.abs(features @ head - logits).max())


def separates(features: np.ndarray, signs: np.ndarray) -> bool:
    """Whether some head gives every row a logit of at least 1 in size on its side, so that the loss can be made 0."""
    rows = -signs[:, None] * features
    found = linprog(np.zeros(features.shape[1]), A_ub=rows, b_ub=-np.ones(len(rows)), bounds=(None, None))
    return bool(found.success)


def share_of_separable(rows: int, features: int) -> float:
    """Of all assignments of signs to points in general position, those that a head can produce (Cover 1965)."""
    return 2.0 ** (1 - rows) * sum(math.comb(rows - 1, count) for count in range(features))


# Lemma 1: members that share the features, or the head, or both


def test_lemma_1a_as_many_images_as_features_can_have_any_logits() -> None:
    draws = np.random.default_rng(0)
    for images, fits in ((6, True), (8, True), (9, False), (20, False)):
        features = draws.normal(size=(images, 8))
        _, error = solve(features, draws.normal(size=images))
        assert (error < 1e-9) == fits


@pytest.mark.parametrize(("images", "share"), [(4, 1.0), (8, 0.5), (12, 0.11328125)])
def test_beyond_lemma_1a_the_loss_can_be_small_for_the_share_that_cover_counted(
    images: int, share: float
) -> None:
    """The lemma is sufficient, not necessary: a small loss needs the signs alone."""
    assert share_of_separable(images, 4) == share
    draws = np.random.default_rng(images)
    features = draws.normal(size=(images, 4))
    signs = np.array(list(itertools.product((-1, 1), repeat=images - 1)))
    chosen = draws.choice(len(signs), size=min(len(signs), 60), replace=False)
    found = np.mean([separates(features, np.append(signs[row], 1)) for row in chosen])
    if images <= 8:  # every assignment up to a common sign, or nearly: the count is exact
        exact = [separates(features, np.append(row, 1)) for row in signs]
        assert np.mean(exact) == share
    else:
        assert abs(found - share) < 3 * math.sqrt(share * (1 - share) / len(chosen))


def test_lemma_1b_one_head_for_all_members_needs_a_feature_for_every_member_and_image() -> None:
    draws = np.random.default_rng(1)
    members, images = 3, 4
    for size, fits in ((12, True), (11, False)):
        features = draws.normal(size=(members * images, size))
        _, error = solve(features, draws.normal(size=members * images))
        assert (error < 1e-9) == fits


def test_lemma_1c_shared_features_and_head_leave_the_entropy_of_the_codeword() -> None:
    """All members say the same of an image: the loss is least at the share of ones, and 0 for a constant codeword."""
    for ones, length in ((1, 4), (3, 7), (5, 10), (0, 6), (6, 6)):
        targets = (torch.arange(length) < ones).to(torch.int64)[None]

        def loss(logit: float, hinge: bool, targets: torch.Tensor = targets) -> float:
            logits = torch.full(targets.shape, logit, dtype=torch.float64)
            return float((member_hinge if hinge else member_cross_entropy)(logits, targets).mean())

        share = ones / length
        entropy = sum(-part * math.log(part) for part in (share, 1 - share) if part)
        least = minimize_scalar(lambda logit: loss(logit, False), bounds=(-40, 40), method="bounded").fun
        assert least == pytest.approx(entropy, abs=1e-6)
        hinge = min(loss(logit, True) for logit in (-1.0, 1.0))
        assert hinge == pytest.approx(2 * min(share, 1 - share))


def test_lemma_1c_does_not_follow_from_rows_that_differ() -> None:
    """Two classes whose codewords differ in every bit, and one network for all members solves every task."""
    code = CodeMatrix([[0, 0, 0], [1, 1, 1]])
    assert code.min_row_distance == 3
    logits = torch.tensor([[-9.0] * 3, [9.0] * 3])
    assert member_hinge(logits, torch.from_numpy(code.symbols.astype("int64"))).max() == 0
    # What it takes is two columns that differ: then some codeword has both bits.
    assert (load_code("10x30").symbols.mean(axis=1) % 1 > 0).all()


# Lemma 2: features of the members that are permutations of each other


def permuted(
    draws: np.random.Generator, members: int, classes: int, size: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """(member, class, feature) features, those of each member the same in another order; and the orders."""
    common = draws.normal(size=(classes, size))
    orders = [np.arange(size), *(draws.permutation(size) for _ in range(members - 1))]
    return np.stack([common[:, order] for order in orders]), orders


def test_lemma_2a_own_heads_undo_the_permutations_if_there_are_no_more_classes_than_features() -> None:
    """The condition M <= F is not in the lemma, and CIFAR-100 does not meet it."""
    draws = np.random.default_rng(2)
    for classes, fits in ((6, True), (7, False)):
        features, orders = permuted(draws, 5, classes, 6)
        logits = np.sign(draws.normal(size=(5, classes)))
        errors = [solve(own, wanted)[1] for own, wanted in zip(features, logits, strict=True)]
        assert all((error < 1e-9) == fits for error in errors)
        # One head, put in each member's order, gives all of them the logits of the first: nothing is gained by it.
        head, _ = solve(features[0], logits[0])
        same = [own @ head[order] for own, order in zip(features, orders, strict=True)]
        assert np.allclose(same, same[0])
    assert PAPER["cifar100"][0] > FEATURES


def test_lemma_2b_a_shared_head_misses_given_logits_as_soon_as_there_are_more_than_features() -> None:
    """NM > F is enough, the lemma's NM >= F(M + 1) asks for more than its conclusion needs."""
    draws = np.random.default_rng(3)
    members, classes, size = 3, 4, 8
    assert size < members * classes < size * (classes + 1)
    features, _ = permuted(draws, members, classes, size)
    assert solve(features.reshape(-1, size), np.sign(draws.normal(size=12)))[1] > 0.01
    few, _ = permuted(draws, 2, classes, size)
    assert solve(few.reshape(-1, size), np.sign(draws.normal(size=8)))[1] < 1e-9


def test_lemma_2b_does_not_hold_for_the_loss() -> None:
    """Its condition is met, and yet a head of one's choice has a loss near 0 on all features in a neighbourhood."""
    draws = np.random.default_rng(3)
    members, classes, size = 4, 4, 3
    assert members * classes >= size * (classes + 1)
    features, orders = permuted(draws, members, classes, size)
    head = np.array([1.0, 0.3, -1.2])
    logits = features @ head  # (member, class)
    symbols = (logits > 0).astype(int).T
    assert len({tuple(row) for row in symbols}) == classes
    assert len({tuple(column) for column in symbols.T}) == members
    room = np.abs(logits).min() / np.linalg.norm(head)
    moved = features[0] + 0.9 * room / math.sqrt(size) * (2 * draws.random((classes, size)) - 1)
    again = np.stack([moved[:, order] for order in orders]) @ (1e4 * head)
    targets = torch.from_numpy(symbols)
    assert member_cross_entropy(torch.from_numpy(again.T), targets).max() < 1e-6


# Lemma 3: independent mean features and a shared head


def test_lemma_3_a_shared_head_is_right_up_to_the_radius_that_its_length_gives() -> None:
    draws = np.random.default_rng(4)
    members, classes = 3, 4
    size = members * classes
    means = draws.normal(size=(size, size))
    signs = np.sign(draws.normal(size=size))
    head, error = solve(means, signs)
    assert error < 1e-9
    radius = 1 / np.linalg.norm(head)
    noise = draws.normal(size=(200, size, size))
    noise *= 0.999 * radius / np.linalg.norm(noise, axis=2, keepdims=True)
    assert ((means + noise) @ head * signs > 0).all()
    worst = -1.001 * radius * signs[:, None] * head / np.linalg.norm(head)
    assert ((means + worst) @ head * signs < 0).all()


def test_lemma_3_asks_for_more_independent_vectors_than_there_are_dimensions() -> None:
    draws = np.random.default_rng(5)
    for classes, members, _ in PAPER.values():
        means = draws.normal(size=(members * classes, FEATURES))
        assert np.linalg.matrix_rank(means) == FEATURES < members * classes


def test_which_conditions_the_papers_own_settings_meet() -> None:
    """The table of docs/theory.md."""
    met = {
        name: {
            "1a: K <= F": images <= FEATURES,
            "1b: NK <= F": members * images <= FEATURES,
            "2a: M <= F": classes <= FEATURES,
            "2b: NM >= F(M + 1)": members * classes >= FEATURES * (classes + 1),
            "3: NM <= F": members * classes <= FEATURES,
        }
        for name, (classes, members, images) in PAPER.items()
    }
    assert {(name, lemma) for name, row in met.items() for lemma, holds in row.items() if holds} == {
        ("mnist", "2a: M <= F"),
        ("cifar10", "2a: M <= F"),
        ("cifar100", "2b: NM >= F(M + 1)"),
    }


# Lemma 4: what the entropy term does to the confidence


def joint(logit: float, weight: float, *, hinge: bool = False) -> float:
    """Loss less weight times entropy, of one member whose bit is 1."""
    logits, targets = torch.tensor([[logit]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.int64)
    loss = (member_hinge if hinge else member_cross_entropy)(logits, targets)
    return float(loss.mean() - weight * member_entropy(logits).mean())


@pytest.mark.parametrize("weight", [0.05, 0.1, 0.2, 0.5])
def test_lemma_4_is_the_minimum_with_the_entropy_subtracted(weight: float) -> None:
    least = minimize_scalar(
        lambda logit: joint(logit, weight), bounds=(0, 45), method="bounded", options={"xatol": 1e-9}
    )
    logit, confidence = stationary_logit(weight), stationary_confidence(weight)
    assert logit == pytest.approx(math.log(confidence / (1 - confidence)), rel=1e-7)
    assert 1 / confidence == pytest.approx(weight * logit, rel=1e-12)
    # The minimum is flat, so that its place is found to fewer digits than its height.
    assert least.x == pytest.approx(logit, abs=1e-2)
    assert joint(logit, weight) <= least.fun + 1e-12


def test_lemma_4_has_no_solution_with_the_printed_sign() -> None:
    """The sum of loss and entropy falls for ever: confidence is rewarded, not punished."""
    values = [joint(logit, -0.1) for logit in np.linspace(0, 30, 200)]
    assert all(after < before for before, after in itertools.pairwise(values))


def test_lemma_4_at_the_papers_weight_asks_for_next_to_no_doubt() -> None:
    assert stationary_logit(0.1) == pytest.approx(10.000454, abs=1e-6)
    assert stationary_confidence(0.1) == pytest.approx(0.99995, abs=1e-5)


def test_with_the_hinge_loss_the_optimum_is_the_margin_itself() -> None:
    logits = np.linspace(0, 5, 501)
    assert logits[np.argmin([joint(logit, 0.1, hinge=True) for logit in logits])] == 1


def test_soft_labels_of_the_joint_objective_do_not_sum_to_one() -> None:
    """Label smoothing moves weight between classes; here some is taken away."""
    confidence, weight = 0.8, 0.1
    soft = np.array([0.0, 1.0]) - weight * np.array([1 - confidence, confidence])
    assert soft.sum() == pytest.approx(1 - weight)


# Lemma 5: how much a column tells of the class


def most_information(classes: int, arity: int) -> float:
    """max I(y, c) over all columns, by trying all sizes of the groups."""

    def entropy(sizes: tuple[int, ...]) -> float:
        return -sum(size / classes * math.log(size / classes) for size in sizes if size)

    sizes = (cut for cut in itertools.product(range(classes + 1), repeat=arity - 1) if sum(cut) <= classes)
    return max(entropy((*cut, classes - sum(cut))) for cut in sizes)


@pytest.mark.parametrize("classes", [4, 6, 7])
def test_lemma_5_information_grows_with_arity_up_to_the_number_of_classes(classes: int) -> None:
    most = {arity: most_information(classes, arity) for arity in range(2, 7)}
    for arity, value in most.items():
        assert value == pytest.approx(bounds.max_entropy(classes, arity))
        assert (value == pytest.approx(math.log(arity), abs=1e-12)) == (classes % arity == 0)
    for arity in range(2, 6):
        assert (most[arity + 1] > most[arity] + 1e-9) == (arity < classes)
    assert max(most.values()) <= math.log(classes) + 1e-12


# Slips in formulas


def test_printed_hinge_attack_helps_the_defender() -> None:
    """Minimising minus the maximum raises the margin of the label; c = 50 is too large to cut it."""
    scores = torch.tensor([[3.0, 1.0, 0.0]])
    worse = torch.tensor([[1.0, 3.0, 0.0]])
    labels = torch.zeros(1, dtype=torch.int64)

    def printed(values: torch.Tensor) -> float:
        return -max(float(values[0, 0] - values[0, 1:].max()) + 50, 0)

    assert printed(scores) < printed(worse)
    assert score_loss(worse, labels, "margin") > score_loss(scores, labels, "margin")


def test_printed_carlini_wagner_points_leave_the_box() -> None:
    image, w = torch.tensor([0.0, 0.4, 1.0]), torch.tensor([0.3, 1.0, 2.0])
    printed, right = image + (torch.tanh(w) + 1) / 2, (torch.tanh(w) + 1) / 2
    assert printed.max() > 1
    assert 0 <= right.min() <= right.max() <= 1


def test_printed_bim_leaves_the_ball_and_ours_does_not() -> None:
    """Each printed step is cut, their sum is not: with the gradient at the image it goes on for ever."""
    weights = torch.tensor([1.0, -2.0, 0.5])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([weights, -weights]))  # type: ignore[operator]
    images, labels = torch.full((1, 1, 1, 3), 0.5), torch.ones(1, dtype=torch.int64)
    eps, steps = 0.1, 5
    attacked = BIM(norm="linf", eps=eps, steps=steps, step_size=0.05, keep="last")(model, images, labels)
    assert (attacked - images).abs().max() == pytest.approx(eps, abs=1e-6)
    printed = images + steps * (FGSM(norm="linf", eps=0.05, keep="last")(model, images, labels) - images)
    assert (printed - images).abs().max() == pytest.approx(steps * 0.05, abs=1e-6)


def test_printed_p_nu_is_the_same_for_all_classes() -> None:
    """Its denominator sums over tasks what does not depend on them; ours over classes, and gives probabilities."""
    code = load_code("10x30")
    correlation = (
        torch.from_numpy(code.signed.astype("float64")) @ torch.randn(30).double().tanh()
    ).clamp_min(0)
    positive = correlation[correlation > 0]
    printed = positive / (code.code_length * positive)
    assert torch.allclose(printed, torch.full_like(printed, 1 / 30))
    scores = make_decoder(code, "logit", "p_nu")(torch.randn(5, 30, dtype=torch.float64))
    assert torch.allclose(scores.exp().sum(dim=1), torch.ones(5).double(), atol=1e-6)


def test_logistic_decoding_of_symbols_depends_on_a_level_that_says_nothing() -> None:
    code = load_code("10x30-q2")
    logits = torch.randn(4, 30, 2, dtype=torch.float64)
    lifted = logits + 5 * torch.randn(4, 30, 1, dtype=torch.float64)
    logistic, softmax = (make_decoder(code, "symbols", name) for name in ("sigmoid", "softmax"))
    assert torch.allclose(softmax(logits), softmax(lifted))
    assert (logistic(logits).argmax(dim=1) != logistic(lifted).argmax(dim=1)).any()


def test_energy_needs_a_guard_where_columns_say_the_same() -> None:
    code = doubled(load_code("10x15"))
    assert code.min_column_distance == 0
    assert code.min_row_distance == 2 * load_code("10x15").min_row_distance
    assert math.isinf(code.energy(1.0))


def test_what_the_paper_computes_from_its_tables() -> None:
    def percent(value: float, digits: int = 1) -> float:
        return round(100 * value, digits)

    assert percent((61.3 - 36.3) / 61.3) == 40.8  # printed: 40.7
    assert percent((62.2 - 5.3) / 62.2) == 91.5
    assert percent((490_209 - 401_168) / 401_168) == 22.2
    assert percent((818_334 - 490_209) / 818_334) == 40.1
    assert (percent(490_497 / 819_198, 2), percent(490_497 / 2_313_104, 2)) == (59.88, 21.21)
    differences = (
        (88.4, 79.2, 9.2),
        (88.4, 0.2, 88.2),
        (80.8, 4.4, 76.4),
        (71.6, 63.1, 8.5),
        (78.7, 61.3, 17.4),
    )
    assert all(round(a - b, 1) == difference for a, b, difference in differences)
