"""The public names: lazy, complete, and guarded against foreign packages."""

import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import eagle3_jax as e3

FIRST = ["eagle3_jax", "checkpoints.store", "sharding", "kernels_pallas", "eagle3_jax.generation"]


@pytest.mark.parametrize("module", FIRST)
def test_each_package_imports_first(module):
    code = (
        f"import sys, {module}\n"
        "assert 'jax' not in sys.modules or sys.argv[1] != 'eagle3_jax'\n"
        "import eagle3_jax as e3\n"
        "assert callable(e3.generate) and callable(e3.load_verifier)\n"
        "from eagle3_jax.generation import generate\n"
        "assert e3.generate is generate\n"
    )
    done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_resolve_and_are_listed():
    assert set(e3.__all__) <= set(dir(e3))
    for name in e3.__all__:
        assert getattr(e3, name) is not None
    assert e3.checkpoints.__name__ == "checkpoints"
    assert e3.kernels.__name__ == "kernels_pallas"
    assert e3.evaluate.__module__ == "eagle3_jax.training.evaluation"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'load_verifer'"):
        e3.load_verifer  # type: ignore  # noqa: B018


def test_version_is_the_distributions():
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    assert tomllib.loads(pyproject.read_text())["project"]["version"] == e3.__version__


@pytest.mark.parametrize("name", ["checkpoints", "sharding"])
@pytest.mark.parametrize("mark", [None, "eagle3-jax 0.0.1"])
def test_a_foreign_package_is_named(monkeypatch, name, mark):
    foreign = types.ModuleType(name)
    foreign.__file__ = "/elsewhere/checkpoints.py"
    if mark:
        foreign.EAGLE3_JAX_MARK = mark  # type: ignore
    monkeypatch.setitem(sys.modules, name, foreign)
    monkeypatch.delitem(vars(e3), "load_drafter", raising=False)
    with pytest.raises(ImportError, match="/elsewhere/checkpoints.py .*first on the path"):
        e3.load_drafter  # noqa: B018
