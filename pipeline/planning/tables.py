"""The tables of `longhaul plan`: parameters, FLOPs, states and memory, from a config alone."""

from collections.abc import Sequence

from longhaul.configs import RunConfig, load_run_config
from longhaul.modules.attention.sympow import SympowOptions
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.muon import orthogonalization_flops
from longhaul.modules.optim import parameter_groups
from longhaul.pipeline.planning.fit import device_option, memory_rows, verdict, with_num_gpus
from longhaul.pipeline.planning.memory import Planner
from longhaul.pipeline.planning.phases import phases
from longhaul.pipeline.planning.sizes import (
    allocated_bytes,
    attention_layers,
    build_on_meta,
    state_bytes,
)
from longhaul.pipeline.planning.states import states_by_degree, states_of_published_sizes
from longhaul.pipeline.system.devices import Device
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
    fit = None
    if gpus is not None or device is not None:
        fit = with_num_gpus(path, overrides, run, gpus), device_option(device)
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
    if fit is not None:
        _print_fit(*fit)


def _muon_costs(run: RunConfig) -> str:
    """What an update's iterations cost beside the least that its passes take during the run."""
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


def print_states() -> None:
    """Print the states of the sympow paper's four sizes of GPT-2."""
    print(
        "States of one sequence, in half precision and without padding, and numbers in them per"
        " weight.\nDegree 1: the linear transformer, without a normaliser.\n"
    )
    print_table(states_of_published_sizes())


def _print_fit(config: RunConfig, device: Device) -> None:
    ranks = config.trainer.world_size
    print(f"\nGB of one of {ranks} ranks at the peak of an update, and the most GB that one sends.")
    print(
        "Copies: gathered or cast parameters, buffers of collectives. Workspace: inside of an op,"
    )
    print("if one runs at the peak. Held: with what is no tensor, the allocator's gaps, CUDA's")
    print("context and NCCL's buffers, which are estimates. All other numbers are traced from the")
    print("update itself, except with DeepSpeed: there only activations and workspace are traced,")
    print("the rest is computed.\n", flush=True)
    planner = Planner(config)
    print_table(memory_rows(config, device, planner))
    print(f"\n{verdict(config, device, planner)}")


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
