"""fit(): one training loop for every model, objective and attack; resumable at any epoch."""

from ecnn.models import RECIPES
from ecnn.recipes import Recipe
from ecnn.training.loop import History, TrainingError, fit

__all__ = ["RECIPES", "History", "Recipe", "TrainingError", "fit"]
