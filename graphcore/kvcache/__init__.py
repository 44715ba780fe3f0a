"""The KV cache: buffers, pages, the prefix cache, and snapshots that can be saved to a file."""
