"""DeepSpeed's ZeRO as a strategy. Only this file knows what DeepSpeed keeps private."""

import argparse
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from longhaul.configs import RunConfig
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.optim import MOMENTS
from longhaul.modules.pretraining import Outcome
from longhaul.pipeline.checkpoints.integrity import CheckpointError
from longhaul.pipeline.checkpoints.reader import SavedCheckpoint
from longhaul.pipeline.distributed.strategy import (
    Connecting,
    LaunchesRanks,
    Resumable,
    broadcast_weights,
)
from longhaul.pipeline.distributed.zero import bucket_sizes, zero_config


class DeepSpeedZero(Resumable, LaunchesRanks, DeepSpeedStrategy):
    """DeepSpeed's ZeRO: stage 1 shards the moments, 2 the gradients too, 3 the parameters too."""

    def __init__(
        self, config: RunConfig, devices: list[torch.device], connecting: Connecting
    ) -> None:
        self._gpu = devices[0].type == "cuda"
        # This rank's tensors of a checkpoint. The same for every save, since for each of them the
        # save has a page-locked copy, which is slow to allocate.
        self._kept: dict[str, Tensor] = {}
        # Without this setting DeepSpeed would look for a GPU, and compile its shared-memory op.
        if not self._gpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().__init__(
            parallel_devices=devices,
            # Our data loader yields ready batches, so the strategy cannot look up a batch size.
            logging_batch_size_per_gpu=config.trainer.micro_batch,
            config=zero_config(config, gpu=self._gpu),
            **connecting,
        )

    def setup_environment(self) -> None:
        # Skips the parent's own method, which refuses every device but CUDA.
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        # As the parent, without its check of the device index, which a CPU does not have.
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _init_deepspeed_distributed(self) -> None:
        from deepspeed import ops

        # DeepSpeed would compile an op for collectives in one machine; that needs a C++ compiler.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        super()._init_deepspeed_distributed()

    def _set_node_environment_variables(self) -> None:
        super()._set_node_environment_variables()
        if self._gpu:
            # DeepSpeed takes this for the index of the rank's device.
            os.environ["LOCAL_RANK"] = str(self.root_device.index)

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> Any:
        # Imported here because it is slow to import and only this strategy needs it.
        import deepspeed

        assert optimizer is not None
        # ZeRO's shards may have parameters of several groups, so that all must be of one kind.
        (self._moments,) = {MOMENTS[group["kind"]] for group in optimizer.param_groups}
        broadcast_weights(model.to(self.root_device))
        trained = [p for p in model.parameters() if p.requires_grad]
        assert isinstance(self.config, dict)
        self.config["zero_optimization"] |= bucket_sizes(sum(p.numel() for p in trained))
        engine, optimizer, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.root_device.index or 0),
            config=self.config,
            model=model,
            model_parameters=trained,
            optimizer=optimizer,
            dist_init_required=False,
        )
        return engine, optimizer

    def update(
        self,
        optimizer: Optimizer,
        max_norm: float,
        loss: Tensor,
        is_good: Callable[[float], bool],
    ) -> Outcome:
        """As the parent, but the engine takes max_norm from its own config.

        It reads the norm itself, so the loss is read on its own, before the engine begins.
        """
        engine = cast(Any, self.model)
        loss_read = loss.item()
        if not is_good(loss_read):
            self._drop_gradients(engine)
            return Outcome(loss_read, math.nan, applied=False)
        engine.step()
        norm = engine.get_global_grad_norm()
        return Outcome(loss_read, float(norm), bool(engine.was_step_applied()))

    def _drop_gradients(self, engine: Any) -> None:
        """Skip the step as the engine does after an overflow; it computes no gradient norm then."""
        zero = engine.optimizer
        check = "_overflow_check_and_loss_scale_update" if self.zero_stage_3 else "check_overflow"
        setattr(zero, check, lambda *args, **kwargs: setattr(zero, "overflow", True))
        if not self.zero_stage_3:
            was_checked, zero.check_grad_overflow = zero.check_grad_overflow, True
        engine.step()
        delattr(zero, check)
        if not self.zero_stage_3:
            zero.check_grad_overflow = was_checked
        assert not engine.was_step_applied()

    def tensors(self, model: LanguageModel, optimizer: Optimizer) -> dict[str, Tensor]:
        """Full tensors, gathered one by one. Each rank keeps every world_size-th parameter's."""
        from deepspeed.utils import safe_get_full_optimizer_state

        zero = cast(Any, optimizer)
        states = list(zero.optimizer.state.values())
        if states and not self.zero_stage_3:
            # DeepSpeed links parameters to moments after the first group's first step, when the
            # other groups have no moments yet. Link all of them again.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        for number, (name, parameter) in enumerate(model.named_parameters()):
            gathered = {f"model/{name}": self._whole(parameter)}
            if parameter.requires_grad and states:
                for key in self._moments:
                    value = safe_get_full_optimizer_state(parameter, key)
                    gathered[f"optimizer/{name}/{key}"] = value
                gathered[f"optimizer/{name}/step"] = states[0]["step"]
            if number % self.world_size == self.global_rank:
                for key, value in gathered.items():
                    if key not in self._kept:
                        self._kept[key] = torch.empty_like(value, device="cpu")
                    self._kept[key].copy_(value.detach())
        return dict(self._kept)

    def whole_weights(self, model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            yield name, self._whole(parameter)

    def restore(self, model: LanguageModel, optimizer: Optimizer, saved: SavedCheckpoint) -> None:
        zero = cast(Any, optimizer)
        states = [name for name in saved.tensors if name.startswith("optimizer/")]
        has_state = bool(states)
        step_name = next((name for name in states if name.endswith("/step")), None)
        if has_state and step_name is None:
            raise CheckpointError(
                f"checkpoint {saved.path}: found no parameter's step in the optimizer's state, "
                "wanted one"
            )
        if has_state and not zero.optimizer.state:
            # The optimizer would create its state only at its first step, so create it here.
            for flat in self._flat_shards(zero):
                moments = {key: torch.zeros_like(flat) for key in self._moments}
                step = torch.zeros((), device=flat.device)
                zero.optimizer.state[flat] = {"step": step, **moments}
            if not self.zero_stage_3:
                zero._lazy_init_hp_params_optimizer_state()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                with self._gathered(parameter, is_written=True):
                    parameter.data.copy_(saved.read_one(f"model/{name}"))
                continue
            wanted: dict[str | None, str] = {None: f"model/{name}"}
            if has_state:
                wanted |= {key: f"optimizer/{name}/{key}" for key in self._moments}
            shape = getattr(parameter, "ds_shape", parameter.shape)
            values = {key: torch.empty(shape, dtype=torch.float32) for key in wanted}
            saved.read({wanted[key]: value for key, value in values.items()})
            for key, value in values.items():
                self._write_shard(zero, parameter, value, key)
        if step_name is not None:
            # The step counter is the same for every parameter.
            step = saved.read_one(step_name)
            for state in zero.optimizer.state.values():
                state["step"].copy_(step)
        if self.zero_stage_3:
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        else:
            zero.update_lp_params()

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's value in the precision in which it is trained."""
        from deepspeed.utils import safe_get_full_fp32_param

        if not parameter.requires_grad:
            with self._gathered(parameter):
                return parameter.detach().clone()
        return cast(Tensor, safe_get_full_fp32_param(parameter))

    def _flat_shards(self, zero: Any) -> list[Tensor]:
        """This rank's float32 shards of the parameters, as the inner optimizer holds them."""
        if self.zero_stage_3:
            return list(zero.fp32_partitioned_groups_flat)
        return list(zero.single_partition_of_fp32_groups)

    def _write_shard(
        self, zero: Any, parameter: nn.Parameter, value: Tensor, key: str | None
    ) -> None:
        """Write this rank's shard of a parameter (key None), or of one of its moments."""
        if not self.zero_stage_3:
            from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

            if key is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, key)
            return
        # DeepSpeed's safe_set_* functions fail where the ranks do not divide a parameter's size.
        shard, _ = zero._get_fp32_opt_state_partition(parameter, False, key)
        mine = value.flatten()[shard.numel() * self.global_rank :][: shard.numel()]
        shard.data[: mine.numel()].copy_(mine)

    def _gathered(
        self, parameter: nn.Parameter, *, is_written: bool = False
    ) -> AbstractContextManager[Any]:
        """Context with the full parameter. Changes to it are kept only with `is_written`."""
        import deepspeed

        return deepspeed.zero.GatheredParameters(  # type: ignore[no-any-return]
            [parameter], modifier_rank=0 if is_written else None, enabled=self.zero_stage_3
        )
