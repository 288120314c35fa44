"""Every public signature with shapes refuses a wrong axis, a wrong rank and a wrong dtype.

The signatures are found, not listed: whatever the four packages define in public is collected, its
arguments are made from its own annotations, and each array among them is spoiled in turn.
"""

import ast
import collections
import dataclasses
import importlib
import inspect
import math
import pkgutil
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from eagle3_jax.contracts import DIMENSIONS
from tests.stand_ins import (
    ARGUMENTS,
    FIELD_SIZES,
    KEY,
    LEAD,
    OF_TYPE,
    SIZES,
    UNSHAPED,
)

PACKAGES = ("eagle3_jax", "kernels_pallas", "sharding", "checkpoints")


def is_shaped(annotation: Any) -> bool:
    """Whether an annotation is a jaxtyping array type."""
    return isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, else the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def shaped(annotation: Any) -> Any:
    """The jaxtyping array type in an annotation, None where there is none."""
    return next((a for a in members(annotation) if is_shaped(a)), None)


class Signature(typing.NamedTuple):
    """A public callable: a function, a method with its class, or a class by its `__init__`."""

    name: str
    call: Callable
    parameters: dict[str, inspect.Parameter]
    owner: type | None

    @property
    def arrays(self) -> dict[str, Any]:
        """Parameters with a shape."""
        found = {k: shaped(p.annotation) for k, p in self.parameters.items()}
        return {k: a for k, a in found.items() if a is not None}


