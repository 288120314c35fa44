"""Training a drafter: online features, training-time test through the loop, resumable runs."""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from checkpoints.drafters import Manifest, write_drafter
from checkpoints.store import Store
from checkpoints.tensors import read_json, write_json
from eagle3_jax.configs import Speculation, TrainConfig
from eagle3_jax.contracts import RequestError, UnsupportedError
from eagle3_jax.drafter import Drafter
from eagle3_jax.generation import generate
from eagle3_jax.load import DTYPES
from eagle3_jax.loop import run as run_loop
from eagle3_jax.loop.learn import Batches, LearnStages, LearnState, Tally, empty_tally
from eagle3_jax.states import arrays_of
from eagle3_jax.training.data import Document, Packed, read_documents, split
from eagle3_jax.training.features import Readings
from eagle3_jax.training.start import DrafterShape, new_drafter
from eagle3_jax.verifier import Verifier
from sharding.mesh import shape_of
from sharding.placement import put, shardings, to_host
from sharding.processes import is_first, meet

UPDATES_A_CALL = 10
"""Updates of one compiled call; the progress bar moves that often."""


def optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW after clipping; linear warm-up, then cosine to a tenth of the peak."""
    warmup = max(int(config.warmup * config.updates), 1)
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        warmup,
        max(config.updates, warmup + 1),
        config.learning_rate * 0.1,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(rate, config.beta1, config.beta2, weight_decay=config.weight_decay),
    )


def train(
    verifier: Verifier,
    data: Path,
    run: Path,
    config: TrainConfig = TrainConfig(),
    shape: DrafterShape = DrafterShape(),
    boundaries: tuple[int, ...] | None = None,
    progress: bool = False,
    resume: bool = False,
    start: Drafter | None = None,
    readings: Path | None = None,
    spread: bool = True,
) -> dict[str, Any]:
    """Train a drafter for a verifier on JSONL rows; features are computed as it goes.

    Over a mesh rows lie over its data axis. Several processes call this together and see one file
    system; a run goes on over another mesh than it was begun on.

    Args:
        verifier: frozen.
        data: training rows, as `eagle3_jax.training.data` reads them.
        run: folder of the run: `checkpoints/`, `drafter/` (the best so far by held-out accept
            length), `run.json`, `log.jsonl`.
        config: how.
        shape: the drafter's sizes.
        boundaries: the features it is fed; None is the default ones.
        progress: show a bar on standard error.
        resume: go on from the run's last checkpoint.
        start: a drafter to start from, in place of a new one.
        readings: a folder that keeps what the verifier says of the rows, so that later epochs and
            runs over the same rows need not read them again; None reads them as they come.
        spread: over a mesh, whether the drafter's matrices and moments lie over its data axis; else
            they are whole on every device.

    Returns:
        `run`, `checkpoint`, `tokens`, `accept_length`, `loss`, `accuracy_by_step`,
        `tokens_per_second`.

    Raises:
        RequestError: bad data, a run that exists without `resume`, a resume under other settings,
            a batch that a mesh does not divide, or a loss that is no number any more.
        UnsupportedError: kept readings and several processes.
    """
    if config.batch % (data_size := shape_of(verifier.mesh).data):
        raise RequestError(
            f"train batch {config.batch} does not divide over data {data_size} of the mesh; name a "
            "multiple of it"
        )
    if readings is not None and jax.process_count() > 1:
        raise UnsupportedError(
            f"kept readings are written by one process, and there are {jax.process_count()}; "
            "leave readings out"
        )
    documents = read_documents(Path(data), verifier.config.vocab_size)
    learned, held = split(documents, config.held_out)
    counts = np.zeros(verifier.config.vocab_size, np.int64)
    for document in learned:
        np.add.at(counts, document.tokens[document.learn], 1)
    drafter = start or new_drafter(verifier, shape, boundaries, counts, config.seed)
    it = _Run(verifier, drafter, Path(run), config, learned, held, spread)
    if readings is not None:
        boundaries = drafter.spec.boundaries
        it.readings = Readings(Path(readings), verifier, it.packed, boundaries)
    return it.go(resume, progress)


class _Run:
    """One training run: its state on the device, its folder, its log."""

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        folder: Path,
        config: TrainConfig,
        learned: list[Document],
        held: list[Document],
        spread: bool = True,
    ):
        self.verifier, self.folder, self.config, self.held = verifier, folder, config, held
        self.packed = Packed(learned, config.length, config.seed, config.rows)
        self.readings: Readings | None = None
        transformation = optimiser(config)
        self.stages = LearnStages(
            verifier=verifier,
            optimiser=transformation,
            steps=config.steps,
            decay=config.step_decay,
            dtype=DTYPES[config.dtype] if config.dtype else verifier.dtype,
            spread=spread,
        )
        # A copy: every update donates the arrays, and the caller keeps its own.
        self.drafter = drafter = jax.tree.map(jnp.copy, drafter)
        init, where = transformation.init, None
        if verifier.mesh is not None:
            self.drafter = drafter = put(drafter, verifier.mesh, self.stages.specs(drafter))
            moments = jax.eval_shape(init, nnx.state(drafter, nnx.Param))
            where = shardings(verifier.mesh, self.stages.specs(moments))
        self.moments = jax.jit(init, out_shardings=where)(nnx.state(drafter, nnx.Param))
        self.settings = {
            "train": dataclasses.asdict(config),
            "drafter": dataclasses.asdict(drafter.config),
            "features": dataclasses.asdict(drafter.spec),
        }
        self.best = -math.inf
        self.last: dict[str, Any] = {}

    def go(self, resume: bool, progress: bool) -> dict[str, Any]:
        """Train to the end of the configuration."""
        done = self._open(resume)
        clock, since = time.perf_counter(), done
        tally = empty_tally(self.config.steps)
        with _bar(self.config.updates, done, progress and is_first()) as show:
            while done < self.config.updates:
                until_save = self.config.save_every - done % self.config.save_every
                count = min(UPDATES_A_CALL, until_save, self.config.updates - done)
                tally = jax.tree.map(jnp.add, tally, self._updates(done, count))
                done += count
                means = summary(tally)
                if not math.isfinite(means["loss"]):
                    raise RequestError(
                        f"the loss is {means['loss']} at update {done}: training diverged; lower "
                        f"learning_rate ({self.config.learning_rate}) and resume from the last "
                        f"checkpoint in {self.folder}"
                    )
                show(done, means)
                if done % self.config.save_every == 0 or done == self.config.updates:
                    tokens = (done - since) * self.config.batch * self.config.length
                    speed = tokens / (time.perf_counter() - clock)
                    self._save(done, {**means, "tokens_per_second": speed})
                    tally = empty_tally(self.config.steps)
                    clock, since = time.perf_counter(), done
        self.store.close()
        last = self.last or self._measure()
        return {
            "run": str(self.folder),
            "checkpoint": str(self.folder / "drafter"),
            "tokens": done * self.config.batch * self.config.length,
            "accept_length": last.get("accept_length"),
            "loss": last.get("held_out_loss", last.get("loss")),
            "accuracy_by_step": last.get("held_out_accuracy_by_step", []),
            "tokens_per_second": last.get("tokens_per_second"),
        }

    def _open(self, resume: bool) -> int:
        """Make or reopen the folder; the number of updates already done."""
        meet("before the run is opened")
        notes = self.folder / "run.json"
        if notes.exists() and not resume:
            raise RequestError(f"{self.folder} holds a run already; resume it, or name another")
        if resume and not notes.exists():
            raise RequestError(f"{self.folder} holds no run to resume")
        if resume:
            before = read_json(notes)
            now = _as_json(self.settings)
            other = [
                f"{part}.{key} was {before.get(part, {}).get(key)!r}, is {value!r}"
                for part, values in now.items()
                for key, value in values.items()
                if before.get(part, {}).get(key) != value
            ]
            if other:
                raise RequestError(f"the run was begun with other settings: {'; '.join(other)}")
        meet("the run can be opened")
        if is_first():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(notes, self.settings)
        meet("the run is open")
        self.store = Store(self.folder / "checkpoints")
        step = self.store.latest()
        if not resume or step is None:
            return 0
        graph, state = nnx.split(self.drafter)
        like = {"drafter": nnx.to_pure_dict(state), "moments": _plain(self.moments)}
        saved, kept = self.store.restore(step, like)
        nnx.replace_by_pure_dict(state, saved["drafter"])
        self.drafter = nnx.merge(graph, state)
        self.moments = _like(self.moments, saved["moments"])
        self.best, self.last = float(kept["best"]), dict(kept["last"])
        return step

    def _updates(self, done: int, count: int) -> Tally:
        """Run `count` updates on the device; the drafter and moments it held are donated."""
        tokens, starts, learn = self.packed.batches(done, count, self.config.batch)
        reading = None
        if self.readings is not None:
            reading = self.readings.take(self.packed.numbers(done, count, self.config.batch))
        state = self._state(self.drafter, self.moments, tokens, starts, learn, reading)
        state = run_loop(self.stages, state, jnp.asarray(count, jnp.int32))
        self.drafter, self.moments = state.drafter, state.moments
        return jax.tree.map(jnp.asarray, to_host(state.tally))

    def _state(self, drafter, moments, tokens, starts, learn, reading=None) -> LearnState:
        """Some batches to come."""
        state = LearnState(
            drafter=drafter,
            moments=moments,
            batches=Batches(
                tokens=jnp.asarray(tokens),
                starts=jnp.asarray(starts),
                learn=jnp.asarray(learn),
                reading=reading,
            ),
            cycle=jnp.zeros((), jnp.int32),
            tally=empty_tally(self.config.steps),
        )
        return self.stages.placed(state)

    def _save(self, done: int, means: dict[str, Any]) -> None:
        """Checkpoint, measure on held-out rows, and export where the drafter is the best so far."""
        row = {"update": done, **means, **self._measure()}
        self.last = row
        score = row.get("accept_length", -row["loss"])
        better = score >= self.best
        self.best = max(self.best, score)
        _, state = nnx.split(self.drafter)
        self.store.save(
            done,
            {"drafter": nnx.to_pure_dict(state), "moments": _plain(self.moments)},
            {"best": self.best, "last": _as_json(row)},
        )
        if is_first():
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(_as_json(row)) + "\n")
        if better:
            export(self.folder / "drafter", self.drafter, {**self.settings["train"], **row})

    def _measure(self) -> dict[str, Any]:
        """Loss, agreement and accept length on held-out rows; nothing where none are held out."""
        if not self.held:
            return {}
        out = {}
        if sum(len(document.tokens) for document in self.held) >= self.config.length:
            packed = Packed(self.held, self.config.length, self.config.seed)
            count = max(min(packed.rows // self.config.batch, 4), 1)
            tokens, starts, learn = packed.batches(0, count, self.config.batch)
            still = dataclasses.replace(self.stages, optimiser=_STILL)
            copy = jax.tree.map(jnp.copy, self.drafter)
            nothing = _STILL.init(nnx.state(self.drafter, nnx.Param))
            state = self._state(copy, nothing, tokens, starts, learn)
            tally = run_loop(still, state, jnp.asarray(count, jnp.int32)).tally
            means = summary(to_host(tally))
            out["held_out_loss"] = means["loss"]
            out["held_out_accuracy_by_step"] = means["accuracy_by_step"]
        prompts = [p for p in map(_prompt, self.held[:16]) if p]
        if prompts:
            decoded = generate(
                self.verifier,
                self.drafter,
                prompts,
                max_new_tokens=64,
                speculation=Speculation(depth=min(self.config.steps, 5)),
            )
            out["accept_length"] = decoded.stats.accept_length
            out["acceptance_by_depth"] = list(decoded.stats.acceptance_by_depth)
        return out


_STILL = optax.set_to_zero()
"""An optimiser that changes nothing, for measuring through the same loop."""


def _prompt(document: Document) -> list[int]:
    """What precedes the first learned token; half of a document learned from its beginning."""
    first = int(np.argmax(document.learn)) if document.learn.any() else 0
    if first < 2:
        first = min(len(document.tokens) // 2, 128)
    return document.tokens[:first][-512:].tolist()


def summary(tally: Tally) -> dict[str, Any]:
    """Means of a tally: `loss` (nats, step 0), `loss_by_step`, `accuracy_by_step`."""
    learned = np.maximum(np.asarray(tally.learned), 1)
    rows = np.maximum(np.asarray(tally.rows), 1)
    losses = (np.asarray(tally.loss) / learned).tolist()
    return {
        "loss": losses[0],
        "loss_by_step": losses,
        "accuracy_by_step": (np.asarray(tally.correct) / rows).tolist(),
    }


def export(folder: Path, drafter: Drafter, training: dict[str, Any], dtype=None, recommended=None):
    """Write a drafter folder; of several processes, which all call this, the first one writes.

    Args:
        folder: made where missing.
        drafter: what is written.
        training: notes for the manifest.
        dtype: of the stored matrices; None stores them as they are.
        recommended: settings for the manifest.
    """
    arrays = {}
    for name, array in to_host(arrays_of(drafter)).items():
        small = "norm" in name or not np.issubdtype(array.dtype, np.floating)
        arrays[name] = array if small or dtype is None else array.astype(dtype)
    if not is_first():
        return
    manifest = Manifest(
        config=drafter.config,
        spec=drafter.spec,
        recommended=dict(recommended or {}),
        training=_as_json(training),
    )
    write_drafter(folder, manifest, arrays)


def _as_json(value: Any) -> Any:
    """What JSON would give back."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _plain(moments: Any) -> list[jax.Array]:
    """Optimiser state as a list of arrays, whose order optax fixes."""
    return jax.tree.leaves(moments)


def _like(moments: Any, leaves: list[jax.Array]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(moments), leaves)


class _bar:
    """A rich progress bar with loss and agreement by step; silent unless asked for."""

    def __init__(self, total: int, done: int, visible: bool):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("update {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            disable=not visible,
        )
        self._task = self._progress.add_task("", total=total, completed=done)

    def __enter__(self):
        self._progress.start()
        return self._show

    def __exit__(self, *_):
        self._progress.stop()

    def _show(self, done: int, means: dict[str, Any]) -> None:
        accuracy = " ".join(f"{value:.2f}" for value in means["accuracy_by_step"])
        self._progress.update(
            self._task,
            completed=done,
            description=f"loss {means['loss']:.3f} accuracy by step {accuracy}",
        )
