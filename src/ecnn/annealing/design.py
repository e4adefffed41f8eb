"""`design_code`: many annealing chains, and for the largest distances also starts from known constructions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from ecnn.annealing.chains import Allowance, anneal_chain, distance_problem, energy_problem
from ecnn.bounds import min_column_distance_bound, min_row_distance_bound
from ecnn.checks import check_choice, check_count, check_kind, check_number
from ecnn.codes import CodeMatrix, ColumnWeight, check_size, resolve_column_weight
from ecnn.constructions import HadamardSource, hadamard_matrices, levenshtein_code, random_code
from ecnn.errors import InputError
from ecnn.progress import Progress

CodeObjective = Literal["energy", "distance"]

_STEPS = {"energy": 4_000_000, "distance": 24_000_000}

# Cost of a pair of rows one short of the target, relative to a pair of columns at the distance aimed for. If it is too
# small, the target is missed; if it is too large, no change is accepted. The best value depends on the size of the
# code, so chains try these in turn. Raising the row distance takes larger weights than spreading the columns at a row
# distance already reached.
_RAISING_WEIGHTS = (3000.0, 30000.0, 300.0)
_SPREADING_WEIGHTS = (3.0, 300.0, 30.0, 3000.0)
_ROW_SWAPS = 4000
_MAX_TABLED_ROWS = 100  # a table has the third power of this many entries


def design_code(
    num_classes: int,
    code_length: int,
    *,
    arity: int = 2,
    objective: CodeObjective = "energy",
    column_weight: ColumnWeight = "balanced",
    chains: int = 8,
    steps: int | None = None,
    seconds: float | None = None,
    seed: int,
    init: CodeMatrix | None = None,
    progress: Progress | None = None,
) -> CodeMatrix:
    """The best code that a search of `steps` proposals finds; its `provenance` says how.

    The same arguments give the same code on every machine, with and without numba, unless the search was cut short.

    Args:
        objective: "energy" anneals the paper's energy (eq:Mobj_alternative). "distance" makes d_H as large as
            possible, then d_VI, with every symbol given to at least 60 % of its fair share of classes.
        column_weight: the paper's eta; "balanced" weighs rows and columns about equally.
        chains: independent runs that share the steps; no more than there are steps.
        steps: proposals in all; by default 4 million for "energy", 24 million for "distance".
        seconds: stop after this long even if steps are left. provenance["stopped_by"] says what ended the search:
            "steps", "seconds", "interrupt", or "bounds" when no code of this size can have larger distances.
        init: start every chain from this code instead of random ones.
        progress: called with (proposals, steps, what was found so far).

    Ctrl-C ends the search and returns the best code so far.
    """
    check_size(num_classes, code_length, arity)
    check_count("seed", seed, least=0)
    num_classes, code_length, arity = int(num_classes), int(code_length), int(arity)  # NumPy's would overflow
    weight = resolve_column_weight(column_weight, num_classes, code_length, arity)
    steps = _checked_steps(objective, chains, steps, seconds)
    chains = min(int(chains), steps)
    size = (num_classes, code_length, arity)
    if init is not None:
        check_kind("init", init, CodeMatrix, "a CodeMatrix")
    if init is not None and (init.num_classes, init.code_length, init.arity) != size:
        raise InputError(
            f"init is {init.num_classes} x {init.code_length} with arity {init.arity}, but the design is "
            f"{num_classes} x {code_length} with arity {arity}."
        )
    budget = Allowance(steps, seconds, progress)
    search = _Search(size, weight, chains, budget, np.random.SeedSequence(seed), init)
    try:
        if objective == "energy":
            search.lower_energy(steps)
        else:
            search.raise_distance()
    except KeyboardInterrupt:  # between two chains; within one, the chain keeps its own best
        budget.ended_by = "interrupt"
    provenance = {
        "method": "annealing",
        "objective": objective,
        "column_weight": weight,
        "chains": chains,
        "steps": steps,
        "seed": int(seed),
        "proposals": budget.proposals,
        "stopped_by": budget.stopped_by,
    }
    if init is not None:
        provenance["init"] = init.content_hash
    return CodeMatrix(search.best.symbols, arity, provenance=provenance)


def _checked_steps(objective: str, chains: int, steps: int | None, seconds: float | None) -> int:
    check_choice("objective", objective, _STEPS)
    steps = _STEPS[objective] if steps is None else steps
    check_count("chains", chains)
    check_count("steps", steps)
    if seconds is not None:
        check_number("seconds", seconds, above=True)
    return int(steps)


class _Search:
    """A search in progress: the best code so far, the budget, and the methods that improve the code."""

    def __init__(
        self,
        size: tuple[int, int, int],
        column_weight: float,
        chains: int,
        budget: Allowance,
        seed: np.random.SeedSequence,
        init: CodeMatrix | None,
    ) -> None:
        self.size, self.column_weight, self.chains = size, column_weight, chains
        self.budget, self.seed, self.init = budget, seed, init
        self.smallest_group = max(1, 3 * size[0] // (5 * size[2])) if size[2] <= size[0] else 0
        self.row_bound = min_row_distance_bound(size[0], size[1], arity=size[2])
        self.column_bound = min_column_distance_bound(size[0], size[1], arity=size[2])
        self.best = init or self._random_start()

    def lower_energy(self, steps: int) -> None:
        """Anneals the energy in several chains and keeps the code with the lowest energy."""
        problem = energy_problem(*self.size, self.column_weight)
        lowest = math.inf
        start = self.best
        for _ in range(self.chains):
            energy, symbols = anneal_chain(
                problem, start.symbols, steps // self.chains, self.budget, self._next_seed()
            )
            if energy < lowest:
                lowest, self.best = energy, _code_or(symbols, start)
                self.budget.news = f"energy {self.best.energy(self.column_weight):.6g}"
            if self.budget.is_over():
                return
            start = self.init or self._random_start()

    def raise_distance(self) -> None:
        """Makes the row distance as large as possible, then the column distance.

        A quarter of the steps goes to each: annealing the energy, starts from constructions, pushing the rows apart,
        pushing the columns apart.
        """
        quarter = self.budget.steps // 4
        self.lower_energy(quarter)
        self._stop_at_the_bounds()
        if self.size[2] == 2 and self.init is None:
            self._use_constructions(quarter)
        target = self.best.min_row_distance
        while self.best.min_row_distance == target < self.row_bound and self.budget.proposals <= 3 * quarter:
            target += 1
            self._push(target, quarter // 2, [self.best], _RAISING_WEIGHTS)
        starts = [self.best] if self.init else [self.best, self._random_start()]
        left = self.budget.steps - self.budget.proposals
        self._push(self.best.min_row_distance, left, starts, _SPREADING_WEIGHTS)

    def _use_constructions(self, steps: int) -> None:
        """Spreads the columns of known codes that have enough rows at the largest row distance."""
        for target in range(self.row_bound, self.best.min_row_distance - 1, -1):
            starts = []
            for _ in range(self.chains):
                if self.budget.is_over():
                    return
                starts += [self._start_from(pool) for pool in self._pools(target)]
            if starts:
                for start in starts:
                    self._keep_better(start)
                self._push(target, steps, starts, _SPREADING_WEIGHTS)
                return

    def _push(self, target: int, steps: int, starts: list[CodeMatrix], row_weights: Sequence[float]) -> None:
        """Pushes columns apart while rows are kept `target` apart. Chains go through the starts, then the weights."""
        chains = max(self.chains, len(starts))
        for chain in range(chains):
            if steps < chains or self.budget.is_over():
                return
            start = starts[chain % len(starts)]
            problem = distance_problem(
                self.size,
                target=target,
                smallest_group=self.smallest_group,
                column_distance=self._column_goal(),
                row_weight=row_weights[chain // len(starts) % len(row_weights)],
            )
            _, symbols = anneal_chain(problem, start.symbols, steps // chains, self.budget, self._next_seed())
            self._keep_better(_code_or(symbols, start))

    def _column_goal(self) -> float:
        """The column distance to aim for: a fifth above the best so far, but at most the bound."""
        goal = min(self.column_bound, 1.2 * self.best.min_column_distance)
        return goal if 0 < goal < math.inf else 1.0

    def _keep_better(self, code: CodeMatrix) -> None:
        if self._quality(code) > self._quality(self.best):
            self.best = code
            self.budget.news = f"d_H {code.min_row_distance}, d_VI {code.min_column_distance:.4f}"
            self._stop_at_the_bounds()

    def _stop_at_the_bounds(self) -> None:
        """Ends the search if no code of this size can have larger distances."""
        if self._quality(self.best)[:3] >= (self.row_bound, True, round(self.column_bound, 9)):
            self.budget.ended_by = "bounds"

    def _quality(self, code: CodeMatrix) -> tuple[int, bool, float, float]:
        even = int(code.group_sizes.min()) >= self.smallest_group
        # Rounded, so that rounding errors of logarithms do not outrank the energy.
        columns = round(code.min_column_distance, 9)
        return code.min_row_distance, even, columns, -code.energy(self.column_weight)

    def _pools(self, target: int) -> Iterator[np.ndarray]:
        """(row, column) known binary codes with that row distance, enough rows and at most the design's length."""
        rng = np.random.default_rng(self._next_seed())
        for length in range(self.size[1], target - 1, -1):
            if length > 2 * target + target % 2 or _levenshtein_rows(length, target) < self.size[0]:
                continue
            try:
                yield levenshtein_code(length, target, hadamard=_shuffled_hadamard(rng)).symbols
            except InputError:  # no Hadamard matrix of an order that the code needs
                continue

    def _start_from(self, pool: np.ndarray) -> CodeMatrix:
        """A start from a known code: rows of it whose columns differ, filled up with random columns if too short."""
        seed = self._next_seed()
        rng = np.random.default_rng(seed)
        # Complementing random columns changes no distance. Without it, Hadamard codes have an all-ones codeword.
        rows = choose_rows(pool, self.size[0], _ROW_SWAPS, rng) ^ rng.integers(2, size=pool.shape[1])
        free = self.size[1] - pool.shape[1]
        if free:
            extra = random_code(self.size[0], self.size[1], seed=int(seed.generate_state(1)[0])).symbols
            rows = np.hstack([rows, extra[:, :free]])
        return _code_or(rows, self._random_start())

    def _random_start(self) -> CodeMatrix:
        num_classes, code_length, arity = self.size
        return random_code(
            num_classes, code_length, arity=arity, seed=int(self._next_seed().generate_state(1)[0])
        )

    def _next_seed(self) -> np.random.SeedSequence:
        return self.seed.spawn(1)[0]


