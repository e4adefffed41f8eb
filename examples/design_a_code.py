"""Design a code and see what it forgives. Run: python examples/design_a_code.py

Ten classes, thirty yes-or-no questions. Each class gets a row of answers; the further apart any two rows are, the more
members of the ensemble may be wrong before one class is taken for another.
"""

import ecnn
from ecnn.constructions import random_code


def main(*, steps: int | None = None) -> None:
    """Designs a code by so many proposals (as many as `design_code` thinks fit) and flips some of its bits."""
    designed = ecnn.design_code(num_classes=10, code_length=30, objective="distance", steps=steps, seed=0)
    print(designed.report())

    # A random code of the same size is quickly had, and forgives less.
    drawn = random_code(10, 30, seed=0)
    print(
        f"\nsmallest distance of two rows: designed {designed.min_row_distance}, drawn {drawn.min_row_distance}"
    )

    # Fewer wrong answers than half of that distance can be corrected: flip so many of every class, and decode.
    wrong = (designed.min_row_distance - 1) // 2
    answers = designed.signed.copy()  # (class, task) +1 or -1
    answers[:, :wrong] *= -1
    nearest = (answers @ designed.signed.T).argmax(axis=1)
    print(f"classes 0 to 9 with {wrong} wrong answers each are read as {nearest.tolist()}")


if __name__ == "__main__":
    main()
