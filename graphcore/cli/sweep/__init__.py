"""Sweeps: each run in a process of its own, and a summary of all."""
