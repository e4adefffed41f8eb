"""Decoders: agreement with the nearest codeword, correction of errors, common levels, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import codes
from torch import Tensor

from ecnn.codes import CodeMatrix, load_code
from ecnn.constructions import to_binary
from ecnn.decoders import DECODERS, DEFAULT_DECODER, decoders_for, make_decoder
from ecnn.errors import InputError

LOGIT = ("tanh", "linear", "p_nu", "hamming")
SYMBOLS = ("linear", "sigmoid", "softmax", "binary_tanh", "hamming")
TOY = CodeMatrix([[1, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 1]])
TERNARY = CodeMatrix([[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1]], 3)


def peaks(code: CodeMatrix, words: np.ndarray) -> Tensor:
    """(word, member, symbol) +1 at the received symbol and -1 elsewhere."""
    return torch.from_numpy(2.0 * (words[:, :, None] == np.arange(code.arity)) - 1).float()


@st.composite
def received(draw: st.DrawFn, code: CodeMatrix, max_errors: int) -> tuple[int, np.ndarray]:
    """A label and its codeword with at most that many wrong symbols."""
    label = draw(st.integers(0, code.num_classes - 1))
    word = code.symbols[label].astype(np.int64)
    for task in draw(st.lists(st.integers(0, code.code_length - 1), unique=True, max_size=max_errors)):
        word[task] = (word[task] + draw(st.integers(1, code.arity - 1))) % code.arity
    return label, word


def test_names_and_what_they_accept() -> None:
    assert decoders_for("logit") == LOGIT
    assert decoders_for("symbols") == SYMBOLS
    assert set(LOGIT) | set(SYMBOLS) == set(DECODERS)
    assert DEFAULT_DECODER == {"logit": "tanh", "symbols": "sigmoid"}
    assert type(make_decoder(TOY, "logit")) is DECODERS["tanh"]
    assert type(make_decoder(TERNARY, "symbols")) is DECODERS["sigmoid"]


def test_formulas_for_logit_members() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0, -0.1]], dtype=torch.float64)
    signs = torch.tensor([[1, -1, 1, -1], [1, 1, -1, 1], [-1, -1, -1, 1]], dtype=torch.float64)
    correlations = (signs * torch.tanh(logits)).sum(dim=1)
    torch.testing.assert_close(make_decoder(TOY, "logit", "tanh").double()(logits)[0], correlations)
    torch.testing.assert_close(
        make_decoder(TOY, "logit", "linear").double()(logits)[0], (signs * logits).sum(dim=1)
    )
    shares = correlations.clamp(min=0) + 1e-6
    torch.testing.assert_close(
        make_decoder(TOY, "logit", "p_nu").double()(logits)[0], (shares / shares.sum()).log()
    )
    assert make_decoder(TOY, "logit", "hamming")(logits).tolist() == [[4, 1, 1]]


def test_formulas_for_symbols_members() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 3, dtype=torch.float64)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda z: z - z.mean(),
        "sigmoid": lambda z: torch.sigmoid(z) - 0.5,
        "softmax": lambda z: z.exp() / z.exp().sum(),
    }
    for name, function in functions.items():
        scores = make_decoder(TERNARY, "symbols", name).double()(logits)
        for image in range(2):
            for label, word in enumerate(TERNARY.symbols):
                said = [function(logits[image, task])[symbol] for task, symbol in enumerate(word)]
                assert scores[image, label].item() == pytest.approx(sum(value.item() for value in said))


def test_binary_tanh_is_the_tanh_decoder_of_the_one_hot_code() -> None:
    logits = torch.randn(5, 3, 3)
    expanded = make_decoder(to_binary(TERNARY), "logit", "tanh")
    torch.testing.assert_close(
        make_decoder(TERNARY, "symbols", "binary_tanh")(logits), expanded(logits.flatten(1))
    )


@given(codes(arities=(2,)), st.integers(0, 2**32))
def test_soft_decoding_of_hard_bits_is_the_nearest_codeword(code: CodeMatrix, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2, (8, code.code_length))
    nearest = torch.from_numpy(code.nearest(words))
    bits = torch.from_numpy(2.0 * words - 1).float()
    for name in ("tanh", "linear", "hamming"):
        scores = make_decoder(code, "logit", name)(bits)
        # A word can be equally near to several: the nearest must be among the best, up to rounding.
        best = scores.amax(dim=1)
        torch.testing.assert_close(scores.gather(1, nearest[:, None])[:, 0], best, atol=1e-5, rtol=0)
        distances = (words[:, None, :] != code.symbols[None]).sum(axis=2)
        scale = math.tanh(1) if name == "tanh" else 1.0
        expected = torch.from_numpy(
            code.code_length - distances if name == "hamming" else scale * (code.code_length - 2 * distances)
        )
        torch.testing.assert_close(scores, expected.float(), atol=1e-5, rtol=0)


@given(codes(), st.integers(0, 2**32))
def test_soft_decoding_of_hard_symbols_is_the_nearest_codeword(code: CodeMatrix, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, code.arity, (8, code.code_length))
    nearest = torch.from_numpy(code.nearest(words))
    for name in SYMBOLS:
        scores = make_decoder(code, "symbols", name)(peaks(code, words))
        torch.testing.assert_close(
            scores.gather(1, nearest[:, None])[:, 0], scores.amax(dim=1), atol=1e-5, rtol=0
        )


@given(codes(arities=(2,)), st.data())
def test_bit_errors_up_to_half_the_distance_are_corrected(code: CodeMatrix, data: st.DataObject) -> None:
    label, word = data.draw(received(code, code.correctable_errors))
    bits = torch.from_numpy(2.0 * word[None] - 1).float() * data.draw(st.sampled_from([0.3, 1.0, 20.0]))
    for name in LOGIT:
        assert make_decoder(code, "logit", name)(bits).argmax().item() == label


@given(codes(), st.data())
def test_symbol_errors_up_to_half_the_distance_are_corrected(code: CodeMatrix, data: st.DataObject) -> None:
    label, word = data.draw(received(code, code.correctable_errors))
    for name in SYMBOLS:
        assert make_decoder(code, "symbols", name)(peaks(code, word[None])).argmax().item() == label


def test_a_common_level_fools_only_the_decoders_that_see_it() -> None:
    """Erratum 8: the answers do not change, yet the sigmoid decoder's margin all but vanishes."""
    code = load_code("10x30-q2")
    answers = peaks(code, code.symbols[:1].astype(np.int64)) / 2  # every member right by a lead of 1
    for level in (-12.0, 12.0):
        for name in ("softmax", "linear", "hamming"):
            decoder = make_decoder(code, "symbols", name)
            torch.testing.assert_close(decoder(answers + level), decoder(answers), atol=1e-4, rtol=0)
        for name in ("sigmoid", "binary_tanh"):
            decoder = make_decoder(code, "symbols", name)
            before, after = (
                decoder(values)[0].sort(descending=True).values for values in (answers, answers + level)
            )
            assert (after[0] - after[1]) < 0.001 * (before[0] - before[1])
    sigmoid = make_decoder(code, "symbols", "sigmoid").double()
    assert sigmoid(answers.double() + 12).argmax() == 0  # flattened, but not turned


