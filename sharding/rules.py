"""Partition rules: which axis of which array lies over which axes of the mesh, and how it is cut.

A device's part is one contiguous block of the array on the mesh. Where several matrices lie side by
side in one kernel, that array has its columns in another order than the checkpoint: device by
device, each with its own query, key and value heads, or its own columns of gate and up.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from jax.sharding import PartitionSpec

from eagle3_jax.configs import VerifierConfig
from eagle3_jax.contracts import RequestError
from sharding.mesh import EXPERT, MODEL, TENSOR, MeshShape

How = Literal["even", "halves", "heads", "once"]


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an array lies along some axes of the mesh.

    Attributes:
        axis: of the array, counted from its last one, -1.
        over: axes of the mesh.
        how: `even`: equal blocks. `halves`: equal blocks of the first and of the second half, side
            by side (gate and up). `heads`: blocks of query, key and value heads, side by side; a
            key/value head is on every device whose query heads need it. `once`: all of it on the
            first device and zeros on the others, as a bias that is added to partial sums wants it.
    """

    axis: int
    over: tuple[str, ...]
    how: How = "even"

    def parts(self, shape: MeshShape) -> int:
        """Devices it is cut for."""
        count = 1
        for name in self.over:
            count *= getattr(shape, name)
        return count

    def spans(self, size: int, part: int, parts: int, config: VerifierConfig) -> list[slice]:
        """What of an axis of `size` one of `parts` devices holds; nothing stands for zeros."""
        if self.how == "once":
            return [slice(0, size)] if part == 0 else []
        if self.how == "heads":
            h, k, width = config.num_heads, config.num_kv_heads, config.head_width
            starts = (part * h // parts, h + part * k // parts, h + k + part * k // parts)
            counts = (h // parts, kv_heads(config, parts), kv_heads(config, parts))
            return [
                slice(start * width, (start + count) * width)
                for start, count in zip(starts, counts, strict=True)
            ]
        blocks = 2 if self.how == "halves" else 1
        block = size // blocks
        own = block // parts
        return [slice(i * block + part * own, i * block + (part + 1) * own) for i in range(blocks)]

    def size(self, size: int, parts: int, config: VerifierConfig) -> int:
        """Length on each of the parts' devices of an axis that has `size` in the checkpoint."""
        return sum(s.stop - s.start for s in self.spans(size, 0, parts, config))


def kv_heads(config: VerifierConfig, parts: int) -> int:
    """Key/value heads that each of `parts` devices holds."""
    return max(config.num_kv_heads // parts, 1)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What happens to arrays of one kind.

    Attributes:
        paths: a regular expression that their dotted paths match as a whole.
        cuts: none is the whole array on every device.
    """

    paths: str
    cuts: tuple[Cut, ...] = ()


_LAYER = r"(dense|moe)_layers\."
STORED = ("codes", "scales", "minima")
"""What a packed kernel is stored as: arrays below its path, [out, in] where it is [in, out]."""


@dataclasses.dataclass(frozen=True)
class PartitionRules:
    """All rules of a verifier; every array matches exactly one.

    The embedding lies whole on every device: the drafter looks tokens up at each of its steps, and
    an exchange a step costs more than the 1.5 % of a large verifier that the copies take.
    """

    embedding: Rule = Rule("embedding")
    head: Rule = Rule("head\\.kernel", (Cut(-1, MODEL),))
    norms: Rule = Rule(r"(.+[._])?norm\.weight")
    heads: Rule = Rule(f"{_LAYER}attention\\.qkv\\.(kernel|bias)", (Cut(-1, MODEL, "heads"),))
    sinks: Rule = Rule(f"{_LAYER}attention\\.sinks", (Cut(-1, MODEL),))
    latent_down: Rule = Rule(f"{_LAYER}attention\\.(q|kv)_down\\.(kernel|bias)")
    latent_up: Rule = Rule(f"{_LAYER}attention\\.(q|kv)_up\\.kernel", (Cut(-1, MODEL),))
    attention_out: Rule = Rule(f"{_LAYER}attention\\.o\\.kernel", (Cut(-2, MODEL),))
    attention_out_bias: Rule = Rule(f"{_LAYER}attention\\.o\\.bias", (Cut(-1, MODEL, "once"),))
    router: Rule = Rule(f"{_LAYER}router\\.(kernel|bias|correction)")
    mlp_in: Rule = Rule(f"{_LAYER}mlp\\.gate_up\\.kernel", (Cut(-1, MODEL, "halves"),))
    mlp_out: Rule = Rule(f"{_LAYER}mlp\\.down\\.kernel", (Cut(-2, MODEL),))
    experts_in: Rule = Rule("experts\\.gate_up", (Cut(-3, (EXPERT,)), Cut(-1, (TENSOR,), "halves")))
    experts_out: Rule = Rule("experts\\.down", (Cut(-3, (EXPERT,)), Cut(-2, (TENSOR,))))
    experts_in_bias: Rule = Rule(
        r"experts\.gate_up_bias", (Cut(-2, (EXPERT,)), Cut(-1, (TENSOR,), "halves"))
    )
    experts_out_bias: Rule = Rule(
        r"experts\.down_bias", (Cut(-2, (EXPERT,)), Cut(-1, (TENSOR,), "once"))
    )

    def rule(self, path: str) -> Rule:
        """The one rule of an array.

        Raises:
            RequestError: there is none, or more than one.
        """
        rules = {name: rule for name, rule in vars(self).items()}
        found = [name for name, rule in rules.items() if re.fullmatch(rule.paths, path)]
        if len(found) != 1:
            which = f"the partition rules {' and '.join(found)} match" if found else "no rule for"
            raise RequestError(f"{which} {path}; expected exactly one rule for an array")
        return rules[found[0]]

    def cuts(self, path: str, shape: tuple[int, ...]) -> tuple[Cut, ...]:
        """How an array of a shape is cut.

        Raises:
            RequestError: there is no single rule for it, or it names an axis twice.
        """
        kernel, _, part = path.rpartition(".")
        cuts = self.rule(kernel if part in STORED else path).cuts
        if part in STORED:
            turned = {-1: -2, -2: -1}
            cuts = [dataclasses.replace(cut, axis=turned.get(cut.axis, cut.axis)) for cut in cuts]
            # A scale for all inputs together belongs to each part of them.
            cuts = tuple(cut for cut in cuts if shape[cut.axis] > 1)
        axes = [cut.axis for cut in cuts]
        over = [name for cut in cuts for name in cut.over]
        if (
            len(set(axes)) < len(axes)
            or len(set(over)) < len(over)
            or min(axes, default=0) < -len(shape)
        ):
            raise RequestError(
                f"the partition rule of {path} uses an axis twice, or one that an array of "
                f"{len(shape)} dimensions does not have: {cuts}"
            )
        return cuts

    def spec(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        """How an array of a shape lies on the mesh; errors are those of `cuts`."""
        over = {len(shape) + cut.axis: cut.over for cut in self.cuts(path, shape)}
        return PartitionSpec(*(over.get(axis) for axis in range(len(shape))))

    def check(
        self, shapes: Mapping[str, tuple[int, ...]], config: VerifierConfig, shape: MeshShape
    ) -> None:
        """Refuse arrays without rule or with several, and sizes that a mesh cannot cut evenly.

        Args:
            shapes: of all arrays, as in the checkpoint, by dotted path.
            config: the verifier's.
            shape: the mesh's.

        Raises:
            RequestError: says what does not fit, all of it in one line.
        """
        faults = indivisible(config, shape)
        for path, sizes in shapes.items():
            cuts = self.cuts(path, sizes)
            for cut in () if faults else cuts:
                parts = cut.parts(shape)
                blocks = parts * (2 if cut.how == "halves" else 1)
                if cut.how in ("even", "halves") and sizes[cut.axis] % blocks:
                    faults.append(f"axis {cut.axis} of {path} {list(sizes)} over {parts}")
        if faults:
            raise RequestError(
                f"a mesh of {shape} does not divide {'; '.join(faults)}; name other sizes"
            )


RULES = PartitionRules()


def indivisible(config: VerifierConfig, shape: MeshShape) -> list[str]:
    """What of a verifier a mesh does not divide evenly."""
    c, e = config, config.experts
    model = shape.model
    asked = [("heads", c.num_heads, model), ("vocabulary", c.vocab_size, model)]
    if c.dense_layers:
        asked.append(("dense width", c.mlp_width, model))
    if e is not None and c.moe_layers:
        asked.append(("experts", e.count, shape.expert))
        asked.append(("expert width", e.width, shape.tensor))
        asked.append(("shared width", e.width * e.shared, model))
    faults = [f"{what} {size} over {parts}" for what, size, parts in asked if size % parts]
    if not c.latent and c.num_kv_heads % model and model % c.num_kv_heads:
        faults.append(f"key/value heads {c.num_kv_heads} over {model}")
    return faults
