"""What `longhaul generate` is asked for, checked before the model is loaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of `longhaul generate`, whose help explains each.

    Raises:
        ValueError: the value of an option, which the message names, is of no use.
    """

    prompts: Sequence[str]
    num_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    stop: Sequence[str]
    state: Path | None
    has_bfloat16_weights: bool
    has_bfloat16_state: bool
    save_state: Path | None

    def __post_init__(self) -> None:
        if not self.prompts and self.state is None:
            raise ValueError("--prompt: found none, wanted one or more, or --state")
        if self.num_tokens < 1:
            raise ValueError(f"--tokens: found {self.num_tokens}, wanted 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature: found {self.temperature}, wanted 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"--top-k: found {self.top_k}, wanted 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p: found {self.top_p}, wanted more than 0, and 1 at most")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed: found {self.seed}, wanted 0 to 2**63 - 1")
        if "" in self.stop:
            raise ValueError("--stop: found an empty text, wanted a character or more")
        if self.save_state is not None:
            self._check_save_state(self.save_state)

    def _check_save_state(self, path: Path) -> None:
        if len(self.prompts) > 1:
            raise ValueError(
                f"--save-state: found {len(self.prompts)} prompts, wanted one: a file holds one "
                "state"
            )
        if path.is_dir():
            raise ValueError(f"--save-state: found the folder {path}, wanted a file")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--save-state: found no folder {path.parent}, wanted one")