def choose_rows(pool: np.ndarray, num_rows: int, swaps: int, rng: np.random.Generator) -> np.ndarray:
    """(row, column) `num_rows` rows of a binary pool, chosen by a local search so that their columns are far apart.

    A subset of rows keeps the pool's row distance, so only the columns matter. The search exchanges rows and keeps an
    exchange unless it raises the sum of VI^-16 over pairs of columns.
    """
    order = rng.permutation(len(pool))
    left, right = np.triu_indices(pool.shape[1], k=1)
    ones = pool.astype(np.int64)
    both = ones[:, left] & ones[:, right]
    costs_of = (
        _tabled_costs(num_rows) if num_rows <= _MAX_TABLED_ROWS else functools.partial(_pair_costs, num_rows)
    )

    def cost(ones_of: np.ndarray, both_of: np.ndarray) -> float:
        return float(costs_of(ones_of[left], ones_of[right], both_of).sum())

    chosen, spare = order[:num_rows].copy(), order[num_rows:].copy()
    ones_now, both_now = ones[chosen].sum(axis=0), both[chosen].sum(axis=0)
    lowest = cost(ones_now, both_now)
    for _ in range(swaps if len(spare) else 0):
        out, into = rng.integers(num_rows), rng.integers(len(spare))
        old, new = chosen[out], spare[into]
        trial_ones, trial_both = ones_now + ones[new] - ones[old], both_now + both[new] - both[old]
        trial = cost(trial_ones, trial_both)
        if trial <= lowest:
            lowest, ones_now, both_now = trial, trial_ones, trial_both
            chosen[out], spare[into] = new, old
    return pool[chosen]


