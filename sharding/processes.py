"""Several processes as one: their start, what only the first does, and an end when one is lost.

Every process runs the same program over the same inputs and holds its own devices of one mesh; all
see one file system. Where one is gone the others cannot go on: they end, and a run resumes from its
last checkpoint.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from eagle3_jax.contracts import RequestError

HEARTBEAT_SECONDS = 20
"""A process that has said nothing for so long is lost; jax's own default is 100."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """Where the processes of one program find each other.

    Attributes:
        cluster: the cluster's own environment says it (Slurm, Open MPI, Kubernetes and others that
            jax detects). Elsewhere the next three do, all of them.
        coordinator: address and port of the first process, `HOST:PORT`.
        count: processes in all.
        index: which of them this is, from 0.
        heartbeat_seconds: after which a silent process is lost.
        wait_seconds: that the processes wait for each other at the start.
    """

    cluster: bool = False
    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    heartbeat_seconds: int = HEARTBEAT_SECONDS
    wait_seconds: int = 300

    def __post_init__(self):
        given = [x is not None for x in (self.coordinator, self.count, self.index)]
        if any(given) and (self.cluster or not all(given)):
            raise RequestError(
                f"processes: coordinator {self.coordinator}, count {self.count} and index "
                f"{self.index}: give all three, or cluster alone where its environment says them"
            )
        if self.count is not None and self.index is not None and not 0 <= self.index < self.count:
            raise RequestError(f"process index {self.index} must be at least 0, below {self.count}")


def start_processes(processes: Processes) -> None:
    """Join the other processes; `jax.devices()` are those of all of them afterwards.

    To be called before anything else of jax is; does nothing where no others are named.

    Raises:
        RequestError: no cluster is found, or the others are not.
    """
    p = processes
    if not p.cluster and p.coordinator is None:
        return
    try:
        jax.distributed.initialize(
            p.coordinator,
            p.count,
            p.index,
            initialization_timeout=p.wait_seconds,
            heartbeat_timeout_seconds=p.heartbeat_seconds,
        )
    except (RuntimeError, ValueError) as error:
        raise RequestError(f"the processes did not come together: {_line(error)}") from None


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def meet(where: str) -> None:
    """Wait until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around what several processes do together; does nothing for one alone.

    Where another process is lost this one ends at once, with status 1 and the cause on standard
    error: an ordinary exit would wait for the lost one first.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not jax.distributed.is_initialized():
            raise
        print(
            f"eagle3: error: process {jax.process_index()} of {jax.process_count()} ends, since "
            f"another one is lost or failed: {_line(error)}; start all again, and resume",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


@contextlib.contextmanager
def only_python_prints() -> Iterator[None]:
    """Keep what libraries below Python print, as Gloo does, out of standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
