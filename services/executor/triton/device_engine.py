"""The engine of a GPU: launches steps ahead of their results, and waits for nothing but what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quartet.services.executor.attention.interface import AttentionBackend
from quartet.services.executor.engine import Forward
from quartet.services.executor.forward_batch import ForwardBatch
from quartet.services.executor.input_batch import InputBatch, Step, flatten
from quartet.services.executor.kv_cache import KVCache
from quartet.services.executor.logprobs import GatheredLogprobs, logprob_entries
from quartet.services.executor.sampler import SamplerOutput
from quartet.services.executor.step_times import StepTimes
from quartet.services.executor.triton.decode_graphs import DecodeGraphs, EagerGraph, Graph, graph_sizes
from quartet.services.executor.triton.decoder import TritonDecoder
from quartet.services.executor.triton.device_sampler import DeviceSample, DeviceSampler
from quartet.services.executor.triton.staging import Download, Staging, make_transfers, pack_offsets, view
from quartet.shared.messages import FAILED_TOKEN_ID, TokenLogprobs

IntArray = npt.NDArray[np.int64]

# Of a decode batch, as they are packed; all but seq_lens are int64.
_GRAPH_COLUMNS = ("rows", "token_ids", "positions", "slot_mapping", "seq_lens")


@dataclass(slots=True)
class _DeviceForward(Forward):
    """logits [S, V] where a graph has computed them; logits_indices otherwise. rows, output_indices [S]."""

    logits: torch.Tensor | None
    logits_indices: torch.Tensor
    rows: torch.Tensor
    output_indices: torch.Tensor


class DeviceEngine:
    """An Engine. Rows' block tables, newest tokens and sampling state are kept on the device and follow the
    batch by deltas; a step's columns travel in one copy on a stream of its own, as its tokens do on their
    way back. Batches of decodes alone are replayed as graphs once `capture_graphs` was called."""

    def __init__(
        self,
        model: TritonDecoder,
        kv_cache: KVCache,
        attention: AttentionBackend,
        batch: InputBatch,
        device: torch.device,
        times: StepTimes | None = None,
    ) -> None:
        self.times = StepTimes() if times is None else times
        self._model = model
        self._kv_cache = kv_cache
        self._attention = attention
        self._batch = batch
        self._device = device
        self._sampler = DeviceSampler(batch.sampling, batch.max_num_seqs, device)
        self._transfers = make_transfers(device)
        self._staging = Staging(device, self._transfers)
        batch.block_table.follow()
        self._block_tables = torch.zeros(batch.block_table.table.shape, dtype=torch.int32, device=device)
        self._graphs: DecodeGraphs | None = None
        self._static = torch.empty(0, dtype=torch.uint8, device=device)
        self._outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def use_idle_time(self) -> bool:
        return False

    @torch.inference_mode()
    def add_rows(self, req_indices: Sequence[int]) -> None:
        self._sampler.add(req_indices)

    @torch.inference_mode()
    def forward(self, step: Step) -> Forward:
        size = None
        if self._graphs is not None and step.num_decodes == len(step.rows):
            size = self._graphs.size_for(step.num_decodes)
        return self._eager(step) if size is None else self._replay(step, size)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)

    @torch.inference_mode()
    def sample(self, step: Step, forward: Forward) -> DownloadedSample:
        assert isinstance(forward, _DeviceForward)
        logits = forward.logits
        if logits is None:
            logits = self._model.compute_logits(forward.hidden.index_select(0, forward.logits_indices))
        self.times.spent("logits")
        sample = self._sampler.sample(logits, forward.rows, forward.output_indices, step.sampled_rows)
        download = self._transfers.download([sample.token_ids, *(sample.logprobs or ())])
        num_logprobs = self._batch.sampling.num_logprobs[step.sampled_rows]
        return DownloadedSample(sample, download, num_logprobs)

    @torch.inference_mode()
    def profile(self) -> None:
        """Computes and draws from as many logits as a step can have, for its memory to be measured."""
        num_rows = min(self._batch.max_num_seqs, self._batch.max_num_batched_tokens)
        hidden = torch.zeros((num_rows, self._model.config.hidden_size), dtype=self._model.dtype, device=self._device)
        rows = torch.arange(num_rows, device=self._device)
        self._sampler.sample(self._model.compute_logits(hidden), rows, rows, np.arange(num_rows))

    # --- one by one -------------------------------------------------------------------------------

    def _eager(self, step: Step) -> _DeviceForward:
        query_start_loc = np.zeros(len(step.rows) + 1, np.int32)
        np.cumsum(step.counts, out=query_start_loc[1:])
        flat_rows, positions = flatten(step.rows, step.starts, step.counts)
        seq_lens = step.starts + step.counts
        _, columns = self._staging.send(
            [
                *self._common_columns(step),
                step.rows,
                flat_rows,
                self._batch.token_ids[flat_rows, positions].astype(np.int64),
                positions,
                step.slot_mapping,
                seq_lens.astype(np.int32),
                query_start_loc,
                query_start_loc[1:][step.samples].astype(np.int64) - 1,
            ]
        )
        rows, flat, token_ids, positions_, slot_mapping, seq_lens_, start_loc, logits_indices = columns[4:]
        self._append_blocks(columns[2], columns[3])
        batch = ForwardBatch(
            token_ids=self._known(token_ids, flat),
            positions=positions_,
            slot_mapping=slot_mapping,
            query_start_loc=start_loc,
            seq_lens=seq_lens_,
            block_tables=self._block_tables.index_select(0, rows),
            num_decodes=step.num_decodes,
            logits_indices=logits_indices,
            query_start_loc_list=query_start_loc.tolist(),
            seq_lens_list=seq_lens.tolist(),
        )
        self.times.spent("host")
        self._attention.prepare(batch)
        hidden = self._model.forward(batch, self._kv_cache, self._attention)
        return _DeviceForward(hidden, batch.query_start_loc_list, None, logits_indices, columns[0], columns[1])

    def _common_columns(self, step: Step) -> list[npt.NDArray[np.generic]]:
        places, block_ids = self._batch.block_table.take_appended()
        return [step.sampled_rows, step.output_indices, places, block_ids.astype(np.int32)]

    def _append_blocks(self, places: torch.Tensor, block_ids: torch.Tensor) -> None:
        if len(places):
            self._block_tables.view(-1).index_copy_(0, places, block_ids)

    def _known(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What the host does not know yet is the newest token of its row."""
        return torch.where(token_ids < 0, self._sampler.last_tokens.index_select(0, rows), token_ids)

    # --- graphs -----------------------------------------------------------------------------------

    def capture_graphs(
        self,
        *,
        max_seconds: float,
        max_bytes: int,
        make_graph: Callable[[], Graph] = EagerGraph,
        memory_used: Callable[[], int] = lambda: 0,
    ) -> None:
        """To be called before any step; makes steps of decodes alone graphs, as far as the bounds allow."""
        sizes = graph_sizes(self._batch.max_num_seqs)
        self._static = torch.zeros(self._layout(sizes[-1])[1], dtype=torch.uint8, device=self._device)
        graphs = DecodeGraphs(sizes, make_graph)
        with torch.inference_mode():
            graphs.capture(self._decode, max_seconds=max_seconds, max_bytes=max_bytes, memory_used=memory_used)
        self._graphs = graphs

    def _replay(self, step: Step, size: int) -> _DeviceForward:
        assert self._graphs is not None
        num_rows = step.num_decodes
        token_ids = self._batch.token_ids[step.rows, step.starts]
        graph_columns: list[npt.NDArray[np.generic]] = [
            step.rows,
            token_ids,
            step.starts,
            step.slot_mapping,
            (step.starts + 1).astype(np.int32),
        ]
        padded = [_padded(column, name, size) for name, column in zip(_GRAPH_COLUMNS, graph_columns, strict=True)]
        packed, columns = self._staging.send([*padded, *self._common_columns(step)])
        rows, output_indices, places, block_ids = columns[len(padded) :]
        self._append_blocks(places, block_ids)
        num_bytes = self._layout(size)[1]
        # Into the graph's own memory on the computing stream: the graph of the last step may still be running.
        self._static[:num_bytes].copy_(packed[:num_bytes])
        self.times.spent("host")
        self._graphs.replay(size)
        hidden, logits = self._outputs[size]
        return _DeviceForward(
            hidden[:num_rows], list(range(num_rows + 1)), logits[:num_rows], rows, rows, output_indices
        )

    @staticmethod
    def _layout(size: int) -> tuple[list[int], int]:
        return pack_offsets([size * (4 if name == "seq_lens" else 8) for name in _GRAPH_COLUMNS])

    def _decode(self, size: int) -> None:
        """The work of a decode batch of `size` rows, all in static memory; leaves it in `outputs`."""
        offsets, _ = self._layout(size)
        rows, token_ids, positions, slot_mapping, seq_lens = (
            view(self._static, offset, np.int32 if name == "seq_lens" else np.int64, size)
            for name, offset in zip(_GRAPH_COLUMNS, offsets, strict=True)
        )
        each = torch.arange(size + 1, device=self._device)
        batch = ForwardBatch(
            token_ids=self._known(token_ids, rows),
            positions=positions,
            slot_mapping=slot_mapping,
            query_start_loc=each.to(torch.int32),
            seq_lens=seq_lens,
            block_tables=self._block_tables.index_select(0, rows),
            num_decodes=size,
            logits_indices=each[:-1],
            query_start_loc_list=[],
            seq_lens_list=[],
        )
        self._attention.prepare(batch)
        hidden = self._model.forward(batch, self._kv_cache, self._attention)
        self._outputs[size] = hidden, self._model.compute_logits(hidden)


