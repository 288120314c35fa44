"""The contracts between verifier and drafter: errors, dimension names, two hidden-state types.

A hidden state crosses from verifier to drafter at one place only, `Drafter.fuse`, which takes
`VerifierFeatures` and gives `DraftHidden`. The drafter's recurrent step takes nothing but
`DraftHidden`. Widths are never compared to decide what to do; a mismatch is an error.
"""

import dataclasses
import warnings
from typing import Literal

from flax import nnx
from jax import Array
from jaxtyping import Float

DIMENSIONS = {
    "b": "rows (sequences decoded or learned side by side)",
    "t": "positions",
    "r": "roots: one a row when decoding, one a position when learning",
    "w": "block slots asking (the queries of one root)",
    "u": "own keys of a root's block",
    "n": "drafted nodes",
    "g": "slots whose children were drafted, each with the drafter's logits",
    "d": "verifier width",
    "m": "drafter width",
    "f": "fused feature width: boundaries x verifier width",
    "h": "attention heads",
    "k": "key/value heads",
    "hd": "head width of queries and keys",
    "hv": "head width of values",
    "e": "routed experts",
    "i": "feed-forward width",
    "x": "experts chosen for a token",
    "v": "verifier vocabulary",
    "dv": "draft vocabulary",
    "l": "layers",
    "s": "cache slots",
    "c": "context rows waiting for the drafter, or a prefill chunk",
    "p": "path slots: root and accepted nodes, depth + 1",
    "q": "tokens sorted by expert, one for each expert a token is sent to: n * x",
    "rows": "rows of a whole cache, of which b are asking",
    "hv_out": "head width of what attention gives: hv, or the latent's where values are None",
    "a": "inputs of a linear map, or any vector's width",
    "z": "outputs of a linear map; gate and up side by side: 2 * i",
    "bytes": "bytes of an output's codes in a packed kernel",
    "groups": "groups of a packed kernel's inputs, of one scale each",
}
"""Every dimension name used in a shape annotation, and what it counts."""


class Eagle3Error(Exception):
    """Something the user can put right; the command line prints it as one line."""


class ContractError(Eagle3Error, ValueError):
    """Verifier and drafter (or features and either) do not belong together."""


class CapacityError(Eagle3Error, ValueError):
    """A request does not fit the cache, found before anything runs."""


class LoadError(Eagle3Error, ValueError):
    """A folder, file or name cannot be loaded as what it claims to be."""


class RequestError(Eagle3Error, ValueError):
    """A prompt, flag or setting that cannot be served, found before anything runs."""


class UnsupportedError(Eagle3Error, NotImplementedError):
    """Something this version cannot do; the message names what it would need."""


Convention = Literal["boundary", "layer-output"]


