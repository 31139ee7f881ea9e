"""The model card: the model, its data and training, and its evaluations."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from longhaul.configs import RunConfig
from longhaul.configs.loader import flatten, to_dict
from longhaul.datamodules.corpus import Corpus
from longhaul.datamodules.files.plain_text import plain
from longhaul.datamodules.files.untrusted import parse_json, read_regular, shown
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.checkpoints.training_state import TrainingState
from longhaul.pipeline.runs.folder import RunFolder
from longhaul.pipeline.system.environment import Environment

_TEXT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [longhaul, {tags}]
---

# {name}

A causal language model of {parameters:,} parameters, {made}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER"{tokenizer_code})
model = AutoModelForCausalLM.from_pretrained("FOLDER"{model_code})
prompt = tokenizer("def main(", return_tensors="pt")
text = model.generate(**prompt, max_new_tokens=64)[0]
print(tokenizer.decode(text, skip_special_tokens=True))
```

It needs torch and transformers 5. {begins}.

## Model

| | |
|---|---|
{model}

## Data

| | |
|---|---|
{data}

## Training

| | |
|---|---|
{training}

## Evaluation

{evaluation}
"""
# What other rows show, and what the weights no longer depend on.
_SHOWN_ELSEWHERE = (
    *("attention", "layer_attention", "layers", "width", "heads", "vocabulary"),
    "init",
)


def write_card(
    folder: Path,
    run: RunFolder,
    config: RunConfig,
    checkpoint: Path,
    state: TrainingState,
    corpus: Corpus,
    parameters: int,
    *,
    adds_bos: bool,
    brings_code: bool,
) -> None:
    """Write README.md.

    Args:
        folder: to write to.
        run: has the evaluations of the checkpoint, and the commit.
        config: of the run.
        checkpoint: of the run.
        state: of the checkpoint.
        corpus: that the model was trained on.
        parameters: number of elements in all weights.
        adds_bos: whether the exported tokenizer puts bos before a text.
        brings_code: whether the folder holds the model's code.
    """
    imported = None if state.progress.step else str(corpus.origin.get("imported", "unknown"))
    rows = _rows(run, config, checkpoint, state, corpus, imported)
    trust = ", trust_remote_code=True"
    text = _TEXT.format(
        model_code=trust if brings_code else "",
        tokenizer_code=trust if brings_code or corpus.tokenizer_name == "longcrawl64" else "",
        tags=", ".join(kind.replace("_", "-") for kind in config.model.kinds),
        name=_escaped(config.name),
        parameters=parameters,
        made="trained with longhaul" if imported is None else f"imported from {_escaped(imported)}",
        begins=_begins(corpus.bos_id, adds_bos=adds_bos, is_imported=imported is not None),
        evaluation=_evaluation(run, checkpoint),
        **{
            name: "\n".join(f"| {key} | {_escaped(value)} |" for key, value in table.items())
            for name, table in rows.items()
        },
    )
    (folder / "README.md").write_text(text)


def _begins(bos: int, *, adds_bos: bool, is_imported: bool) -> str:
    """What stands before a text. Of weights that others have trained, the tokenizer alone tells."""
    if is_imported:
        return f"The tokenizer puts {f'the token {bos}' if adds_bos else 'nothing'} before a text"
    what = "the tokenizer puts it before a text" if adds_bos else "put it before every text"
    return f"In training every sequence began with the token {bos}:\n{what}"