def _padded(column: npt.NDArray[np.generic], name: str, size: int) -> npt.NDArray[np.generic]:
    """A padding row has no context and writes no slot."""
    padded = np.full(size, -1 if name == "slot_mapping" else 0, np.int32 if name == "seq_lens" else np.int64)
    padded[: len(column)] = column
    return padded


class DownloadedSample:
    """A PendingSample."""

    def __init__(self, sample: DeviceSample, download: Download, num_logprobs: IntArray) -> None:
        self._sample = sample
        self._download = download
        self._num_logprobs = num_logprobs

    @property
    def is_ready(self) -> bool:
        return self._download.is_ready

    def wait(self) -> None:
        self._download.wait()

    def output(self) -> SamplerOutput:
        token_ids, *gathered = self._download.take()
        tokens = token_ids.numpy().astype(np.int64)
        failed = tokens < 0
        logprobs: list[TokenLogprobs | None] | None = None
        if gathered:
            wanted = np.flatnonzero(self._sample.wanted)
            entries = logprob_entries(GatheredLogprobs(*gathered), tokens[wanted], self._num_logprobs[wanted])
            logprobs = [None] * len(tokens)
            for place, entry in zip(wanted.tolist(), entries, strict=True):
                logprobs[place] = None if failed[place] else entry
        return SamplerOutput(np.where(failed, FAILED_TOKEN_ID, tokens), failed, logprobs)
