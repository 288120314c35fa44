"""Make the golden files of GGUF reading; see README.md.

`gguf/tiny.gguf`: a tiny Llama in many block formats, converted as llama.cpp does it.
`gguf/tiny.npz`: transformers' `tokens` and `logits` for it, and a checksum of its tensors.
`gguf/tokenizers.json`: tiny tokenizers by the name of their pre-tokenizer: what a GGUF holds of
them, and the ids that the tokenizers themselves give for `texts.py`.
"""

import json
import tempfile
import zlib
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from texts import TEXTS
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

OUT = Path(__file__).parent / "gguf"
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, MLP_WIDTH, LENGTH = 2, 64, 4, 2, 16, 256, 40
BOS, EOS, THINK = "<|im_start|>", "<|im_end|>", "<think>"
TEMPLATE = (
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + message['content'] }}"
    "{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ bos_token + 'a\n' }}"
    "{% endif %}"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
"""As GPT-2's, SmolLM2's and Llama 3's tokenizer.json have it."""


def train(pre: str) -> tokenizers.Tokenizer:
    """A tiny byte-level BPE over the texts, with added tokens of both kinds."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        min_frequency=2,
        show_progress=False,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # A whole word that no merge leads to: only Llama 3 takes it as it is.
    raw = json.loads(tokenizer.to_str())
    raw["model"]["vocab"]["Ġworld"] = len(raw["model"]["vocab"])
    raw["model"]["ignore_merges"] = pre == "llama-bpe"
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_tokens([AddedToken(THINK, normalized=False, special=False)])
    if pre == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[BOS, "$A"], special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return tokenizer


def fields(tokenizer: tokenizers.Tokenizer) -> dict[str, list]:
    """Tokens in order of id, their kinds, and the merges, as llama.cpp's conversion lists them."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    kinds = {BOS: gguf.TokenType.CONTROL, EOS: gguf.TokenType.CONTROL}
    kinds[THINK] = gguf.TokenType.USER_DEFINED
    return {
        "tokens": tokens,
        "token_type": [int(kinds.get(token, gguf.TokenType.NORMAL)) for token in tokens],
        "merges": [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]],
    }


def add_tokenizer(writer: gguf.GGUFWriter, pre: str, held: dict[str, list]) -> None:
    """A tokenizer's metadata."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(held["tokens"])
    writer.add_token_types(held["token_type"])
    writer.add_token_merges(held["merges"])
    writer.add_bos_token_id(held["tokens"].index(BOS))
    writer.add_eos_token_id(held["tokens"].index(EOS))
    writer.add_chat_template(TEMPLATE)


def close(writer: gguf.GGUFWriter) -> None:
    """Write it all."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from half-split to neighbouring pairs, as llama.cpp's Llama conversion."""
    halves = value.reshape(heads, 2, -1, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def q6_k(rng: np.random.RandomState, rows: int, columns: int) -> np.ndarray:
    """Random Q6_K blocks of 256: 192 bytes of values, 16 scales, one float16 over all."""
    raw = rng.randint(0, 256, (rows, columns // 256, 210), np.int64).astype(np.uint8)
    raw[..., 208:] = np.frombuffer(np.float16(2e-5).tobytes(), np.uint8)
    return raw.reshape(rows, -1)


def write_model(path: Path, held: dict[str, list]) -> None:
    """The tiny model; each kind of tensor in another format."""
    rng = np.random.RandomState(zlib.crc32(b"tiny gguf"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(held["tokens"]))
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, "smollm", held)

    def matrix(name: str, rows: int, columns: int, kind: Kind, heads: int = 0) -> None:
        value = rng.randn(rows, columns).astype(np.float32) / np.float32(columns**0.5)
        value = permute(value, heads) if heads else value
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, (1 + 0.2 * rng.randn(WIDTH)).astype(np.float32))

    vocabulary, kv = len(held["tokens"]), KV_HEADS * HEAD_WIDTH
    matrix("token_embd.weight", vocabulary, WIDTH, Kind.Q8_0)
    matrix("output.weight", vocabulary, WIDTH, Kind.Q5_0)
    norm("output_norm.weight")
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")
        matrix(f"blk.{layer}.attn_q.weight", HEADS * HEAD_WIDTH, WIDTH, Kind.Q4_0, HEADS)
        matrix(f"blk.{layer}.attn_k.weight", kv, WIDTH, Kind.Q4_1, KV_HEADS)
        matrix(f"blk.{layer}.attn_v.weight", kv, WIDTH, Kind.F16)
        matrix(f"blk.{layer}.attn_output.weight", WIDTH, HEADS * HEAD_WIDTH, Kind.F32)
        matrix(f"blk.{layer}.ffn_gate.weight", MLP_WIDTH, WIDTH, Kind.Q5_1)
        matrix(f"blk.{layer}.ffn_up.weight", MLP_WIDTH, WIDTH, Kind.BF16)
        down = q6_k(rng, WIDTH, MLP_WIDTH)
        writer.add_tensor(f"blk.{layer}.ffn_down.weight", down, raw_dtype=Kind.Q6_K)
    close(writer)


@torch.no_grad()
def run(path: Path, vocabulary: int) -> dict[str, np.ndarray]:
    """What transformers makes of the model."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(info.values()), info
    checksum = 0
    for name, value in sorted(model.state_dict().items()):
        checksum = zlib.crc32(value.numpy().tobytes(), zlib.crc32(name.encode(), checksum))
    rng = np.random.RandomState(zlib.crc32(b"tiny gguf tokens"))
    tokens = rng.randint(0, vocabulary, (1, LENGTH)).astype(np.int32)
    ids = torch.from_numpy(tokens.astype(np.int64))
    logits = model.eval()(input_ids=ids, use_cache=False).logits.numpy()
    wide = model.double()(input_ids=ids, use_cache=False).logits.numpy()
    error = float(np.abs(logits - wide).max())
    print("logits", float(np.abs(logits).max()), "float64 differs by", error)
    assert error < 1e-5
    return {"tokens": tokens, "logits": logits, "weights_crc32": np.asarray(checksum, np.int64)}


def read_by_transformers(pre: str, held: dict[str, list]) -> list[list[int]]:
    """The texts' ids by the tokenizer that transformers reads from a GGUF."""
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "tokenizer.gguf", "llama")
        add_tokenizer(writer, pre, held)
        close(writer)
        theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="tokenizer.gguf")
    return [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


def main() -> None:
    """Write the three files."""
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    out = {}
    for pre in SPLITS:
        tokenizer = train(pre)
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
        out[pre] = fields(tokenizer) | {"ids": ids}
        theirs = read_by_transformers(pre, out[pre])
        other = [text for text, a, b in zip(TEXTS, ids, theirs, strict=True) if a != b]
        print(pre, len(out[pre]["tokens"]), "tokens; transformers differs for", other)
    text = json.dumps(out, ensure_ascii=False).replace('], "', '],\n"')
    (OUT / "tokenizers.json").write_text(text + "\n", encoding="utf-8")
    write_model(OUT / "tiny.gguf", out["smollm"])
    kept = run(OUT / "tiny.gguf", len(out["smollm"]["tokens"]))
    np.savez_compressed(OUT / "tiny.npz", allow_pickle=False, **kept)
    for path in sorted(OUT.iterdir()):
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
