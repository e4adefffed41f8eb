"""Measures how fast codes are designed and how good they are; writes annealing.json and annealing.md beside this file.

Run: python benchmarks/annealing.py [--quick]. One process on one core; compile time is reported separately.
Incremental updates are compared in the same run with a full re-evaluation of the energy per proposal, compiled by numba
as well. With --quick it does little work, in seconds, and writes to out/quick: this only shows that everything runs.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np

from ecnn import files
from ecnn.annealing import design_code
from ecnn.annealing.chains import Allowance, anneal_chain, energy_problem
from ecnn.codes import balanced_column_weight
from ecnn.constructions import random_code

HERE = Path(__file__).parent
RATE_SIZES = [(10, 10), (10, 30), (43, 30), (100, 80), (300, 100), (1000, 200)]
PAPER_SIZES = [(10, 10), (10, 15), (10, 20), (10, 25), (10, 30), (43, 30), (100, 80)]


@numba.njit
def full_energy(symbols: np.ndarray, weight: float) -> Any:
    """The energy of a binary code, computed from scratch in O(classes * tasks * (classes + tasks))."""
    num_classes, code_length = symbols.shape
    energy = 0.0
    for i in range(num_classes):
        for j in range(i):
            distance = 0
            for n in range(code_length):
                distance += symbols[i, n] != symbols[j, n]
            energy += 1.0 / max(distance, 0.25) ** 2
    for m in range(code_length):
        for n in range(m):
            counts = np.zeros((2, 2))
            for i in range(num_classes):
                counts[symbols[i, m], symbols[i, n]] += 1
            vi = 0.0
            for a in range(2):
                for b in range(2):
                    if counts[a, b] > 0:
                        vi -= counts[a, b] * math.log(
                            counts[a, b] ** 2
                            / ((counts[a, 0] + counts[a, 1]) * (counts[0, b] + counts[1, b]))
                        )
            energy += weight / max(vi / num_classes, 1e-3) ** 2
    return energy


@numba.njit
def anneal_by_full_evaluation(symbols: np.ndarray, weight: float, proposals: int, temperature: float) -> Any:
    energy = full_energy(symbols, weight)
    for _ in range(proposals):
        row, column = np.random.randint(symbols.shape[0]), np.random.randint(symbols.shape[1])
        symbols[row, column] = 1 - symbols[row, column]
        trial = full_energy(symbols, weight)
        if trial <= energy or np.random.random() < math.exp((energy - trial) / temperature):
            energy = trial
        else:
            symbols[row, column] = 1 - symbols[row, column]
    return energy


def seconds_of(call: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def rates(sizes: list[tuple[int, int]], work: int) -> list[dict[str, Any]]:
    """Proposals per second at each size; `work` is about how many distances a measurement updates."""
    table = []
    for num_classes, code_length in sizes:
        weight = balanced_column_weight(num_classes, code_length)
        problem = energy_problem(num_classes, code_length, 2, weight)
        start = random_code(num_classes, code_length, seed=0).symbols
        steps = max(20_000, work // (num_classes + code_length))
        allowance, seeds = Allowance(steps, None, None), np.random.SeedSequence(0)
        elapsed, _ = seconds_of(partial(anneal_chain, problem, start, steps, allowance, seeds))
        full_steps = max(5, 5 * work // (2 * num_classes * code_length * (num_classes + code_length)))
        full_elapsed, _ = seconds_of(
            partial(anneal_by_full_evaluation, start.astype(np.int64), weight, full_steps, 1e-4)
        )
        rate, full_rate = steps / elapsed, full_steps / full_elapsed
        table.append(
            {
                "size": f"{num_classes} x {code_length}",
                "proposals_per_second": rate,
                "rate_times_size": rate * (num_classes + code_length),
                "full_evaluations_per_second": full_rate,
                "speedup": rate / full_rate,
            }
        )
    return table


def designs(paper_sizes: list[tuple[int, int]], steps: int | None) -> list[dict[str, Any]]:
    table = []
    for objective, sizes in (("energy", [(10, 30)]), ("distance", paper_sizes)):
        for num_classes, code_length in sizes:
            elapsed, code = seconds_of(
                lambda: design_code(num_classes, code_length, objective=objective, steps=steps, seed=0)  # type: ignore[arg-type]  # noqa: B023
            )
            report = code.report()
            table.append(
                {
                    "objective": objective,
                    "size": f"{num_classes} x {code_length}",
                    "min_row_distance": report.min_row_distance,
                    "min_row_distance_bound": report.min_row_distance_bound,
                    "min_column_distance": report.min_column_distance,
                    "min_column_distance_bound": report.min_column_distance_bound,
                    "smallest_group": report.smallest_group,
                    "seconds": elapsed,
                    "stopped_by": code.provenance["stopped_by"],
                }
            )
    return table


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "# Designing codes: speed and quality",
        "",
        "`python benchmarks/annealing.py` on one core; compiling, or loading what was compiled before, took "
        f"{result['compile_seconds']:.1f} s and is not counted.",
        "Absolute times depend on the machine; the ratios were taken in one run.",
        "",
        "| classes x tasks | proposals/s | rate x (classes + tasks) | full re-evaluation/s | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['size']} | {row['proposals_per_second']:,.0f} | {row['rate_times_size'] / 1e6:.0f} M "
        f"| {row['full_evaluations_per_second']:,.0f} | {row['speedup']:.0f}x |"
        for row in result["rates"]
    ]
    sizes = [row["rate_times_size"] for row in result["rates"]]
    lines += [
        "",
        f"Rate x (classes + tasks) varies by {max(sizes) / min(sizes):.2f}x over these sizes: a proposal costs",
        "O(classes + tasks).",
        "",
        "| objective | classes x tasks | d_H | bound | d_VI | bound | smallest group | seconds | ended by |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {row['objective']} | {row['size']} | {row['min_row_distance']} | {row['min_row_distance_bound']} "
        f"| {row['min_column_distance']:.4f} | {row['min_column_distance_bound']:.4f} | {row['smallest_group']} "
        f"| {row['seconds']:.1f} | {row['stopped_by']} |"
        for row in result["designs"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="little, to out/quick: does it run?")
    quick = parser.parse_args().quick
    compile_seconds, _ = seconds_of(lambda: design_code(4, 3, seed=0, steps=100))
    anneal_by_full_evaluation(np.eye(4, dtype=np.int64), 1.0, 1, 1.0)
    result = {
        "compile_seconds": compile_seconds,
        "rates": rates(RATE_SIZES[:2], 200_000) if quick else rates(RATE_SIZES, 80_000_000),
        "designs": designs(PAPER_SIZES[:2], 20_000) if quick else designs(PAPER_SIZES, None),
    }
    folder = Path("out/quick") if quick else HERE
    files.write_json(folder / "annealing.json", result)
    files.write_text(folder / "annealing.md", markdown(result))


if __name__ == "__main__":
    main()
