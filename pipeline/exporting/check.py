"""Compares what an exported folder computes with what its run's model computes.

The folder's own code is imported. Weights are read one block at a time, from the checkpoint and
from the folder, so that the check of a model needs the memory of a few blocks: each block reads all
texts before the next one is loaded. The code of padding and of the cache needs transformers, which
may not be installed; it is checked where it is. A folder without code is loaded by transformers.
"""

import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longhaul.datamodules.files.untrusted import one_line
from longhaul.datamodules.native import foreign_content
from longhaul.datamodules.tokenizer import Tokenizer
from longhaul.modules.block import Block
from longhaul.modules.language_model import LanguageModel
from longhaul.pipeline.architectures.architecture import Architecture
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.exporting.model_files import has_large_states
from longhaul.pipeline.exporting.source import file_of
from longhaul.pipeline.exporting.transformers_check import (
    STEPS,
    has_transformers,
    load_architecture,
    logits_in_parts,
    padded_pair,
)
from longhaul.pipeline.runs.exported import find_tensors

_TOKENS, _PADDING, _STEPS = 64, 24, 8
_PADDED, _BESIDE = "a row with padding before it", "the row beside one with padding"
# No text is longer than three chunks of this many tokens: scores of longer ones in float64 would be
# larger than a block's weights. Power attention reads such texts in its attention form.
_LONGEST_CHUNK = 64
# Relative to the largest logit. Both sides run the same code, so that more is no rounding.
_TOLERANCE = 1e-5
_TEXT = "def main(x):\n\treturn f'{x}'  # é, 日本語, 100\n"
_numbers = itertools.count()

Read = Callable[[str], Tensor]


class _Case(NamedTuple):
    """A text, the dtype that it is read in, and how many tokens are read before single steps."""

    tokens: Tensor
    dtype: torch.dtype = torch.float32
    before_steps: int | None = None


def check_export(
    folder: Path,
    model: LanguageModel,
    saved: SavedCheckpoint,
    tokenizer: Tokenizer,
    architecture: Architecture | None,
) -> None:
    """Raise where the exported folder is not the model.

    Args:
        folder: with config.json, the code, the weights and the tokenizer.
        model: the run's model, on `meta`.
        saved: the run's checkpoint.
        tokenizer: the run's.
        architecture: of transformers, if the folder has no code.

    Raises:
        ValueError: the code does not run without longhaul, or the tokenizer fails.
        OSError: the weights cannot be read.
        RuntimeError: the logits or ids of a short text differ.
    """
    _check_tokenizer(folder, tokenizer)
    name = ", ".join(model.config.kinds) if architecture is None else architecture.name
    cases = _cases(model)
    wanted = _logits(model, cases, lambda name: saved.read_one(f"model/{name}"))
    try:
        if architecture is None:
            found = _found_by_code(folder, cases, STEPS if _holds_states(model) else 0)
        else:
            found = _found(folder, cases)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        failed = f"attention.kind: found {name}, whose exported code does not run"
        if architecture is not None:
            failed = f"transformers cannot run the exported {name}"
        raise ValueError(f"{failed}: {type(error).__name__}: {one_line(error)}") from error
    found = {case: logits.double() for case, logits in found.items()}
    for case, ours in wanted.items():
        logits = ours.double()
        size = max(1.0, logits.abs().nan_to_num().max().item())
        if not torch.allclose(found[case], logits, rtol=0, atol=_TOLERANCE * size, equal_nan=True):
            difference = (found[case] - logits).abs().max().item()
            raise RuntimeError(
                f"attention.kind: found logits of the exported {name} that differ from the run's "
                f"by {difference:.3g} for {case}, wanted at most {_TOLERANCE * size:.3g}"
            )


