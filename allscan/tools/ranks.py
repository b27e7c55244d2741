"""Ranks for tests and examples: processes started here, on GPUs or in Triton's interpreter, or torchrun's."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..comm.heap import init

LOOPBACK = "127.0.0.1"
# Modules that the fork server imports for ranks without GPUs; torch imports torch._dynamo at an operator's first call
PRELOAD = ["allscan.tools.ranks", "torch._dynamo"]
_groups: dict[int, Any] = {}  # groups of on_first, by number of ranks


class Ranks:
    """``size`` processes with torch.distributed initialised, which run functions collectively until the block ends.

    Functions and arguments are pickled, so functions must be defined in importable modules. Ranks without GPUs run
    kernels in Triton's interpreter, and are forked from multiprocessing's fork server, which has imported torch, so
    that they start fast. CUDA does not survive a fork, so ranks with GPUs are spawned.

    Args:
        size: number of ranks.
        device: "cuda" (rank r on GPU r; with ``ALLSCAN_TRANSPORT=ipc`` ranks may share fewer GPUs), "cpu" (Triton's
            interpreter), or "auto".
        backend: torch.distributed's back end; default nccl on GPUs, gloo without GPUs or if ranks share them.
        share: whether ranks may share GPUs also over NVSHMEM, if NVSHMEM supports it (it does if the ranks have
            different host names).

    Raises:
        ValueError: if there are fewer GPUs than ranks.

    Example:
        >>> with Ranks(4) as ranks:
        ...     values = ranks.run(function, *arguments)     # function(*arguments) in every process; list by rank
    """

    def __init__(self, size: int, device: str = "auto", backend: str | None = None, share: bool = False) -> None:
        self.size = size
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        shared = self.device == "cuda" and size > torch.cuda.device_count()
        if shared and not share and os.environ.get("ALLSCAN_TRANSPORT") != "ipc":
            raise ValueError(f"{size} ranks need {size} GPUs, this machine has {torch.cuda.device_count()}")
        backend = backend or ("nccl" if self.device == "cuda" and not shared else "gloo")
        listening = socket.create_server((LOOPBACK, 0))  # TCPStore's own would listen on every address
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        environment = os.environ | {
            "TRITON_INTERPRET": "1" if self.device == "cpu" else "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        changed = environment  # a child must find this package and import its kernels before it runs our code
        if self.device == "cpu":
            multiprocessing.set_forkserver_preload(PRELOAD)
            changed = environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        context: Any = multiprocessing.get_context("spawn" if self.device == "cuda" else "forkserver")
        before = dict(os.environ)
        os.environ.update(changed)
        try:
            self.processes, self._pipes, self._calls = [], [], 0
            self._begun: set[int] = set()  # ranks that have answered a call
            for rank in range(size):
                mine, theirs = context.Pipe()
                arguments = ((rank, size, self.device, backend, self._store.port), theirs, sys.path, environment)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self._pipes.append(mine)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start ``function`` in every process; does not wait.

        Args:
            function: of an importable module.
            arguments: positional ones.

        Raises:
            AttributeError, TypeError, pickle.PicklingError: if one of them cannot be pickled.

        Example:
            >>> ranks.start(function, 3)
            >>> answers = ranks.results()
        """
        self._calls += 1
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # its process has ended: results() says so
                pipe.send((self._calls, function, arguments))

    def results(self, timeout: float = 300.0, after_failure: float | None = None) -> list:
        """Wait for the answers of all ranks to the last ``start``.

        Args:
            timeout: seconds; a rank that does not answer gives a TimeoutError, and prints its stack.
            after_failure: seconds until the other ranks must answer once a rank has failed, since they may wait for it.

        Returns:
            (value, None) or (None, exception) of every rank, by rank; a dead process gives a ProcessError.

        Raises:
            Nothing of the ranks: their errors are in the list.

        Example:
            >>> (value, error), *_ = ranks.results(timeout=60)
        """
        deadline, limit = time.monotonic() + timeout, f"within {timeout:g} s"
        answers: dict[int, tuple[Any, Exception | None]] = {}
        while waiting := [rank for rank in range(len(self._pipes)) if rank not in answers]:
            pipes = [self._pipes[rank] for rank in waiting]
            ready = multiprocessing.connection.wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._show(waiting)
                answers |= {rank: (None, TimeoutError(f"rank {rank} did not answer {limit}")) for rank in waiting}
            for rank in (rank for rank in waiting if self._pipes[rank] in ready):
                try:
                    call, answer = self._pipes[rank].recv()
                    if call != self._calls:
                        continue  # an answer to an earlier call that timed out
                except (EOFError, ConnectionError):
                    self.processes[rank].join(5.0)  # its pipe may be closed before it has ended
                    how = f"exit code {self.processes[rank].exitcode}"  # -9: by signal 9, as where memory runs out
                    answer = None, multiprocessing.ProcessError(f"the process of rank {rank} has ended ({how})")
                answers[rank] = answer
                self._begun.add(rank)
                if answer[1] is not None and after_failure is not None and time.monotonic() + after_failure < deadline:
                    deadline, limit = time.monotonic() + after_failure, f"{after_failure:g} s after rank {rank} failed"
        return [answers[rank] for rank in range(len(self._pipes))]

    def _show(self, ranks: list[int]) -> None:
        """Let these processes print their stacks, except those that may not have started: the signal kills them."""
        for rank in ranks:
            if rank in self._begun and self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR2)
        time.sleep(0.5)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> list:
        """Run ``function`` in every process.

        Args:
            function: of an importable module.
            arguments: positional ones.
            timeout: seconds; after a rank's failure the others have 30 s to answer.

        Returns:
            The values of ``function(*arguments)`` by rank.

        Raises:
            RuntimeError: with the tracebacks, if any rank failed or did not answer.

        Example:
            >>> assert max(ranks.run(largest_error, "zigzag")) < 1e-5
        """
        self.start(function, *arguments)
        return values_of(self.results(timeout, after_failure=30.0))

    def close(self, timeout: float = 20.0) -> None:
        """End all processes. The end of the ``with`` block calls it.

        Args:
            timeout: seconds; processes that have not ended by themselves by then are killed.

        Raises:
            Nothing.

        Example:
            >>> ranks.close()
        """
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join(5.0)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(20.0 if kind is None else 5.0)  # after an exception they may wait for each other


