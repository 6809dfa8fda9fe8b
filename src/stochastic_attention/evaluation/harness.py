"""lm-evaluation-harness on a swapped model (extra "harness").

import lm_eval
from stochastic_attention.evaluation.harness import SwappedLM

lm_eval.simple_evaluate(SwappedLM(pretrained=model, tokenizer=tokenizer, batch_size=8), tasks=["arc_easy"])
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm


class SwappedLM(HFLM):
    """The harness's `HFLM`, with batches of loglikelihood requests that need no padding. Arguments: those of `HFLM`.

    `HFLM` pads such batches at the right and tells the model nothing of it. That is harmless where a token's keys do
    not depend on what comes later, but scope "sequence" draws its permutation over the whole row: padding would take
    part, and the scores would move with the batch size. Here rows of one length run together. Generation needs no such
    care: there `HFLM` passes its attention mask.

    Rolling texts begin with one beginning-of-sequence token, where a tokenizer that adds its own would give `HFLM` two,
    the second of which it scores.
    """

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log likelihood of each text, in windows of the model's length, as in `HFLM`."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),  # type: ignore[attr-defined]
                prefix_token=self.prefix_token_id,  # type: ignore[attr-defined]
                max_seq_len=self.max_length,  # type: ignore[attr-defined]
                context_len=1,
            )
            for window in map(utils.make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        return totals

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        by_length = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            kept = min(len(context) + len(continuation), self.max_length + 1)  # type: ignore[attr-defined]
            by_length[kept].append(index)
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood requests") as progress:
            for length in sorted(by_length, reverse=True):  # the longest first, so that too large a batch fails at once
                indices = by_length[length]
                alike = [requests[index] for index in indices]
                found = super()._loglikelihood_tokens(alike, disable_tqdm=True, override_bs=override_bs)  # type: ignore[misc]
                answers |= zip(indices, found, strict=True)
                progress.update(len(indices))
        return [answers[index] for index in range(len(requests))]
