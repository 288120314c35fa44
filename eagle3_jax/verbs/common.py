"""What verbs share: flags of dtype, speculation and sampling; loading by source."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from jax.sharding import Mesh
from rich.console import RenderableType
from tyro.conf import UseAppendAction

from checkpoints.drafters import read_manifest
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import LoadError, RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.load import (
    find_drafter,
    load_drafter,
    load_verifier,
    recommended_plain_dtype,
    recommended_speculation,
)
from eagle3_jax.verifier import Verifier

Dtype = Literal["float32", "bfloat16"] | None
Quantization = Literal["int8", "stored"] | None
Result = tuple[dict[str, Any], RenderableType]
SamplingFlags = Annotated[Sampling, UseAppendAction]
"""What is several is given one by one, so that no flag takes the prompts behind it."""


@dataclasses.dataclass(frozen=True)
class SpeculationFlags:
    """How many tokens are drafted in a cycle.

    Attributes:
        depth: tokens along one path; None is what the drafter's manifest recommends.
        topk: children a node gets; 1 is a chain.
        nodes: drafted nodes kept, the root not counted; a tree of another depth or topk than the
            recommended one has to name it.
        sampled: draw candidates from the drafter, in place of its likeliest.
        block: judge a chain of sampled candidates as a whole.
    """

    depth: int | None = None
    topk: int | None = None
    nodes: int | None = None
    sampled: bool = False
    block: bool = True

    def over(self, drafter: Drafter | None) -> Speculation:
        """What the drafter recommends, with what was given put over it."""
        unset = SpeculationFlags()
        given = {k: value for k, value in vars(self).items() if value != getattr(unset, k)}
        if given and drafter is None:
            raise RequestError(f"speculation.{next(iter(given))} was given, but no drafter")
        if "depth" in given or "topk" in given:
            given.setdefault("nodes", None)  # the recommended number belongs to its own shape
        return dataclasses.replace(recommended_speculation(drafter), **given)

    def whole(self, text: str) -> Speculation:
        """A shape named as a whole, `depth=4,topk=4,nodes=15`, drafted as these flags say.

        `sampled` and `no-block` may stand in the list, too.

        Raises:
            RequestError: the text says something else.
        """
        given: dict[str, Any] = {"sampled": self.sampled, "block": self.block}
        for part in text.replace(" ", "").split(","):
            name, _, value = part.partition("=")
            if part in ("sampled", "no-block"):
                given |= {"sampled": True} if part == "sampled" else {"block": False}
            elif name in ("depth", "topk", "nodes") and value.isdecimal() and value.isascii():
                given[name] = int(value)
            else:
                raise RequestError(
                    f"settings {text!r} hold {part!r}; expected a list such as "
                    "depth=4,topk=4,nodes=15 in which sampled or no-block may stand"
                )
        return Speculation(**given)


def shape_of(speculation: Speculation) -> str:
    """A chain or tree in a few words."""
    parts = [f"depth {speculation.depth}"]
    if speculation.topk > 1:
        parts += [f"topk {speculation.topk}", f"nodes {speculation.nodes}"]
    if speculation.sampled:
        parts += ["sampled"] if speculation.block or speculation.topk > 1 else ["sampled, no block"]
    return ", ".join(parts)


def load(
    verifier: str,
    drafters: Sequence[str | None],
    dtype: str | None,
    mesh: Mesh | None = None,
    quantization: str | None = None,
) -> tuple[Verifier, dict[str, Drafter]]:
    """A verifier, and drafters for it by the source they were named by.

    Args:
        verifier: its source.
        drafters: their sources; None is the drafter that comes with the verifier.
        dtype: None is what the drafters' manifests recommend, where they agree.
        mesh: over which the verifier is to lie.
        quantization: of the verifier's weights.

    Raises:
        RequestError: no drafter comes with the verifier, or one is named twice.
        LoadError, ContractError: as loading does.
    """
    sources = [verifier if source is None else source for source in drafters]
    if len(set(sources)) < len(sources):
        raise RequestError("a drafter is named twice")
    try:
        folders = [find_drafter(source) for source in sources]
    except LoadError:
        load_verifier(verifier, dtype)  # where its own source is wrong, this says so
        if None in drafters:
            raise RequestError(
                f"no drafter comes with the verifier {verifier}; name one with --drafter"
            ) from None
        raise
    if dtype is None:
        recommended = {read_manifest(folder).recommended.get("dtype") for folder in folders}
        dtype = recommended.pop() if len(recommended) == 1 else None
    loaded = load_verifier(verifier, dtype, mesh, quantization)
    return loaded, {source: load_drafter(source, loaded) for source in sources}


def load_plain(
    source: str,
    verifier: Verifier,
    drafters: Mapping[str, Drafter],
    dtype: str | None,
    quantization: str | None = None,
) -> Verifier:
    """The verifier as plain decoding beside those drafters takes it: in its own best dtype.

    Args:
        source: the verifier's.
        verifier: as the drafters take it; given back where the dtype is the same.
        drafters: for it.
        dtype: None is plain decoding's by the drafters' manifests, where they agree.
        quantization: that the verifier was loaded with.
    """
    if dtype is None:
        recommended = {recommended_plain_dtype(drafter) for drafter in drafters.values()}
        dtype = recommended.pop() if len(recommended) == 1 else None
    if dtype in (None, str(verifier.dtype)):
        return verifier
    return load_verifier(source, dtype, verifier.mesh, quantization)