def modules() -> Iterator[types.ModuleType]:
    """Every module of the four packages."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        yield root
        for info in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not info.name.endswith("__main__"):
                yield importlib.import_module(info.name)


def callables(module: types.ModuleType) -> Iterator[tuple[str, Callable, type | None]]:
    """Public functions and methods that a module defines, by full name."""
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
        if not own or not callable(value) or not hasattr(value, "__qualname__"):
            continue
        if not isinstance(value, type):
            yield f"{module.__name__}.{name}", value, None
            continue
        for method, raw in vars(value).items():
            function = getattr(raw, "__func__", raw)
            public = not method.startswith("_") or method in ("__init__", "__call__")
            here = getattr(function, "__qualname__", "") == f"{value.__qualname__}.{method}"
            if public and here and inspect.isfunction(function):
                yield f"{module.__name__}.{name}.{method}", function, value


def signatures() -> list[Signature]:
    """Every public signature of the four packages."""
    found = []
    for module in modules():
        for name, call, owner in callables(module):
            parameters = dict(inspect.signature(call).parameters)
            if owner is not None and next(iter(parameters), None) in ("self", "cls"):
                parameters.pop(next(iter(parameters)))
            variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            parameters = {k: p for k, p in parameters.items() if p.kind not in variadic}
            found.append(Signature(name, call, parameters, owner))
    return found


ALL = signatures()
WITH_SHAPES = [signature for signature in ALL if signature.arrays]

each_signature = pytest.mark.parametrize(
    "signature", WITH_SHAPES, ids=[signature.name for signature in WITH_SHAPES]
)


def axis_sizes(
    annotation: Any, owner: Any, sizes: dict[str, int] = SIZES
) -> list[tuple[str, tuple[int, ...]]]:
    """Each axis of an annotation and its sizes (several for `*lead` and `...`)."""
    out = []
    for axis in annotation.dim_str.split():
        if axis.startswith("*") or axis == "...":
            out.append((axis, LEAD))
        elif axis.startswith("{"):
            out.append((axis, (eval(axis[1:-1], {"self": owner}),)))
        else:
            out.append((axis, (int(axis) if axis.isdigit() else sizes[axis],)))
    return out


KINDS = {"float": jnp.float32, "int": jnp.int32, "bool": jnp.bool_}


def kind_of(annotation: Any) -> str:
    """`float`, `int`, `bool` or `key`; `any` where the annotation leaves the dtype open."""
    names = " ".join(map(str, getattr(annotation.dtypes, "__iter__", tuple)()))
    found = [k for k in ("key", "float", "int", "bool") if k in names]
    return found[0] if len(found) == 1 else "any"


def abstract(annotation: Any, shape: tuple[int, ...], kind: str) -> Any:
    """An array as `jax.eval_shape` takes it, or a numpy array where that is annotated."""
    if annotation.array_type is np.ndarray:
        return np.arange(math.prod(shape)).reshape(shape).astype(KINDS[kind])
    return jax.ShapeDtypeStruct(shape, KEY.dtype if kind == "key" else KINDS.get(kind, jnp.int32))


def right(annotation: Any, owner: Any, sizes: dict[str, int] = SIZES) -> Any:
    """The array that an annotation asks for."""
    shape = sum((part for _, part in axis_sizes(annotation, owner, sizes)), ())
    return abstract(annotation, shape, kind_of(annotation))


def make(annotation: Any) -> Any:
    """A value of an annotation that holds no shape itself; ours are made field by field."""
    for member in members(annotation):
        if member in OF_TYPE:
            return OF_TYPE[member]()
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member(**{f.name: field(f.type) for f in dataclasses.fields(member)})
    raise LookupError(f"nothing stands for {annotation}; name it in OF_TYPE or ARGUMENTS")


def field(annotation: Any) -> Any:
    """A concrete value for a field of a dataclass."""
    array = shaped(annotation)
    if array is None:
        return make(annotation)
    value = right(array, None, FIELD_SIZES)
    if value.dtype == KEY.dtype:
        return jax.random.split(KEY, value.shape)
    return jnp.zeros(value.shape, value.dtype)


def arguments(signature: Signature) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """`self` (None for functions and constructors), fixed arguments, arrays."""
    owner = None
    if signature.owner is not None and not signature.name.endswith(".__init__"):
        owner = make(signature.owner)
    given = ARGUMENTS.get(signature.name, {})
    fixed = {}
    for name, parameter in signature.parameters.items():
        if name in signature.arrays:
            continue
        if name in given:
            fixed[name] = given[name]()
        elif parameter.default is inspect.Parameter.empty:
            fixed[name] = make(parameter.annotation)
    arrays = {name: right(array, owner) for name, array in signature.arrays.items()}
    return owner, fixed, arrays


def trace(signature: Signature, owner: Any, fixed: dict, arrays: dict) -> None:
    """Call a signature as far as types, shapes and dtypes go."""
    call: Callable = signature.call
    if signature.name.endswith(".__init__"):
        assert signature.owner is not None
        call = signature.owner
    elif owner is not None:
        call = getattr(owner, signature.name.rpartition(".")[2])
    traced = {k: v for k, v in arrays.items() if not isinstance(v, np.ndarray)}
    fixed = {**arrays, **fixed}

    def go(traced):
        call(**{**fixed, **traced})

    if traced:
        jax.eval_shape(go, traced)
    else:
        go({})


def shared_axes(signature: Signature) -> set[str]:
    """Axes that two arrays of a signature share, or that `self` or an argument binds."""
    count = collections.Counter(
        axis for array in signature.arrays.values() for axis in array.dim_str.split()
    )
    return {
        axis for axis, n in count.items() if (n > 1 and axis != "...") or axis.startswith("{")
    } | {axis for axis in count if axis.isdigit()}


def spoiled(signature: Signature, owner: Any) -> Iterator[tuple[str, str, Any]]:
    """Every wrong array: (what is wrong, parameter, the array)."""
    shared = shared_axes(signature)
    for name, array in signature.arrays.items():
        axes = axis_sizes(array, owner)
        shape = sum((sizes for _, sizes in axes), ())
        kind = kind_of(array)
        at = 0
        for axis, sizes in axes:
            if axis in shared:
                wrong = (*shape[:at], shape[at] + 1, *shape[at + 1 :])
                yield f"axis {axis}", name, abstract(array, wrong, kind)
            at += len(sizes)
        fixed = [axis for axis, _ in axes if not (axis == "..." or axis.startswith("*"))]
        if len(fixed) == len(axes):
            yield "one axis more", name, abstract(array, (1, *shape), kind)
        if fixed:
            yield "one axis less", name, abstract(array, shape[-len(fixed) :][1:], kind)
        for other, dtype in KINDS.items():
            if kind not in (other, "any"):
                yield f"dtype {np.dtype(dtype)}", name, abstract(array, shape, other)


@each_signature
def test_right_arguments_are_accepted(signature):
    """What the annotations ask for passes the type check and the whole body."""
    trace(signature, *arguments(signature))


@each_signature
def test_wrong_arguments_are_refused(signature):
    """A wrong axis, rank or dtype of any array is refused by this signature's own type check."""
    owner, fixed, arrays = arguments(signature)
    tried = 0
    for what, name, wrong in spoiled(signature, owner):
        try:
            trace(signature, owner, fixed, {**arrays, name: wrong})
        except jaxtyping.TypeCheckError as refusal:
            at_the_door = f"parameters of {signature.name}." in str(refusal)
            assert at_the_door, f"{name}, {what}: refused too late, {refusal}"
        else:
            pytest.fail(f"{signature.name} takes {name} with a wrong {what}")
        tried += 1
    assert tried >= 2 * len(arrays)


