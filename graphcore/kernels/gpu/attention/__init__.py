"""Attention over a static cache: split-KV decode for one new token, flash attention for chunks, and the cache write."""
