"""Attacks: immutable objects called as attack(model, images, labels) -> images in the same ball, still in [0, 1]."""

from ecnn.attacks.ball import project, random_start
from ecnn.attacks.gradient import PGD
from ecnn.attacks.views import VIEWS

__all__ = ["PGD", "VIEWS", "project", "random_start"]
