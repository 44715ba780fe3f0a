"""Registers custom ops with torch, and derives an op's schema from the signature of its implementation.

A custom op is one node of a compiled graph. torch needs three things: a schema (the arguments, and which of them are
mutated), an implementation for each device type, and a fake that returns a tensor with the result's shape and dtype.

Schemas have no records (NamedTuples or dataclasses). So each field of a record becomes an argument of the op, called
`parameter_field`, and a list if the parameter is a sequence of records. Callers pass the record, and implementations
receive it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import Any, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

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
    Sequence[float]: "float[]",
    **{kind: kind.__name__ for kind in (int, float, bool, str)},
    **{kind | None: f"{kind.__name__}?" for kind in (int, float, bool, str)},
    torch.dtype: "ScalarType",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of an implementation, and the op's arguments for it.

    Attributes:
        default: default value; `inspect.Parameter.empty` if there is none.
        arguments: schema types of the op's arguments by name: one argument, or one for each field of a record.
        record: class of the record; None if the parameter is no record.
        is_list: True if the parameter is a sequence of records.
    """

    name: str
    default: Any
    arguments: Mapping[str, str]
    record: Callable[..., Any] | None = None
    is_list: bool = False

    def split(self, value: Any) -> list[Any]:
        """Return the op's arguments for a value of the parameter."""
        if self.record is None:
            return [value]
        fields = [argument[len(self.name) + 1 :] for argument in self.arguments]
        if self.is_list:
            return [[getattr(one, field) for one in value] for field in fields]
        return [None if value is None else getattr(value, field) for field in fields]

    def join(self, values: Sequence[Any]) -> Any:
        """Return the value of the parameter for the op's arguments."""
        if self.record is None:
            return values[0]
        if self.is_list:
            return [self.record(*fields) for fields in zip(*values, strict=True)]
        return None if all(value is None for value in values) else self.record(*values)


def register_custom_op(
    name: str,
    implementation: Callable[P, R],
    fake: Callable[..., R] | None = None,
    *,
    mutates_args: Sequence[str] = (),
    dispatch_key: str | None = "CompositeExplicitAutograd",
    schema: str = "",
) -> Callable[P, R]:
    """Define the op `graphcore::name`, and return a function that calls it.

    Args:
        implementation: function whose parameters become the op's, with their names, types (`SCHEMA_TYPES`, or records
            of them) and defaults. Keyword-only parameters are no arguments of the op.
        fake: function that returns an empty tensor like the result, for tracing. It takes, by name, those of the
            implementation's parameters that it needs. None if the op returns nothing.
        mutates_args: names of the op's arguments that it writes to, tensors or lists of tensors.
        dispatch_key: devices that the implementation is for; the default is every device, because Triton's interpreter
            runs kernels on the CPU. `register_implementation` adds another device's. None if `implementation` has only
            the signature.
        schema: schema of the op, if a type of its arguments is not in `SCHEMA_TYPES`.

    Raises:
        KeyError: the type of a parameter or of the result is not in `SCHEMA_TYPES`.
    """
    torch.library.define(f"graphcore::{name}", schema or schema_of(implementation, mutates_args))
    op = getattr(torch.ops.graphcore, name).default
    parameters = _parameters_of(implementation)
    if schema:
        parameters = [Parameter(one.name, one.default_value, {one.name: ""}) for one in op._schema.arguments]
    if dispatch_key is not None:
        register_implementation(name, dispatch_key, implementation)
    needed = () if fake is None else tuple(inspect.signature(fake).parameters)
    join = _join_by(parameters)

    def fake_of_all(*args: Any, **kwargs: Any) -> R | None:
        given = join(args, kwargs)
        return None if fake is None else fake(*(given[one] for one in needed))

    torch.library.register_fake(f"graphcore::{name}", fake_of_all)
    names, defaults = [one.name for one in parameters], {one.name: one.default for one in parameters}

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        return op(*(argument for one in parameters for argument in one.split(given[one.name])))  # type: ignore[no-any-return]

    return call if any(one.record for one in parameters) else cast(Callable[P, R], op)


def register_implementation(name: str, dispatch_key: str, implementation: Callable[..., Any]) -> None:
    """Register another implementation of the op `graphcore::name`, for the devices of a dispatch key."""
    parameters = _parameters_of(implementation)
    join = _join_by(parameters)

    def with_records(*args: Any, **kwargs: Any) -> Any:
        return implementation(**join(args, kwargs))

    has_records = any(one.record for one in parameters)
    # called as a function, because as a decorator it would bind the function's name to None
    torch.library.impl(f"graphcore::{name}", dispatch_key, with_records if has_records else implementation)


def _join_by(parameters: Sequence[Parameter]) -> Callable[[Sequence[Any], Mapping[str, Any]], dict[str, Any]]:
    """Return a function from an op's arguments to an implementation's, by name; torch leaves out the op's defaults."""
    names = [name for one in parameters for name in one.arguments]
    defaults: dict[str, Any] = {}
    for one in parameters:
        if one.default is not inspect.Parameter.empty:
            defaults |= zip(one.arguments, one.split(one.default), strict=True)

    def join(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return {one.name: one.join([values[name] for name in one.arguments]) for one in parameters}

    return join


def _parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a function that are arguments of an op."""
    given = inspect.signature(function).parameters.values()
    return [_parameter_of(one) for one in given if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _parameter_of(given: inspect.Parameter) -> Parameter:
    kind: Any = given.annotation
    is_list, is_optional = get_origin(kind) is Sequence, get_origin(kind) is UnionType
    record: Any = get_args(kind)[0] if is_list or is_optional else kind
    if not (is_dataclass(record) or hasattr(record, "_fields")):
        return Parameter(given.name, given.default, {given.name: SCHEMA_TYPES[kind]})
    types: dict[str, Any] = get_type_hints(record)
    if is_list or is_optional:
        types = {field: Sequence[one] if is_list else one | None for field, one in types.items()}  # type: ignore[valid-type]
    arguments = {f"{given.name}_{field}": SCHEMA_TYPES[one] for field, one in types.items()}
    return Parameter(given.name, given.default, arguments, record, is_list)


def schema_of(function: Callable[..., Any], mutates_args: Sequence[str] = ()) -> str:
    """Return the schema of an op with a function's parameters, such as "(Tensor(a!) x, float eps=0.0) -> ()"."""
    parameters = _parameters_of(function)
    names = {name for one in parameters for name in one.arguments}
    assert {*mutates_args} <= names, f"{mutates_args} are not all among {sorted(names)}"
    letters = dict(zip(mutates_args, "abcdefghijklmnopqrstuvwxyz", strict=False))
    arguments = []
    for one in parameters:
        has_default = one.default is not inspect.Parameter.empty
        defaults = one.split(one.default) if has_default else [None] * len(one.arguments)
        for (name, kind), default in zip(one.arguments.items(), defaults, strict=True):
            if name in letters:
                kind = kind.replace("Tensor", f"Tensor({letters[name]}!)")
            arguments.append(f"{kind} {name}={default!r}" if has_default else f"{kind} {name}")
    returned = SCHEMA_TYPES[inspect.signature(function).return_annotation]
    return f"({', '.join(arguments)}) -> {returned}"
