"""The instructions of a native decode step: ctypes structures that mirror native/step.h field by field."""

import ctypes

from graphcore.kernels.cpu.library import Matrix

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
STORES = {"put": 0, "add": 1, "gated": 2}
ELEMENTS = {"gate": 0, "add": 1, "cap": 2, "scale": 3}
NORM_KINDS = {"rms": 1, "layer": 2}
MOST_TAPS = 8  # largest width of a short convolution
CHOICE_PARTS = 64  # parts of the vocabulary that threads search for the argmax
MOST_ROWS = 16  # largest number of a program's rows
DOWN_GROUPS = 32  # groups of rows whose expert outputs are buffered before they are summed


class PerRow(ctypes.Structure):
    """One array per row of a program: pointer to the first row's array, and stride between rows in elements."""

    _fields_ = (("first", POINTER), ("stride", ctypes.c_int64))


class Sharing(ctypes.Structure):
    """The chosen experts of all rows as lists per expert."""

    _fields_ = (("count", POINTER), ("begins", POINTER), ("choices", POINTER))


class Norm(ctypes.Structure):
    """A normalisation; all fields zero for none."""

    _fields_ = (("kind", INT), ("eps", FLOAT), ("weight", POINTER), ("bias", POINTER))


class Embed(ctypes.Structure):
    """x = row of a table * scale (+ row of a position table)."""

    KIND = 0
    _fields_ = (
        ("table", Matrix),
        ("positions", Matrix),
        ("token_ids", POINTER),
        ("starts", POINTER),
        ("x", PerRow),
        ("scale", FLOAT),
    )


class Project(ctypes.Structure):
    """Up to four matrices times each row's normalised vector."""

    KIND = 1
    _fields_ = (
        ("x", PerRow),
        ("norm", Norm),
        ("rounding", INT),
        ("num_matrices", INT),
        ("matrices", Matrix * 4),
        ("biases", POINTER * 4),
        ("outs", PerRow * 4),
        ("store", INT),
        ("activation", INT),
        ("factor", FLOAT),
    )


class Attend(ctypes.Structure):
    """Attention of one token of each row: norms of heads, rotation, scale of queries, cache write and softmax."""

    KIND = 2
    _fields_ = (
        ("q", PerRow),
        ("k", PerRow),
        ("v", PerRow),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("v_norm", Norm),
        ("rope", POINTER),
        ("sinks", POINTER),
        ("starts", POINTER),
        ("sequences", POINTER),
        ("k_cache", POINTER),
        ("v_cache", POINTER),
        ("table", POINTER),
        ("out", PerRow),
        ("heads", INT),
        ("kv_heads", INT),
        ("head_dim", INT),
        ("page", INT),
        ("num_pages", INT),
        ("window", INT),
        ("k_format", INT),
        ("v_format", INT),
        ("unrotated", INT),
        ("values_from", INT),
        ("period", INT),
        ("scale", FLOAT),
        ("cap", FLOAT),
        ("beta", FLOAT),
    )


class AddNorm(ctypes.Structure):
    """x += norm(y), or x = norm(y), for each of several equal parts of x and y."""

    KIND = 3
    _fields_ = (("y", PerRow), ("norm", Norm), ("x", PerRow), ("dim", INT), ("puts", INT), ("parts", INT))


class Choose(ctypes.Structure):
    """Finds the argmax of each row's logits in each part of the vocabulary."""

    KIND = 4
    _fields_ = (("logits", PerRow), ("vocab", INT), ("best", POINTER), ("best_index", POINTER))


class Advance(ctypes.Structure):
    """Makes the argmax token of each row its next input, and advances the position."""

    KIND = 5
    _fields_ = (
        ("best", POINTER),
        ("best_index", POINTER),
        ("chosen", POINTER),
        ("token_ids", POINTER),
        ("starts", POINTER),
    )


class Route(ctypes.Structure):
    """Chooses the experts of each row and their shares."""

    KIND = 6
    _fields_ = (
        ("logits", PerRow),
        ("experts", INT),
        ("used", INT),
        ("chosen", POINTER),
        ("weights", POINTER),
        ("over_all", INT),
        ("scales", POINTER),
        ("sharing", Sharing),
        ("function", INT),
        ("bias", POINTER),
        ("groups", INT),
        ("used_groups", INT),
        ("normalises", INT),
        ("eps", FLOAT),
        ("factor", FLOAT),
        ("ranked_by", INT),
    )


