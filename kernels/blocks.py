"Which blocks of an attention table hold a visible pair: what the kernels and the blockwise version skip by."

import torch
import torch.nn.functional as F


def _bounds(doc_ids: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    "Least and greatest document of each block (B, blocks), padding left out."
    ids = F.pad(doc_ids, (0, -doc_ids.shape[1] % size), value=-1).unflatten(1, (-1, size))
    nowhere = torch.iinfo(ids.dtype).max
    return ids.where(ids >= 0, nowhere).amin(2), ids.amax(2)


def query_documents(doc_ids: torch.Tensor, num_queries: int) -> torch.Tensor:
    "The documents (B, Tq) of the last Tq positions; queries before the first key are padding."
    early = max(0, num_queries - doc_ids.shape[1])
    return F.pad(doc_ids[:, doc_ids.shape[1] - num_queries + early:], (early, 0), value=-1)


def block_ranges(
    row_ids: torch.Tensor,     # (B, R) document of each row of the table, -1 = padding
    column_ids: torch.Tensor,  # (B, C) document of each column
    rows: int,                 # rows in a block
    columns: int,              # columns in a block
) -> torch.Tensor:             # (B, blocks of rows, 2) int32: first block of columns, and one past the last
    "For each block of rows, the blocks of columns between which a document can be shared; an empty range where none is."
    row_low, row_high = _bounds(row_ids, rows)
    low, high = _bounds(column_ids, columns)
    shared = (row_low[:, :, None] <= high[:, None]) & (low[:, None] <= row_high[:, :, None])
    if not shared.shape[2]:
        return torch.zeros(*shared.shape[:2], 2, dtype=torch.int32, device=shared.device)
    number = torch.arange(1, shared.shape[2] + 1, device=shared.device, dtype=torch.int32)
    last = (shared * number).amax(2)
    first = (shared * number.flip(0)).amax(2)
    return torch.stack([torch.where(last > 0, shared.shape[2] - first, 0), last], 2).to(torch.int32).contiguous()
