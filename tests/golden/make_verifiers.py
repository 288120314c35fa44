"""Make the golden verifier files from transformers; see README.md for the environment.

Each file holds `tokens` [b t], `logits` [b t v], `boundaries` [l+1 b t d] (the residual stream
before layer k, and un-normed after the last), the smallest router gaps where there is a router, and
for some models `greedy` [b n]: transformers' own continuation of the first `prompt_length` tokens.
"""

# pyright: reportMissingImports=false
import argparse
import tempfile
import zlib
from pathlib import Path

import numpy as np
import tiny_models
import torch
import transformers

HERE = Path(__file__).parent
GREEDY = ("deepseek_a", "kimi_k", "llama3")
PROMPT_LENGTH, NEW_TOKENS = 17, 24
ROUTER_GAP, LOGIT_GAP = 1e-5, 1e-3


def load(name: str) -> torch.nn.Module:
    """transformers' model of one configuration; refuses tensors it missed or did not know."""
    with tempfile.TemporaryDirectory() as folder:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tiny_models.write_folder(name, folder),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    problems = {key: found for key, found in info.items() if found}
    if problems:
        raise SystemExit(f"{name}: {problems}")
    return model.eval()


@torch.no_grad()
def run(model: torch.nn.Module, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, list]:
    """Logits, every boundary, and the (gate, input) pairs of one pass without a cache."""
    stream, routed, handles = [], [], []

    def before(module, args, kwargs):
        stream.append((args[0] if args else kwargs["hidden_states"]).clone())

    def after(module, args, output):
        stream.append((output if torch.is_tensor(output) else output[0]).clone())

    layers = model.model.layers
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        if hasattr(layer.mlp, "gate"):
            handles.append(
                layer.mlp.gate.register_forward_hook(
                    lambda gate, args, output: routed.append((gate, args[0], output[2]))
                )
            )
    handles.append(layers[-1].register_forward_hook(after))
    ids = torch.from_numpy(tokens.astype(np.int64))
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    for handle in handles:
        handle.remove()

    assert len(stream) == len(layers) + 1
    for k in range(len(layers)):
        assert torch.equal(stream[k], output.hidden_states[k]), k
    assert torch.equal(model.model.norm(stream[-1]), output.hidden_states[-1])
    return output.logits.numpy(), torch.stack(stream).numpy(), routed


def gap(scores: np.ndarray, k: int) -> float:
    """The smallest distance of the k-th from the next score in a row; inf where all are taken."""
    ranked = -np.sort(-scores, axis=-1)
    return float((ranked[:, k - 1] - ranked[:, k]).min()) if k < scores.shape[1] else np.inf


def router_gaps(config: dict, routed: list) -> tuple[float, float]:
    """The smallest expert and group gaps of one pass, by the routing rule in float64."""
    expert_gap = group_gap = np.inf
    groups, kept, topk = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
    for gate, x, chosen in routed:
        x = x.reshape(-1, x.shape[-1]).double().numpy()
        score = 1.0 / (1.0 + np.exp(-x @ gate.weight.detach().double().numpy().T))
        score = score + gate.e_score_correction_bias.double().numpy()
        grouped = score.reshape(len(x), groups, -1)
        group_score = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
        group_gap = min(group_gap, gap(group_score, kept))
        masked = np.full_like(grouped, -np.inf)
        best = np.argsort(-group_score, axis=-1)[:, :kept, None]
        np.put_along_axis(masked, best, np.take_along_axis(grouped, best, axis=1), axis=1)
        masked = masked.reshape(score.shape)
        expert_gap = min(expert_gap, gap(masked, topk))
        ours = np.sort(np.argsort(-masked, axis=-1)[:, :topk], axis=-1)
        assert np.array_equal(ours, np.sort(chosen.numpy(), axis=-1))
    return expert_gap, group_gap


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: np.ndarray) -> np.ndarray:
    """transformers' greedy continuation, through its cache and past any end token."""
    ids = torch.from_numpy(prompt.astype(np.int64))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        use_cache=True,
        max_new_tokens=NEW_TOKENS,
    )
    return output[:, prompt.shape[1] :].numpy().astype(np.int32)


def make(name: str) -> dict[str, np.ndarray]:
    """Everything that the golden file of one model holds."""
    model, tokens, config = load(name), tiny_models.tokens(name), tiny_models.CONFIGS[name]
    logits, boundaries, routed = run(model, tokens)
    checksum = 0
    for tensor, value in sorted(tiny_models.hub_tensors(name).items()):
        checksum = zlib.crc32(value.tobytes(), zlib.crc32(tensor.encode(), checksum))
    kept = {
        "tokens": tokens,
        "logits": logits,
        "boundaries": boundaries,
        "weights_crc32": np.asarray(checksum, np.int64),
    }
    if name in GREEDY:
        prompt = tokens[:, :PROMPT_LENGTH]
        new = greedy(model, prompt)
        # One pass over the whole text must agree with the cached steps, and no choice be close.
        again, _, more = run(model, np.concatenate([prompt, new], axis=1))
        again = again[:, PROMPT_LENGTH - 1 : -1]
        assert np.array_equal(again.argmax(-1), new), name
        ranked = np.sort(again, axis=-1)
        logit_gap = float((ranked[..., -1] - ranked[..., -2]).min())
        assert logit_gap > LOGIT_GAP, (name, logit_gap)
        routed = routed + more
        kept |= {
            "greedy": new,
            "prompt_length": np.asarray(PROMPT_LENGTH, np.int32),
            "greedy_logit_gap": np.asarray(logit_gap, np.float32),
        }
    if routed:
        expert_gap, group_gap = router_gaps(config, routed)
        assert min(expert_gap, group_gap) > ROUTER_GAP, (name, expert_gap, group_gap)
        kept["router_expert_gap"] = np.asarray(expert_gap, np.float32)
        kept["router_group_gap"] = np.asarray(group_gap, np.float32)  # inf: there is one group
    return kept


def main() -> None:
    """Write the files of the models named on the command line, by default of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(tiny_models.CONFIGS))
    parser.add_argument("--out", type=Path, default=HERE / "verifiers")
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