def test_a_common_level_by_hand() -> None:
    code = CodeMatrix([[0, 1], [1, 0]])
    logits = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    decoder = make_decoder(code, "symbols", "sigmoid")
    margin = 2 * (1 / (1 + math.exp(-1)) - 0.5)
    shifted = 2 * (1 / (1 + math.exp(-4)) - 1 / (1 + math.exp(-3)))
    scores, raised = decoder(logits)[0], decoder(logits + 3)[0]
    assert (scores[0] - scores[1]).item() == pytest.approx(margin, rel=1e-5)
    assert (raised[0] - raised[1]).item() == pytest.approx(shifted, rel=1e-5)


def test_flat_scores_do_not_depend_on_the_order_of_addition() -> None:
    """Members in another order, as another processor may add them: the same scores to the bit, though all but equal."""
    code = load_code("10x30-q2")
    torch.manual_seed(0)
    logits = 8 + torch.randn(1000, code.code_length, 2)
    order = torch.randperm(code.code_length)
    turned = CodeMatrix(code.symbols[:, order.numpy()])
    decoder, other = (make_decoder(each, "symbols", "sigmoid") for each in (code, turned))
    scores = decoder(logits)
    assert scores.dtype == torch.float32
    assert float((scores.amax(dim=1) - scores.amin(dim=1)).median()) < 0.02
    assert torch.equal(scores, other(logits[:, order]))
    shares = torch.sigmoid(logits)  # what sums in float32 would say
    assert not torch.equal(
        shares.flatten(1) @ decoder.one_hot.T, shares[:, order].flatten(1) @ other.one_hot.T
    )


