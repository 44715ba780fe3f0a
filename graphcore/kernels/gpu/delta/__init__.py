"""Gated DeltaNet between a layer's projections, on a GPU."""
