"""Decode steps of the CPU: one native program, its instructions and its memory."""
