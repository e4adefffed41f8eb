"""One annealing chain: cost tables and counts for the kernel, cooling, and the budget that all chains share."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ecnn.annealing import kernel
from ecnn.errors import InputError
from ecnn.progress import Progress

_ENERGY_UNITS = 2.0**36  # per unit of energy: energies of codes differ by as little as about 1e-6
_FEWEST_UNITS = 2.0**20  # per unit of energy, at least, for large codes whose sums need the range
_LARGEST_ENERGY = 2.0**62  # of the column term, so that its sum with the row term fits in 64 bits
_VI_UNITS = 2.0**40  # per nat
_DISTANCE_UNITS = 2.0**24  # cost of a pair of columns at the reference distance
_HALF_POWER = 16  # a pair of columns costs VI^-32, so steep that nearly only the closest pair matters
_LEVELS = 400  # temperatures per chain, at least
_HEAT = 0.1  # first temperature / average change of energy by a proposal
_COOLING = 300.0  # first temperature / last temperature


@dataclass
class Allowance:
    """The budget of a search in proposals and seconds, how much of it is spent, and what ended the search."""

    steps: int
    seconds: float | None
    progress: Progress | None
    news: str = ""
    proposals: int = 0
    ended_by: str | None = None  # what ended the search early
    hurried: bool = False  # whether a chain cooled faster than by its steps, for lack of time
    started: float = field(default_factory=time.monotonic)

    @property
    def stopped_by(self) -> str:
        return self.ended_by or ("seconds" if self.hurried else "steps")

    def spend(self, proposals: int) -> None:
        self.proposals += proposals
        if self.progress:
            self.progress(min(self.proposals, self.steps), self.steps, self.news)

    def is_over(self) -> bool:
        """Whether the search should end before its steps are spent."""
        if (
            self.ended_by is None
            and self.seconds is not None
            and time.monotonic() - self.started >= self.seconds
        ):
            self.ended_by = "seconds"
        return self.ended_by is not None

    def seconds_for(self, steps: int) -> float:
        """The part of the remaining seconds for this many of the remaining steps; infinite without a time limit."""
        if self.seconds is None:
            return math.inf
        left = self.started + self.seconds - time.monotonic()
        return left * min(1.0, steps / max(1, self.steps - self.proposals))


def energy_problem(num_classes: int, code_length: int, arity: int, column_weight: float) -> kernel.Problem:
    """The paper's energy (eq:Mobj_alternative) in the kernel's fixed point."""
    distances = np.maximum(np.arange(code_length + 1), 0.25)  # equal rows cost 16 times a distance of 1
    # The smallest VI of two different splits: one class moves out of a group of two.
    closest = (2 / num_classes) * math.log(2)
    clash = 16 * column_weight / closest**2
    worst = clash * math.comb(code_length, 2)
    units = _ENERGY_UNITS
    if worst * units > _LARGEST_ENERGY:
        units = 2.0 ** math.floor(math.log2(_LARGEST_ENERGY / worst))
    if units < _FEWEST_UNITS:
        most = column_weight * (_LARGEST_ENERGY / worst) / _FEWEST_UNITS
        raise InputError(
            f"column_weight must be at most {most:.3g} for a code of this size, not {column_weight:g}."
        )
    return _problem(
        (num_classes, code_length, arity),
        smallest_group=0,
        row_cost=np.rint(units * distances**-2.0),
        column_scale=units * column_weight,
        half_power=1,
        column_clash=int(units * clash),
    )


def distance_problem(
    size: tuple[int, int, int], *, target: int, smallest_group: int, column_distance: float, row_weight: float
) -> kernel.Problem:
    """The problem of keeping rows at least `target` apart while the closest columns are pushed apart.

    A pair of columns costs 1 at `column_distance` and steeply less at larger distances. A pair of rows that is short of
    the target by k costs row_weight * k^2.
    """
    short = np.maximum(target - np.arange(size[1] + 1), 0)
    return _problem(
        size,
        smallest_group=smallest_group,
        row_cost=np.rint(_DISTANCE_UNITS * row_weight * short**2.0),
        column_scale=_DISTANCE_UNITS * column_distance ** (2 * _HALF_POWER),
        half_power=_HALF_POWER,
        column_clash=int(_DISTANCE_UNITS * 1e4),
    )


def _problem(size: tuple[int, int, int], row_cost: np.ndarray, **costs: Any) -> kernel.Problem:
    num_classes, code_length, arity = size
    counts = np.arange(num_classes + 1)
    tables = (
        row_cost.astype(np.int64),
        np.rint(_VI_UNITS / num_classes * counts * np.log(np.maximum(counts, 1))).astype(np.int64),
        -np.log((np.arange(4096) + 0.5) / 4096),
    )
    row_table, count_log_count, minus_log = (_for_kernel(table) for table in tables)
    return kernel.Problem(
        num_classes=num_classes,
        code_length=code_length,
        arity=arity,
        row_cost=row_table,
        count_log_count=count_log_count,
        vi_unit=1 / _VI_UNITS,
        minus_log=minus_log,
        **costs,
    )


def _for_kernel(array: np.ndarray) -> Any:
    """Arrays for machine code, lists for plain Python, which indexes them several times faster."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat if kernel.COMPILED else flat.tolist()