@pytest.mark.parametrize("name", LOGIT)
def test_scores_of_sure_and_of_silent_members_are_finite(name: str) -> None:
    logits = torch.tensor([[50.0, -50.0, 50.0, -50.0], [0.0, 0.0, 0.0, 0.0]])
    scores = make_decoder(TOY, "logit", name)(logits)
    assert scores.isfinite().all()
    if name == "p_nu":
        torch.testing.assert_close(scores.exp().sum(dim=1), torch.ones(2))


def test_p_nu_has_no_gradient_for_a_class_below_zero() -> None:
    logits = torch.tensor([[1.0, -1.0, 1.0, -1.0]], requires_grad=True)
    correlations = make_decoder(TOY, "logit", "tanh")(logits)
    assert (correlations[0] < 0).tolist() == [False, True, True]
    difference = make_decoder(TOY, "logit", "p_nu")(logits)[0]
    (gradient,) = torch.autograd.grad(difference[1] - difference[2], logits)
    assert not gradient.any()


@pytest.mark.parametrize(
    ("code", "output", "shape"), [(TOY, "logit", (2, 4)), (TERNARY, "symbols", (2, 3, 3))]
)
def test_hard_decoding_has_a_gradient_of_zero(code: CodeMatrix, output: str, shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, requires_grad=True)
    scores = make_decoder(code, output, "hamming")(logits)
    (gradient,) = torch.autograd.grad(scores.sum(), logits)
    assert not gradient.any()
    assert scores.frac().eq(0).all()


def test_hard_ties() -> None:
    assert make_decoder(TOY, "logit", "hamming")(torch.zeros(1, 4)).tolist() == [
        [2, 1, 3]
    ]  # zero is symbol 0
    scores = make_decoder(TERNARY, "symbols", "hamming")(torch.zeros(1, 3, 3))  # so is a tie
    assert scores[0].tolist() == (TERNARY.symbols == 0).sum(axis=1).tolist()


@pytest.mark.parametrize(
    ("code", "output", "name", "sentence"),
    [
        (TOY, "symbols", "tanh", "for those use linear, sigmoid, softmax, binary_tanh, hamming"),
        (TOY, "symbols", "p_nu", "reads members with logit output, not 'symbols'"),
        (TOY, "logit", "sigmoid", "for those use tanh, linear, p_nu, hamming"),
        (TOY, "logit", "softmax", "reads members with symbols output, not 'logit'"),
        (TOY, "logit", "binary_tanh", "reads members with symbols output, not 'logit'"),
        (TERNARY, "logit", "tanh", 'arity 3: use member_output="symbols"'),
        (TERNARY, "logit", None, "arity 3"),
        (TOY, "bits", None, "member_output must be logit or symbols, not 'bits'"),
        (TOY, "logit", "majority", "must be one of tanh, linear"),
    ],
)
def test_wrong_combinations_are_refused(
    code: CodeMatrix, output: str, name: str | None, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        make_decoder(code, output, name)


def test_a_decoder_class_refuses_by_itself() -> None:
    with pytest.raises(InputError, match="TanhDecoder reads members with logit output"):
        DECODERS["tanh"](TOY, "symbols")


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 4, 2)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"\(batch, 4\), not"):
        make_decoder(TOY, "logit")(torch.zeros(shape))


def test_nothing_is_saved_and_precision_is_kept() -> None:
    decoder = make_decoder(load_code("10x30"), "logit")
    assert decoder.state_dict() == {}
    logits = torch.randn(4, 30)
    expected = decoder(logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(decoder(logits), expected)
        assert decoder(logits.bfloat16()).dtype == torch.float32
    assert decoder.double()(logits.double()).dtype == torch.float64
