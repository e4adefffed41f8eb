"""Bounds on the distances of a code of a given size, to judge a design by."""

from __future__ import annotations

import math

import numpy as np


def most_balanced(num_classes: int, groups: int) -> np.ndarray:
    """(group,) class counts of the most even split of the classes, empty groups left out."""
    share, rest = divmod(num_classes, groups)
    sizes = np.full(groups, share)
    sizes[:rest] += 1
    return sizes[sizes > 0]


def max_entropy(num_classes: int, groups: int) -> float:
    """Largest entropy, in nats, of a split of the classes into at most that many groups."""
    shares = most_balanced(num_classes, groups) / num_classes
    return float(-(shares * np.log(shares)).sum())


def plotkin_bound(num_classes: int, code_length: int, *, arity: int = 2) -> int:
    """Largest average Hamming distance between codewords, rounded down: no minimum can exceed it.

    A column separates the most pairs of classes when its symbols occur equally often (Plotkin 1960).
    """
    pairs = num_classes * (num_classes - 1) // 2
    unseparated = sum(size * (size - 1) // 2 for size in most_balanced(num_classes, arity).tolist())
    return int(code_length * (pairs - unseparated) // pairs)


def fits_in_spheres(num_classes: int, code_length: int, distance: int, *, arity: int = 2) -> bool:
    """Whether disjoint decoding spheres around `num_classes` codewords fit in the space of words (Hamming 1950)."""
    if arity == 2 and distance % 2 == 0:
        # Without one column the code has at least the next lower, odd distance; the test of that code is stricter.
        code_length, distance = code_length - 1, distance - 1
    radius = (distance - 1) // 2
    volume = sum(math.comb(code_length, errors) * (arity - 1) ** errors for errors in range(radius + 1))
    return bool(num_classes * volume <= arity**code_length)


def min_row_distance_bound(num_classes: int, code_length: int, *, arity: int = 2) -> int:
    """Upper bound on the minimum Hamming distance between the codewords of a code of this size.

    It is the largest distance that passes three tests:

    - Plotkin's bound allows it, for the code and for every code obtained from it by keeping the rows that agree in
      some columns (which contains Singleton's bound).
    - For binary codes with an odd distance d at length n, the same holds for d + 1 at length n + 1, because a parity
      bit can be appended.
    - Decoding spheres around the codewords fit in the space of words.

    Shipped codes attain the bound at every binary size that the paper uses (docs/codes.md). Not every size does.
    """

    def average_allows(length: int, distance: int) -> bool:
        rows = num_classes
        while rows > 1:
            if length < 1 or plotkin_bound(rows, length, arity=arity) < distance:
                return False
            rows, length = -(-rows // arity), length - 1
        return True

    def possible(distance: int) -> bool:
        padded = arity == 2 and distance % 2
        # Volumes of spheres are slow to compute, being integers of many digits, so they come last.
        return average_allows(code_length + padded, distance + padded) and fits_in_spheres(
            num_classes, code_length, distance, arity=arity
        )

    return next((distance for distance in range(code_length, 0, -1) if possible(distance)), 0)


def count_splits(num_classes: int, arity: int) -> int:
    """Number of different tasks: splits of the classes into 2 to `arity` groups, whatever their names."""
    # Row k of `ways` counts splits into exactly k groups (Stirling numbers of the second kind).
    ways = [1] + [0] * arity
    for _ in range(num_classes):
        ways = [0] + [k * ways[k] + ways[k - 1] for k in range(1, arity + 1)]
    return sum(ways[2:])


def min_column_distance_bound(num_classes: int, code_length: int, *, arity: int = 2) -> float:
    """Upper bound, in nats, on the smallest variation of information (VI) between two columns of a code.

    It is infinite for a single column, and otherwise the smallest of three bounds:

    - 0 if there are more columns than different splits of the classes, because two columns then make the same split.
    - For any pair of columns, VI is at most the joint entropy of the two splits, and at most twice the largest
      entropy of one split.
    - Centred binary columns are vectors in num_classes - 1 dimensions. If there are more columns than dimensions,
      some pair must be correlated, and correlation limits VI.
    """
    if code_length < 2:
        return math.inf
    # More than 64 classes can be split in more ways than any code has columns.
    if num_classes <= 64 and code_length > count_splits(num_classes, arity):
        return 0.0
    bound = min(2 * max_entropy(num_classes, arity), max_entropy(num_classes, arity * arity))
    if arity == 2:
        bound = min(
            bound, _max_vi_of_correlated_splits(num_classes, _forced_correlation(num_classes, code_length))
        )
    return bound


def _forced_correlation(num_classes: int, code_length: int) -> float:
    """Lower bound on the squared correlation of the two most correlated columns of a binary code of this size.

    With P_n the projection on column n's centred direction, sum_{m,n} tr(P_m P_n) is at least
    (sum_n tr P_n)^2 / dimension, by Cauchy-Schwarz on the eigenvalues of sum_n P_n (Welch 1974).
    """
    dimension = num_classes - 1
    return max(0.0, (code_length - dimension) / (dimension * (code_length - 1)))


def _max_vi_of_correlated_splits(num_classes: int, squared_correlation: float) -> float:
    """Largest VI, in nats, of two binary splits with at least that squared correlation, over all group sizes.

    VI is concave in the overlap of the two splits and largest where they are independent. So for each pair of group
    sizes only the admissible overlap nearest to independence matters, on each side of it.
    """
    a, b = np.meshgrid(np.arange(1, num_classes), np.arange(1, num_classes), indexing="ij")
    independent = a * b / num_classes
    spread = np.sqrt(squared_correlation * a * b * (num_classes - a) * (num_classes - b)) / num_classes
    # An overlap exactly on the limit is admissible in spite of rounding: the bound must never be too low.
    tolerance = 1e-9
    best = -math.inf
    for overlap in (
        np.floor(independent - spread + tolerance).astype(int),
        np.ceil(independent + spread - tolerance).astype(int),
    ):
        cells = np.stack([overlap, a - overlap, b - overlap, num_classes - a - b + overlap])
        values = _vi_from_counts(np.maximum(cells, 0), a, b, num_classes)
        best = max(best, float(np.where((cells >= 0).all(axis=0), values, -math.inf).max()))
    return best


def _vi_from_counts(cells: np.ndarray, a: np.ndarray, b: np.ndarray, num_classes: int) -> np.ndarray:
    """VI in nats of pairs of binary splits, from their (4, ...) contingency counts and group sizes a, b."""

    def entropy(*counts: np.ndarray) -> np.ndarray:
        shares = np.stack(counts) / num_classes
        return np.asarray(-(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=0))

    vi: np.ndarray = 2 * entropy(*cells) - entropy(a, num_classes - a) - entropy(b, num_classes - b)
    return vi
