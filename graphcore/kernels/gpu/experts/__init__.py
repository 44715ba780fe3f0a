"""A mixture of experts on a GPU: the router's choice, kernels for a few tokens, and for many grouped by expert."""
