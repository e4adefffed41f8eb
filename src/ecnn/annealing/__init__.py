"""Designing codes: simulated annealing of the paper's energy, a search for the largest distances, brute force."""

from ecnn.annealing.design import design_code
from ecnn.annealing.exhaustive import exhaustive_code

__all__ = ["design_code", "exhaustive_code"]
