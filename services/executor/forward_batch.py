"""What one forward pass is told: a flat batch of tokens over the block tables of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of R rows, decode rows first. All tensors are on the model's device.

    token_ids       [T] int64
    positions       [T] int64, each token's position in its sequence
    slot_mapping    [T] int64, where its K/V go: block_id * block_size + position % block_size
    query_start_loc [R + 1] int32, row r's tokens are [query_start_loc[r], query_start_loc[r + 1])
    seq_lens        [R] int32, context length of each row with this step's tokens
    block_tables    [R, W] int32, logical -> physical block; entries past a row's length are 0
    num_decodes     the first num_decodes rows have exactly one token
    logits_indices  [S] int64, which of the T tokens are projected to logits
    query_start_loc_list, seq_lens_list: the same two as Python lists, for host-side decisions
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    num_decodes: int
    logits_indices: torch.Tensor
    query_start_loc_list: list[int]
    seq_lens_list: list[int]
