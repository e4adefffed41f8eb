"""Codes that need no search: random, one-vs-rest, Hadamard, Levenshtein, doubled, one-hot expansion."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np

from ecnn.checks import check_count
from ecnn.codes import CodeMatrix, check_size
from ecnn.errors import InputError

HadamardSource = Callable[[int], np.ndarray]


def random_code(num_classes: int, code_length: int, *, arity: int = 2, seed: int) -> CodeMatrix:
    """A random code whose columns use every symbol equally often, as far as the number of classes allows.

    If two classes get the same codeword, another code is drawn. After 100 such draws, up to 100 codes of distinct
    codewords are drawn instead, whose columns need not be balanced. This happens when nearly all words of this length
    are needed. Raises InputError if these fail too.
    """
    check_size(num_classes, code_length, arity)
    check_count("seed", seed, least=0)
    rng = np.random.default_rng(seed)
    even_column = np.arange(num_classes) % arity
    for attempt in range(200):
        if attempt < 100:
            # Which symbols get the extra class is drawn anew for each column.
            columns = [rng.permutation(arity)[rng.permutation(even_column)] for _ in range(code_length)]
            symbols = np.stack(columns, axis=1)
        else:
            symbols = _distinct_words(num_classes, code_length, arity, int(rng.integers(2**62)))
        try:
            return CodeMatrix(symbols, arity, provenance={"method": "random", "seed": int(seed)})
        except InputError:
            continue
    raise InputError(
        f"found no random {num_classes} x {code_length} code of arity {arity} in 200 draws: try a longer one."
    )


def one_vs_rest(num_classes: int) -> CodeMatrix:
    """The code with one task per class, "is it this class?", as in an ordinary classifier. Its d_H is only 2."""
    check_size(num_classes, num_classes, 2)
    return CodeMatrix(np.eye(num_classes, dtype=np.int64), provenance={"method": "one-vs-rest"})


def doubled(code: CodeMatrix) -> CodeMatrix:
    """The code [C, 1 - C]: its row distance is twice that of C, but every task occurs twice (d_VI = 0).

    The paper's ablation M' (tab:codematrixdouble) is `doubled` of the first 15 columns of its 10 x 30 code.
    """
    if code.arity != 2:
        raise InputError(f"only a binary code can be doubled; this one has arity {code.arity}.")
    provenance = {"method": "doubled", "of": code.content_hash}
    return CodeMatrix(np.hstack([code.symbols, 1 - code.symbols]), provenance=provenance)


def first_columns(code: CodeMatrix, code_length: int) -> CodeMatrix:
    """The code made of the first `code_length` columns."""
    check_count("code_length", code_length, most=code.code_length)
    provenance = {"method": "first columns", "of": code.content_hash}
    return CodeMatrix(code.symbols[:, :code_length], code.arity, provenance=provenance)


def to_binary(code: CodeMatrix) -> CodeMatrix:
    """One binary task "is it symbol k?" for each task and symbol: (class, task * arity).

    A decoder for binary members can then be used for q-ary members. Symbols that a task never uses give constant
    columns. These are kept, so that column `task * arity + k` always means symbol k.
    """
    symbols = code.one_hot.reshape(code.num_classes, -1)
    provenance = {"method": "one-hot", "of": code.content_hash}
    return CodeMatrix(
        symbols, provenance=provenance, allow_equal_rows=code.allow_equal_rows, allow_constant_columns=True
    )


def hadamard_matrices(order: int) -> dict[str, np.ndarray]:
    """Every Hadamard matrix of that order that our constructions give, by name; entries -1 and +1.

    Sylvester's doubling (as the Kronecker product with the first smaller matrix that exists), Paley I
    (order - 1 a prime power, 3 mod 4) and Paley II (order / 2 - 1 a prime power, 1 mod 4). Matrices of the same order
    are often not equivalent: Sylvester's matrix of order 32 repeats columns where Paley's does not.
    """
    found: dict[str, np.ndarray] = {}
    if order in (1, 2):
        found["sylvester"] = np.array([[1, 1], [1, -1]])[:order, :order]
        return found
    if order < 1 or order % 4:
        return found
    if _prime_power(order - 1):
        found["paley1"] = _paley_one(order - 1)
    if _prime_power(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
        found["paley2"] = _paley_two(order // 2 - 1)
    for factor in (2, *range(4, order // 2, 4)):
        if order % factor == 0:
            left, right = hadamard_matrices(factor), hadamard_matrices(order // factor)
            if left and right:
                found["sylvester"] = np.kron(next(iter(left.values())), next(iter(right.values())))
                break
    return found


def hadamard_matrix(order: int) -> np.ndarray:
    """(order, order) a matrix of -1 and +1 with orthogonal rows and a first row and column of +1."""
    found = hadamard_matrices(order)
    if not found:
        raise InputError(
            f"no Hadamard matrix of order {order} can be built here: orders are 1, 2 and multiples of 4, and of "
            "these the ones that Sylvester's and Paley's constructions reach (all below 92)."
        )
    return normalised(next(iter(found.values())))


def normalised(matrix: np.ndarray) -> np.ndarray:
    """The same Hadamard matrix with rows and columns negated so that the first row and column are +1."""
    matrix = matrix * matrix[0]
    return np.asarray(matrix * matrix[:, :1])


def hadamard_code(order: int, *, hadamard: HadamardSource = hadamard_matrix) -> CodeMatrix:
    """Rows of a Hadamard matrix and their complements: 2 * order codewords, all at least order / 2 apart."""
    bits = _bits(normalised(hadamard(order)))
    return CodeMatrix(np.vstack([bits, 1 - bits]), provenance={"method": "hadamard", "order": order})


def levenshtein_code(
    code_length: int, min_distance: int, *, hadamard: HadamardSource = hadamard_matrix
) -> CodeMatrix:
    """A binary code with as many codewords as any of this length and distance, for distances of half the length up.

    Levenshtein (1961) puts parts of two Hadamard matrices side by side and so meets Plotkin's bound
    (MacWilliams & Sloane, The Theory of Error-Correcting Codes, ch. 2, th. 8).

    Args:
        code_length: n.
        min_distance: d, with n <= 2d (d even) or n <= 2d + 1 (d odd).
        hadamard: function from an order to a Hadamard matrix; another one gives another code of the same size.
    """
    length, distance = int(code_length), int(min_distance)
    check_count("min_distance", distance, most=length)
    if distance % 2:  # delete a column of the code whose length and distance are larger by one
        longer = levenshtein_code(length + 1, distance + 1, hadamard=hadamard)
        return _from_blocks([longer.symbols[:, :-1]], length, distance)
    if length > 2 * distance:
        raise InputError(
            f"Levenshtein's construction needs a distance of at least half the length; {distance} of {length} is less."
        )
    if length == 2 * distance:
        return hadamard_code(length, hadamard=hadamard)
    k = distance // (2 * distance - length)
    if k == 1:  # only two codewords fit: they must differ everywhere, or some columns would be constant
        return _from_blocks([np.array([[0] * length, [1] * length])], length, distance)
    a = distance * (2 * k + 1) - length * (k + 1)
    b = k * length - distance * (2 * k - 1)
    blocks: list[np.ndarray] = []
    if a:
        blocks += [_simplex(2 * k, hadamard)] * a if a % 2 else [_shortened(4 * k, hadamard)] * (a // 2)
    if b:
        blocks += (
            [_simplex(2 * k + 2, hadamard)] * b if b % 2 else [_shortened(4 * k + 4, hadamard)] * (b // 2)
        )
    rows = min(len(block) for block in blocks)
    return _from_blocks([block[:rows] for block in blocks], length, distance)


def _simplex(order: int, hadamard: HadamardSource) -> np.ndarray:
    """(order, order - 1) codewords at distance exactly order / 2: the matrix without its constant column."""
    return _bits(normalised(hadamard(order)))[:, 1:]


def _shortened(order: int, hadamard: HadamardSource) -> np.ndarray:
    """(order / 2, order - 2) the simplex codewords that begin with 0, without that symbol."""
    simplex = _simplex(order, hadamard)
    return simplex[simplex[:, 0] == 0, 1:]


def _from_blocks(blocks: list[np.ndarray], length: int, distance: int) -> CodeMatrix:
    provenance = {"method": "levenshtein", "min_distance": distance}
    code = CodeMatrix(np.hstack(blocks), provenance=provenance)
    if code.code_length != length or code.min_row_distance < distance:
        raise AssertionError(
            f"Levenshtein's construction gave {code!r} for length {length}, distance {distance}"
        )
    return code


def _bits(signed: np.ndarray) -> np.ndarray:
    return (signed < 0).astype(np.int64)


def _distinct_words(num_classes: int, code_length: int, arity: int, seed: int) -> np.ndarray:
    draw = random.Random(seed)
    words: dict[tuple[int, ...], None] = {}
    if arity**code_length <= 4 * num_classes:
        every = list(itertools.product(range(arity), repeat=code_length))
        return np.array(draw.sample(every, num_classes))
    while len(words) < num_classes:
        words[tuple(draw.randrange(arity) for _ in range(code_length))] = None
    return np.array(list(words))


# Finite fields and Paley's matrices.


def _prime_power(number: int) -> tuple[int, int] | None:
    """(prime, exponent) when the number is an odd prime power, else None."""
    if number < 3 or number % 2 == 0:
        return None
    prime = next(p for p in range(3, number + 1, 2) if number % p == 0)
    exponent = 0
    while number % prime == 0:
        number, exponent = number // prime, exponent + 1
    return (prime, exponent) if number == 1 else None


def _quadratic_characters(size: int) -> np.ndarray:
    """(size, size) chi(a - b) over the field of that size: 0 if equal, +1 if the difference is a square, else -1."""
    power = _prime_power(size)
    if power is None:
        raise AssertionError(f"{size} is not an odd prime power")
    prime, degree = power
    elements = list(itertools.product(range(prime), repeat=degree))  # coefficients, constant term last
    modulus = _irreducible(prime, degree)
    squares = {_multiply(e, e, modulus, prime) for e in elements} - {(0,) * degree}

    def character(element: tuple[int, ...]) -> int:
        return 0 if not any(element) else (1 if element in squares else -1)

    return np.array(
        [
            [character(tuple((x - y) % prime for x, y in zip(a, b, strict=True))) for b in elements]
            for a in elements
        ]
    )


def _irreducible(prime: int, degree: int) -> tuple[int, ...]:
    """Coefficients, except the leading 1, of a monic irreducible polynomial of that degree, found by trial."""
    for tail in itertools.product(range(prime), repeat=degree):
        if degree == 1 or _is_irreducible(tail, prime, degree):
            return tail
    raise AssertionError("an irreducible polynomial of every degree exists")


def _is_irreducible(tail: tuple[int, ...], prime: int, degree: int) -> bool:
    """Whether no monic polynomial of at most half the degree divides x^degree + tail."""
    for low in range(1, degree // 2 + 1):
        for divisor in itertools.product(range(prime), repeat=low):
            if not any(_remainder((1, *tail), divisor, prime)):
                return False
    return True


def _remainder(polynomial: tuple[int, ...], tail: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """Remainder of the polynomial after division by x^len(tail) + tail; highest coefficient first."""
    rest = list(polynomial)
    for index in range(len(rest) - len(tail)):
        lead = rest[index]
        for offset, coefficient in enumerate(tail, start=1):
            rest[index + offset] = (rest[index + offset] - lead * coefficient) % prime
    return tuple(rest[-len(tail) :])


def _multiply(
    a: tuple[int, ...], b: tuple[int, ...], modulus: tuple[int, ...], prime: int
) -> tuple[int, ...]:
    product = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] = (product[i + j] + x * y) % prime
    if len(modulus) == 1:
        return (product[0] % prime,)
    return _remainder(tuple(product), modulus, prime)


def _paley_one(size: int) -> np.ndarray:
    """Hadamard matrix of order size + 1 from a field whose size is 3 mod 4."""
    conference = np.zeros((size + 1, size + 1), dtype=np.int64)
    conference[0, 1:], conference[1:, 0] = 1, -1
    conference[1:, 1:] = _quadratic_characters(size)
    return conference + np.eye(size + 1, dtype=np.int64)


def _paley_two(size: int) -> np.ndarray:
    """Hadamard matrix of order 2 * (size + 1) from a field whose size is 1 mod 4."""
    conference = np.ones((size + 1, size + 1), dtype=np.int64)
    conference[1:, 1:] = _quadratic_characters(size)
    conference[0, 0] = 0
    identity = np.eye(size + 1, dtype=np.int64)
    return np.kron(conference, [[1, 1], [1, -1]]) + np.kron(identity, [[1, -1], [-1, -1]])