def default_boundaries(num_layers: int) -> tuple[int, int, int]:
    """The boundaries that EAGLE-3 projects take by default: (2, L // 2, L - 3).

    Args:
        num_layers: the verifier's number of decoder layers, L.

    Raises:
        ContractError: where L is too small for three ascending boundaries; they must be named.

    Source: SafeAILab/EAGLE `modeling_llama_kv.py`; the same residual streams in every project.
    """
    chosen = (2, num_layers // 2, num_layers - 3)
    if not 2 < chosen[1] < chosen[2]:
        raise ContractError(
            f"a verifier of {num_layers} layers is too shallow for the default boundaries "
            f"(2, L//2, L-3); name the boundaries, each between 0 and {num_layers}"
        )
    return chosen


def boundaries_from_ids(
    ids: tuple[int, ...], convention: Convention | None, num_layers: int
) -> tuple[int, ...]:
    """Translate an origin's auxiliary layer ids to boundaries.

    Args:
        ids: as written in the origin's configuration, e.g. `(2, 30, 58)`.
        convention: `"boundary"`: id k is the input of layer k (SafeAILab, vLLM, speculators);
            `"layer-output"`: id k is the output of layer k (SpecForge, ModelOpt, TorchSpec).
        num_layers: the verifier's number of layers.

    Raises:
        ContractError: no convention is known (nothing is guessed from the ids), or an id lies
            outside the verifier.
    """
    if convention is None:
        raise ContractError(
            f"auxiliary layer ids {list(ids)} mean boundaries {list(ids)} by one convention and "
            f"{[k + 1 for k in ids]} by the other, and their origin is unknown; pass "
            'convention="boundary" (SafeAILab, vLLM, speculators) or '
            'convention="layer-output" (SpecForge, ModelOpt, TorchSpec)'
        )
    if convention not in ("boundary", "layer-output"):
        raise ContractError(
            f'convention {convention!r} is unknown; expected "boundary" or "layer-output"'
        )
    boundaries = tuple(ids) if convention == "boundary" else tuple(k + 1 for k in ids)
    check_boundaries(boundaries, num_layers)
    return boundaries


def check_boundaries(boundaries: tuple[int, ...], num_layers: int) -> None:
    """Refuse boundaries that the verifier does not have.

    Raises:
        ContractError: empty, repeated, or outside 0..num_layers.
    """
    outside = [k for k in boundaries if not 0 <= k <= num_layers]
    if outside or not boundaries or len(set(boundaries)) != len(boundaries):
        raise ContractError(
            f"boundaries {list(boundaries)} do not fit a verifier of {num_layers} layers; expected "
            f"distinct numbers between 0 (embeddings) and {num_layers} (after the last layer)"
        )


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """What a drafter's features are: which residual streams of which verifier, in which order.

    Attributes:
        boundaries: boundary b is the un-normed residual stream after b layers; in the order in
            which the features are concatenated.
        width: the verifier's width, d.
        num_layers: the verifier's number of layers, L.
        verifier: the verifier's identity where known (a name or a hash), else None.
        tokenizer: the tokenizer's fingerprint where known, else None.
    """

    boundaries: tuple[int, ...]
    width: int
    num_layers: int
    verifier: str | None = None
    tokenizer: str | None = None

    def __post_init__(self):
        check_boundaries(self.boundaries, self.num_layers)

    @property
    def fused_width(self) -> int:
        """Width f of the concatenated features: boundaries x width."""
        return len(self.boundaries) * self.width

    def require(self, found: "FeatureSpec", *, of: str, identity: bool = True) -> None:
        """Compare with another spec wherever two meet.

        Args:
            found: the spec that was found.
            of: what carries it, for the message (e.g. "the verifier tiny-kimi").
            identity: whether to compare verifier and tokenizer by name too.

        Raises:
            ContractError: width, layers or boundaries differ.

        Warns:
            UserWarning: only the identity of verifier or tokenizer differs (a sibling's drafter is
                used on purpose at times).
        """
        if self.width != found.width:
            raise ContractError(
                f"the drafter expects features of width {self.width}, {of} has width "
                f"{found.width}; this drafter was trained for another model"
            )
        if self.num_layers != found.num_layers:
            raise ContractError(
                f"the drafter expects a verifier of {self.num_layers} layers, {of} has "
                f"{found.num_layers}; this drafter was trained for another model"
            )
        if self.boundaries != found.boundaries:
            cause = "this drafter was trained on other boundaries"
            if sorted(self.boundaries) == sorted(found.boundaries):
                cause = "the same boundaries in another order"
            elif {abs(a - b) for a, b in zip(self.boundaries, found.boundaries, strict=False)} == {
                1
            } and len(self.boundaries) == len(found.boundaries):
                cause = 'off by one everywhere: read with the other convention ("boundary" or '
                cause += '"layer-output")'
            raise ContractError(
                f"the drafter expects boundaries {list(self.boundaries)}, {of} gives "
                f"{list(found.boundaries)}; likely cause: {cause}"
            )
        for what in ("verifier", "tokenizer") if identity else ():
            mine, other = getattr(self, what), getattr(found, what)
            if mine is not None and other is not None and mine != other:
                warnings.warn(
                    f"the drafter was trained with {what} {mine}, {of} has {other}; acceptance "
                    "may be lower",
                    stacklevel=3,
                )


@nnx.dataclass
class VerifierFeatures(nnx.Pytree):
    """The verifier's residual stream at the spec's boundaries, concatenated in the spec's order.

    Attributes:
        array: features; un-normed.
        spec: which boundaries of which verifier; static.
    """

    array: Float[Array, "b t f"] = nnx.data()
    spec: FeatureSpec = nnx.static()

    def __post_init__(self):
        found = self.array.shape[-1]
        if found != self.spec.fused_width:
            raise ContractError(
                f"features of boundaries {list(self.spec.boundaries)} have width "
                f"{self.spec.fused_width} ({len(self.spec.boundaries)} x {self.spec.width}), "
                f"found {found}; a single boundary or another verifier's features were passed"
            )


@nnx.dataclass
class DraftHidden(nnx.Pytree):
    """The drafter's own hidden state: fused features first, then what its layer feeds back.

    That is the layer's output before the drafter's final norm, or after it with `norm_output`.

    Attributes:
        array: one vector of the drafter's width a position or node.
    """

    array: Float[Array, "b t m"] = nnx.data()
