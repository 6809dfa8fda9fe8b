"""Where in a text a model does well: perplexity by position, and by the distance of the context that a token needs.

A text is cut into windows of one document each, back to back from the document's beginning, and every token of a window
but the first is predicted, once. A predicted token t of a window x counts

    by position   under t, the number of tokens before it
    by distance   under what the window says of its cue, the two tokens before it:
                    "repeat"   the cue occurred earlier, and the last time the same token followed it: under the
                               distance t - s of that earlier copy x[s], which a model that reaches so far may look up
                    "changed"  the cue occurred earlier, and the last time another token followed
                    "new"      the cue did not occur, or there is none

Positions and distances are put together in buckets [2**k, 2**(k+1)). All models see the same windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..lm.text import pieces, text_path
from ..lm.token_file import Encoder
from ..records import Estimate
from . import copies
from .scoring import checked
from .tasks.base import ratio_perplexity, spread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Window = list[int]
OVERALL, POSITION, REPEAT, CHANGED, NEW = "all", "position", "repeat", "changed", "new"


@dataclass(frozen=True)
class Bucket:
    """Perplexity of some of the tokens.

    Attributes:
        kind: "all", "position", "repeat", "changed" or "new".
        first, last: of the positions or distances; 0 where the kind has none.
        tokens: how many.
        perplexity: a token; its n counts windows, over which its standard error is.
    """

    kind: str
    first: int
    last: int
    tokens: int
    perplexity: Estimate

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Bucket:
        """Read what `dataclasses.asdict` made."""
        return cls(**{**facts, "perplexity": Estimate(**facts["perplexity"])})


def cut(encoder: Encoder, text: str, length: int, limit: int | None) -> list[Window]:
    """Windows of `length` tokens, `limit` evenly spaced or all. ValueError where there are fewer, or none."""
    windows: list[Window] = []
    document: Window = []
    for tokens, is_last, _ in encoder.encode(pieces(text_path(text))):
        document += tokens
        whole = len(document) // length * length
        windows += [document[start : start + length] for start in range(0, whole, length)]
        document = [] if is_last else document[whole:]
    if not windows:
        raise ValueError(f"length must leave a window of one document in {text}, got {length}")
    return windows if limit is None else spread(windows, limit, f"windows of {length} tokens in {text}")


@torch.inference_mode()
def token_losses(
    model: PreTrainedModel, windows: Sequence[Window], *, batch_tokens: int, on_batch: Callable[[int], object]
) -> Tensor:
    """-log likelihood (natural log) of every token of every window but its first, float32 [windows, length - 1].

    Args:
        model: a causal language model in evaluation mode.
        windows: all of one length.
        batch_tokens: most tokens of a batch; a longer window runs alone.
        on_batch: called after each batch with its number of windows.

    Raises:
        ValueError: a token that the model has no embedding of, or a loss that is no number.
    """
    known: int = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    largest = max(map(max, windows))
    if largest >= known:
        raise ValueError(
            f"model must have an embedding of every token of the windows, has {known}, got token {largest}"
        )
    rows = max(1, batch_tokens // len(windows[0]))
    losses = []
    for start in range(0, len(windows), rows):
        tokens = torch.tensor(windows[start : start + rows], device=model.device)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        # A row at a time: the loss of a large vocabulary takes as much memory again as its logits.
        losses += [
            F.cross_entropy(row.float(), targets, reduction="none").cpu()
            for row, targets in zip(logits, tokens[:, 1:], strict=True)
        ]
        on_batch(len(tokens))
    return checked(torch.stack(losses))


def buckets(windows: Sequence[Window], losses: Tensor) -> list[Bucket]:
    """Perplexity of all tokens, and by position and distance; buckets without tokens are left out."""
    where = torch.tensor([copies.copy_distances(window)[1:] for window in windows])
    position = torch.arange(1, losses.shape[1] + 1).expand_as(where)
    found = [
        _bucket(OVERALL, 0, 0, torch.ones_like(where, dtype=torch.bool), losses),
        *_doubling(POSITION, position, losses),
        *_doubling(REPEAT, where, losses),
        _bucket(CHANGED, 0, 0, where == copies.CHANGED, losses),
        _bucket(NEW, 0, 0, where == copies.NEW, losses),
    ]
    return [bucket for bucket in found if bucket is not None]


def _doubling(kind: str, values: Tensor, losses: Tensor) -> Iterator[Bucket | None]:
    first = 1
    while first <= losses.shape[1]:
        last = min(2 * first - 1, losses.shape[1])
        yield _bucket(kind, first, last, (values >= first) & (values <= last), losses)
        first *= 2


def _bucket(kind: str, first: int, last: int, chosen: Tensor, losses: Tensor) -> Bucket | None:
    counts = chosen.sum(1).double()
    sums = (losses.double() * chosen).sum(1)
    held = counts > 0
    if not held.any():
        return None
    estimate = ratio_perplexity(sums[held].tolist(), counts[held].tolist())
    return Bucket(kind, first, last, int(counts.sum()), estimate)
