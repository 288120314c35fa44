"""Write tiny-kimi's two folders as they are bundled: bfloat16, a Hugging Face verifier folder.

python examples/tiny_kimi/bundle.py verifier --run R --corpus C
python examples/tiny_kimi/bundle.py drafter --run R --depth 4
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import jax
import ml_dtypes
import numpy as np
import tyro
from flax import nnx
from train_verifier import CONFIG, Recipe, optimiser

import eagle3_jax as e3
from checkpoints import drafters, families, hub
from checkpoints.store import Store
from checkpoints.tensors import write_json, write_tensors
from eagle3_jax.load import BUNDLED
from eagle3_jax.states import arrays_of

BFLOAT16 = ml_dtypes.bfloat16


@dataclasses.dataclass(frozen=True)
class BundleVerifier:
    """Bundle a run of train_verifier.py.

    Attributes:
        run: its folder; the corpus folder with tokenizer.json lies in `corpus`.
        corpus: folder of tokenizer.json.
        out: where to.
    """

    run: Path
    corpus: Path
    out: Path = BUNDLED / "tiny-kimi" / "verifier"

    def go(self) -> None:
        """The last checkpoint as config.json, model.safetensors, tokenizer.json."""
        verifier = e3.Verifier(CONFIG, jax.random.key(0))
        _, state = nnx.split(verifier)
        params = nnx.to_pure_dict(state)
        store = Store(self.run / "checkpoints")
        step = store.latest()
        assert step is not None, f"{self.run} holds no checkpoint"
        tx = optimiser(Recipe(corpus=self.corpus, out=self.run))
        (params, _), _ = store.restore(step, (params, tx.init(params)))
        nnx.replace_by_pure_dict(state, params)
        nnx.update(verifier, state)
        arrays = {name: np.asarray(value) for name, value in arrays_of(verifier).items()}
        tensors = {
            name: value if "e_score_correction_bias" in name else value.astype(BFLOAT16)
            for name, value in hub.to_hub(CONFIG, arrays).items()
        }
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / "config.json", families.config_to_hub(CONFIG))
        write_tensors(self.out / "model.safetensors", tensors)
        (self.out / "tokenizer.json").write_bytes((self.corpus / "tokenizer.json").read_bytes())
        write_json(
            self.out / "tokenizer_config.json", {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        )


@dataclasses.dataclass(frozen=True)
class BundleDrafter:
    """Bundle the best drafter of an `eagle3 train` run.

    Attributes:
        run: its folder.
        depth: recommended chain, by measured speed.
        out: where to.
    """

    run: Path
    depth: int = 4
    out: Path = BUNDLED / "tiny-kimi" / "drafter"

    def go(self) -> None:
        """The run's exported drafter, in bfloat16, with the recommendation."""
        manifest, arrays = drafters.read_drafter(self.run / "drafter")
        stored = {
            name: value.astype(BFLOAT16) if value.dtype == np.float32 else value
            for name, value in arrays.items()
        }
        recommended = {"speculation": {"depth": self.depth}, "dtype": "float32"}
        drafters.write_drafter(
            self.out, dataclasses.replace(manifest, recommended=recommended), stored
        )


if __name__ == "__main__":
    tyro.cli(
        Annotated[BundleVerifier, tyro.conf.subcommand("verifier")]
        | Annotated[BundleDrafter, tyro.conf.subcommand("drafter")]
    ).go()
