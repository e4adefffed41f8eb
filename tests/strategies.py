"""Random codes for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from ecnn.codes import CodeMatrix
from ecnn.constructions import random_code


@st.composite
def codes(
    draw: st.DrawFn, max_classes: int = 12, max_length: int = 10, arities: tuple[int, ...] = (2, 3, 4)
) -> CodeMatrix:
    arity = draw(st.sampled_from(arities))
    num_classes = draw(st.integers(2, max_classes))
    shortest = next(n for n in range(1, 9) if arity**n >= num_classes)
    code_length = draw(st.integers(shortest, max(max_length, shortest)))
    return random_code(num_classes, code_length, arity=arity, seed=draw(st.integers(0, 2**32)))


@st.composite
def partitions(draw: st.DrawFn, num_classes: int, max_groups: int = 4) -> np.ndarray:
    groups = st.lists(st.integers(0, max_groups - 1), min_size=num_classes, max_size=num_classes)
    return np.array(draw(groups))
