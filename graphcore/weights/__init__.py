"""Weights in memory: layouts, slots, the plan, and the loader that fills them from a checkpoint."""
