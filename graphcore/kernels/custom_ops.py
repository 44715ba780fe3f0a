"""Registers custom ops with torch, and derives an op's schema from the signature of its implementation.

A custom op is one node of a compiled graph. torch needs three things: a schema (the arguments, and which of them are
mutated), an implementation for each device type, and a fake that returns a tensor with the result's shape and dtype.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

# torch.library.infer_schema is not used: it supports no list of strings, and maps int to SymInt.
SCHEMA_TYPES: dict[Any, str] = {
    None: "()",
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[Tensor] | None: "Tensor[]?",
    Sequence[Tensor | None]: "Tensor?[]",
    tuple[Tensor, Tensor]: "(Tensor, Tensor)",
    Sequence[int]: "int[]",
    Sequence[int] | None: "int[]?",
    Sequence[str]: "str[]",
    **{kind: kind.__name__ for kind in (int, float, bool, str)},
    torch.dtype: "ScalarType",
}


def register_custom_op(
    name: str,
    implementation: Callable[P, R],
    fake: Callable[..., R] | None = None,
    *,
    mutates_args: Sequence[str] = (),
    dispatch_key: str = "CompositeExplicitAutograd",
    schema: str = "",
) -> Callable[P, R]:
    """Define the op `graphcore::name`, and return it.

    Args:
        implementation: function whose parameters become the op's, with their names, types (`SCHEMA_TYPES`) and
            defaults.
        fake: function that returns an empty tensor like the result, for tracing. It takes, by name, those of the op's
            arguments that it needs; these must have no defaults. None if the op returns nothing.
        mutates_args: names of the tensors, or lists of tensors, that the op writes to.
        dispatch_key: devices that the implementation is for; the default is every device, because Triton's interpreter
            runs kernels on the CPU. To add another device's implementation, call `torch.library.impl` as a function: as
            a decorator it would bind the function's name to None.
        schema: schema of the op; empty to derive it from the implementation's signature.

    Raises:
        KeyError: the type of a parameter or of the result is not in `SCHEMA_TYPES`.
    """
    qualified_name = f"graphcore::{name}"
    torch.library.define(qualified_name, schema or schema_of(implementation, mutates_args))
    torch.library.impl(qualified_name, dispatch_key, implementation)
    op = getattr(torch.ops.graphcore, name).default
    names = [argument.name for argument in op._schema.arguments]
    needed = () if fake is None else tuple(inspect.signature(fake).parameters)

    def fake_of_all(*args: Any, **kwargs: Any) -> R | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        return None if fake is None else fake(*(given[one] for one in needed))

    torch.library.register_fake(qualified_name, fake_of_all)
    return cast(Callable[P, R], op)


def schema_of(function: Callable[..., Any], mutates_args: Sequence[str] = ()) -> str:
    """Return the schema of an op with a function's parameters, such as "(Tensor(a!) x, float eps=0.0) -> ()"."""
    signature = inspect.signature(function)
    assert {*mutates_args} <= {*signature.parameters}, f"{mutates_args} are not all among {[*signature.parameters]}"
    letters = dict(zip(mutates_args, "abcdefghijklmnopqrstuvwxyz", strict=False))
    arguments = []
    for one in signature.parameters.values():
        kind = SCHEMA_TYPES[one.annotation]
        if one.name in letters:
            kind = kind.replace("Tensor", f"Tensor({letters[one.name]}!)")
        default = "" if one.default is inspect.Parameter.empty else f"={one.default!r}"
        arguments.append(f"{kind} {one.name}{default}")
    return f"({', '.join(arguments)}) -> {SCHEMA_TYPES[signature.return_annotation]}"