def values_of(answers: list) -> list:
    """The values of these results by rank; RuntimeError with the tracebacks if any rank failed."""
    failures = [
        f"rank {rank}: {getattr(error, 'text', error)}" for rank, (_, error) in enumerate(answers) if error is not None
    ]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [value for value, _ in answers]


def take_local_gpu() -> None:
    """Set torch's current GPU to the one of this process in a job: number LOCAL_RANK, or srun's SLURM_LOCALID, of the
    visible GPUs; if only one is visible, that one."""
    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
    count = torch.cuda.device_count()
    if local is None and count > 1:
        raise ValueError(f"set LOCAL_RANK, as torchrun does: this process sees {count} GPUs")
    torch.cuda.set_device(0 if count == 1 else int(local or 0))


class JobRanks:
    """The ranks of a job that torchrun or srun has started, in each of its processes.

    Rank 0 calls ``run`` as with Ranks; the other ranks call ``serve``. Rank 0 sends functions and arguments by pickle.
    An exception in a function ends its process; torchrun then ends the others, which may wait for it.
    """

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") != "1"
        self.device = "cuda" if on_gpu else "cpu"
        if on_gpu:
            take_local_gpu()
        dist.init_process_group("nccl" if on_gpu else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))  # rank 0 may take long

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 0.0) -> list:
        """The values of ``function(*arguments)`` by rank. timeout: not used."""
        self._send((function, arguments))
        return self._gather(function, arguments)

    def serve(self) -> None:
        """Run rank 0's functions until it calls ``close``."""
        while (work := self._send(None)) is not None:
            self._gather(*work)

    def close(self) -> None:
        if self.rank == 0:
            self._send(None)
        dist.destroy_process_group()

    def _send(self, work: Any) -> Any:
        box = [work]
        dist.broadcast_object_list(box, 0, group=self._control)
        return box[0]

    def _gather(self, function: Callable[..., Any], arguments: tuple) -> list:
        values: list = [None] * self.size
        dist.gather_object(function(*arguments), values if self.rank == 0 else None, 0, group=self._control)
        return values


