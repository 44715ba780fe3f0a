"""Rank 0 leads, the others follow: all run the same batches on the same events, each the layers that it has."""
