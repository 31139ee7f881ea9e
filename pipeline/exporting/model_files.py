"""Writes config.json, generation_config.json and the model code that config.json names."""

import json
import shutil
from pathlib import Path
from typing import Any

from longhaul.configs import RunConfig
from longhaul.datamodules.manifest import Manifest
from longhaul.pipeline.runs.exported import shape_of

_CODE = ("configuration_longhaul.py", "modeling_longhaul.py")


def write_model_files(folder: Path, config: RunConfig, manifest: Manifest) -> None:
    """Write all of them into `folder`."""
    ids = {
        "bos_token_id": manifest.bos_id,
        "eos_token_id": manifest.eot_id,
        "pad_token_id": manifest.eot_id,
    }
    shape = shape_of(config.model)
    described = {
        "architectures": ["LonghaulForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_longhaul.LonghaulConfig",
            "AutoModelForCausalLM": "modeling_longhaul.LonghaulForCausalLM",
        },
        "model_type": "longhaul",
        "dtype": "float32",
        **shape,
        "attention": list(shape["attention"].values()),
        "num_hidden_layers": config.model.layers,
        # The context in training; no kind of attention is limited to it.
        "max_position_embeddings": config.data.context,
        "tie_word_embeddings": True,
        "use_cache": True,
        **ids,
    }
    generation: dict[str, Any] = dict(ids)
    # Rows of the embedding beyond the tokenizer's ids are padding, and must not be generated.
    if padding := list(range(manifest.vocab_size, config.model.vocabulary)):
        generation["suppress_tokens"] = padding
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation) + "\n")
    for name in _CODE:
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
