"""The reference of task=verify: the same model in transformers."""
