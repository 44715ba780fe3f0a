"""A chat at the terminal: its input, its conversation and its commands."""
