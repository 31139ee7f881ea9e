"""Loads a trained or an exported model for use from Python, with its tokenizer."""

from os import PathLike
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from longhaul.datamodules.tokenizer import Tokenizer
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.meta_device import on_meta
from longhaul.pipeline.runs.exported import (
    exported_model,
    exported_tokenizer,
    exported_weights,
    is_exported,
)
from longhaul.pipeline.runs.trained_model import load_trained_model


class LoadedModel(LanguageModel):
    """A language model with its tokenizer."""

    def __init__(self, config: LanguageModelConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config)
        self.tokenizer = tokenizer

    def encode(self, text: str) -> Int[Tensor, "1 T"]:
        """The ids of a text on the model's device, after the id that begins every sequence."""
        ids = [self.tokenizer.bos_id, *self.tokenizer.encode(text).tolist()]
        return torch.tensor([ids], device=self.embedding.weight.device)

    def decode(self, tokens: Int[Tensor, "T"]) -> str:
        """The text of these ids."""
        return self.tokenizer.decode(tokens.tolist())


def load_model(path: str | PathLike[str]) -> LoadedModel:
    """The model in a run folder, a checkpoint or an exported folder; see `longhaul.load`."""
    folder = Path(path)
    if is_exported(folder):
        config, tokenizer = exported_model(folder), exported_tokenizer(folder)
        weights = exported_weights(folder)
    else:
        trained = load_trained_model(folder)
        config, weights = trained.config.model, trained.model.state_dict()
        tokenizer = trained.corpus.load_tokenizer()
    with on_meta():
        model = LoadedModel(config, tokenizer)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path}: the weights are not those of its config, {error}") from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