def start_state(problem: kernel.Problem, symbols: np.ndarray, seed: np.random.SeedSequence) -> kernel.State:
    """The kernel's state for a code: its symbols, with distances, counts and costs computed from scratch."""
    size, length, arity = problem.num_classes, problem.code_length, problem.arity
    symbols = symbols.astype(np.int64)
    one_hot = (symbols[:, :, None] == np.arange(arity)).astype(np.float64)
    flat = one_hot.reshape(size, -1)
    distance = length - np.rint(flat @ flat.T).astype(np.int64)
    joint = (
        np.rint(flat.T @ flat).astype(np.int64).reshape(length, arity, length, arity).transpose(0, 2, 1, 3)
    )
    counts = one_hot.sum(axis=0).astype(np.int64)
    table = np.asarray(problem.count_log_count)
    own, shared = table[counts].sum(axis=1), table[joint].sum(axis=(2, 3))
    vi = own[:, None] + own[None, :] - 2 * shared
    # There are few different distances: the cost of each is computed once.
    values, number = np.unique(vi, return_inverse=True)
    costs = np.array([kernel.column_cost(problem, int(value)) for value in values], dtype=np.int64)
    pair_cost = costs[number].reshape(length, length)
    np.fill_diagonal(pair_cost, 0)
    row_cost = np.asarray(problem.row_cost)
    energy = int(row_cost[distance[np.triu_indices(size, 1)]].sum() + pair_cost.sum() // 2)
    words = seed.generate_state(4).astype(np.int64) | np.array([1, 0, 0, 0])  # all zeros would stay zeros
    arrays = (symbols, symbols.T, distance, counts, joint, own, shared, pair_cost)
    scratch = (np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64), symbols.copy())
    tally = np.array([energy, energy, 0, 0, 0])
    return kernel.State(*(_for_kernel(array) for array in (*arrays, *scratch, words, tally)))


def anneal_chain(
    problem: kernel.Problem, symbols: np.ndarray, steps: int, budget: Allowance, seed: np.random.SeedSequence
) -> tuple[int, np.ndarray]:
    """The lowest energy (in the problem's fixed point) that one chain found, and its (class, task) symbols.

    A descent without uphill moves comes first. Then the temperature falls geometrically from a tenth of the average
    change of energy by a proposal. If the seconds do not suffice for all steps, the chain cools faster, and
    `budget.hurried` is set.
    """
    state = start_state(problem, symbols, seed)
    size, length = problem.num_classes, problem.code_length
    best = (int(state.tally[kernel.ENERGY]), symbols)
    spent, started, seconds = 0, time.monotonic(), budget.seconds_for(steps)
    block = max(1, min(steps // _LEVELS, 2_000_000 // (size + length)))

    def run(temperature: float) -> None:
        nonlocal best, spent
        proposals = min(block, steps - spent)
        spent += proposals
        kernel.anneal(problem, state, proposals, temperature)
        if state.tally[kernel.BEST_ENERGY] < best[0]:
            saved = state.best if state.tally[kernel.BEST_IS_SAVED] else state.rows
            best = (int(state.tally[kernel.BEST_ENERGY]), np.array(saved).reshape(size, length))
        budget.spend(proposals)

    try:
        while spent < min(steps // 24, 50 * size * length) and not budget.is_over():
            run(0.0)
        state.tally[kernel.TOTAL_CHANGE] = 0
        run(-1.0)
        hot = _HEAT * float(state.tally[kernel.TOTAL_CHANGE]) / block
        while spent < steps and not budget.is_over():
            share, clock = spent / steps, (time.monotonic() - started) / seconds
            budget.hurried = budget.hurried or clock > share
            if clock >= 1:
                break
            run(hot * _COOLING ** -max(share, clock))
    except KeyboardInterrupt:
        budget.ended_by = "interrupt"
    return best
