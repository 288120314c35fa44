"""Make the golden int4 file from compressed-tensors and transformers; see README.md.

`packed`, `scale` (as its bits) and `shape` are what compressed-tensors makes of a random bfloat16
weight [out, in]; `widened` (as its bits) is what it unpacks again. `logits` are
transformers' in float32 for a tiny Kimi with the experts that it reads from a folder of int4; read
in float32 it would widen the scales first, and round nothing.
"""

# pyright: reportMissingImports=false
import runpy
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

HERE = Path(__file__).parent
TINY = runpy.run_path(str(HERE / "tiny_int4.py"))
NAME = "kimi_k"


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A bfloat16 tensor's bits, which numpy has no dtype for."""
    return tensor.view(torch.int16).numpy()


def linear() -> dict[str, np.ndarray]:
    """One weight through compressed-tensors' own packing and back."""
    args = QuantizationArgs(**TINY["QUANTIZATION"]["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn((24, 96), generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = (weight.reshape(24, 3, 32).abs().amax(-1) / 7.5).bfloat16()
    state = {"weight": weight, "weight_scale": scale}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    widened = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    assert widened.dtype == torch.bfloat16
    return {
        "packed": packed["weight_packed"].numpy(),
        "scale": bits(scale),
        "shape": packed["weight_shape"].numpy(),
        "widened": bits(widened),
    }


@torch.no_grad()
def main() -> None:
    """Write `int4.npz`."""
    tokens = TINY["MODELS"]["tokens"](NAME)
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        for packed, dtype in ((True, torch.bfloat16), (False, torch.float32)):
            config = TINY["config"](NAME) if packed else TINY["MODELS"]["CONFIGS"][NAME]
            at = Path(folder) / str(packed)
            TINY["MODELS"]["write_files"](config, TINY["tensors"](NAME, packed), at)
            models[packed] = transformers.AutoModelForCausalLM.from_pretrained(
                at, dtype=dtype, attn_implementation="eager"
            ).eval()
    compared = 0
    for name, value in models[True].named_parameters():
        if ".experts." in name:
            assert torch.equal(value.float(), models[False].get_parameter(name)), name
            compared += value.numel()
    logits = models[False](torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    print(compared, "weights of experts equal bit for bit; logits up to", np.abs(logits).max())
    assert compared
    checksum = 0
    for name, value in sorted(TINY["tensors"](NAME).items()):
        checksum = zlib.crc32(value.tobytes(), zlib.crc32(name.encode(), checksum))
    np.savez_compressed(
        HERE / "int4.npz",
        tokens=tokens,
        logits=logits,
        weights_crc32=np.uint32(checksum),
        allow_pickle=False,
        **linear(),
    )


if __name__ == "__main__":
    main()
