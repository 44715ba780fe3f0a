"""The engine: loading a model, scheduling requests, prefill, decode, sampling and stopping."""

from graphcore.processors import load_torch

load_torch()  # before any module of this package imports it
