"""Joining and leaving; `make check NAME=two_processes` runs and loses real ones."""

import os

import jax
import pytest

from eagle3_jax.contracts import RequestError
from sharding import processes
from sharding.processes import (
    Processes,
    is_first,
    meet,
    only_python_prints,
    start_processes,
    together,
)


def test_all_three_or_the_cluster_s_environment():
    with pytest.raises(RequestError, match="give all three, or cluster alone"):
        Processes(count=2)
    with pytest.raises(RequestError, match="give all three, or cluster alone"):
        Processes(coordinator="a:1", count=2)
    with pytest.raises(RequestError, match="give all three, or cluster alone"):
        Processes(cluster=True, coordinator="a:1", count=2, index=0)
    with pytest.raises(RequestError, match="process index 2 must be at least 0, below 2"):
        Processes(coordinator="a:1", count=2, index=2)
    assert Processes().heartbeat_seconds < 60


def test_one_process_alone_starts_nothing():
    start_processes(Processes())
    assert not jax.distributed.is_initialized()
    assert is_first()
    meet("nobody")
    with together():
        pass


def test_a_start_that_fails_is_one_line():
    jax.devices()  # too late, whoever else there is
    with pytest.raises(RequestError, match="the processes did not come together: .*before") as said:
        start_processes(Processes(coordinator="127.0.0.1:1", count=2, index=1, wait_seconds=1))
    assert "\n" not in str(said.value)


class Ended(Exception):
    """In the place of the process's end."""


def test_a_lost_process_ends_this_one_with_the_cause(monkeypatch, capsys):
    def end(status):
        raise Ended(status)

    monkeypatch.setattr(processes.os, "_exit", end)
    lost = jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed:\nclosed by peer")
    with pytest.raises(jax.errors.JaxRuntimeError), together():
        raise lost
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(Ended, match="1"), together():
        raise lost
    said = capsys.readouterr().err
    assert said.startswith("eagle3: error: process 0 of 1 ends, since another one is lost")
    assert "Gloo all-reduce failed: closed by peer; start all again, and resume" in said
    with pytest.raises(ZeroDivisionError), together():
        raise ZeroDivisionError


def test_what_is_printed_below_python_goes_to_standard_error(capfd):
    with only_python_prints():
        os.write(1, b"native\n")
    os.write(1, b"ours\n")
    out, err = capfd.readouterr()
    assert (out, err) == ("ours\n", "native\n")