def launch(main: Callable[[Ranks | JobRanks], int], count: int | None = None) -> int:
    """Return ``main(ranks)``, an exit status; ``ranks.run(function, ...)`` runs a function on every rank.

    In a job of torchrun or srun (with RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR set) the ranks are the job's
    processes, and ``main`` runs on rank 0. Otherwise this function starts ``count`` ranks, by default one per GPU, or 4
    processes in Triton's interpreter on a machine with fewer than 2 GPUs.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        job, status = JobRanks(), 0
        if job.rank == 0:
            status = main(job)
        else:
            job.serve()
        job.close()
        return status
    gpus = torch.cuda.device_count()
    with Ranks(count or gpus, "cuda") if gpus > 1 else Ranks(count or 4, "cpu") as ranks:
        return main(ranks)


def on_first(count: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(group, *arguments)`` on the first ``count`` ranks of the job; None on the others.

    All ranks must call it, since creating the group is collective: ``ranks.run(on_first, count, function, ...)``.
    """
    init()  # collective over the job; only some ranks create a communicator
    if count not in _groups:
        whole = count == dist.get_world_size()
        _groups[count] = dist.group.WORLD if whole else dist.new_group(list(range(count)))
    return function(_groups[count], *arguments) if dist.get_rank() < count else None


def _serve(which: tuple[int, int, str, str, int], pipe: Any, path: list[str], environment: dict[str, str]) -> None:
    """Main loop of a rank's process: run functions from the pipe. which: (rank, size, device, back end, port)."""
    rank, size, device, backend, port = which
    if environment["TRITON_INTERPRET"] != os.environ.get("TRITON_INTERPRET"):
        raise RuntimeError("create Ranks without GPUs before any other use of multiprocessing's fork server")
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    faulthandler.register(signal.SIGUSR2)
    gc.freeze()  # collections, as of comm.resync(), need not read what the fork server has imported
    store = dist.TCPStore(LOOPBACK, port)
    where: dict[str, Any] = {}
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        where = {"device_id": torch.device(device, rank)} if backend == "nccl" else {}
    else:
        torch.set_num_threads(1)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, calls), name="allscan-calls", daemon=True).start()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **where)
    while message := calls.get():
        call, function, arguments = pickle.loads(message)
        answer: tuple[Any, Exception | None]
        try:
            answer = (function(*arguments), None)
        except Exception as error:
            answer = (None, _portable(error))
        try:
            pipe.send((call, answer))
        except Exception as error:  # a value that cannot be pickled
            pipe.send((call, (None, RuntimeError(f"{answer!r}: {error}"))))
    dist.destroy_process_group()


def _receive(pipe: Any, calls: queue.SimpleQueue[bytes]) -> None:
    """Put the parent's messages into a queue, also while this rank computes or sends: the parent's send must not wait
    for a call that has timed out. End this process if the parent has ended."""
    with contextlib.suppress(EOFError, OSError):
        while message := pipe.recv_bytes():
            calls.put(message)
        return calls.put(message)
    os._exit(1)


def _portable(error: Exception) -> Exception:
    """``error`` with its traceback as ``text``; a RuntimeError with that text if it cannot be pickled."""
    text = traceback.format_exc()
    try:
        error.text = text  # type: ignore[attr-defined]
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(text)
    return error
