"""Measurements of task=bench, task=microbench and task=perplexity."""
