"""Make the golden drafter files from speculators; see README.md for the environment.

Each file holds what its `Eagle3DraftModel` computes for one tiny drafter: `logits` [n t dv], of
every step of training-time test over the text (step 0 is the pass over true features); `greedy` [n]
and `greedy_logits` [n dv], the chain of its own choices, as verifier ids, below the row at
the prompt's last position; `rope_offset_gap`, the largest change of a logit where rope positions
start at 0 (there they start at 1); the smallest top-1/top-2 logit gap of the chain; and a checksum
of everything drawn.
"""

# pyright: reportMissingImports=false
import argparse
import sys
import types
from pathlib import Path

import numpy as np
import tiny_drafters
import torch
import transformers

# The model's module reaches for training data's client libraries; it wants one alias of there.
_data = types.ModuleType("speculators.train.data")
vars(_data)["BatchType"] = dict
sys.modules[_data.__name__] = _data

from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402

HERE = Path(__file__).parent
LOGIT_GAP = 1e-3
ROPE_OFFSET_GAP = 5e-6
NOT_OURS = {"verifier_norm.weight", "verifier_lm_head.weight"}


def config_of(name: str) -> Eagle3SpeculatorConfig:
    """speculators' configuration of a drafter: `qk_norm` is its qwen3 architecture."""
    flags = tiny_drafters.flags(name)
    kind = "Qwen3Config" if flags.pop("qk_norm", False) else "LlamaConfig"
    rope = {"rope_type": "default", "rope_theta": tiny_drafters.ROPE_THETA}
    if "llama3" in tiny_drafters.CONFIGS[name]:
        rope |= {**tiny_drafters.LLAMA3, "rope_type": "llama3"}
    layer = getattr(transformers, kind)(
        vocab_size=tiny_drafters.VOCABULARY,
        hidden_size=tiny_drafters.WIDTH,
        num_hidden_layers=1,
        num_attention_heads=tiny_drafters.HEADS,
        num_key_value_heads=tiny_drafters.KV_HEADS,
        head_dim=tiny_drafters.HEAD_WIDTH,
        intermediate_size=tiny_drafters.MLP_WIDTH,
        rms_norm_eps=tiny_drafters.NORM_EPS,
        rope_parameters=rope,
        attention_bias=False,
    )
    layer._attn_implementation = "eager"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=tiny_drafters.draft_vocabulary(name),
        eagle_aux_hidden_state_layer_ids=list(range(1, tiny_drafters.num_features(name) + 1)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **flags,
    )


def load(name: str) -> Eagle3DraftModel:
    """speculators' model of a drafter; refuses tensors it missed or did not know."""
    model = Eagle3DraftModel(config_of(name))
    state = {key: torch.from_numpy(value) for key, value in tiny_drafters.tensors(name).items()}
    missing, unknown = model.load_state_dict(state, strict=False)
    if unknown or set(missing) != NOT_OURS:
        raise SystemExit(f"{name}: missing {missing}, unknown {unknown}")
    return model.eval()


@torch.no_grad()
def run(
    model: Eagle3DraftModel,
    features: np.ndarray,
    tokens: np.ndarray,
    documents: np.ndarray,
    steps: int,
    first_position: int = 1,
) -> np.ndarray:
    """Logits [n t dv] of every step; row t pairs the features at t with the token after it."""
    logits = []
    handle = model.lm_head.register_forward_hook(lambda head, args, out: logits.append(out[0]))
    rows = len(tokens) - 1
    chosen = model(
        hidden_states=torch.from_numpy(features[None, :rows]),
        input_ids=torch.from_numpy(tokens[None, 1:].astype(np.int64)),
        document_ids=torch.from_numpy(documents[None, :rows].astype(np.int64)),
        position_ids=torch.arange(first_position, first_position + rows)[None],
        ttt_steps=steps,
    )
    handle.remove()
    assert len(logits) == len(chosen) == steps
    assert all(torch.equal(one.argmax(-1), ids[0]) for one, ids in zip(logits, chosen, strict=True))
    return torch.stack(logits).numpy()


def greedy(model: Eagle3DraftModel, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The chain of the model's own choices [n] below one row, and the logits [n dv] of each.

    The model feeds a text's tokens only, so a choice is written into the text and the text run
    again. No row sees those after it: what features they have does not matter.
    """
    tokens, _, features = tiny_drafters.text(name)
    ids, root = tiny_drafters.vocabulary(name), tiny_drafters.PROMPT_LENGTH - 1
    text, logits = tokens[: root + 2], []
    for step in range(tiny_drafters.STEPS):
        fed = np.zeros((len(text), features.shape[1]), np.float32)
        fed[: root + 1] = features[: root + 1]
        logits.append(run(model, fed, text, np.zeros(len(text)), step + 1)[step, root])
        text = np.append(text, ids[logits[-1].argmax()]).astype(np.int32)
    return text[root + 2 :], np.stack(logits)


def make(name: str) -> dict[str, np.ndarray]:
    """Everything that the golden file of one drafter holds."""
    model = load(name)
    tokens, documents, features = tiny_drafters.text(name)
    steps = tiny_drafters.STEPS
    logits = run(model, features, tokens, documents, steps)
    shifted = run(model, features, tokens, documents, steps, first_position=0)
    offset_gap = float(np.abs(shifted - logits).max())
    assert offset_gap < ROPE_OFFSET_GAP, (name, offset_gap)
    chosen, chain = greedy(model, name)
    ranked = np.sort(chain, axis=-1)
    logit_gap = float((ranked[:, -1] - ranked[:, -2]).min())
    assert logit_gap > LOGIT_GAP, (name, logit_gap)
    return {
        "logits": logits,
        "greedy": chosen,
        "greedy_logits": chain,
        "greedy_logit_gap": np.asarray(logit_gap, np.float32),
        "rope_offset_gap": np.asarray(offset_gap, np.float32),
        "drawn_crc32": np.asarray(tiny_drafters.checksum(name), np.int64),
    }


def main() -> None:
    """Write the files of the drafters named on the command line, by default of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(tiny_drafters.CONFIGS))
    parser.add_argument("--out", type=Path, default=HERE / "drafters")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        kept, path = make(name), arguments.out / f"{name}.npz"
        np.savez_compressed(path, allow_pickle=False, **kept)
        scalars = {key: value.item() for key, value in kept.items() if value.ndim == 0}
        print(name, path.stat().st_size, scalars, flush=True)


if __name__ == "__main__":
    main()
