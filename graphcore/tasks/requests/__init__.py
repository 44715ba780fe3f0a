"""Requests to the model: prompts, files of prompts, and the batches in which they run."""
