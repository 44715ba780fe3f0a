"""Bytes in: which tensors and settings a stored model has, where each byte lies, and the bytes on request.

`open_checkpoint` picks a reader by what the path holds; every reader is a `Checkpoint`. No floor above opens a
checkpoint's files by itself, and nothing here knows what a tensor means to a model.
"""
