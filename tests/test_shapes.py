"""Every public signature with shapes refuses a wrong axis, a wrong rank and a wrong dtype.

The signatures are found, not listed: whatever the four packages define in public is collected, its
arguments are made from its own annotations, and each array among them is spoiled in turn.
"""

import ast
import atexit
import collections
import dataclasses
import importlib
import inspect
import math
import pkgutil
import shutil
import tempfile
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
from flax import nnx

from eagle3_jax import testing
from eagle3_jax.configs import ExpertsConfig, RopeConfig, Sampling, Speculation, VerifierConfig
from eagle3_jax.contracts import DIMENSIONS, DraftHidden, FeatureSpec
from eagle3_jax.drafter import Drafter
from eagle3_jax.drafter.drafter import Roots
from eagle3_jax.forest.processing import Plan
from eagle3_jax.layers import Linear, Mlp, RmsNorm
from eagle3_jax.loop.decode import DecodeStages, DecodeState
from eagle3_jax.packed import PackedWeight
from eagle3_jax.training.data import Document, Packed
from eagle3_jax.training.features import Readings
from eagle3_jax.turned import Apart, Turned
from eagle3_jax.verifier import Verifier
from eagle3_jax.verifier.attention import GroupedQueryAttention, LatentAttention
from eagle3_jax.verifier.decoder import Layer
from eagle3_jax.verifier.experts import Experts, Router
from kernels_pallas import Backend
from sharding.exchange import Exchange

PACKAGES = ("eagle3_jax", "kernels_pallas", "sharding", "checkpoints")

# A size for each dimension. They differ, so that one name in another's place shows, except where
# the tiny models want it so: t = n = r * w, u = w, z = 2 * i, f = 3 * d.
SIZES = {
    **{"b": 2, "t": 15, "r": 3, "w": 5, "u": 5, "n": 15, "p": 6, "c": 9, "s": 16, "rows": 3},
    **{"d": 32, "f": 96, "m": 24, "h": 4, "k": 2, "hd": 8, "hv": 7, "l": 4, "v": 64, "dv": 40},
    **{"e": 8, "x": 3, "i": 12, "a": 34, "z": 24, "g": 11, "bytes": 34, "groups": 1},
}
FIELD_SIZES = {**SIZES, "hv": SIZES["hd"]}
"""Of caches and their like, which belong to models whose heads have one width."""

LEAD = (2, 3)
"""Axes of `*lead` and of `...`."""

LLAMA = testing.tiny_verifier("llama")
DEEPSEEK = testing.tiny_verifier("deepseek")
DRAFTER = testing.tiny_drafter("llama", head_width=SIZES["hd"])
KEY = jax.random.key(0)


def one_layer(stack):
    """A layer of a stack, as `jax.lax.scan` hands it out."""
    return jax.tree.map(lambda x: x[0], stack)


STAGES = DecodeStages(verifier=LLAMA, drafter=DRAFTER, speculation=Speculation(depth=2))

# What stands for an argument, or for `self`, of a type that is not made from its annotations.
OF_TYPE: dict[Any, Callable[[], Any]] = {
    bool: lambda: True,
    int: lambda: 2,
    float: lambda: 1.0,
    str: lambda: "text",
    tuple[int, ...]: lambda: (1, 2),
    list[int]: lambda: [1, 2],
    Sampling: lambda: Sampling(),
    Plan: lambda: Plan(drawn=True, most_kept=2, top_p=True, min_p=True, penalty=True),
    FeatureSpec: lambda: DRAFTER.spec,
    RopeConfig: lambda: RopeConfig(),
    VerifierConfig: lambda: LLAMA.config,
    ExpertsConfig: lambda: DEEPSEEK.config.experts,
    Verifier: lambda: LLAMA,
    Drafter: lambda: DRAFTER,
    DecodeStages: lambda: STAGES,
    Any: lambda: (),
    Backend: lambda: "xla",
    DecodeState: lambda: STAGES.make_state(SIZES["b"], 128),
    PackedWeight: lambda: packed_weight(),
    Linear: lambda: Linear(KEY, SIZES["a"], SIZES["z"]),
    Turned: lambda: Turned(Linear(KEY, SIZES["a"], SIZES["z"])),
    Apart: lambda: apart_linear(),
    RmsNorm: lambda: RmsNorm(SIZES["a"], 1e-6),
    Mlp: lambda: Mlp(KEY, SIZES["a"], SIZES["i"]),
    GroupedQueryAttention: lambda: one_layer(LLAMA.dense_layers).attention,
    LatentAttention: lambda: one_layer(DEEPSEEK.moe_layers).attention,
    Layer: lambda: one_layer(LLAMA.dense_layers),
    Router: lambda: one_layer(DEEPSEEK.moe_layers).router,
    Experts: lambda: DEEPSEEK.experts,
    Exchange: lambda: Exchange(None, (SIZES["b"], SIZES["r"], SIZES["w"])),
    Readings: lambda: kept_readings(),
}


def kept_readings() -> Readings:
    """Of more rows than there are arguments, in a folder that is gone with this process."""
    document = Document("a", np.full(999, 2, np.int32), np.ones(999, bool))
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return Readings(folder, LLAMA, Packed([document], 8, 0), (1, 2))


def packed_weight(*lead: int) -> PackedWeight:
    """A kernel in int8, or a stack of them."""
    codes = jnp.zeros((*lead, SIZES["z"], SIZES["a"]), jnp.int8)
    return PackedWeight(codes=codes, scales=jnp.ones((*lead, SIZES["z"], 1)))


