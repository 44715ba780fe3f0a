"""Checkpoints: the tensors and settings of a stored model, the place of each byte, and the bytes on request.

`open_checkpoint` picks a reader by the contents of a path; every reader is a `Checkpoint`. Other packages open a
checkpoint's files only through this one, and nothing here depends on a tensor's role in a model.
"""
