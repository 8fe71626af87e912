"""The way of a step's columns to the device and of its results back, beside the computation."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16


class Download(Protocol):
    """Tensors on their way to the host."""

    @property
    def is_ready(self) -> bool: ...

    def wait(self) -> None:
        """Until it is ready; raises nothing."""

    def take(self) -> list[torch.Tensor]:
        """On the host; waits, and raises RuntimeError when the device failed."""


class Transfers(Protocol):
    """Copies between pinned memory and one device."""

    def pinned(self, num_bytes: int) -> torch.Tensor: ...

    def upload(self, source: torch.Tensor, target: torch.Tensor, reuse: Any) -> Any:
        """Copies pinned memory to the device, after `reuse` (a mark, or None) and before what is launched next.
        Returns a mark of the copy's end."""

    def mark(self) -> Any:
        """The end of all that was launched so far."""

    def wait_host(self, mark: Any) -> None: ...

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """What they hold when all that was launched so far is done."""


class HostTransfers:
    """Transfers where the device is the host, as in Triton's interpreter: nothing is ever under way."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, source: torch.Tensor, target: torch.Tensor, reuse: Any) -> None:
        target.copy_(source)

    def mark(self) -> None:
        pass

    def wait_host(self, mark: Any) -> None:
        pass

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        return _HostDownload([tensor.clone() for tensor in tensors])


class _HostDownload:
    is_ready = True

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        pass

    def take(self) -> list[torch.Tensor]:
        return self._tensors


class CudaTransfers:
    """Transfers on a stream of their own; marks are events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: torch.Tensor, target: torch.Tensor, reuse: Any) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            if reuse is not None:
                self._stream.wait_event(reuse)
            target.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(copied)
        return copied

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_host(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        computed = self.mark()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            copies = []
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(copy.copy_(tensor, non_blocking=True))
                # Its memory is not to be used again before it has been read on this stream.
                tensor.record_stream(self._stream)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _CudaDownload(copies, done)


class _CudaDownload:
    def __init__(self, tensors: list[torch.Tensor], done: torch.cuda.Event) -> None:
        self._tensors = tensors
        self._done = done
        self._has_ended = False

    @property
    def is_ready(self) -> bool:
        if not self._has_ended:
            try:
                self._has_ended = self._done.query()  # type: ignore[no-untyped-call]
            except RuntimeError:
                # The device's error is an end too: who takes the result meets it.
                self._has_ended = True
        return self._has_ended

    def wait(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._done.synchronize()

    def take(self) -> list[torch.Tensor]:
        self._done.synchronize()
        return self._tensors


def make_transfers(device: torch.device) -> Transfers:
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()


class _Buffer:
    """One step's columns: pinned on the host, and on the device."""

    def __init__(self) -> None:
        self.host = torch.empty(0, dtype=torch.uint8)
        self.array: npt.NDArray[np.uint8] = self.host.numpy()
        self.device = self.host
        self.copied: Any = None
        self.used: Any = None


class Staging:
    """Sends the columns of each step in one copy. What `send` gives is good until `num_buffers` sends later."""

    def __init__(self, device: torch.device, transfers: Transfers, num_buffers: int = 3) -> None:
        self._device = device
        self._transfers = transfers
        self._buffers = [_Buffer() for _ in range(num_buffers)]
        self._next = 0

    def send(self, columns: Sequence[npt.NDArray[Any]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The columns on the device: packed [bytes] uint8, each at a multiple of 16 bytes, and one by one."""
        # All that reads the last step's columns has been launched by now.
        self._buffers[self._next - 1].used = self._transfers.mark()
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        self._transfers.wait_host(buffer.copied)
        offsets, size = pack_offsets([column.nbytes for column in columns])
        if size > len(buffer.array):
            buffer.host = self._transfers.pinned(2 * size)
            buffer.array = buffer.host.numpy()
            buffer.device = torch.empty(2 * size, dtype=torch.uint8, device=self._device)
            # Whose memory it was may be waiting to be computed.
            buffer.used = self._transfers.mark()
        for column, offset in zip(columns, offsets, strict=True):
            buffer.array[offset : offset + column.nbytes] = column.view(np.uint8)
        packed = buffer.device[:size]
        buffer.copied = self._transfers.upload(buffer.host[:size], packed, buffer.used)
        return packed, [view(packed, o, c.dtype, len(c)) for o, c in zip(offsets, columns, strict=True)]


def pack_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where columns of so many bytes begin, and the end of the last."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


_TORCH_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


def view(packed: torch.Tensor, offset: int, dtype: npt.DTypeLike, length: int) -> torch.Tensor:
    """The column [length] that begins at `offset`."""
    name = np.dtype(dtype)
    return packed[offset : offset + length * name.itemsize].view(_TORCH_DTYPES[name.name])
