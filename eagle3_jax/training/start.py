"""The drafter that training starts from: its sizes, and weights near what the verifier knows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle3_jax.configs import DrafterConfig
from eagle3_jax.drafter import Drafter
from eagle3_jax.drafter.vocabulary import choose_vocabulary
from eagle3_jax.verifier import Verifier


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """Sizes of a new drafter, of which what is None follows the verifier, and its flags.

    Attributes:
        width: m; the verifier's.
        num_heads: query heads; the verifier's.
        num_kv_heads: key/value heads; as many as query heads.
        head_width: width / heads.
        mlp_width: feed-forward width; three times the width.
        draft_vocab_size: dv, chosen from the data by frequency; the whole vocabulary up to 32,000.
        fc_norm: a norm for each feature before fusion; with norm_output, EAGLE-3.1.
        norm_before_fc: one norm over all features together before fusion.
        norm_before_residual: the residual stream starts at the normed hidden state.
        norm_output: what is fed back is the hidden state after the final norm.
        qk_norm: queries and keys are normed head by head.
    """

    width: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_width: int | None = None
    mlp_width: int | None = None
    draft_vocab_size: int | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False

    def config(self, verifier: Verifier, num_features: int) -> DrafterConfig:
        """The drafter's configuration for a verifier."""
        v = verifier.config
        width = self.width or v.width
        heads = self.num_heads or v.num_heads
        return DrafterConfig(
            width=width,
            verifier_width=v.width,
            num_features=num_features,
            num_heads=heads,
            num_kv_heads=self.num_kv_heads or heads,
            head_width=self.head_width or max(width // heads // 2 * 2, 2),
            mlp_width=self.mlp_width or 3 * width,
            vocab_size=v.vocab_size,
            draft_vocab_size=self.draft_vocab_size or min(v.vocab_size, 32000),
            fc_norm=self.fc_norm,
            norm_before_fc=self.norm_before_fc,
            norm_before_residual=self.norm_before_residual,
            norm_output=self.norm_output,
            qk_norm=self.qk_norm,
        )


def new_drafter(
    verifier: Verifier,
    shape: DrafterShape,
    boundaries: tuple[int, ...] | None,
    counts: np.ndarray,
    seed: int,
) -> Drafter:
    """A drafter to train, started near what the verifier knows.

    Of equal width, its norm and head are the verifier's own (the head's rows of the draft
    vocabulary) and its fusion starts at the highest boundary, so that its first guess is the
    verifier's view of the token before.

    Args:
        verifier: what it will draft for.
        shape: its sizes.
        boundaries: None is the default ones.
        counts: how often each token is learned from.
        seed: of the rest of its weights.
    """
    spec = verifier.spec(boundaries)
    config = shape.config(verifier, len(spec.boundaries))
    drafter = Drafter(config, spec, jax.random.key(seed))
    vocabulary = jnp.asarray(choose_vocabulary(counts, config.draft_vocab_size))
    drafter.vocabulary[...] = vocabulary
    if config.width == verifier.config.width:
        f32 = jnp.float32
        drafter.norm.weight[...] = verifier.norm.weight[...].astype(f32)
        drafter.head.kernel = nnx.Param(verifier.head.columns(vocabulary).astype(f32))
        highest = int(np.argmax(spec.boundaries)) * config.verifier_width
        kernel = drafter.fusion.kernel[...] * f32(0.3)
        eye = jnp.eye(config.width, dtype=f32)
        kernel = kernel.at[highest : highest + config.width].add(eye)
        drafter.fusion.kernel = nnx.Param(kernel)
    return drafter
