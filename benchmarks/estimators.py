"""Designed codes against random ones: ErrorCorrectingClassifier and scikit-learn's OutputCodeClassifier on digits.

Run: python benchmarks/estimators.py [--quick]. Both get the same base estimator, number of members, training rows and
random_state in each split, so that differences are paired. Writes estimators.json and estimators.md beside this file,
or to --out. With --quick it does little work, in seconds, and writes to out/quick: this only shows that everything
runs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.multiclass import OutputCodeClassifier
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier

from ecnn import files, runs
from ecnn.estimators import ErrorCorrectingClassifier

HERE = Path(__file__).parent
SIZES = (1.0, 1.5, 2.0, 3.0)
BASES: dict[str, Any] = {
    "logistic regression": LogisticRegression(max_iter=500),
    "linear SVM": LinearSVC(),
    "decision tree": DecisionTreeClassifier(random_state=0),
}
TEST_SHARE = 0.25


def paired_interval(differences: np.ndarray, shared: float = 0.0) -> tuple[float, float]:
    """Lower and upper end of the 95 % t interval of the mean difference.

    Args:
        differences: (split,) of accuracies.
        shared: test rows per training row. It widens the interval, because splits of the same rows are not independent
            (Nadeau & Bengio 2003). 0 treats them as independent.
    """
    count = len(differences)
    spread = math.sqrt((1 / count + shared) * differences.var(ddof=1))
    reach = float(stats.t.ppf(0.975, count - 1)) * spread
    return float(differences.mean()) - reach, float(differences.mean()) + reach


def measure(splits: int, sizes: tuple[float, ...], bases: dict[str, Any]) -> list[dict[str, Any]]:
    rows, labels = load_digits(return_X_y=True)
    table = []
    for name, base in bases.items():
        for size in sizes:
            rates: dict[str, list[float]] = {"designed": [], "random": []}
            started = time.monotonic()
            for split in range(splits):
                parts = train_test_split(
                    rows / 16, labels, test_size=TEST_SHARE, stratify=labels, random_state=split
                )
                train, test, train_labels, test_labels = parts
                options: dict[str, Any] = {"code_size": size, "random_state": split}
                ours = ErrorCorrectingClassifier(base, **options).fit(train, train_labels)
                theirs = OutputCodeClassifier(base, **options).fit(train, train_labels)
                rates["designed"].append(ours.score(test, test_labels))
                rates["random"].append(theirs.score(test, test_labels))
            differences = np.subtract(rates["designed"], rates["random"])
            row = {
                "estimator": name,
                "code_size": size,
                "members": len(ours.estimators_),
                "splits": splits,
                **{key: float(np.mean(values)) for key, values in rates.items()},
                "difference": float(differences.mean()),
                "interval": paired_interval(differences),
                "wide_interval": paired_interval(differences, TEST_SHARE / (1 - TEST_SHARE)),
                "seconds": time.monotonic() - started,
            }
            table.append(row)
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
    return table


def markdown(result: dict[str, Any]) -> str:
    table = result["rows"]
    lines = [
        "# Designed codes beside random ones",
        "",
        "`python benchmarks/estimators.py`: `ErrorCorrectingClassifier` (designed codes) and scikit-learn's",
        "`OutputCodeClassifier` (random codes) on the embedded digits, three quarters of them to train on,",
        f"{table[0]['splits']} splits. Both have the same base estimator, number of members, rows and random_state.",
        "",
        "| base estimator | code_size | members | designed | random | difference, points | 95 % interval | widened |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table:
        shares = " | ".join(f"{100 * row[name]:.2f} %" for name in ("designed", "random"))
        ends = [
            " to ".join(f"{100 * end:+.2f}" for end in row[name]) for name in ("interval", "wide_interval")
        ]
        cells = [
            f"{row['code_size']:g}",
            str(row["members"]),
            shares,
            f"{100 * row['difference']:+.2f}",
            *ends,
        ]
        lines.append(f"| {row['estimator']} | {' | '.join(cells)} |")
    above = {name: sum(row[name][0] > 0 for row in table) for name in ("interval", "wide_interval")}
    lines += [
        "",
        "The interval is the paired t interval of the mean over the splits. The splits are of the same rows and so not",
        "independent, while the random codes are: the widened interval (Nadeau and Bengio 2003) takes all of the",
        "spread as coming from shared rows.",
        f"Above 0 are {above['interval']} of {len(table)} intervals and {above['wide_interval']} of the widened ones.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--out", type=Path, default=HERE / "estimators.json")
    parser.add_argument("--quick", action="store_true", help="little, to out/quick: does it run?")
    options = parser.parse_args()
    sizes: tuple[float, ...] = SIZES
    bases = BASES
    if options.quick:
        options.splits, options.out = 2, Path("out/quick/estimators.json")
        sizes, bases = (1.0,), {"decision tree": BASES["decision tree"]}
    rows = measure(options.splits, sizes, bases)
    files.write_json(options.out, {"environment": runs.environment(), "rows": rows})
    files.write_text(options.out.with_suffix(".md"), markdown(files.read_json(options.out)))


if __name__ == "__main__":
    main()
