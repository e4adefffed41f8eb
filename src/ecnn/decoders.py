"""Decoders: member logits to class scores, by a soft or hard comparison with the codewords."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import full_precision
from ecnn.checks import check_choice
from ecnn.codes import CodeMatrix
from ecnn.errors import InputError

MemberOutput = Literal["logit", "symbols"]
MEMBER_OUTPUTS: tuple[str, ...] = ("logit", "symbols")
DEFAULT_DECODER: dict[str, str] = {"logit": "tanh", "symbols": "sigmoid"}

# Added to every class's correlation, so that a share of zero has a finite logarithm, as Verma & Swami do.
SHARE_FLOOR = 1e-6


def check_member_output(code: CodeMatrix, member_output: str) -> None:
    """Raises InputError unless members with that output can learn the tasks of this code."""
    check_choice("member_output", member_output, MEMBER_OUTPUTS)
    if member_output == "logit" and code.arity != 2:
        raise InputError(
            f"one logit per member can only tell two symbols apart, but the code has arity {code.arity}: use "
            'member_output="symbols".'
        )


class Decoder(nn.Module):
    """Base of the decoders: from member logits to class scores (batch, class), in float32 or better.

    Scores are never computed in half precision, not even under autocast: they are sums of up to `code_length`
    terms whose small differences decide.

    Args:
        code: its codewords are compared with the members' logits.
        member_output: "logit" for member logits (batch, member), "symbols" for (batch, member, symbol).
    """

    accepts: ClassVar[tuple[str, ...]] = ()
    signs: Tensor
    one_hot: Tensor

    def __init__(self, code: CodeMatrix, member_output: str) -> None:
        super().__init__()
        check_member_output(code, member_output)
        if member_output not in self.accepts:
            raise InputError(
                f"{type(self).__name__} reads members with {' or '.join(self.accepts)} output, not "
                f"{member_output!r}; for those use {', '.join(decoders_for(member_output))}."
            )
        self.member_output = member_output
        self.shape = (code.code_length,) if member_output == "logit" else (code.code_length, code.arity)
        # (class, member * symbol) codewords as -1 and +1, then as 0 and 1; rebuilt from the code, so not saved.
        table = code.signed if member_output == "logit" else 2 * code.one_hot - 1
        signs = torch.from_numpy(table.reshape(code.num_classes, -1).astype(np.float32))
        self.register_buffer("signs", signs, persistent=False)
        self.register_buffer("one_hot", (signs + 1) / 2, persistent=False)

    def forward(self, member_logits: Tensor) -> Tensor:
        if member_logits.ndim != len(self.shape) + 1 or tuple(member_logits.shape[1:]) != self.shape:
            expected = ", ".join(str(size) for size in self.shape)
            raise InputError(
                f"member logits must have the shape (batch, {expected}), not {tuple(member_logits.shape)}."
            )
        logits = full_precision(member_logits)
        device = logits.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.scores(logits)
        return self.scores(logits)

    def scores(self, member_logits: Tensor) -> Tensor:
        """(batch, class) scores of member logits whose shape has been checked; every decoder defines this."""
        raise NotImplementedError


class TanhDecoder(Decoder):
    """Correlation of tanh(z) with each codeword in signs, from -N to N: the paper's decoder.

    In float32 the gradient of tanh is exactly zero from |z| = 9.02 on: gradient attacks on these scores can
    stall where the model is not robust. Use `LinearDecoder` or the member logits to attack.
    """

    accepts = ("logit",)

    def scores(self, member_logits: Tensor) -> Tensor:
        return _correlate(torch.tanh(member_logits), self.signs)


class LinearDecoder(Decoder):
    """Correlation of the logits themselves with each codeword: nothing saturates.

    For members with "symbols" output, each member's mean over its symbols is subtracted first, so that adding a
    constant to its logits changes nothing.
    """

    accepts = ("logit", "symbols")

    def scores(self, member_logits: Tensor) -> Tensor:
        if self.member_output == "logit":
            return _correlate(member_logits, self.signs)
        return _correlate(member_logits - member_logits.mean(dim=-1, keepdim=True), self.one_hot)


class SigmoidDecoder(Decoder):
    """Sum over members of sigmoid(z) - 1/2 at the symbol in the codeword of each class, from -N/2 to N/2.

    The scores change if a constant is added to all logits of a member, although the member's answer does not, and a
    hinge on differences of logits (`symbol_hinge`) leaves this constant free. If it is large, every sigmoid is close to
    1, and sums near N differ by less than float32 resolves. Therefore 1/2 is subtracted, and the sum is computed in
    float64 and rounded once. A CPU, a GPU and the same model in float64 then agree on the best class.

    Departs: the appendix prints M nu(z) with an M of the wrong size; as in the authors' program, M is expanded one-hot.
        Their scores are ours plus N/2.
    """

    accepts = ("symbols",)

    def scores(self, member_logits: Tensor) -> Tensor:
        shares = torch.sigmoid(member_logits) - 0.5
        if shares.device.type == "mps":  # has no float64
            return _correlate(shares, self.one_hot)
        return _correlate(shares.double(), self.one_hot).to(shares.dtype)


class SoftmaxDecoder(Decoder):
    """Expected number of symbols that agree with each codeword, from 0 to N.

    Departs: replaces the logistic function by a softmax over each member's symbols, so that adding a constant to a
        member's logits changes nothing.
    """

    accepts = ("symbols",)

    def scores(self, member_logits: Tensor) -> Tensor:
        return _correlate(torch.softmax(member_logits, dim=-1), self.one_hot)


class BinaryTanhDecoder(Decoder):
    """Correlation of tanh(z) with the codewords expanded to one sign per symbol, from -qN to qN.

    It is the main text's binary decoder applied to q-ary members: one-hot expansion makes the code M x qN.
    """

    accepts = ("symbols",)

    def scores(self, member_logits: Tensor) -> Tensor:
        return _correlate(torch.tanh(member_logits), self.signs)


class ShareDecoder(Decoder):
    """Logarithm of each class's share of the positive correlations of tanh(z): Verma & Swami's p_nu.

    p_k is proportional to max(m_k . tanh(z), 0) + 1e-6; the constant is that of their program. Negative correlations
    pass on exactly no gradient.

    Departs: the printed denominator does not sum over classes; a probability must.
    """

    accepts = ("logit",)

    def scores(self, member_logits: Tensor) -> Tensor:
        shares = torch.relu(_correlate(torch.tanh(member_logits), self.signs)) + SHARE_FLOOR
        return shares.log() - shares.sum(dim=1, keepdim=True).log()


class HammingDecoder(Decoder):
    """Number of members whose hard decision agrees with each codeword, 0 to N; the gradient is zero.

    A single logit above zero means symbol 1. Of several logits the largest gives the symbol (the first, if tied).
    """

    accepts = ("logit", "symbols")

    def scores(self, member_logits: Tensor) -> Tensor:
        # sign keeps the scores differentiable, with gradient zero: an attack then finds nothing instead of failing.
        sign = torch.sign(member_logits)
        if self.member_output == "logit":
            bits = torch.sign(sign - 0.5)
            return (_correlate(bits, self.signs) + self.shape[0]) / 2
        # Not by scatter, with which an exported graph would be fixed to one batch size.
        symbols = torch.arange(member_logits.shape[-1], device=member_logits.device)
        answer = (member_logits.argmax(dim=-1, keepdim=True) == symbols).to(member_logits.dtype)
        return _correlate(answer + 0 * sign, self.one_hot)


DECODERS: dict[str, type[Decoder]] = {
    "tanh": TanhDecoder,
    "linear": LinearDecoder,
    "sigmoid": SigmoidDecoder,
    "softmax": SoftmaxDecoder,
    "binary_tanh": BinaryTanhDecoder,
    "p_nu": ShareDecoder,
    "hamming": HammingDecoder,
}


def decoders_for(member_output: str) -> tuple[str, ...]:
    """Names of the decoders for members with that output."""
    return tuple(name for name, decoder in DECODERS.items() if member_output in decoder.accepts)


def make_decoder(code: CodeMatrix, member_output: str, name: str | None = None) -> Decoder:
    """The decoder of that name; None takes the paper's: "tanh" for logits, "sigmoid" for symbols."""
    check_member_output(code, member_output)
    name = DEFAULT_DECODER[member_output] if name is None else name
    check_choice("decoder", name, DECODERS)
    return DECODERS[name](code, member_output)


def _correlate(values: Tensor, table: Tensor) -> Tensor:
    """(batch, class) inner products of (batch, member[, symbol]) with (class, member * symbol)."""
    return values.flatten(1) @ table.to(values.dtype).T
