"""What devices do for each other within a pass, from the view of one device inside `shard_map`.

Few tokens lie whole on every device, and a layer's two partial sums are added up by one all-reduce
each. Of many tokens each device keeps its own share between a layer's halves, where norms and
residual stream are computed: they are gathered before a half and its sums scattered after it, which
moves as many bytes as the all-reduce.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from sharding.mesh import DATA, EXPERT, MODEL, shape_of

MANY = 128
"""From so many tokens on, each device keeps its own share between the halves of a layer."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A device's exchange with the others that hold the same copy of the verifier.

    Without a mesh, or where one device holds a copy alone, everything is left as it is.

    Attributes:
        mesh: None on a single device.
        tokens: b, r and w of the pass.
    """

    mesh: Mesh | None
    tokens: tuple[int, int, int] = (1, 1, 1)

    @property
    def parts(self) -> int:
        """Devices that hold one copy of the verifier between them."""
        return shape_of(self.mesh).model

    @property
    def count(self) -> int:
        """Tokens of the pass."""
        b, r, w = self.tokens
        return b * r * w

    @property
    def scattered(self) -> bool:
        """Whether each device keeps its own share of the tokens."""
        return self.parts > 1 and self.count >= MANY

    def _flat(self, x):
        """[b r w d] -> [1 1 n d], n padded to a multiple of the devices."""
        flat = x.reshape(1, 1, self.count, x.shape[-1])
        return jnp.pad(flat, ((0, 0), (0, 0), (0, -self.count % self.parts), (0, 0)))

    def own(self, x: Float[Array, "b r w d"]) -> Float[Array, "..."]:
        """Of tokens that lie whole here, this device's share, [1 1 n/parts d]."""
        if not self.scattered:
            return x
        flat = self._flat(x)
        size = flat.shape[2] // self.parts
        return jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(MODEL) * size, size, axis=2)

    def whole(self, x: Float[Array, "b r w d"]) -> Float[Array, "..."]:
        """All tokens, [b r w d], from every device's share."""
        if not self.scattered:
            return x
        flat = jax.lax.all_gather(x, MODEL, axis=2, tiled=True)
        return flat[:, :, : self.count].reshape(*self.tokens, x.shape[-1])

    def total(self, partial: Float[Array, "b r w d"]) -> Float[Array, "..."]:
        """The sum of all devices' partial sums; of many tokens, this device's share of it."""
        if self.parts == 1:
            return partial
        if not self.scattered:
            return jax.lax.psum(partial, MODEL)
        flat = self._flat(partial)
        return jax.lax.psum_scatter(flat, MODEL, scatter_dimension=2, tiled=True)

    def mine(
        self, chosen: Int[Array, "n x"], weights: Float[Array, "n x"], count: int
    ) -> tuple[Int[Array, "n x"], Float[Array, "n x"]]:
        """Chosen experts as this device numbers its `count` own; the others' are `count`, weight 0.

        Args:
            chosen: experts of each token.
            weights: theirs.
            count: experts of a layer on this device.
        """
        if shape_of(self.mesh).expert == 1:
            return chosen, weights
        own = chosen - jax.lax.axis_index(EXPERT) * count
        here = (own >= 0) & (own < count)
        return jnp.where(here, own, count), jnp.where(here, weights, 0.0)

    def vocabulary(self, logits: Float[Array, "*lead v"]) -> Float[Array, "..."]:
        """Logits over the whole vocabulary, from those over each device's part of it."""
        if self.parts == 1:
            return logits
        return jax.lax.all_gather(logits, MODEL, axis=logits.ndim - 1, tiled=True)

    def likeliest(self, logits: Float[Array, "*lead v"], best: Int[Array, "*lead"]) -> Array:
        """The greatest logit's id over the whole vocabulary, the lowest of equals.

        Args:
            logits: over this device's part of it.
            best: the greatest's place among those.
        """
        if self.parts == 1:
            return best
        own = logits.shape[-1]
        most = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
        here = most == jax.lax.pmax(most, MODEL)
        last = own * self.parts - 1  # where there is a NaN, as on a single device
        ids = best + jax.lax.axis_index(MODEL) * own
        return jax.lax.pmin(jnp.where(here, ids, last), MODEL)

    def columns(
        self,
        take: Callable[[Int[Array, " dv"]], Float[Array, "d dv"]],
        count: int,
        ids: Int[Array, " dv"],
    ) -> Float[Array, "d dv"]:
        """Some columns of a kernel whose columns are the vocabulary, of which this is a part.

        Args:
            take: columns of the part, by their places in it.
            count: columns of the part.
            ids: places among all.
        """
        if self.parts == 1:
            return take(ids)
        own = ids - jax.lax.axis_index(MODEL) * count
        here = (own >= 0) & (own < count)
        found = take(jnp.where(here, own, 0))
        return jax.lax.psum(jnp.where(here[None], found, 0), MODEL)

    def over_rows(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The sum over all groups of rows."""
        return x if shape_of(self.mesh).data == 1 else jax.lax.psum(x, DATA)

    def anywhere(self, flag: Bool[Array, ""]) -> Bool[Array, ""]:
        """Whether it holds for any rows, of whichever device."""
        if shape_of(self.mesh).data == 1:
            return flag
        return jax.lax.pmax(flag.astype(jnp.int32), DATA) > 0
