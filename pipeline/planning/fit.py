"""Whether a run fits its devices: a table of a rank's memory and traffic, and one verdict."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

from longhaul.configs import RunConfig, load_run_config
from longhaul.pipeline.distributed.blocks import Checkpointing
from longhaul.pipeline.planning.memory import MemorySettings, Plan, Planner
from longhaul.pipeline.planning.memory_tracker import CATEGORIES
from longhaul.pipeline.system.devices import DEVICES, Device, find_device
from longhaul.pipeline.terminal.numbers import digits, in_bytes
from longhaul.pipeline.terminal.table import print_table

logger = logging.getLogger(__name__)


def print_memory(config: RunConfig, device: Device) -> None:
    """Print memory and communication of a rank under each strategy, and what would fit."""
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


def device_option(name: str | None) -> Device:
    """The device of --device. Raises ValueError, with all known names, for any other name."""
    device = None if name is None else find_device(name)
    if device is None:
        keys = ", ".join(sorted(one.key for one in DEVICES))
        found = "found none with --gpus" if name is None else f"found {name!r}"
        raise ValueError(f"--device: {found}, wanted one of {keys}")
    return device


def with_num_gpus(
    path: str, overrides: Sequence[str], run: RunConfig, gpus: int | None
) -> RunConfig:
    """The run of a path and overrides, on `gpus` ranks instead of its own number; None keeps it.

    Where an update has too few samples for the run's micro-batches on so many ranks, the largest
    micro-batch is taken with which it has enough.
    """
    if gpus is None:
        return run
    if gpus < 1:
        raise ValueError(f"--gpus: found {gpus}, wanted 1 or more")
    strategy = run.trainer.strategy
    if gpus == 1:
        strategy = "single"
    elif strategy == "single":
        strategy = "ddp"
    spread = [f"trainer.devices={gpus}", "trainer.nodes=1", f"trainer.strategy={strategy}"]
    own = run.trainer.micro_batch
    groups = max(1, gpus // run.trainer.context_parallel)
    fitting = (n for n in range(own, 0, -1) if run.samples_per_update % (n * groups) == 0)
    micro_batch = next(fitting, own)
    if micro_batch != own:
        spread.append(f"trainer.micro_batch={micro_batch}")
        text = "--gpus %d: planned with trainer.micro_batch=%d, not %d"
        logger.info(text, gpus, micro_batch, own)
    try:
        return load_run_config(path, [*overrides, *spread])
    except ValueError as error:
        raise ValueError(f"--gpus: found {gpus}: {error}") from None


def configured_settings(config: RunConfig) -> MemorySettings:
    """The settings in the config itself."""
    trainer = config.trainer
    strategy = trainer.strategy
    return MemorySettings(
        strategy=strategy,
        stage=trainer.deepspeed_stage if strategy == "deepspeed" else None,
        checkpointing=trainer.activation_checkpointing,
    )


def memory_rows(config: RunConfig, device: Device, planner: Planner) -> list[list[str]]:
    """The column names, then one row per strategy and mode of checkpointing."""
    names = ["strategy", "checkpointing", *CATEGORIES, "total", "held", "sent"]
    table = [[*names, device.name]]
    for settings in _all_settings(config):
        plan = planner.plan(settings)
        gigabytes = [_gigabytes(getattr(plan, category)) for category in CATEGORIES]
        verdict = "fits" if fits(plan, device.memory_bytes) else "does not fit"
        table.append(
            [
                settings.name,
                _checkpointing(settings),
                *gigabytes,
                _gigabytes(plan.total),
                _gigabytes(plan.held),
                _gigabytes(plan.sent),
                f"{verdict} {_device_memory(device)}",
            ]
        )
    return table


def fits(plan: Plan, memory_bytes: int) -> bool:
    return plan.held <= memory_bytes


def verdict(config: RunConfig, device: Device, planner: Planner) -> str:
    """One line: the config fits, or the smallest change of it that would fit."""
    own = configured_settings(config)
    plan = planner.plan(own)
    as_it_is = f"As configured ({own.name}, checkpointing {_checkpointing(own)}, micro-batch "
    as_it_is += f"{config.trainer.micro_batch}): {in_bytes(plan.held)} of {_device_memory(device)}"
    if fits(plan, device.memory_bytes):
        return f"{as_it_is}, fits."
    change = _smallest_change(config, device.memory_bytes, planner)
    if change is None:
        return f"{as_it_is}, does not fit, and no strategy or micro-batch here would."
    return f"{as_it_is}, does not fit; the smallest change that would: {change}."


def smallest_change(config: RunConfig, memory_bytes: int) -> str | None:
    """The smallest change with which a run fits whose update found no memory left on a device.

    The plan may hold that the run fits as it is. It did not, so the change must need less.

    Args:
        config: of the run.
        memory_bytes: of the device.

    Returns:
        Keys with their values and the bytes planned then; None if no change that is known would
        fit.
    """
    planner = Planner(config)
    own = planner.plan(configured_settings(config))
    return _smallest_change(config, min(memory_bytes, own.held - 1), planner)


def _smallest_change(config: RunConfig, memory_bytes: int, planner: Planner) -> str | None:
    for change, settings, micro_batches in _changes(config, configured_settings(config)):
        fitting = _largest_that_fits(planner, settings, micro_batches, memory_bytes)
        if fitting is not None:
            size, plan = fitting
            if size != config.trainer.micro_batch:
                change.append(f"trainer.micro_batch={size}")
            return f"{' '.join(change)} ({in_bytes(plan.held)})"
    return None


def _all_settings(config: RunConfig) -> Iterator[MemorySettings]:
    own = configured_settings(config)
    modes = (0, "light", *sorted({1, own.checkpointing} - {0, "light"}))
    strategies: list[tuple[str, int | None]] = [("single", None)]
    if config.trainer.world_size > 1:
        strategies += [("ddp", None), ("fsdp", None)]
    if config.trainer.world_size > 1 and config.optim.name != "muon":
        strategies += [("deepspeed", stage) for stage in (1, 2, 3)]
    for strategy, stage in strategies:
        for mode in modes:
            yield MemorySettings(strategy=strategy, stage=stage, checkpointing=mode)


def _changes(
    config: RunConfig, own: MemorySettings
) -> Iterator[tuple[list[str], MemorySettings, Sequence[int]]]:
    """Changes from small to large: config values, the settings they make, micro-batches to try."""
    as_it_is = [config.trainer.micro_batch]
    smaller = _micro_batches(config)
    yield [], own, smaller
    yield from _recomputing([], own, as_it_is, smaller)
    if config.trainer.world_size > 1 and own.strategy in ("single", "ddp"):
        sharded = MemorySettings(strategy="fsdp", checkpointing=own.checkpointing)
        change = ["trainer.strategy=fsdp"]
        yield list(change), sharded, as_it_is
        yield from _recomputing(change, sharded, as_it_is, smaller)


def _recomputing(
    change: list[str], settings: MemorySettings, *micro_batches: Sequence[int]
) -> Iterator[tuple[list[str], MemorySettings, Sequence[int]]]:
    """The change together with each that recomputes, the one that takes less time first."""
    modes: tuple[Checkpointing, ...] = ("light", 1)
    for mode in modes:
        recomputed = dataclasses.replace(settings, checkpointing=mode)
        for sizes in micro_batches:
            yield [*change, f"trainer.activation_checkpointing={mode}"], recomputed, sizes


def _micro_batches(config: RunConfig) -> list[int]:
    """Smaller micro-batches that keep the size of an update."""
    samples = config.samples_per_update // config.trainer.data_ranks
    return [size for size in range(1, config.trainer.micro_batch) if samples % size == 0]


def _largest_that_fits(
    planner: Planner, settings: MemorySettings, sizes: Sequence[int], memory_bytes: int
) -> tuple[int, Plan] | None:
    """The largest micro-batch that fits, by bisection, since memory grows with the micro-batch."""
    largest = None
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        plan = planner.plan(settings, sizes[middle])
        if fits(plan, memory_bytes):
            largest, low = (sizes[middle], plan), middle + 1
        else:
            high = middle
    return largest


def _checkpointing(settings: MemorySettings) -> str:
    mode = settings.checkpointing
    names: dict[Checkpointing, str] = {0: "none", "light": "light", 1: "every block"}
    return names.get(mode, f"1 in {mode}")


def _device_memory(device: Device) -> str:
    return f"{device.memory_bytes // 10**9} GB"


def _gigabytes(number: float) -> str:
    if 0 < number < 5e6:
        return "<0.01"
    return digits(number / 1e9) if number else "0"
