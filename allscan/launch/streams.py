"""The streams on which a communicator's launches follow one another. Without GPUs there are none."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..bindings import cuda_driver
from ..bindings.torch_compat import capturing, current_device, current_stream_of

# Priorities of a communicator's own streams. SCANS: what other ranks wait for. LONG: kernels of few long programs,
# which are to begin before what is left of the many short ones on the caller's stream
SCANS, LONG = -2, -1


class Streams:
    """Of one communicator, on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.index = device.index
        self._last: torch.cuda.Stream | None = None  # where the last launch was, and its handle
        self.last_number: int | None = None
        self._own: dict[int, torch.cuda.Stream] = {}
        self._looking: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._known: dict[int, torch.cuda.Stream] = {}
        # what is released behind a capture, and its memory
        self.later: list[tuple[SideStream, tuple[object, ...]]] = []

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return self.cuda and capturing()

    def number(self) -> int:
        """The handle of the current stream."""
        return current_stream_of(self.index) if self.cuda else 0

    def current(self) -> torch.cuda.Stream:
        """torch.cuda.current_stream(), without another object for the same stream."""
        number = current_stream_of(self.index)
        stream = self._known.get(number)
        if stream is None:
            stream = self._known[number] = torch.cuda.current_stream(self.device)
        return stream

    def synchronize(self) -> None:
        """Wait for this rank's kernels."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
            self.later.clear()

    def release_later(self, side: SideStream, memory: tuple[object, ...]) -> None:
        """With the first launch that is not captured."""
        self.later.append((side, memory))

    def _release_later(self) -> None:
        later, self.later = self.later, []
        for side, memory in later:
            side.release(memory)

    def follow(self) -> None:
        """Put the current stream behind what was launched on another one. In a capture the order is the caller's."""
        if not self.cuda:
            return
        if self.later and not capturing():
            self._release_later()
        number = current_stream_of(self.index)
        if number != self.last_number and not capturing():
            stream = self.current()
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last, self.last_number = stream, number

    def peek(self, words: torch.Tensor) -> list[Any]:
        """What is in this rank's ``words`` now, whatever its streams are doing."""
        if not self.cuda:
            return words.tolist()
        if self._looking is None:
            self._looking = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._looking):
            return words.tolist()

    def side(self, priority: int = SCANS) -> AbstractContextManager[Callable[[], None]]:
        """The communicator's own stream of this priority, put behind the current one. With SCANS what is launched on
        the current one next comes behind the beginning of this one, so that it does not take all room first. Gives
        ``join``, which makes the current stream wait for what was launched inside; memory that is used there may not be
        given back before. Inside there may be a stream of another priority, which is joined inside, too."""
        return Side(self, priority) if self.cuda else contextlib.nullcontext(_nothing)

    def put_behind(self, later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
        """``later`` goes on when ``earlier`` has done what it was given so far."""
        if self._event is None:
            self._event = torch.cuda.Event()  # one for all times: half of Stream.wait_stream
        self._event.record(earlier)
        later.wait_event(self._event)

    def side_stream(self) -> SideStream:
        """The same stream, but the current one goes on at once. In a CUDA graph's capture it is the current stream:
        there nothing else orders a communicator's launches."""
        return SideStream(self)

    def own(self, priority: int) -> torch.cuda.Stream:
        """The communicator's own stream of this priority."""
        if priority not in self._own:
            self._own[priority] = private_stream(self.device, priority)
        return self._own[priority]


_idle: dict[tuple[torch.device, int], list[int]] = {}  # private streams that nothing holds, by device and priority


def private_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream that no other code is given: what another thread launches is not captured with ours. Once nothing holds
    it, it is not destroyed, since torch's allocator may know it, but given to whoever asks next."""
    idle = _idle.setdefault((device, priority), [])
    with torch.cuda.device(device):
        try:
            number = idle.pop()
        except IndexError:
            number = cuda_driver.new_stream(priority)
        stream = _PrivateStream(number, device)
    stream.idle = idle
    return stream


@functools.cache
def table_stream(device: torch.device) -> torch.cuda.Stream:
    """On which tables are copied to this GPU, in whose memory they lie."""
    return private_stream(device)


class _PrivateStream(torch.cuda.ExternalStream):
    """No weak references to it, as weakref.finalize has one: torch (2.11) does not clear those to CUDA streams,
    and the interpreter's last garbage collection then reads freed memory."""

    idle: list[int]

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.idle.append(self.cuda_stream)


def _nothing() -> None:
    pass


class Side:
    """See ``Streams.side``; torch.cuda.stream would take 7 us more. With ``done``, which is then recorded behind
    what was launched inside, the current stream goes on at once."""

    def __init__(self, streams: Streams, priority: int, done: torch.cuda.Event | None = None) -> None:
        self._streams, self._stream, self._done, self.priority = streams, streams.own(priority), done, priority
        self._first = done is None and priority == SCANS

    def __enter__(self) -> Callable[[], None]:
        self.current, self._device = self._streams.current(), current_device()
        self._streams.put_behind(self._stream, self.current)
        if self._first:
            self._streams.put_behind(self.current, self._stream)
        torch.cuda.set_stream(self._stream)
        return self._join

    def __exit__(self, *error: object) -> None:
        if self._done is not None:
            self._done.record(self._stream)
        torch.cuda.set_stream(self.current)
        if self._device != self._streams.device.index:  # set_stream has left it
            torch.cuda.set_device(self._device)

    def _join(self) -> None:
        self._streams.put_behind(self.current, self._stream)


class SideStream:
    """See ``Streams.side_stream``: a context manager, and what was launched inside."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._side = streams, None
        if streams.cuda and not streams.capturing():
            self._done = torch.cuda.Event()
            self._side = Side(streams, SCANS, self._done)

    def __enter__(self) -> SideStream:
        if self._side is not None:
            self._side.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._side is not None:
            self._side.__exit__(*error)

    def wait(self, memory: tuple[object, ...]) -> None:
        """Put the current stream behind it, and release ``memory``. Raises RuntimeError in a capture, which goes on, if
        it was launched outside."""
        if self._side is None:
            return
        if self._streams.capturing():
            raise RuntimeError("a scan that was begun before a CUDA graph's capture is to be waited for before it, too")
        if not self.release(memory):
            self._streams.current().wait_event(self._done)

    def release(self, memory: tuple[object, ...]) -> bool:
        """``memory``, which it uses, may be given back behind it: the stream that was current when it was launched
        waits, and the current one. False if they must not, since one is captured and the graph would wait for what is
        none of its own: then the memory is kept until behind the capture."""
        side, streams = self._side, self._streams
        if side is None:
            return True
        origin, current = side.current, streams.current()
        if streams.capturing() or (origin != current and cuda_driver.is_captured(origin.cuda_stream)):
            streams.release_later(self, memory)
            return False
        for stream in {origin, current}:
            stream.wait_event(self._done)
        return True
