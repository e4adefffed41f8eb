"""Faster searches (`quick=True`): a faster copy of the model, convolutions on tensor cores, and replayed passes."""
