"""Log probabilities of requests under a model, batched so that no score moves with the batch size or the order.

Rows are right-padded and always come with their attention mask, so positions are the plain 0, 1, 2, ... and no token
sees padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .requests import Request, Score

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def batches(requests: Sequence[Request], batch_tokens: int, batch_rows: int | None = None) -> Iterator[list[int]]:
    """Indices of requests that run together: as many as fit in `batch_tokens` when padded, or `batch_rows`.

    The longest come first so that a batch too large for memory fails at once. A row shorter than three quarters of its
    batch's longest waits for the next one: padding costs as much as text.
    """
    order = sorted(range(len(requests)), key=lambda index: -requests[index].queries)
    start = 0
    while start < len(order):
        longest = requests[order[start]].queries
        most = batch_rows or max(1, batch_tokens // longest)
        batch = [index for index in order[start : start + most] if 4 * requests[index].queries >= 3 * longest]
        yield batch
        start += len(batch)


@torch.inference_mode()
def score_requests(
    model: PreTrainedModel,
    requests: Sequence[Request],
    *,
    batch_tokens: int = 4096,
    batch_rows: int | None = None,
    on_batch: Callable[[int], object] | None = None,
) -> list[Score]:
    """The score of each request, in the order given.

    Requests that differ in their last token alone, such as answers of one token, are one row.

    Args:
        model: a Hugging Face causal language model in evaluation mode.
        requests: what to score.
        batch_tokens: most tokens of a padded batch; a longer request runs alone.
        batch_rows: rows of a batch, whatever their tokens, in place of `batch_tokens`.
        on_batch: called after each batch with the number of tokens of the requests in it.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        sharing.setdefault(request.tokens[:-1], []).append(index)
    groups = list(sharing.values())
    rows = [max((requests[index] for index in group), key=lambda request: request.scored) for group in groups]
    scores: dict[int, Score] = {}
    for batch in batches(rows, batch_tokens, batch_rows):
        done = 0
        for place, logits in zip(batch, _scored_logits(model, [rows[place] for place in batch]), strict=True):
            for index in groups[place]:
                scores[index] = _score(logits[-requests[index].scored :], requests[index])
                done += requests[index].queries
        if on_batch is not None:
            on_batch(done)
    return [scores[index] for index in range(len(requests))]


def _scored_logits(model: PreTrainedModel, rows: Sequence[Request]) -> list[Tensor]:
    """Each row's logits of its scored queries, [scored, vocabulary]. The head runs on columns that some row scores."""
    longest = max(request.queries for request in rows)
    first = min(request.queries - request.scored for request in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, request in enumerate(rows):
        tokens[row, : request.queries] = torch.tensor(request.tokens[:-1])
        mask[row, : request.queries] = 1
    logits = model(
        input_ids=tokens.to(model.device),
        attention_mask=mask.to(model.device),
        use_cache=False,
        logits_to_keep=longest - first,
    ).logits
    ends = [request.queries - first for request in rows]
    return [logits[row, end - request.scored : end] for row, (end, request) in enumerate(zip(ends, rows, strict=True))]


def checked(loglikelihoods: Tensor) -> Tensor:
    """The same; ValueError where one is NaN, of which metrics would make figures that look like any other."""
    if loglikelihoods.isnan().any():
        raise ValueError(
            "the model must give a number for every token it scores, got NaN; float16 overflows in many models that "
            "were trained in bfloat16"
        )
    return loglikelihoods


def _score(logits: Tensor, request: Request) -> Score:
    logits = logits.float()
    targets = torch.tensor(request.tokens[-request.scored :], device=logits.device)
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    loglikelihoods = checked((chosen - logits.logsumexp(-1)).double())
    return Score(tuple(loglikelihoods.tolist()), tuple((logits.argmax(-1) == targets).tolist()))
