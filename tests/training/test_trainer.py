"""Training: the loss of the right token, runs that resume exactly, drafters that improve."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from eagle3_jax.configs import TrainConfig
from eagle3_jax.contracts import RequestError
from eagle3_jax.load import load_drafter
from eagle3_jax.loop import run as run_loop
from eagle3_jax.loop.learn import Batches, LearnStages, LearnState, chain_logits, empty_tally
from eagle3_jax.testing import tiny_drafter, tiny_verifier
from eagle3_jax.training import trainer
from eagle3_jax.training.start import DrafterShape, new_drafter
from eagle3_jax.training.trainer import summary, train

STEPS = 3
CONFIG = TrainConfig(
    steps=STEPS, updates=20, batch=4, length=32, save_every=10, held_out=0.1, learning_rate=3e-3
)
SHAPE = DrafterShape(num_heads=2, draft_vocab_size=40)
BOUNDARIES = (1, 2, 4)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Forty rows of the tiny verifier's own making: short patterns, learned after five tokens."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(40):
            tokens = np.tile(rng.integers(2, 40, 4), 12)[: int(rng.integers(20, 48))].tolist()
            row = {"id": f"row{i}", "tokens": tokens, "loss": [[5, len(tokens)]]}
            file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "whole"
    verifier = tiny_verifier("llama")
    return folder, train(verifier, rows, folder, CONFIG, SHAPE, BOUNDARIES)


def one_cycle(learn, starts=None, steps=STEPS):
    """The tally of one learning cycle over a random text with the given loss mask."""
    verifier, drafter = tiny_verifier("llama"), tiny_drafter("llama")
    tokens = jax.random.randint(jax.random.key(2), learn.shape, 2, 64)
    still = optax.set_to_zero()
    stages = LearnStages(verifier=verifier, optimiser=still, steps=steps, decay=0.8)
    starts = jnp.zeros_like(tokens) if starts is None else starts
    state = LearnState(
        drafter=jax.tree.map(jnp.copy, drafter),
        moments=still.init(nnx.state(drafter, nnx.Param)),
        batches=Batches(tokens=tokens[None], starts=starts[None], learn=learn[None]),
        cycle=jnp.zeros((), jnp.int32),
        tally=empty_tally(steps),
    )
    return tokens, run_loop(stages, state, jnp.asarray(1, jnp.int32)).tally


@pytest.mark.parametrize("predicted", [2, 7, 15])
def test_the_loss_is_that_of_the_predicted_token(predicted):
    """Learn from one token alone: step i takes the loss of root predicted - 2 - i, nothing else.

    The public trainers are one or two positions off here.
    """
    learn = jnp.zeros((1, 16), bool).at[0, predicted].set(True)
    tokens, tally = one_cycle(learn)
    verifier, drafter = tiny_verifier("llama"), tiny_drafter("llama")
    scores = verifier.score(tokens, drafter.spec.boundaries)
    starts = jnp.zeros_like(tokens)
    logits = chain_logits(drafter, verifier, scores.features, tokens, starts, STEPS)
    vocabulary = drafter.vocabulary[...]
    teacher = scores.logits[0, predicted - 1]
    for step in range(STEPS):
        root = predicted - 2 - step
        if root < 0:
            assert float(tally.rows[step]) == 0
            continue
        assert float(tally.rows[step]) == 1
        mine = logits[step][0, root]
        best = int(jnp.argmax(teacher))
        right = int(vocabulary[jnp.argmax(mine)]) == best
        assert float(tally.correct[step]) == float(right)
        sayable = best in vocabulary.tolist()
        assert float(tally.learned[step]) == float(sayable)
        if sayable:
            wanted = optax.softmax_cross_entropy(mine, jax.nn.softmax(teacher[vocabulary]))
            np.testing.assert_allclose(tally.loss[step], wanted, rtol=1e-4)


def test_nothing_is_judged_across_documents():
    starts = jnp.where(jnp.arange(16) < 9, 0, 9)[None].astype(jnp.int32)
    _, tally = one_cycle(jnp.ones((1, 16), bool), starts)
    # A document of n tokens has n - 2 - step roots that predict a token of it.
    assert tally.rows.tolist() == [(9 - 2 - i) + (7 - 2 - i) for i in range(STEPS)]


def test_training_improves_and_reports(trained):
    folder, result = trained
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["update"] for row in log] == [10, 20]
    assert log[1]["loss"] < log[0]["loss"]
    assert log[1]["held_out_accuracy_by_step"][0] > log[0]["held_out_accuracy_by_step"][0] - 0.05
    assert result["tokens"] == 20 * 4 * 32
    assert result["loss"] == log[1]["held_out_loss"]
    assert 1.0 <= result["accept_length"] <= STEPS + 1
    assert len(result["accuracy_by_step"]) == STEPS
    drafter = load_drafter(folder, tiny_verifier("llama"))
    assert drafter.spec.boundaries == BOUNDARIES
    fresh = new_drafter(tiny_verifier("llama"), SHAPE, BOUNDARIES, np.ones(64, np.int64), 0)
    assert not np.allclose(drafter.fusion.kernel[...], fresh.fusion.kernel[...])


def test_a_killed_run_resumes_to_the_same_weights(rows, trained, tmp_path, monkeypatch):
    verifier = tiny_verifier("llama")
    folder = tmp_path / "run"
    updates = trainer._Run._updates

    def killed(self, done, count):
        if done >= 10:
            raise KeyboardInterrupt
        return updates(self, done, count)

    with monkeypatch.context() as patch:
        patch.setattr(trainer._Run, "_updates", killed)
        with pytest.raises(KeyboardInterrupt):
            train(verifier, rows, folder, CONFIG, SHAPE, BOUNDARIES)
    train(verifier, rows, folder, CONFIG, SHAPE, BOUNDARIES, resume=True)
    whole = [json.loads(x) for x in (trained[0] / "log.jsonl").read_text().splitlines()]
    parts = [json.loads(x) for x in (folder / "log.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]
    assert parts[-1]["held_out_loss"] == whole[-1]["held_out_loss"]


def test_runs_are_not_overwritten_or_resumed_under_other_settings(rows, trained):
    verifier = tiny_verifier("llama")
    with pytest.raises(RequestError, match="holds a run already"):
        train(verifier, rows, trained[0], CONFIG, SHAPE, BOUNDARIES)
    other = dataclasses.replace(CONFIG, learning_rate=1e-4)
    with pytest.raises(RequestError, match="learning_rate was 0.003, is 0.0001"):
        train(verifier, rows, trained[0], other, SHAPE, BOUNDARIES, resume=True)
    with pytest.raises(RequestError, match="holds no run to resume"):
        train(verifier, rows, trained[0] / "none", CONFIG, SHAPE, BOUNDARIES, resume=True)


def test_a_diverged_loss_is_named(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "summary", lambda tally: {**summary(tally), "loss": float("nan")})
    with pytest.raises(RequestError, match="diverged; lower learning_rate"):
        train(tiny_verifier("llama"), rows, tmp_path / "run", CONFIG, SHAPE, BOUNDARIES)


def test_a_run_with_kept_readings_learns_the_same(rows, trained, tmp_path):
    verifier = tiny_verifier("llama")
    kept = tmp_path / "readings"
    train(verifier, rows, tmp_path / "run", CONFIG, SHAPE, BOUNDARIES, readings=kept)
    whole, other = (
        [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in (trained[0], tmp_path / "run")
    )
    np.testing.assert_allclose(other, whole, rtol=1e-4)
