"""Whether a run fits its devices: a table of what a rank holds and sends, and one verdict."""

import dataclasses
from collections.abc import Iterator, Sequence

from longhaul.configs import RunConfig, load_run_config
from longhaul.pipeline.planning.memory import MemorySettings, Plan, Planner
from longhaul.pipeline.planning.memory_tracker import CATEGORIES
from longhaul.pipeline.system.devices import DEVICES, Device, find_device
from longhaul.pipeline.terminal.numbers import digits, in_bytes

# Left to the device's context, to buffers of NCCL and to the allocator's rounding.
_RESERVED_BYTES = 2 * 10**9


def find(device: str | None) -> Device:
    """The device that is asked for; ValueError names those there are."""
    found = None if device is None else find_device(device)
    if found is None:
        keys = ", ".join(sorted(one.key for one in DEVICES))
        what = "missing with --gpus" if device is None else f"found {device!r}"
        raise ValueError(f"--device: {what}, wanted one of {keys}")
    return found


def with_num_gpus(
    path: str, overrides: Sequence[str], run: RunConfig, gpus: int | None
) -> RunConfig:
    """The run that a path and overrides give, on so many ranks in place of its own number."""
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
    try:
        return load_run_config(path, [*overrides, *spread])
    except ValueError as error:
        raise ValueError(f"--gpus: found {gpus}: {error}") from None


def configured_settings(config: RunConfig) -> MemorySettings:
    """What the config itself says."""
    trainer = config.trainer
    strategy = trainer.strategy
    return MemorySettings(
        strategy=strategy,
        stage=trainer.deepspeed_stage if strategy == "deepspeed" else None,
        checkpointing=trainer.activation_checkpointing,
    )


def rows(config: RunConfig, device: Device, planner: Planner) -> list[list[str]]:
    """A row for every strategy and mode of checkpointing, below the names of the columns."""
    table = [["strategy", "checkpointing", *CATEGORIES, "total", "sent", device.name]]
    for choice in _choices(config):
        plan = planner.plan(choice)
        parts = [_gigabytes(getattr(plan, part)) for part in CATEGORIES]
        verdict = "fits" if fits(plan, device) else "does not fit"
        table.append(
            [
                choice.name,
                _checkpointing(choice),
                *parts,
                _gigabytes(plan.total),
                _gigabytes(plan.sent),
                f"{verdict} {_device_memory(device)}",
            ]
        )
    return table


def fits(plan: Plan, device: Device) -> bool:
    return plan.total + _RESERVED_BYTES <= device.memory_bytes


def verdict(config: RunConfig, device: Device, planner: Planner) -> str:
    """One line: the config as it is fits, or the smallest change with which it would."""
    own = configured_settings(config)
    plan = planner.plan(own)
    as_it_is = f"As configured ({own.name}, checkpointing {_checkpointing(own)}, micro-batch "
    as_it_is += f"{config.trainer.micro_batch}): {in_bytes(plan.total)} of {_device_memory(device)}"
    if fits(plan, device):
        return f"{as_it_is}, fits."
    for change, choice, micro_batches in _changes(config, own):
        found = _largest_that_fits(planner, choice, micro_batches, device)
        if found is not None:
            size, plan = found
            if size != config.trainer.micro_batch:
                change.append(f"trainer.micro_batch={size}")
            return (
                f"{as_it_is}, does not fit; the smallest change that would: {' '.join(change)} "
                f"({in_bytes(plan.total)})."
            )
    return f"{as_it_is}, does not fit, and no strategy or micro-batch here would."


def _choices(config: RunConfig) -> Iterator[MemorySettings]:
    own = configured_settings(config)
    modes = sorted({0, 1, own.checkpointing})
    strategies: list[tuple[str, int | None]] = [("single", None)]
    if config.trainer.world_size > 1:
        strategies += [("ddp", None), ("fsdp", None)]
        strategies += [("deepspeed", stage) for stage in (1, 2, 3)]
    for strategy, stage in strategies:
        for mode in modes:
            yield MemorySettings(strategy=strategy, stage=stage, checkpointing=mode)


def _changes(
    config: RunConfig, own: MemorySettings
) -> Iterator[tuple[list[str], MemorySettings, Sequence[int]]]:
    """Changes from small to large: settings, what they choose, and micro-batches to try."""
    as_it_is = [config.trainer.micro_batch]
    smaller = _micro_batches(config)
    recomputed = dataclasses.replace(own, checkpointing=1)
    checkpointing = "trainer.activation_checkpointing=1"
    yield [], own, smaller
    yield [checkpointing], recomputed, as_it_is
    yield [checkpointing], recomputed, smaller
    if config.trainer.world_size > 1 and own.strategy in ("single", "ddp"):
        sharded = MemorySettings(strategy="fsdp", checkpointing=own.checkpointing)
        change = ["trainer.strategy=fsdp"]
        yield list(change), sharded, as_it_is
        change.append(checkpointing)
        sharded = dataclasses.replace(sharded, checkpointing=1)
        yield list(change), sharded, as_it_is
        yield list(change), sharded, smaller


def _micro_batches(config: RunConfig) -> list[int]:
    """Smaller micro-batches that leave the size of an update as it is."""
    samples = config.samples_per_update // config.trainer.world_size
    return [size for size in range(1, config.trainer.micro_batch) if samples % size == 0]


def _largest_that_fits(
    planner: Planner, choice: MemorySettings, sizes: Sequence[int], device: Device
) -> tuple[int, Plan] | None:
    """By bisection: memory grows with the micro-batch."""
    found = None
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        plan = planner.plan(choice, sizes[middle])
        if fits(plan, device):
            found, low = (sizes[middle], plan), middle + 1
        else:
            high = middle
    return found


def _checkpointing(choice: MemorySettings) -> str:
    return {0: "none", 1: "every block"}.get(choice.checkpointing, f"1 in {choice.checkpointing}")


def _device_memory(device: Device) -> str:
    return f"{device.memory_bytes // 10**9} GB"


def _gigabytes(number: float) -> str:
    if 0 < number < 5e6:
        return "<0.01"
    return digits(number / 1e9) if number else "0"
