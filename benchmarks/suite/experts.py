"""Experts in page-locked host memory, read by the kernels themselves, against experts that are copied to a cache."""

from suite.bench import Bench


def run(bench: Bench) -> None:
    raise NotImplementedError
