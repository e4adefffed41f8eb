"""The best code of a small size, found by exhaustive search; tests compare annealing with it."""

from __future__ import annotations

import itertools
import math

import numpy as np

from ecnn.bounds import most_balanced
from ecnn.codes import CodeMatrix, ColumnWeight, check_size, resolve_column_weight, variation_of_information
from ecnn.errors import InputError

MAX_CLASSES, MAX_LENGTH = 6, 5


def exhaustive_code(
    num_classes: int, code_length: int, *, arity: int = 2, column_weight: ColumnWeight = 1.0
) -> CodeMatrix:
    """A code of the lowest energy that exists at this size, by branch and bound over sets of columns.

    Renaming symbols in a column, permuting columns and permuting rows change no distance. So columns are splits of the
    classes, taken in increasing order, and as first column one split per list of group sizes is enough.
    """
    check_size(num_classes, code_length, arity)
    if num_classes > MAX_CLASSES or code_length > MAX_LENGTH:
        raise InputError(
            f"trying every code is feasible up to {MAX_CLASSES} classes and length {MAX_LENGTH}, not "
            f"{num_classes} x {code_length}: use design_code."
        )
    weight = resolve_column_weight(column_weight, num_classes, code_length, arity)
    search = _Search(_splits(num_classes, arity), code_length, weight)
    search.run()
    if search.best_columns is None:
        raise InputError(
            f"every {num_classes} x {code_length} code of arity {arity} has two equal tasks: use fewer tasks."
        )
    symbols = np.stack([search.splits[index] for index in search.best_columns], axis=1)
    provenance = {"method": "exhaustive", "column_weight": weight}
    return CodeMatrix(symbols, arity, provenance=provenance)


def _splits(num_classes: int, arity: int) -> np.ndarray:
    """(split, class) every split into 2 to arity groups once, group numbers in order of first appearance.

    Splits are sorted by their group sizes, the most balanced first.
    """
    names = itertools.product(range(arity), repeat=num_classes)
    found = [
        split
        for split in names
        if max(split) > 0 and all(split[i] <= max(split[:i], default=-1) + 1 for i in range(num_classes))
    ]
    return np.array(sorted(found, key=lambda split: (_kind(np.array(split)), split)))


def _kind(split: np.ndarray) -> tuple[int, ...]:
    """Group sizes, largest first; equal for two splits exactly if permuting the classes maps one to the other."""
    return tuple(sorted(np.bincount(split).tolist(), reverse=True))


class _Search:
    """Depth-first search over increasing sets of splits; it keeps the best code and skips what cannot beat it."""

    def __init__(self, splits: np.ndarray, code_length: int, weight: float) -> None:
        self.splits, self.code_length = splits, code_length
        first, second = np.triu_indices(splits.shape[1], k=1)
        self.separated = (splits[:, first] != splits[:, second]).astype(np.int64)
        vi = np.array([[variation_of_information(a, b) for b in splits] for a in splits])
        with np.errstate(divide="ignore"):
            self.pair_cost = weight * vi**-2 if weight else np.where(vi > 0, 0.0, math.inf)
        self.cheapest_pair = float(self.pair_cost.min())
        groups = most_balanced(splits.shape[1], int(splits.max()) + 1).tolist()
        self.most_separated = len(first) - sum(math.comb(size, 2) for size in groups)
        self.best_energy = math.inf
        self.best_columns: list[int] | None = None

    def run(self) -> None:
        if self.code_length == 1:
            self._complete([], np.arange(len(self.splits)), 0 * self.separated[0], np.zeros(len(self.splits)))
            return
        seen: set[tuple[int, ...]] = set()
        for index, split in enumerate(self.splits):
            if _kind(split) not in seen:  # the later columns are of this kind or a later one
                seen.add(_kind(split))
                self._extend([index], self.separated[index], 0.0, self.pair_cost[index])

    def _extend(self, columns: list[int], distances: np.ndarray, cost: float, added: np.ndarray) -> None:
        """Tries every way to complete `columns` with later splits.

        Args:
            distances: (pair of rows,) Hamming distances so far.
            cost: energy of the pairs of columns so far.
            added: (split,) energy that each split would add as the next column.
        """
        options = np.arange(columns[-1] + 1, len(self.splits))
        left = self.code_length - len(columns) - 1
        if left == 0:
            self._complete(columns, options, distances, cost + added)
            return
        pairs_left = math.comb(self.code_length, 2) - math.comb(len(columns) + 1, 2)
        for option in options.tolist():
            after = distances + self.separated[option]
            # H^-2 is convex, so the row term is least when all rows are equally far apart.
            mean = (after.sum() + left * self.most_separated) / len(after)
            least = cost + added[option] + pairs_left * self.cheapest_pair + len(after) * mean**-2
            if least < self.best_energy:
                self._extend([*columns, option], after, cost + added[option], added + self.pair_cost[option])

    def _complete(
        self, columns: list[int], options: np.ndarray, distances: np.ndarray, cost: np.ndarray
    ) -> None:
        """Keeps the best of the codes with one more column, if it beats the best so far.

        Args:
            cost: (split,) energy of all pairs of columns with that split as the last column.
        """
        if not len(options):
            return
        with np.errstate(divide="ignore"):
            rows = ((distances + self.separated[options]).astype(np.float64) ** -2).sum(axis=1)
        energies = rows + cost[options]
        best = int(np.argmin(energies))
        if energies[best] < self.best_energy:
            self.best_energy, self.best_columns = float(energies[best]), [*columns, int(options[best])]