def _holds_states(model: LanguageModel) -> bool:
    """Whether the states of a pair of texts in all layers are no larger than a block."""
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    states = sum(block.attention.allocated_bytes(_TOKENS, torch.float64) for block in blocks)
    largest = max(sum(one.numel() for one in block.parameters()) for block in blocks)
    return 2 * states <= torch.float64.itemsize * largest


def _found_by_code(folder: Path, cases: dict[str, _Case], steps: int) -> dict[str, Tensor]:
    """Logits that the folder's code computes, without transformers only those of single rows."""
    with _code_of(folder) as import_module, torch.device("meta"):
        exported = import_module("architecture").build_model(_shape_in(folder))
        found = _logits(exported, cases, _reader(folder))
        if has_transformers():
            model = _filled_while_it_runs(folder, import_module)
            with torch.device("cpu"):
                found |= _pair(model, cases, steps, has_positions=False)
    return found


def _found(folder: Path, cases: dict[str, _Case]) -> dict[str, Tensor]:
    """Logits that transformers computes."""
    model = load_architecture(folder)
    found = {
        name: logits_in_parts(model, case.tokens, case.before_steps)[-_TOKENS:]
        for name, case in cases.items()
    }
    return found | _pair(model, cases, STEPS, has_positions=True)


def _pair(
    model: Callable[..., Any], cases: dict[str, _Case], steps: int, *, has_positions: bool
) -> dict[str, Tensor]:
    short, long = (cases[name].tokens for name in (_PADDED, _BESIDE))
    logits = padded_pair(model, short, long, steps, has_positions=has_positions)
    return dict(zip((_PADDED, _BESIDE), logits, strict=True))


def _shape_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_bytes())["longhaul"]


def _check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise RuntimeError where a text gets other ids than from the run's tokenizer, or they it.

    Raises ValueError where the library fails.
    """
    # Imported here: slow, and only exports need it.
    from tokenizers import Tokenizer as Exported

    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    is_escaped = config["tokenizer_class"] == "LonghaulTokenizer"
    text = f"{_TEXT}a{tokenizer.decode([tokenizer.eot_id])} b"
    ids = tokenizer.encode(text).tolist()
    with foreign_content("tokenizer", "the exported one cannot encode and decode text"):
        exported = Exported.from_file(str(folder / "tokenizer.json"))
        exported.encode_special_tokens = config["split_special_tokens"]
        found = exported.encode(json.dumps(text)[1:-1] if is_escaped else text).ids
        text = exported.decode(ids, skip_special_tokens=False)
    wanted = [tokenizer.bos_id, *ids] if "bos_token" in config else ids
    if found != wanted:
        raise RuntimeError(f"tokenizer: found ids {found} of the exported one, wanted {wanted}")
    text, back = json.loads(f'"{text}"') if is_escaped else text, tokenizer.decode(ids)
    if text != back:
        raise RuntimeError(f"tokenizer: found {text!r} of the exported one, wanted {back!r}")


def _cases(model: LanguageModel) -> dict[str, _Case]:
    """What is compared. Long texts are read in float64, whose rounding adds up to nothing."""
    most = model.config.learned_positions or 3 * _LONGEST_CHUNK
    chunk = min(_LONGEST_CHUNK, most // 3, max(_chunk_size(block) for block in model.blocks))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocabulary, (1, 4 * _LONGEST_CHUNK), generator=generator)
    cases = {
        f"{_TOKENS} tokens": _Case(tokens[:, :_TOKENS]),
        f"{3 * chunk} tokens": _Case(tokens[:, : 3 * chunk], torch.float64),
    }
    if not has_large_states(model):  # which no cache holds either
        part = tokens[:, : chunk + 1 + _STEPS]
        name = f"{chunk + 1} tokens and {_STEPS} more, one at a time"
        cases[name] = _Case(part, torch.float64, before_steps=chunk + 1)
    cases[_PADDED] = _Case(tokens[:, _TOKENS : 2 * _TOKENS - _PADDING], torch.float64)
    cases[_BESIDE] = _Case(tokens[:, :_TOKENS], torch.float64)
    return cases


def _chunk_size(block: nn.Module) -> int:
    """Tokens per chunk where the block's attention is computed in chunks."""
    assert isinstance(block, Block)
    *_, last = block.attention.form(1 << 20, "torch").split()
    return int(last) if last.isdecimal() else _TOKENS


