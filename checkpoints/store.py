"""Training state in Orbax checkpoints: numbered steps under one folder, the last few kept."""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Store:
    """Numbered checkpoints of one run.

    A checkpoint is written beside and renamed when whole, so that a run killed while saving
    resumes from the one before.

    Args:
        folder: made where missing.
        keep: how many checkpoints stay.
    """

    def __init__(self, folder: Path, keep: int = 2):
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._manager = ocp.CheckpointManager(
            Path(folder).absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )

    def latest(self) -> int | None:
        """The newest step, None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Save a pytree of arrays and a JSON object; returns when both are on disk."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes)
            ),
        )
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state saved at `step`, shaped and placed like the abstract or concrete `like`.

        Raises:
            ValueError: Orbax's own message where shapes or keys differ.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        out = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract), notes=ocp.args.JsonRestore()
            ),
        )
        return out["state"], dict(out["notes"] or {})

    def close(self) -> None:
        """Wait for what is being written, and let go of the folder."""
        self._manager.close()
