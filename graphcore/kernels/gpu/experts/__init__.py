"""A mixture of experts on a GPU: top-k routing, kernels for a few tokens, and for many tokens grouped by expert."""
