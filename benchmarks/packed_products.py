"""What a product with packed kernels costs on CPU, by rows, beside the same product in float32.

One process; the forms take turns over kernels that together exceed a core's caches. The
table holds nanoseconds of processor time a weight, which other processes disturb less than elapsed
time; `dense` is the float32 kernel [out, in], as decoding reads it. `many` widens a kernel in large
tiles whatever the rows, `few` in tiles of a few outputs (`eagle3_jax/packed.py`).

    packed_products.py [--shapes 576x1536 1536x576] [--rows 1 2 4 8 32 128] [--rounds 9]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import packed
from eagle3_jax.packed import PackedWeight
from eagle3_jax.turned import turned_matmul

MEMORY = 2**24
"""Bytes of float32 kernels that one turn reads."""


def kernels(kind: str, inputs: int, outputs: int, count: int) -> list:
    """Random kernels of a kind."""
    rng = np.random.default_rng(0)

    def one():
        if kind == "dense":
            return jnp.asarray(rng.standard_normal((outputs, inputs), np.float32))
        groups = 1 if kind == "int8" else inputs // 32
        scales = jnp.asarray(rng.uniform(0.01, 0.02, (outputs, groups)), jnp.float32)
        if kind.startswith("int8"):
            codes = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
            return PackedWeight(codes=jnp.asarray(codes), scales=scales)
        codes = jnp.asarray(rng.integers(0, 256, (outputs, inputs // 2)).astype(np.uint8))
        if kind == "int4":
            return PackedWeight(codes=codes, scales=scales.astype(jnp.bfloat16))
        return PackedWeight(codes=codes, scales=scales, minima=-scales)

    return [one() for _ in range(count)]


def chain(x, each):
    """A product after the other, each of which waits for the last one."""
    for kernel in each:
        packed_one = isinstance(kernel, PackedWeight)
        y = kernel.matmul(x) if packed_one else turned_matmul(x, kernel)
        x = x + jnp.mean(y) * 1e-9
    return x


def main() -> None:
    """Print a table a shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["576x1536", "1536x576", "576x49152"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    kinds = ("dense", "int8", "int8 by 32", "int4", "with minima")
    for shape in arguments.shapes:
        inputs, outputs = map(int, shape.split("x"))
        count = max(1, MEMORY // (4 * inputs * outputs))
        made = {kind: kernels(kind, inputs, outputs, count) for kind in kinds}
        print(f"{shape:18}" + "".join(f"{rows:>5} rows" for rows in arguments.rows), flush=True)
        table: dict[str, list[float]] = {}
        for rows in arguments.rows:
            x = jnp.ones((rows, inputs))
            turns: dict[str, Callable[[], object]] = {}
            for kind, each in made.items():
                for form, most in (("few", 2**20), ("many", 0)):
                    packed.FEW_ROWS = most
                    name = kind if kind == "dense" else f"{kind}, {form}"
                    # Another function object each time: what is traced depends on the form.
                    compiled = jax.jit(lambda x, each: chain(x, each)).lower(x, each).compile()
                    turns[name] = lambda f=compiled, e=each, x=x: jax.block_until_ready(f(x, e))
            times = {name: [] for name in turns}
            for _ in range(arguments.rounds):
                for name, turn in turns.items():
                    clock = time.process_time()
                    turn()
                    times[name].append(time.process_time() - clock)
            for name, spent in times.items():
                cost = 1e9 * statistics.median(spent) / (count * inputs * outputs)
                table.setdefault(name, []).append(cost)
        for name, costs in table.items():
            print(f"{name:18}" + "".join(f"{cost:10.3f}" for cost in costs), flush=True)


if __name__ == "__main__":
    main()
