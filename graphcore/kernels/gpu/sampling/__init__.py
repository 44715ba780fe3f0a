"""Sampling on the device: the next token of each row, which becomes the row's next input."""
