"""Packed matrices on a GPU: reading their planes, products with them, and unpacking to a dense matrix."""
