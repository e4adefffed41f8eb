"""Transfer matrices: images attacked on one member, or one model, are classified by the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecnn.asking import in_usual_state, undisturbed, without_tf32
from ecnn.attacks import PGD, Attack
from ecnn.attacks.randomness import forked_generators
from ecnn.attacks.views import member_margins, members_of
from ecnn.data import Split
from ecnn.errors import InputError
from ecnn.evaluation.batch import (
    BATCH_SIZE,
    ForeignAttack,
    batch_seed,
    check_request,
    place,
    predict,
    run_attack,
)
from ecnn.evaluation.intervals import Rate
from ecnn.progress import Progress

#: The attack of the paper's fig:transfer, with eps 0.04 and 200 iterations; the step size is from the authors' program.
TRANSFER_PGD = PGD(norm="linf", eps=0.04, steps=200, step_size=0.02, loss="margin", keep="last")


@dataclass(frozen=True, eq=False)
class TransferMatrix:
    """How many images each victim classifies correctly after an attack on each source.

    Attributes:
        names: of the members or models, for both axes.
        counts: (source, victim) number of images that the victim gets right after the attack on the source.
        clean_counts: (victim,) number of images that it gets right without an attack.
        n: number of images.
    """

    names: tuple[str, ...]
    counts: np.ndarray
    clean_counts: np.ndarray
    n: int

    @property
    def accuracy(self) -> np.ndarray:
        """(source, victim) accuracy between 0 and 1: the paper's matrix."""
        return self.counts / self.n

    @property
    def clean_accuracy(self) -> np.ndarray:
        """(victim,) accuracy without an attack, between 0 and 1."""
        return self.clean_counts / self.n

    def rate(self, source: int, victim: int) -> Rate:
        """One entry of the matrix, with its interval."""
        return Rate(int(self.counts[source, victim]), self.n)

    def table(self) -> str:
        """The matrix as text, in per cent: rows are sources, columns victims."""
        width = max(6, *(len(name) for name in self.names))
        rows = [("clean", self.clean_accuracy), *zip(self.names, self.accuracy, strict=True)]
        first = max(len(name) for name, _ in rows)
        lines = [" ".join([" " * first, *(name.rjust(width) for name in self.names)])]
        lines += [
            " ".join([name.ljust(first), *(f"{100 * share:{width}.1f}" for share in row)])
            for name, row in rows
        ]
        return "\n".join([*lines, f"{self.n} images, per cent right; rows: crafted on, columns: shown to."])

    def to_json(self) -> dict[str, Any]:
        """The counts as plain values for JSON."""
        return {
            "names": list(self.names),
            "counts": self.counts.tolist(),
            "clean_counts": self.clean_counts.tolist(),
            "images": self.n,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TransferMatrix:
        """The matrix from the values of `to_json`; other entries are ignored."""
        counts, clean_counts = np.array(values["counts"]), np.array(values["clean_counts"])
        return cls(tuple(values["names"]), counts, clean_counts, values["images"])


class Member(nn.Module):
    """One member as a classifier with scores (batch, symbol) of its task, so that any attack can be run on it.

    Args:
        model: with `member_logits` and a code, such as an ECNN.
        member: number of the member, from 0.
    """

    def __init__(self, model: nn.Module, member: int) -> None:
        super().__init__()
        self.model, self.member = model, member

    def forward(self, images: Tensor) -> Tensor:
        logits, _ = members_of(self.model, images)
        logits = logits[:, self.member]
        # A binary logit is the lead of symbol 1: the scores -z/2 and z/2 have that difference.
        return logits if logits.ndim == 2 else torch.stack([-logits / 2, logits / 2], dim=1)


@in_usual_state
def member_transfer(
    model: nn.Module,
    split: Split,
    attack: Attack | ForeignAttack,
    *,
    limit: int | None,
    seed: int = 0,
    members: Sequence[int] | None = None,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
) -> TransferMatrix:
    """Binary accuracy of member j on images crafted against member i (fig:transfer).

    A member is attacked as a classifier of its own task; the label is the symbol of the true class. A member with equal
    logits counts as wrong.

    Args:
        model: with `member_logits` and a code.
        split: the images, of which the first `limit` are used.
        attack: on one member; `TRANSFER_PGD` is the paper's.
        members: numbers of the members that are sources and victims; the paper shows the first four. None takes all.
    """
    chosen = check_request(model, split, limit, batch_size)
    with undisturbed(model), without_tf32():
        with torch.no_grad():
            _, symbols = members_of(model, place(model, chosen[:1][0]))
        shown = _check_members(members, symbols.shape[1])

        def judge(images: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
                return (member_margins(model, images, labels)[:, shown] > 0).sum(dim=0)

        sources = {f"member {member}": Member(model, member) for member in shown}
        tasks = [symbols[:, member].contiguous() for member in shown]
        return _fill(sources, tasks, judge, chosen, attack, seed, batch_size, progress)


@in_usual_state
def model_transfer(
    models: Mapping[str, nn.Module],
    split: Split,
    attack: Attack | ForeignAttack,
    *,
    limit: int | None,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
) -> TransferMatrix:
    """Robust accuracy of model j on images crafted against model i: right both when clean and when attacked.

    Prefer an attack with keep="last". With keep="best" it returns the clean image where it fails on the source, or
    where the source was wrong anyway, and it stops just beyond the source's border: such images transfer less.

    Args:
        models: by name, all for the same classes.
        attack: on one model.
    """
    if not models:
        raise InputError("model_transfer needs at least one model.")
    for model in models.values():
        chosen = check_request(model, split, limit, batch_size)

    def judge(images: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        right = []
        for model in models.values():
            verdicts = [
                predict(model, place(model, batch)).cpu() == labels.cpu() for batch in (clean, images)
            ]
            right.append((verdicts[0] & verdicts[1]).sum())
        return torch.stack(right)

    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(undisturbed(model))
        stack.enter_context(without_tf32())
        return _fill(models, [None] * len(models), judge, chosen, attack, seed, batch_size, progress)


def _fill(
    sources: Mapping[str, nn.Module],
    tasks: Sequence[Tensor | None],
    judge: Callable[[Tensor, Tensor, Tensor], Tensor],
    chosen: Split,
    attack: Attack | ForeignAttack,
    seed: int,
    batch_size: int,
    progress: Progress | None,
) -> TransferMatrix:
    """Computes the matrix, batch by batch.

    Args:
        tasks: for each source the label (class,) that it has for each class; None if its labels are the classes.
        judge: (attacked, clean, labels) -> (victim,) how many images of the batch each victim gets right.
    """
    counts = np.zeros((len(sources), len(sources)), dtype=np.int64)
    clean_counts = np.zeros(len(sources), dtype=np.int64)
    done, total = 0, len(chosen) * len(sources)
    for index in torch.split(torch.arange(len(chosen), device="cpu"), batch_size):
        clean, labels = chosen[index]
        for row, ((name, source), task) in enumerate(zip(sources.items(), tasks, strict=True)):
            images = place(source, clean)
            own = labels.to(images.device)
            if row == 0:
                clean_counts += judge(images, images, own).cpu().numpy()
            goals = own if task is None else task[own]
            with forked_generators(images.device, batch_seed(seed, int(index[0]))):
                crafted = run_attack(source, attack, name, images, goals, seed, index)
            counts[row] += judge(crafted.images, images, own).cpu().numpy()
            done += len(index)
            if progress is not None:
                share = counts[row, row] / (int(index[-1]) + 1)
                progress(done, total, f"{name} on itself {100 * share:.1f} %")
    return TransferMatrix(tuple(sources), counts, clean_counts, len(chosen))


def _check_members(members: Sequence[int] | None, num_members: int) -> list[int]:
    if members is None:
        return list(range(num_members))
    chosen = list(members)
    if (
        not chosen
        or len(set(chosen)) != len(chosen)
        or not all(isinstance(member, int) and 0 <= member < num_members for member in chosen)
    ):
        raise InputError(f"members must be distinct numbers from 0 to {num_members - 1}, not {chosen}.")
    return chosen
