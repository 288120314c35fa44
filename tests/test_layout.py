"""The floors of the design: no import runs upward."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = [
    ("eagle3_jax.contracts", "eagle3_jax.configs", "kernels_pallas"),
    ("sharding", "checkpoints", "eagle3_jax.layers", "eagle3_jax.caches", "eagle3_jax.states")
    + ("eagle3_jax.templates", "eagle3_jax.tokenizer", "eagle3_jax.turned")
    + ("eagle3_jax.packed", "eagle3_jax.int8"),
    ("eagle3_jax.verifier", "eagle3_jax.drafter", "eagle3_jax.forest"),
    ("eagle3_jax.loop", "eagle3_jax.load", "eagle3_jax.testing"),
    ("eagle3_jax.batch",),
    ("eagle3_jax.generation",),
    ("eagle3_jax.training",),
    ("eagle3_jax",),
]
"""Ground first; a module belongs to the longest name that it begins with."""


def floor_of(module: str) -> int | None:
    """The floor of one of our modules, None for another's."""
    best, floor = "", None
    for number, names in enumerate(FLOORS):
        for name in names:
            if (module == name or module.startswith(name + ".")) and len(name) > len(best):
                best, floor = name, number
    return floor


def modules() -> list[tuple[str, Path]]:
    packages = ("eagle3_jax", "kernels_pallas", "sharding", "checkpoints")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [(name.removesuffix(".__init__"), path) for name, path in zip(names, paths, strict=True)]


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_no_import_runs_upward(module, path):
    own = floor_of(module)
    assert own is not None
    for name in imports(path):
        floor = floor_of(name)
        assert floor is None or floor <= own, f"{module} imports {name} from a floor above"
