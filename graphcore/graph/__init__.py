"""Compilation and capture: steps, programs, and the builder that makes them from a decoder."""
