"""The engine: loading a model, scheduling requests, prefill, decode, sampling and stopping."""
