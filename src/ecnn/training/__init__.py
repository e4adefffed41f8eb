"""fit(): one training loop for every model, objective and attack; resumable at any epoch."""

from ecnn.training.loop import History, TrainingError, fit
from ecnn.training.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "History", "Recipe", "TrainingError", "fit"]