def _pair_costs(num_rows: int, left: np.ndarray, right: np.ndarray, both: np.ndarray) -> np.ndarray:
    """VI^-16 of pairs of binary columns, from the numbers of ones on the left, on the right, and in both at once."""
    counts = np.arange(num_rows + 1)
    table = counts * np.log(np.maximum(counts, 1)) / num_rows
    cells = (both, left - both, right - both, num_rows - left - right + both)
    joint = sum(table.take(cell, mode="clip") for cell in cells)
    own_left, own_right = (table[ones] + table[num_rows - ones] for ones in (left, right))
    costs: np.ndarray = np.maximum(own_left + own_right - 2 * joint, 0.01) ** -16
    return costs


@functools.cache
def _tabled_costs(num_rows: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """`_pair_costs` for this many rows from a table, as a search needs few different values many thousand times."""
    counts = np.arange(num_rows + 1)
    table = _pair_costs(num_rows, counts[:, None, None], counts[:, None], counts).ravel()
    width = num_rows + 1
    return lambda left, right, both: table[(left * width + right) * width + both]


def _code_or(symbols: np.ndarray, fallback: CodeMatrix) -> CodeMatrix:
    """The code of these symbols, or the fallback if they are no valid code (two equal rows, a constant column)."""
    try:
        return CodeMatrix(symbols, fallback.arity)
    except InputError:
        return fallback


def _levenshtein_rows(length: int, distance: int) -> int:
    """Number of codewords that `levenshtein_code` gives."""
    if distance % 2:
        length, distance = length + 1, distance + 1
    return 4 * distance if length == 2 * distance else 2 * (distance // (2 * distance - length))


def _shuffled_hadamard(rng: np.random.Generator) -> HadamardSource:
    """A function that draws a known matrix of an order and shuffles its rows and columns, to vary the codes."""

    def source(order: int) -> np.ndarray:
        known = _known_hadamard_matrices(order)
        if not known:
            raise InputError(f"no Hadamard matrix of order {order} is known here.")
        matrix = known[int(rng.integers(len(known)))]
        return matrix[rng.permutation(order)][:, rng.permutation(order)]

    return source


@functools.lru_cache(maxsize=32)
def _known_hadamard_matrices(order: int) -> tuple[np.ndarray, ...]:
    return tuple(hadamard_matrices(order).values())