def untyped(signature: Signature) -> list[str]:
    """Parameters without annotation, or of an array type without shape."""
    bare = (inspect.Parameter.empty, jax.Array, np.ndarray)
    return [
        name
        for name, parameter in signature.parameters.items()
        if any(member in bare for member in members(parameter.annotation))
    ]


def test_every_public_array_has_a_shape():
    """Parameters are annotated, and arrays have shapes, except where the table says why not."""
    found = {s.name: untyped(s) for s in ALL if untyped(s)}
    unlisted = {name: names for name, names in found.items() if name not in UNSHAPED}
    assert not unlisted, f"annotate these parameters, or list the function: {unlisted}"
    assert set(UNSHAPED) <= set(found), "listed, but shaped or gone"


def test_the_collection_is_not_empty():
    """The signatures that everything depends on are among those tried."""
    names = {signature.name for signature in WITH_SHAPES}
    assert {
        "kernels_pallas.forest_attention.api.forest_attention",
        "eagle3_jax.contracts.VerifierFeatures.__init__",
        "eagle3_jax.contracts.DraftHidden.__init__",
        "eagle3_jax.drafter.drafter.Drafter.layer",
        "eagle3_jax.verifier.decoder.Verifier.forward",
        "eagle3_jax.loop.prefill.prefill_chunk",
    } <= names
    assert len(names) > 40


SHAPED = {
    "Float",
    "Int",
    "Integer",
    "Bool",
    "Key",
    "Num",
    "Shaped",
    "Inexact",
    "UInt",
    "Real",
    "Array",
}


def dimension_names(tree: ast.AST) -> Iterator[str]:
    """Every named axis of every jaxtyping annotation of a source file."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)):
            continue
        name = getattr(node.value, "id", getattr(node.value, "attr", None))
        text = node.slice.elts[-1]
        if name in SHAPED and isinstance(text, ast.Constant) and isinstance(text.value, str):
            for axis in text.value.split():
                if axis != "..." and not axis.startswith("{") and not axis.isdigit():
                    yield axis.lstrip("*#")


def test_dimension_names_are_in_the_dictionary():
    """One letter means one thing everywhere: every axis name has a meaning written down."""
    unknown, seen = {}, set()
    for module in modules():
        file = Path(str(module.__file__))
        for axis in dimension_names(ast.parse(file.read_text(encoding="utf-8"))):
            seen.add(axis)
            if axis not in DIMENSIONS and axis != "lead":
                unknown.setdefault(axis, set()).add(module.__name__)
    assert not unknown, f"missing from contracts.DIMENSIONS: {unknown}"
    assert {"b", "t", "d", "m", "f", "hd", "dv"} <= seen
