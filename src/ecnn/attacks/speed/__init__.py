"""Searches that finish sooner (`quick=True`): a copy of the model, tensor cores for it, and passes that are replayed."""