def _reader(folder: Path) -> Read:
    found = find_tensors(folder)
    return lambda name: found[name].read()


@torch.no_grad()
def _logits(model: LanguageModel, cases: dict[str, _Case], read: Read) -> dict[str, Tensor]:
    """Logits of the last tokens of a model on `meta`, whose parts get weights while they run."""
    x: dict[str, Tensor] = {}
    with torch.device("cpu"):
        for name, part in _parts(model.eval()):
            _fill(part, name, read)
            for case, (tokens, dtype, before_steps) in cases.items():
                part.to(dtype)
                if isinstance(part, nn.Embedding):
                    x[case] = part(tokens)
                elif name.startswith("blocks."):
                    x[case] = _through(part, x[case], before_steps)
                else:
                    x[case] = part(x[case])
            part.to("meta")
        holder = "embedding" if model.config.tied_head else "lm_head"  # of the head's matrix
        part = model.get_submodule(holder)
        _fill(part, holder, read)
        logits = {}
        for case, (_, dtype, _) in cases.items():
            part.to(dtype)
            logits[case] = model.head(x[case][0, -_TOKENS:])
        part.to("meta")
        return logits


def _through(block: nn.Module, x: Tensor, before_steps: int | None) -> Tensor:
    """The output of a block for a text that is read at once, or for its end one at a time."""
    if before_steps is None:
        return block(x, keep_state=False)[0]  # type: ignore[no-any-return]
    y, state = block(x[:, :before_steps])
    outputs = [y]
    for token in x[:, before_steps:].split(1, dim=1):
        y, state = block(token, state)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with weights that are called one after the other, and their names."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{number}", one) for number, one in enumerate(child))
        elif name != "lm_head" and child.state_dict():
            yield name, child


def _fill(part: nn.Module, prefix: str, read: Read) -> None:
    tensors = {key: read(f"{prefix}.{key}") for key in part.state_dict()}
    part.load_state_dict(tensors, assign=True)


def _empty(part: nn.Module, *_: object) -> None:
    part.to("meta")


def _filled_while_it_runs(folder: Path, import_module: Callable[[str], Any]) -> Any:
    """The folder's model, on `meta`, whose parts have float64 weights while they are called."""
    config = import_module("configuration_longhaul").LonghaulConfig
    model = import_module("modeling_longhaul").LonghaulForCausalLM(
        config.from_json_file(folder / "config.json")
    )
    read = _reader(folder)
    head = "embedding" if model.config.tie_word_embeddings else "lm_head"

    def fill(part: nn.Module, _: object, name: str) -> None:
        _fill(part, name, read)
        part.double()

    for name, part in [*_parts(model), (head, model.lm_head)]:
        part.register_forward_pre_hook(partial(fill, name=name))
        part.register_forward_hook(_empty)
    return model.eval()


@contextmanager
def _code_of(folder: Path) -> Iterator[Callable[[str], Any]]:
    """Imports modules of the folder by their names without a hash, as of a package of its own."""
    package = f"longhaul_export_{next(_numbers)}"
    spec = ModuleSpec(package, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    sys.modules[package] = module_from_spec(spec)
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    importlib.invalidate_caches()

    def import_module(name: str) -> Any:
        file = file_of(os.listdir(folder), name)
        return importlib.import_module(f"{package}.{file.removesuffix('.py')}")

    try:
        yield import_module
    finally:
        sys.dont_write_bytecode = writes_none
        for module in [one for one in sys.modules if one.partition(".")[0] == package]:
            del sys.modules[module]