class ExpertsUp(ctypes.Structure):
    """The chosen experts' gate and up projections and their activation."""

    KIND = 7
    _fields_ = (
        ("x", PerRow),
        ("norm", Norm),
        ("rounding", INT),
        ("gate", Matrix),
        ("up", Matrix),
        ("gate_bias", POINTER),
        ("up_bias", POINTER),
        ("chosen", POINTER),
        ("places", POINTER),
        ("sharing", Sharing),
        ("hidden", PerRow),
        ("used", INT),
        ("activation", INT),
        ("limit", FLOAT),
        ("alpha", FLOAT),
    )


class ExpertsDown(ctypes.Structure):
    """The chosen experts' down projections, whose weighted sum is added to x, or overwrites x."""

    KIND = 8
    _fields_ = (
        ("hidden", PerRow),
        ("rounding", INT),
        ("down", Matrix),
        ("bias", POINTER),
        ("chosen", POINTER),
        ("places", POINTER),
        ("sharing", Sharing),
        ("weights", POINTER),
        ("x", PerRow),
        ("answers", POINTER),
        ("is_last", POINTER),
        ("used", INT),
        ("puts", INT),
    )


class Elementwise(ctypes.Structure):
    """One operation on each element.

    GATE: out = activation(a) * b; SCALE: the same with one number a; ADD: out = a + factor * b; CAP: out = factor *
    tanh(a / factor).
    """

    KIND = 9
    _fields_ = (
        ("elements", INT),
        ("activation", INT),
        ("a", PerRow),
        ("b", PerRow),
        ("out", PerRow),
        ("size", INT),
        ("factor", FLOAT),
    )


class Delta(ctypes.Structure):
    """Arguments of a Gated DeltaNet layer between its projections, for the instructions Convolve and DeltaRule."""

    _fields_ = (
        ("mixed", POINTER),
        ("z", POINTER),
        ("a", POINTER),
        ("b", POINTER),
        ("conv_weight", POINTER),
        ("conv_bias", POINTER),
        ("rate", POINTER),
        ("dt_bias", POINTER),
        ("norm_weight", POINTER),
        ("convolution", POINTER),
        ("recurrent", POINTER),
        ("starts", POINTER),
        ("counts", POINTER),
        ("joined", POINTER),
        ("out", POINTER),
        ("caches", POINTER),
        ("strides", ctypes.c_int64 * 4),
        ("sequences", INT),
        ("tokens", INT),
        ("width", INT),
        ("key_heads", INT),
        ("heads", INT),
        ("key_dim", INT),
        ("value_dim", INT),
        ("format", INT),
        ("state_format", INT),
        ("tiled", INT),
        ("eps", FLOAT),
    )


class Convolve(Delta):
    """The short convolution of a Gated DeltaNet layer."""

    KIND = 10


class DeltaRule(Delta):
    """The delta rule and the gated norm of the layer, after `Convolve`."""

    KIND = 11


class Reorder(ctypes.Structure):
    """out[i] = x[order[i]] for each of `size` features."""

    KIND = 12
    _fields_ = (("x", PerRow), ("order", POINTER), ("out", PerRow), ("size", INT))


class GatedConvolution(ctypes.Structure):
    """A gated short convolution between its projections: out = c * convolution(b * x)."""

    KIND = 13
    _fields_ = (
        ("mixed", POINTER),
        ("conv_weight", POINTER),
        ("conv_bias", POINTER),
        ("convolution", POINTER),
        ("starts", POINTER),
        ("counts", POINTER),
        ("out", POINTER),
        ("caches", POINTER),
        ("stride", ctypes.c_int64),
        ("sequences", INT),
        ("tokens", INT),
        ("channels", INT),
        ("width", INT),
        ("format", INT),
        ("state_format", INT),
    )


class ProjectHeads(ctypes.Structure):
    """out[h] = [prefix[h] | matrix_h @ x[h]] for each head, whose matrix is its own."""

    KIND = 14
    _fields_ = (
        ("x", PerRow),
        ("prefix", PerRow),
        ("rounding", INT),
        ("matrix", Matrix),
        ("out", PerRow),
        ("heads", INT),
        ("prefix_dim", INT),
    )


class Instruction(ctypes.Structure):
    """One entry of a program."""

    _fields_ = (("kind", INT), ("arguments", POINTER))