def apart_linear() -> Apart:
    """Of the second of two layers."""
    apart = Apart(Linear(KEY, SIZES["a"], SIZES["z"]), 0)
    kernel = jnp.zeros((SIZES["z"], SIZES["a"]))
    apart.kernels, apart.layer = nnx.data([kernel, kernel]), jnp.ones((), jnp.int32)
    return apart


def one_root() -> Roots:
    """Of every row, as decoding has it."""
    b, zero = SIZES["b"], jnp.zeros((SIZES["b"], 1), jnp.int32)
    context = DRAFTER.make_cache(b, SIZES["s"])
    return Roots(positions=zero, lo=zero, hi=zero, context=context)


# Arguments that only one function wants so.
ARGUMENTS: dict[str, dict[str, Callable[[], Any]]] = {
    "eagle3_jax.verifier.attention.attend_and_keep": {"cache": lambda: None},
    "eagle3_jax.packed.multiply_layer": {"stack": lambda: packed_weight(SIZES["l"])},
    "eagle3_jax.turned.bind": {"layer": lambda: LLAMA, "kernels": lambda: []},
    "eagle3_jax.layers.stacked": {"make": lambda: lambda key: Linear(key, 2, 2)},
    "eagle3_jax.forest.trees.grow_tree": {
        "embed": lambda: LLAMA.embed,
        "hidden": lambda: DraftHidden(array=jnp.zeros((SIZES["b"], 1, SIZES["m"]))),
        "roots": one_root,
        "speculation": lambda: Speculation(depth=2, topk=2, nodes=3),
    },
    "eagle3_jax.loop.decode.write_tokens": {"live": lambda: jnp.ones((SIZES["b"],), bool)},
    "eagle3_jax.verifier.decoder.Layer.__call__": {"experts": lambda: None},
    "eagle3_jax.verifier.decoder.Verifier.score": {"boundaries": lambda: (1, 2)},
    "sharding.exchange.Exchange.mine": {"count": lambda: SIZES["e"]},
    "eagle3_jax.loop.run.run": {"stages": lambda: STAGES, "state": OF_TYPE[DecodeState]},
    "eagle3_jax.drafter.vocabulary.check_vocabulary": {"vocab_size": lambda: SIZES["v"]},
    "eagle3_jax.drafter.drafter.Drafter.__init__": {"config": lambda: DRAFTER.config},
    "eagle3_jax.verifier.attention.LatentAttention.__init__": {"config": lambda: DEEPSEEK.config},
    "eagle3_jax.verifier.attention.LatentAttention.__call__": {
        "cache": lambda: DEEPSEEK.make_cache(SIZES["b"], SIZES["s"])
    },
}

BEHIND_THE_API = "called by its operation's api alone, which has checked the shapes"

IN_A_KERNEL = "traced inside a kernel: references and tiles, whose sizes are the kernel's plan"
BESIDE_A_KERNEL = "between an operation's api and its kernel, in the kernel's padded sizes"
HOPPER = (
    *("walk", "copy_tiles", "split_float32", "store_parts", "multiply_parts", "dots"),
    *("add_weighted", "masked", "weigh", "write_sums", "write_rows"),
)
OPERANDS = (
    "place",
    "limits",
    "by_query",
    "pack_ancestors",
    "arrange_queries",
    "arrange_own",
    "combine",
)

# Public signatures that take arrays of no declared shape, and why that is right.
UNSHAPED: dict[str, str] = {
    "kernels_pallas.forest_attention.reference.attend": BEHIND_THE_API,
    "kernels_pallas.forest_attention.xla.attend_blocked": BEHIND_THE_API,
    "kernels_pallas.forest_attention.xla.attend_differentiable": BEHIND_THE_API,
    **{f"kernels_pallas.hopper.{name}": IN_A_KERNEL for name in HOPPER},
    **{f"kernels_pallas.operands.{name}": BESIDE_A_KERNEL for name in OPERANDS},
    **{
        f"kernels_pallas.{op}.mosaic_gpu.{name}": BEHIND_THE_API
        for op in ("forest_attention", "latent_forest_attention")
        for name in ("unsupported", "plan_of", "attend")
    },
    "kernels_pallas.tree_walk.mosaic_gpu.walk": BEHIND_THE_API,
    "kernels_pallas.tree_walk.reference.walk": BEHIND_THE_API,
    "kernels_pallas.tree_walk.xla.walk": BEHIND_THE_API,
    "eagle3_jax.loop.decode.write_tokens": "`live` flags rows, and broadcasts",
    "eagle3_jax.loop.learn.ahead": "anything by row and position: ids, flags, distributions",
    "eagle3_jax.loop.learn.behind": "likewise",
    "eagle3_jax.states.to_device": "any array, by its path",
    "sharding.placement.gathered": "a device's part of any array",
    "eagle3_jax.training.trainer.new_drafter": "token counts, checked by choose_vocabulary",
    "eagle3_jax.training.trainer.export": "a dtype's name and a dictionary, no arrays",
    "eagle3_jax.verifier.decoder.check_tokens": "token lists of any kind and shape, read by numpy",
    "eagle3_jax.tokenizer.Tokenizer.decode": "any sequence of ids; an ordinary list as a rule",
    "eagle3_jax.tokenizer.Tokenizer.from_file": "`special` is a dictionary, no array",
    "checkpoints.tensors.finite": "a tensor of any shape and dtype, from a file",
}


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
