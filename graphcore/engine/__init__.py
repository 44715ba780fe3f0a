"""Tokens: loading a model, prefill, decode, sampling and stopping."""
