"""Tiny random models and a tiny tokenizer, for our tests and for users' own."""

import dataclasses
import functools
from typing import Literal

import jax
import tokenizers

from eagle3_jax.configs import (
    DrafterConfig,
    ExpertsConfig,
    LatentConfig,
    RopeConfig,
    VerifierConfig,
)
from eagle3_jax.drafter import Drafter
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.verifier import Verifier

Family = Literal["llama", "deepseek"]

LLAMA = VerifierConfig(
    vocab_size=64,
    width=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    mlp_width=48,
    max_length=4096,
    eos_tokens=(1,),
)

DEEPSEEK = VerifierConfig(
    vocab_size=64,
    width=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_width=16,
    mlp_width=48,
    rope=RopeConfig(
        kind="yarn",
        factor=4.0,
        original_length=512,
        mscale=1.0,
        mscale_all_dim=0.8,
        interleaved=True,
    ),
    latent=LatentConfig(kv_rank=12, q_rank=20, nope_width=8, rope_width=8, value_width=10),
    experts=ExpertsConfig(
        count=8,
        chosen=3,
        width=12,
        shared=1,
        groups=4,
        chosen_groups=2,
        scaling=1.5,
        correction=True,
    ),
    dense=(0,),
    max_length=4096,
    eos_tokens=(1,),
    family="deepseek_v3",
)


@functools.cache
def tiny_verifier(family: Family = "deepseek", seed: int = 0, **changes) -> Verifier:
    """A random four-layer verifier of some ten thousand parameters; the same for equal arguments.

    Args:
        family: grouped-query attention and dense feed-forwards, or latent attention and experts.
        seed: of the weights.
        changes: fields of its `VerifierConfig` to replace.
    """
    config = dataclasses.replace(LLAMA if family == "llama" else DEEPSEEK, **changes)
    return Verifier(config, jax.random.key(seed), f"tiny-{family}")


@functools.cache
def tiny_drafter(
    family: Family = "deepseek",
    seed: int = 1,
    boundaries: tuple[int, ...] = (1, 2, 3),
    draft_vocab_size: int = 40,
    **changes,
) -> Drafter:
    """A random drafter for `tiny_verifier(family)`; nearly nothing it proposes is accepted.

    Args:
        family: of the verifier it fits.
        seed: of the weights.
        boundaries: that it is fed.
        draft_vocab_size: dv.
        changes: fields of its `DrafterConfig` to replace.
    """
    verifier = tiny_verifier(family)
    config = DrafterConfig(
        width=24,
        verifier_width=verifier.config.width,
        num_features=len(boundaries),
        num_heads=4,
        num_kv_heads=2,
        head_width=6,
        mlp_width=40,
        vocab_size=verifier.config.vocab_size,
        draft_vocab_size=draft_vocab_size,
    )
    config = dataclasses.replace(config, **changes)
    return Drafter(config, verifier.spec(boundaries), jax.random.key(seed))


def tiny_tokenizer() -> Tokenizer:
    """A character tokenizer of 64 tokens: two specials, then letters, digits and some signs."""
    signs = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP0123456789 .,:()=_+\n"[:62]
    vocabulary = {"<|bos|>": 0, "<|eos|>": 1, **{s: i + 2 for i, s in enumerate(signs)}}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<|bos|>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex("[\\s\\S]"), "isolated"
    )
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<|bos|>", "<|eos|>"])
    return Tokenizer(backend.to_str())
