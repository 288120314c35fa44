"""Tensors of Hugging Face checkpoints, both ways: which of them make which of our arrays.

The table of slots follows from a `VerifierConfig`; the same table loads and saves.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from checkpoints import int4
from checkpoints.families import family_of
from checkpoints.sources import Entry, Held, Source
from checkpoints.tensors import Tensors, some
from eagle3_jax.configs import VerifierConfig
from eagle3_jax.contracts import LoadError

FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))
KINDS = {*FLOATS, *int4.PER_ITEM}

PATIENCE = 1000
"""So many names found missing are enough, whatever number a config asks for."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """One array of ours and the hub tensors it is made of.

    Attributes:
        path: our dotted path in the verifier's state.
        names: hub names, `{l}` standing for the layer and `{e}` for the expert; several are joined
            along their output axis.
        sizes: length of each name's output axis.
        layers: the layers stacked in front, None for an array without a layer axis.
        inputs: length of the input axis, None for vectors.
        kernel: ours is [in, out], the hub's [out, in] unless `in_out`.
        experts: number of experts in front, 0 where there are none.
        stacked: all experts of a layer are one hub tensor, [e, ...].
        in_out: the hub's kernels are [in, out] too.
        alternate: the hub's output axis has gate and up in turn, ours side by side.
        fused: another spelling of the same slot, which counts where its tensors are there.
        kinds: dtypes that its tensors may have.
    """

    path: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    layers: Sequence[int] | None = None
    inputs: int | None = None
    kernel: bool = False
    experts: int = 0
    stacked: bool = False
    in_out: bool = False
    alternate: bool = False
    fused: "Slot | None" = None
    kinds: tuple[np.dtype, ...] = FLOATS

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one layer of our array."""
        out = (sum(self.sizes),)
        if self.inputs is not None:
            out = (self.inputs, *out) if self.kernel else (*out, self.inputs)
        return (self.experts, *out) if self.experts else out

    def packed(self, kind: np.dtype, minima: bool) -> "tuple[Slot, ...]":
        """The same array packed, its codes first; all of its parts lie [out, in].

        Args:
            kind: dtype of the codes' tensors.
            minima: whether they are there, too.
        """
        assert self.inputs is not None

        def part(name, of, inputs, kinds):
            names = tuple(one.removesuffix("weight") + of for one in self.names)
            path = f"{self.path}.{name}"
            return dataclasses.replace(
                self, path=path, names=names, inputs=inputs, kernel=False, fused=None, kinds=kinds
            )

        codes = part("codes", int4.PACKED, self.inputs // int4.PER_ITEM.get(kind, 8), (kind,))
        groups = self.inputs // int4.GROUP
        scales = part("scales", int4.SCALE, groups, int4.SCALES)
        lowest = part("minima", int4.MINIMUM, groups, int4.SCALES)
        return (codes, scales, lowest) if minima else (codes, scales)

    def tensors(self, **at: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The hub tensors of one layer (and expert), and their shapes."""
        tail = () if self.inputs is None else (self.inputs,)
        for name, size in zip(self.names, self.sizes, strict=True):
            shape = (*tail, size) if self.in_out else (size, *tail)
            yield name.format(**at), (self.experts, *shape) if self.stacked else shape

    def places(self) -> Iterator[dict[str, int]]:
        """What `{l}` and `{e}` stand for, one after another."""
        for layer in (None,) if self.layers is None else self.layers:
            at = {} if layer is None else {"l": layer}
            if not self.experts or self.stacked:
                yield at
            else:
                yield from (at | {"e": expert} for expert in range(self.experts))

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """Ours from what `tensors` named: one layer, or one expert where they are not stacked."""
        vector = self.inputs is None
        joined = parts[0]
        if len(parts) > 1:
            joined = np.concatenate(parts, axis=-1 if vector or self.in_out else -2)
        if self.kernel and not self.in_out:
            joined = joined.swapaxes(-1, -2)
        if self.alternate:
            joined = np.concatenate([joined[..., 0::2], joined[..., 1::2]], axis=-1)
        return joined


def slots(config: VerifierConfig) -> Iterator[Slot]:
    """Every array of the verifier's state and the hub tensors it comes from."""
    c = config
    d = c.width
    yield Slot("embedding", ("model.embed_tokens.weight",), (c.vocab_size,), inputs=d)
    yield Slot("norm.weight", ("model.norm.weight",), (d,))
    head = "model.embed_tokens.weight" if c.tied_head else "lm_head.weight"
    yield Slot("head.kernel", (head,), (c.vocab_size,), inputs=d, kernel=True)
    for part, layers in (("dense_layers", c.dense_layers), ("moe_layers", c.moe_layers)):
        if layers:
            yield from _layer_slots(c, part, layers)


def _layer_slots(c: VerifierConfig, part: str, layers: Sequence[int]) -> Iterator[Slot]:
    d, bias = c.width, c.attention_bias
    family = family_of(c)

    def full(name: str) -> str:
        return "model.layers.{l}." + family.names.get(name, name)

    def vector(path, name, size):
        return Slot(f"{part}.{path}", (full(name),), (size,), layers)

    def linear(path, names, sizes, inputs, bias=False):
        names = [full(name) for name in names]
        weights = tuple(f"{name}.weight" for name in names)
        yield Slot(f"{part}.{path}.kernel", weights, sizes, layers, inputs, kernel=True)
        if bias:
            yield Slot(f"{part}.{path}.bias", tuple(f"{n}.bias" for n in names), sizes, layers)

    yield vector("attention_norm.weight", "input_layernorm.weight", d)
    yield vector("mlp_norm.weight", "post_attention_layernorm.weight", d)
    if c.latent:
        a = c.latent
        q_width = c.num_heads * (a.nope_width + a.rope_width)
        if a.q_rank is None:
            yield from linear("attention.q_up", ["self_attn.q_proj"], (q_width,), d)
        else:
            yield from linear("attention.q_down", ["self_attn.q_a_proj"], (a.q_rank,), d, bias)
            yield vector("attention.q_norm.weight", "self_attn.q_a_layernorm.weight", a.q_rank)
            yield from linear("attention.q_up", ["self_attn.q_b_proj"], (q_width,), a.q_rank)
        kv = a.kv_rank + a.rope_width
        yield from linear("attention.kv_down", ["self_attn.kv_a_proj_with_mqa"], (kv,), d, bias)
        yield vector("attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight", a.kv_rank)
        up = c.num_heads * (a.nope_width + a.value_width)
        yield from linear("attention.kv_up", ["self_attn.kv_b_proj"], (up,), a.kv_rank)
        inner = c.num_heads * a.value_width
    else:
        inner = c.num_heads * c.head_width
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        sizes = (inner, *(2 * (c.num_kv_heads * c.head_width,)))
        yield from linear("attention.qkv", names, sizes, d, bias)
        if c.qk_norm:
            yield vector("attention.q_norm.weight", "self_attn.q_norm.weight", c.head_width)
            yield vector("attention.k_norm.weight", "self_attn.k_norm.weight", c.head_width)
        if c.sinks:
            yield vector("attention.sinks", "self_attn.sinks", c.num_heads)
    yield from linear("attention.o", ["self_attn.o_proj"], (d,), inner, bias)

    prefix, wide = "mlp", c.mlp_width
    if part == "moe_layers":
        e = c.experts
        assert e is not None
        yield from linear("router", ["mlp.gate"], (e.count,), d, e.bias)
        if e.correction:
            yield vector("router.correction", "mlp.gate.e_score_correction_bias", e.count)
        yield from _expert_slots(c, layers)
        prefix, wide = "mlp.shared_experts", e.width * e.shared
    if wide:
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        yield from linear("mlp.gate_up", names, (wide, wide), d)
        yield from linear("mlp.down", [f"{prefix}.down_proj"], (d,), wide)


def _expert_slots(c: VerifierConfig, layers: Sequence[int]) -> Iterator[Slot]:
    """The routed experts: a matrix an expert and kind, or all of a layer in one tensor."""
    e, d = c.experts, c.width
    assert e is not None
    at = "model.layers.{l}.mlp.experts."
    in_out = family_of(c).in_out
    for name, hub, size, inputs, single in (
        ("gate_up", "gate_up_proj", 2 * e.width, d, ("gate_proj", "up_proj")),
        ("down", "down_proj", d, e.width, ("down_proj",)),
    ):
        fused = Slot(
            f"experts.{name}",
            (at + hub,),
            (size,),
            layers,
            inputs,
            kernel=True,
            experts=e.count,
            stacked=True,
            in_out=in_out,
            alternate=in_out and name == "gate_up",
        )
        if in_out:
            yield fused
        else:
            names = tuple(f"{at}{{e}}.{one}.weight" for one in single)
            sizes = (size // len(names),) * len(names)
            yield dataclasses.replace(fused, names=names, sizes=sizes, stacked=False, fused=fused)
        if e.bias:
            yield dataclasses.replace(
                fused,
                path=f"experts.{name}_bias",
                names=(f"{at}{hub}_bias",),
                inputs=None,
                kernel=False,
                in_out=False,
            )


class Arrays(Mapping[str, np.ndarray]):
    """Our arrays by dotted path, each put together when it is asked for.

    What comes packed is `PATH.codes`, `PATH.scales` and, in a few formats, `PATH.minima`.
    """

    def __init__(self, chosen: Mapping[str, Slot], source: Source, hub_names: Mapping[str, str]):
        self._slots, self._source, self._hub_names = chosen, source, hub_names

    def __iter__(self):
        return iter(self._slots)

    def __len__(self):
        return len(self._slots)

    def __contains__(self, path):
        return path in self._slots

    def __getitem__(self, path: str) -> np.ndarray:
        return self.read(path)

    def read(
        self, path: str, layers: slice = slice(None), experts: slice = slice(None)
    ) -> np.ndarray:
        """An array, or its part of some layers and some routed experts, which alone is read."""
        slot = self._slots[path]
        dtype, front = self._dtype(slot), ()
        if slot.layers is not None:
            slot = dataclasses.replace(slot, layers=slot.layers[layers])
            front = (len(slot.layers or ()),)
        single = slot.experts and not slot.stacked
        wanted = range(slot.experts)[experts]
        shape = (len(wanted), *slot.shape[1:]) if single else slot.shape
        out = np.empty((*front, *shape), dtype)
        flat = out.reshape(-1, *(shape[1:] if single else shape))
        places = [at for at in slot.places() if "e" not in at or at["e"] in wanted]
        for place, at in enumerate(places):
            read = [self._source.read(self._hub_names[name]) for name, _ in slot.tensors(**at)]
            if len({part.dtype for part in read}) > 1:
                read = [part.astype(np.float32) for part in read]
            flat[place] = slot.join(read)
        own = out[:, experts] if slot.stacked else out
        return int4.codes_of(own) if own.dtype == np.int32 else own

    def entry(self, path: str) -> tuple[Entry, int]:
        """Shape and dtype of an array, and how many of its first axes are layers and experts."""
        slot = self._slots[path]
        front = () if slot.layers is None else (len(slot.layers),)
        entry = Entry((*front, *slot.shape), self._dtype(slot))
        if entry.dtype == np.int32:
            entry = Entry((*entry.shape[:-1], entry.shape[-1] * 4), np.dtype(np.uint8))
        return entry, len(front) + bool(slot.experts)

    def _dtype(self, slot: Slot) -> np.dtype:
        """The dtype of a slot's tensors; float32 where they differ."""
        names = (name for at in slot.places() for name, _ in slot.tensors(**at))
        kinds = {self._source.entries[self._hub_names[name]].dtype for name in names}
        return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)


class Stack:
    """An array whose parts are read when they are asked for, one by one; nothing is held.

    Attributes:
        shape: of the whole.
        dtype: of the whole.
    """

    def __init__(self, arrays: Arrays, path: str):
        (self.shape, self.dtype), self._front = arrays.entry(path)
        self._arrays, self._path = arrays, path

    @property
    def ndim(self) -> int:
        """Axes."""
        return len(self.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part, by a slice for every axis; of other layers and experts nothing is read."""
        front, inner = index[: self._front], index[self._front :]
        return self._arrays.read(self._path, *front)[(slice(None),) * len(front) + inner]


def stacks(arrays: Arrays) -> dict[str, Stack]:
    """Our arrays by dotted path, of which a mesh's devices take their parts."""
    return {path: Stack(arrays, path) for path in arrays}


def from_hub(config: VerifierConfig, source: Source | Mapping[str, np.ndarray]) -> Arrays:
    """Our arrays, by dotted path, from hub tensors; nothing is read before all names fit.

    Raises:
        LoadError: tensors are missing, unexpected, misshapen or of another dtype; all are listed
            in one message. Later, when an array is asked for, damaged bytes.
    """
    held: Source = Held(source) if isinstance(source, Mapping) else source
    prefix = family_of(config).prefix
    hub_names = {
        name.removeprefix(prefix): name for name in held.entries if name.startswith(prefix)
    }
    chosen, missing, misshapen, odd, mispacked, used = {}, [], [], [], [], set()

    def check(slot: Slot) -> None:
        for at in slot.places():
            for name, shape in slot.tensors(**at):
                used.update((name, name.replace(int4.PACKED, int4.SHAPE)))
                if name not in hub_names:
                    missing.append(prefix + name)
                    if len(missing) > PATIENCE:
                        return
                    continue
                entry = held.entries[hub_names[name]]
                if entry.shape != shape:
                    misshapen.append(f"{prefix}{name} {list(entry.shape)} (expected {list(shape)})")
                elif entry.dtype not in slot.kinds or entry.dtype not in KINDS:
                    faults = odd if slot.kinds == FLOATS else mispacked
                    faults.append(f"{prefix}{name} {entry.dtype}")

    for slot in slots(config):
        if slot.fused is not None and any(
            name in hub_names for at in slot.fused.places() for name, _ in slot.fused.tensors(**at)
        ):
            slot = slot.fused
        for part in _packed(slot, hub_names, held.entries) or (slot,):
            chosen[part.path] = part
            check(part)
        if len(missing) > PATIENCE:
            break
    unexpected = []
    if len(missing) <= PATIENCE:
        unexpected = [name for name in _left(held.entries, used, config) if name]
    faults = [
        f"{len(names)} {what}: {some(names)}"
        for what, names in (
            ("missing", missing),
            ("misshapen", misshapen),
            ("of another dtype than float32, float16 or bfloat16", odd),
            ("packed in another dtype than int32 with scales in float32 or bfloat16", mispacked),
            ("unexpected", unexpected),
        )
        if names
    ]
    if faults:
        raise LoadError(f"tensors do not fit the {config.family} config: " + "; ".join(faults))
    return Arrays(chosen, held, hub_names)


def _packed(slot: Slot, hub_names: Mapping[str, str], entries: Mapping[str, Entry]):
    """A slot's parts where its first matrix is there packed; else none."""
    first = next(slot.tensors(**next(slot.places())))[0].removesuffix("weight")
    name = hub_names.get(first + int4.PACKED)
    if name is None or slot.inputs is None or slot.inputs % int4.GROUP:
        return ()
    return slot.packed(entries[name].dtype, first + int4.MINIMUM in hub_names)


def _left(names: Iterable[str], used: set[str], config: VerifierConfig) -> Iterator[str]:
    """Tensors that no slot asked for and that are not left out knowingly.

    Left out are parts of other kinds (vision), rotary tables, a tied head's copy and the layers for
    multi-token prediction.
    """
    family = family_of(config)
    extra = range(config.num_layers, config.num_layers + config.extra_layers)
    for name in names:
        own = name.removeprefix(family.prefix)
        if (name.startswith(family.prefix) and own in used) or name.startswith(family.skipped):
            continue
        parts = own.split(".")
        beyond = parts[2] if parts[:2] == ["model", "layers"] and len(parts) > 2 else ""
        if beyond.isdigit() and len(beyond) < 9 and int(beyond) in extra:
            continue
        if own.endswith("rotary_emb.inv_freq") or (config.tied_head and own == "lm_head.weight"):
            continue
        yield name


def to_hub(config: VerifierConfig, arrays: Mapping[str, np.ndarray]) -> Tensors:
    """Hub tensors, one matrix an expert, from our arrays by dotted path.

    Raises:
        LoadError: a family whose experts are one tensor a layer, or packed weights.
    """
    out: Tensors = {}
    for slot in slots(config):
        if slot.stacked:
            raise LoadError(f"writing {config.family} checkpoints is not supported")
        if slot.path == "head.kernel" and config.tied_head:
            continue
        if f"{slot.path}.codes" in arrays:
            raise LoadError(f"{slot.path} is packed; write an unpacked verifier")
        each = slot.shape[1:] if slot.experts else slot.shape
        ends = np.cumsum(slot.sizes)
        for value, at in zip(arrays[slot.path].reshape(-1, *each), slot.places(), strict=True):
            value = value.swapaxes(-1, -2) if slot.kernel else value
            for (name, _), size, end in zip(slot.tensors(**at), slot.sizes, ends, strict=True):
                out[name] = value[end - size : end]
    return out
