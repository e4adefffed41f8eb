"""The inner loop of annealing: one source that runs as plain Python or, if numba is installed, as machine code.

Both give the same code for the same seed, because nothing is rounded differently: energies and c log c are whole
numbers in fixed point (so they do not drift either), random numbers come from an integer generator, the logarithms of
the acceptance rule from a table, and the few floating-point operations are single IEEE operations.

Arrays are flat, so that the same source indexes lists (fast in Python) and arrays (fast in numba).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

numba: Any
try:
    import numba
except ImportError:
    numba = None

COMPILED: bool = numba is not None and not numba.config.DISABLE_JIT


def compiled(function: Function) -> Function:
    """The function compiled by numba, or the function itself if numba is not installed."""
    if not COMPILED:
        return function
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # no place to cache the machine code, as in a read-only installation
        return cast(Function, numba.njit(function))


class Problem(NamedTuple):
    """The objective that is minimised; constant during a chain."""

    num_classes: int
    code_length: int
    arity: int
    smallest_group: int  # a flip may not leave fewer classes than this with a symbol
    row_cost: Sequence[int]  # (code_length + 1,) cost of a pair of rows by its Hamming distance
    column_scale: float  # cost of a pair of columns is column_scale / VI^(2 * half_power) ...
    half_power: int
    column_clash: int  # ... but at most this, which is also the cost at VI = 0
    count_log_count: Sequence[int]  # (num_classes + 1,) c log c / num_classes, in units of VI
    vi_unit: float  # nats per unit of VI
    minus_log: Sequence[float]  # (4096,) -log of evenly spaced probabilities


class State(NamedTuple):
    """A code, with the counts from which the cost of a change is computed in O(classes + tasks)."""

    rows: Any  # (class, task) symbols
    columns: Any  # (task, class) the same, transposed
    distance: Any  # (class, class) Hamming distances
    counts: Any  # (task, symbol) number of classes with the symbol
    joint: Any  # (task, task, symbol, symbol) number of classes with both symbols
    own: Any  # (task,) sum of c log c over counts
    shared: Any  # (task, task) sum of c log c over joint
    pair_cost: Any  # (task, task) cost of each pair of columns
    new_shared: Any  # (task,) `shared` of the column that a proposal changes, valid until the next proposal
    new_cost: Any  # (task,) `pair_cost` of that column, likewise
    best: Any  # (class, task) symbols of the best code so far, saved when the chain leaves it
    random: Any  # (4,) words of the generator
    tally: Any  # (5,) see the indices below


ENERGY, BEST_ENERGY, BEST_IS_SAVED, ACCEPTED, TOTAL_CHANGE = range(5)
_LOW_32 = 0xFFFFFFFF


@compiled
def draw(words: Any) -> Any:
    """The next 32 random bits (xorshift128, Marsaglia 2003)."""
    first = words[0] ^ ((words[0] << 11) & _LOW_32)
    words[0], words[1], words[2] = words[1], words[2], words[3]
    words[3] = words[3] ^ (words[3] >> 19) ^ first ^ (first >> 8)
    return words[3]


@compiled
def draw_below(words: Any, limit: int) -> Any:
    """A random whole number in 0..limit-1."""
    return (draw(words) * limit) >> 32


@compiled
def column_cost(problem: Problem, vi: int) -> int:
    """Cost of two columns with that VI."""
    if vi <= 0:
        return problem.column_clash
    nats = vi * problem.vi_unit
    square = nats * nats
    power = square
    for _ in range(problem.half_power - 1):
        power *= square
    # Compared before dividing: column_scale / power may be too large for a whole number.
    if problem.column_scale >= power * problem.column_clash:
        return problem.column_clash
    return int(problem.column_scale / power)


@compiled
def row_change(problem: Problem, state: State, row: int, skip: int, column: int, old: int, new: int) -> int:
    """Change of the row term if the symbol of `row` changes from `old` to `new`, without the pair with row `skip`."""
    row_cost, size = problem.row_cost, problem.num_classes
    change = 0
    for other in range(size):
        if other in (row, skip):
            continue
        symbol = state.columns[column * size + other]
        away = state.distance[row * size + other]
        if symbol == old:
            change += row_cost[away + 1] - row_cost[away]
        elif symbol == new:
            change += row_cost[away - 1] - row_cost[away]
    return change


@compiled
def flip_column_change(problem: Problem, state: State, row: int, column: int, old: int, new: int) -> int:
    """Change of the column term if the symbol of `row` changes from `old` to `new`; fills new_shared and new_cost."""
    length, arity, table = problem.code_length, problem.arity, problem.count_log_count
    fewer, more = state.counts[column * arity + old], state.counts[column * arity + new]
    own = state.own[column] + table[fewer - 1] - table[fewer] + table[more + 1] - table[more]
    change = 0
    for other in range(length):
        if other == column:
            continue
        pair = column * length + other
        cell = pair * arity * arity + state.rows[row * length + other]
        fewer, more = state.joint[cell + old * arity], state.joint[cell + new * arity]
        shared = state.shared[pair] + table[fewer - 1] - table[fewer] + table[more + 1] - table[more]
        cost = column_cost(problem, own + state.own[other] - 2 * shared)
        change += cost - state.pair_cost[pair]
        state.new_shared[other] = shared
        state.new_cost[other] = cost
    return change


@compiled
def swap_column_change(
    problem: Problem, state: State, row: int, partner: int, column: int, old: int, new: int
) -> int:
    """Change of the column term if `row` (old) and `partner` (new) exchange symbols; fills new_shared and new_cost."""
    length, arity, table = problem.code_length, problem.arity, problem.count_log_count
    change = 0
    for other in range(length):
        if other == column:
            continue
        pair = column * length + other
        mine, theirs = state.rows[row * length + other], state.rows[partner * length + other]
        shared = state.shared[pair]
        cost = state.pair_cost[pair]
        if mine != theirs:
            cell = pair * arity * arity
            fewer, more = state.joint[cell + old * arity + mine], state.joint[cell + new * arity + mine]
            shared += table[fewer - 1] - table[fewer] + table[more + 1] - table[more]
            fewer, more = state.joint[cell + new * arity + theirs], state.joint[cell + old * arity + theirs]
            shared += table[fewer - 1] - table[fewer] + table[more + 1] - table[more]
            cost = column_cost(problem, state.own[column] + state.own[other] - 2 * shared)
            change += cost - state.pair_cost[pair]
        state.new_shared[other] = shared
        state.new_cost[other] = cost
    return change


@compiled
def write_symbol(problem: Problem, state: State, row: int, column: int, new: int) -> None:
    """Sets the symbol of `row` in `column` to `new` and updates counts and distances, but not the costs."""
    size, length, arity, table = (
        problem.num_classes,
        problem.code_length,
        problem.arity,
        problem.count_log_count,
    )
    old = state.columns[column * size + row]
    for other in range(size):
        symbol = state.columns[column * size + other]
        if other != row and symbol in (old, new):
            step = 1 if symbol == old else -1
            state.distance[row * size + other] += step
            state.distance[other * size + row] += step
    for other in range(length):
        if other != column:
            symbol = state.rows[row * length + other]
            there = (column * length + other) * arity * arity + symbol
            back = ((other * length + column) * arity + symbol) * arity
            state.joint[there + old * arity] -= 1
            state.joint[there + new * arity] += 1
            state.joint[back + old] -= 1
            state.joint[back + new] += 1
    fewer, more = state.counts[column * arity + old], state.counts[column * arity + new]
    state.own[column] += table[fewer - 1] - table[fewer] + table[more + 1] - table[more]
    state.counts[column * arity + old] = fewer - 1
    state.counts[column * arity + new] = more + 1
    state.columns[column * size + row] = new
    state.rows[row * length + column] = new


@compiled
def accept(
    problem: Problem, state: State, change: int, row: int, partner: int, column: int, old: int, new: int
) -> None:
    """Carries out a proposal, with costs from new_shared and new_cost; saves the best code before it leaves it."""
    tally = state.tally
    if change > 0 and tally[ENERGY] == tally[BEST_ENERGY] and tally[BEST_IS_SAVED] == 0:
        for index in range(len(state.rows)):
            state.best[index] = state.rows[index]
        tally[BEST_IS_SAVED] = 1
    write_symbol(problem, state, row, column, new)
    if partner >= 0:
        write_symbol(problem, state, partner, column, old)
    length = problem.code_length
    for other in range(length):
        if other != column:
            there, back = column * length + other, other * length + column
            state.shared[there] = state.shared[back] = state.new_shared[other]
            state.pair_cost[there] = state.pair_cost[back] = state.new_cost[other]
    tally[ENERGY] += change
    tally[ACCEPTED] += 1
    if tally[ENERGY] < tally[BEST_ENERGY]:
        tally[BEST_ENERGY] = tally[ENERGY]
        tally[BEST_IS_SAVED] = 0


@compiled
def anneal(problem: Problem, state: State, proposals: int, temperature: float) -> None:
    """Tries `proposals` random changes at one temperature; if that is negative, it only sums up their energy changes.

    Half of the proposals flip one symbol, half exchange two symbols of a column, which keeps its group sizes.
    """
    size, length, arity = problem.num_classes, problem.code_length, problem.arity
    words, tally = state.random, state.tally
    for _ in range(proposals):
        column = draw_below(words, length)
        row = draw_below(words, size)
        old = state.columns[column * size + row]
        partner = -1
        if draw(words) & 0x8000:
            partner = draw_below(words, size)
            while state.columns[column * size + partner] == old:
                partner = (partner + 1) % size
            new = state.columns[column * size + partner]
            change = swap_column_change(problem, state, row, partner, column, old, new)
            change += row_change(problem, state, partner, row, column, new, old)
        else:
            new = (old + 1 + draw_below(words, arity - 1)) % arity
            if state.counts[column * arity + old] <= problem.smallest_group:
                continue
            if state.counts[column * arity + new] + 1 == size:
                continue
            change = flip_column_change(problem, state, row, column, old, new)
        change += row_change(problem, state, row, partner, column, old, new)
        tally[TOTAL_CHANGE] += abs(change)
        if temperature >= 0 and (change <= 0 or change < temperature * problem.minus_log[draw(words) >> 20]):
            accept(problem, state, change, row, partner, column, old, new)
