"""Choices of one token, `Draw`, with their sampling parameters as keywords."""

from dataclasses import fields, replace
from typing import Any

from graphcore.kernels.ops.draw import Draw
from graphcore.sampling_params import SamplingParams

OWN = tuple(one.name for one in fields(Draw) if one.name != "params")


def draw_of(**values: Any) -> Draw:
    """Return a draw; the defaults take the likeliest token."""
    return changed(Draw(SamplingParams()), **values)


def changed(draw: Draw, **values: Any) -> Draw:
    """Return a draw with other values of its fields and of its sampling parameters."""
    own = {name: values.pop(name) for name in OWN if name in values}
    return replace(draw, params=replace(draw.params, **values), **own)
