"""lm_eval's Hugging Face model for models that have always read bos first. Needs lm_eval."""

from typing import Any

from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor

from longhaul.pipeline.evaluation.tasks.lm_eval_task.shortening import Shortening


class LonghaulLM(HFLM):  # type: ignore[misc, unused-ignore]
    """Keeps bos in front of a request that is cut to `max_length`, and counts such requests.

    lm_eval cuts their front off, bos first, and tells of it in lines among hundreds of others.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.shortening = Shortening(self.prefix_token_id, self.max_length)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        # There lm_eval puts bos in front itself: encoding with it would score a second one.
        self.add_bos_token = False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.add_bos_token = True

    def _loglikelihood_tokens(self, requests: Any, *others: Any, **options: Any) -> Any:
        # The last token of an answer is not read.
        cut = [
            (texts, self.shortening.cut(context, len(answer) - 1), answer)
            for texts, context, answer in requests
        ]
        return super()._loglikelihood_tokens(cut, *others, **options)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        for request in requests:
            context, options = request.args
            answer = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            # The texts themselves are cut where they are encoded again, below.
            self.shortening.cut(self.tok_encode(context), answer)
        return super().generate_until(requests, disable_tqdm)

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        tokens, mask = super().tok_batch_encode(strings, padding_side, truncation=truncation)
        if left_truncate_len is None or tokens.shape[1] <= left_truncate_len:
            return tokens, mask
        first = tokens.gather(1, mask.argmax(dim=1, keepdim=True))[:, 0]
        is_cut = (mask.sum(dim=1) > left_truncate_len) & (first == self.prefix_token_id)
        tokens, mask = tokens[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        tokens[is_cut, 0] = self.prefix_token_id
        return tokens, mask
