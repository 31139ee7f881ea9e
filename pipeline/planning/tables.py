"""The tables of `longhaul plan`: parameters, FLOPs, states and memory, from a config alone."""

from collections.abc import Sequence
from functools import partial

from longhaul.configs import RunConfig, load_run_config
from longhaul.modules.attention.sympow import SympowOptions
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.meta_device import build_on_meta
from longhaul.modules.optim import parameter_groups
from longhaul.pipeline.planning.phases import phases
from longhaul.pipeline.planning.sizes import (
    allocated_bytes,
    attention_layers,
    state_bytes,
)
from longhaul.pipeline.planning.states import states_by_degree
from longhaul.pipeline.terminal.numbers import amount, digits, in_bytes
from longhaul.pipeline.terminal.table import print_table


def print_plan(
    path: str,
    overrides: Sequence[str],
    *,
    kinds: Sequence[str] | None,
    contexts: Sequence[int] | None,
    gpus: int | None,
    device: str | None,
) -> None:
    """Print the tables of `longhaul plan`, whose help explains the arguments.

    Raises:
        ValueError: the config, a kind or the device is not known.
    """
    run = load_run_config(path, overrides)
    print_memory = None
    if gpus is not None or device is not None:
        # It imports FSDP, which takes half a second.
        from longhaul.pipeline.planning import fit

        config = fit.with_num_gpus(path, overrides, run, gpus)
        print_memory = partial(fit.print_memory, config, fit.device_option(device))
    own = dict.fromkeys(phase.data.context for phase in phases(run))
    contexts = contexts or list(own)
    models = [run.model]
    if kinds is not None:
        models = [load_run_config(path, overrides, kind=kind).model for kind in kinds]
    print(
        "FLOPs: of the forward pass per token, in the form used on a GPU. State: of one sequence,"
    )
    print("in half precision, without padding and as allocated.")
    if run.optim.name == "muon":
        print(_muon_costs(run))
    print()
    print_table(_costs(models, contexts))
    symmetric = [model for model in models if isinstance(model.attention, SympowOptions)]
    if symmetric:
        print("\nThe state of the symmetric-power layers at each degree, beside the weights:\n")
        print_table(states_by_degree(symmetric[0]))
    if print_memory is not None:
        print_memory()


def _muon_costs(run: RunConfig) -> str:
    """What an update's iterations cost beside the least that its passes take during the run."""
    # It imports torch.distributed.tensor, which takes a second.
    from longhaul.modules.muon import orthogonalization_flops

    model = build_on_meta(run.model)
    flops = orthogonalization_flops(parameter_groups(model, run.optim))
    passes = min(
        3 * phase.optim.tokens_per_update * model.flops_per_token(phase.data.context, "triton")
        for phase in phases(run)
    )
    text = f"Muon: {amount(flops)} FLOPs an update, {digits(100 * flops / passes)}% of what its"
    return (
        f"{text} forward and backward passes take.\nRanks of fsdp share them; others repeat them."
    )


def _costs(models: Sequence[LanguageModelConfig], contexts: Sequence[int]) -> list[list[str]]:
    """The column names, then one row per kind and context."""
    names = ["kind", "context", "parameters", "FLOPs in weights", "in mixing", "ratio"]
    rows = [[*names, "state", "allocated", "form on GPU", "on CPU"]]
    for config in models:
        model = build_on_meta(config)
        layers = attention_layers(model)
        weights = model.weight_flops()
        for T in contexts:
            mixing = model.mixing_flops(T, "triton")
            rows.append(
                [
                    ",".join(config.kinds),
                    f"{T:,}",
                    amount(model.num_parameters()),
                    amount(weights),
                    amount(mixing),
                    digits(mixing / weights),
                    in_bytes(state_bytes(layers, T)),
                    in_bytes(allocated_bytes(layers, T)),
                    *(
                        ", ".join(dict.fromkeys(layer.form(T, backend) for layer in layers))
                        for backend in ("triton", "torch")
                    ),
                ]
            )
    return rows