def _rows(
    run: RunFolder,
    config: RunConfig,
    checkpoint: Path,
    state: TrainingState,
    corpus: Corpus,
    imported: str | None,
) -> dict[str, dict[str, object]]:
    """The rows of the tables of model, data and training.

    Of weights that were imported, the config says only what their folder did.
    """
    model, trainer, optim = config.model, config.trainer, config.optim
    progress, steps = state.progress, ", ".join(f"{step:,}" for step in state.averaged_steps)
    tokenizer = f"{corpus.tokenizer_name}, sha256 {corpus.tokenizer_sha256}"
    context = f"{config.data.context:,} tokens"
    of_run, commit = f"{config.name}, {checkpoint.name}", f"longhaul {_commit(run)}"
    if imported is not None:
        data: dict[str, object] = {"tokenizer": tokenizer, "tokens": "unknown"}
        training: dict[str, object] = {
            "weights": f"imported from {imported}; how they were trained is unknown",
            "run": of_run,
            "context": context,
            "commit": commit,
        }
    else:
        data = {
            "tokenizer": tokenizer,
            "tokens": f"{corpus.num_tokens:,} in {corpus.num_blocks:,} blocks",
            "source": json.dumps(corpus.origin),
        }
        training = {
            "run": of_run,
            "budget": f"{progress.tokens:,} of {trainer.max_tokens:,} tokens, "
            f"{progress.step:,} updates of {optim.tokens_per_update:,}",
            **({"weights": f"the mean of those after the updates {steps}"} if steps else {}),
            "context": context,
            "optimizer": f"{optim.name}, learning rate {optim.learning_rate:g}, "
            f"{optim.schedule.name} schedule",
            "precision": trainer.precision,
            "seed": trainer.seed,
            "commit": commit,
        }
    return {
        "model": {
            "variant": ", ".join(model.kinds),
            **{
                f"layer {layers}": ", ".join(f"{key} {value}" for key, value in options.items())
                for layers, options in _variants(config).items()
            },
            "layers, width, heads": f"{model.layers}, {model.width}, {model.heads}",
            "rows of the embedding": f"{model.vocabulary:,}",
            **_shape_keys(model),
        },
        "data": data,
        "training": training,
    }


def _shape_keys(model: LanguageModelConfig) -> dict[str, object]:
    """The keys of the model's shape that do not have their defaults."""
    return {
        one.name: value if isinstance(value, str) else json.dumps(value)
        for one in dataclasses.fields(model)
        if one.name not in _SHOWN_ELSEWHERE
        for value in (getattr(model, one.name),)
        if value != one.default
    }


def _variants(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Attention options by the layers that have them, such as "0, 2"."""
    layers: dict[str, list[str]] = {}
    options = {}
    for layer in range(config.model.layers):
        values = to_dict(config.model.attention_of(layer))
        key = json.dumps(values)
        layers.setdefault(key, []).append(str(layer))
        options[key] = values
    return {", ".join(layers[key]): options[key] for key in options}


def _commit(run: RunFolder) -> str:
    try:
        content = read_regular(run.environment_file, 1 << 20)
        environment = parse_json(Environment, content, run.environment_file)
        return environment.commit or "unknown"
    except (OSError, ValueError):
        return "unknown"


def _evaluation(run: RunFolder, checkpoint: Path) -> str:
    """A table of all numbers that evaluations of the checkpoint have measured."""
    lines = []
    for file in sorted((run.path / "evaluation").glob(f"{checkpoint.name}*/results.json")):
        label = file.parent.name
        if label != checkpoint.name and not label.startswith(f"{checkpoint.name}-"):
            continue
        try:
            values = parse_json(dict[str, Any], read_regular(file, 16 << 20), file)
        except ValueError:
            raise ValueError(
                f"{file}: found no JSON object, wanted what longhaul evaluate wrote; run it again"
            ) from None
        for name, value in flatten(values).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                # JSON has integers that no float holds.
                number = f"{value:.6g}" if isinstance(value, float) else shown(value)
                lines.append(f"| {_escaped(label)} | {_escaped(name)} | {number} |")
    if not lines:
        return "This checkpoint has not been evaluated."
    return "\n".join(["| checkpoint | measure | value |", "|---|---|---|", *lines])


def _escaped(value: object) -> str:
    """Text of a run folder, such that Markdown shows it as it is, in one line and one cell."""
    # A `_` between letters or digits is itself.
    marks = r"[\\`*\[\]<>|&#~$]|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(marks, r"\\\g<0>", plain(str(value)))
