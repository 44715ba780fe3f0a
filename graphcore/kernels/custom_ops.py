"""Registers custom ops with torch: an op's schema is read from the signature of a function that implements it.

A compiled graph and a captured one hold an op as one node. torch asks for three things: a schema (its arguments, and
which of them it writes to), an implementation for each kind of device, and a fake that says what the result looks like.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

# torch.library.infer_schema knows no list of strings, and takes an int for a number that a compiled graph leaves open.
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
        fake: function that returns an empty tensor like the result, for tracing. Its parameters are those of the op's
            that it needs, by name, none of which has a default. None if the op returns nothing.
        mutates_args: names of the tensors, or lists of tensors, that the op writes to.
        dispatch_key: devices that the implementation is for; the default is every device, as Triton's interpreter runs
            its kernels on the CPU. For another device's, call `torch.library.impl` as a function: as a decorator it
            would leave None under the implementation's name.
        schema: the op's schema, if the implementation's signature does not say it; empty if it does.

    Raises:
        KeyError: a parameter's type, or the result's, is not in `SCHEMA_TYPES`.
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
