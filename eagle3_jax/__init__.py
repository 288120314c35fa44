"""EAGLE-3 speculative decoding in JAX.

The public names are resolved when first used (PEP 562), so that `import eagle3_jax` imports nothing
else and each of the four packages of this distribution can be imported first.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import checkpoints as checkpoints
    import kernels_pallas as kernels
    import sharding as sharding
    from eagle3_jax.chat import Chat
    from eagle3_jax.configs import DrafterConfig, Sampling, Speculation, TrainConfig, VerifierConfig
    from eagle3_jax.contracts import (
        CapacityError,
        ContractError,
        DraftHidden,
        Eagle3Error,
        FeatureSpec,
        LoadError,
        RequestError,
        UnsupportedError,
        VerifierFeatures,
    )
    from eagle3_jax.drafter import Drafter
    from eagle3_jax.generation import generate, stream
    from eagle3_jax.load import load_drafter, load_verifier, recommended_speculation
    from eagle3_jax.training.evaluation import evaluate
    from eagle3_jax.training.synth import SynthConfig, synthesise
    from eagle3_jax.training.trainer import train
    from eagle3_jax.verifier import Verifier

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "Chat",
    "ContractError",
    "DraftHidden",
    "Drafter",
    "DrafterConfig",
    "Eagle3Error",
    "FeatureSpec",
    "LoadError",
    "RequestError",
    "Sampling",
    "Speculation",
    "SynthConfig",
    "TrainConfig",
    "UnsupportedError",
    "Verifier",
    "VerifierConfig",
    "VerifierFeatures",
    "__version__",
    "checkpoints",
    "evaluate",
    "generate",
    "kernels",
    "load_drafter",
    "load_verifier",
    "recommended_speculation",
    "sharding",
    "stream",
    "synthesise",
    "train",
]

_PACKAGES = {"checkpoints": "checkpoints", "sharding": "sharding", "kernels": "kernels_pallas"}
_MARKED = ("checkpoints", "sharding")
_MODULES = {
    "eagle3_jax.chat": ("Chat",),
    "eagle3_jax.configs": (
        *("DrafterConfig", "Sampling", "Speculation", "TrainConfig", "VerifierConfig"),
    ),
    "eagle3_jax.contracts": (
        *("CapacityError", "ContractError", "DraftHidden", "Eagle3Error", "FeatureSpec"),
        *("LoadError", "RequestError", "UnsupportedError", "VerifierFeatures"),
    ),
    "eagle3_jax.drafter": ("Drafter",),
    "eagle3_jax.generation": ("generate", "stream"),
    "eagle3_jax.load": ("load_drafter", "load_verifier", "recommended_speculation"),
    "eagle3_jax.training.evaluation": ("evaluate",),
    "eagle3_jax.training.synth": ("SynthConfig", "synthesise"),
    "eagle3_jax.training.trainer": ("train",),
    "eagle3_jax.verifier": ("Verifier",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def check_packages() -> None:
    """Make sure that `checkpoints` and `sharding` are this distribution's.

    Both names are common, so a script or folder of a user's may come before them on the path.

    Raises:
        ImportError: names the foreign file.
    """
    for name in _MARKED:
        package = importlib.import_module(name)
        found = getattr(package, "EAGLE3_JAX_MARK", None)
        if found != f"eagle3-jax {__version__}":
            where = getattr(package, "__file__", None) or list(getattr(package, "__path__", "?"))[0]
            what = f"is of {found}" if found else "is another package"
            raise ImportError(
                f"eagle3_jax {__version__} needs its own package {name!r}, but {where} {what} and "
                "comes first on the path; rename it, or run from another folder",
                name=name,
                path=where,
            )


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        check_packages()
        value = importlib.import_module(_PACKAGES[name])
    elif name in _HOME:
        check_packages()
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
