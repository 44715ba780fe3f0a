"""Batching: which requests a pass runs, who is admitted to the KV cache, and the decode loops."""
