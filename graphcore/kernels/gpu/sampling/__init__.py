"""Chooses the next token of each row, and makes it the next input, on the device."""
