"""DeepSpeed's configuration: what a run's config asks of ZeRO, on a GPU or on a CPU."""

from typing import Any

from longhaul.configs import RunConfig

# Elements that DeepSpeed reduces or gathers at once, as Lightning would set it.
_LARGEST_BUCKET = 200_000_000


def zero_config(config: RunConfig, *, gpu: bool) -> dict[str, Any]:
    """DeepSpeed's configuration of a run, but for the sizes of its buckets."""
    trainer = config.trainer
    zero: dict[str, Any] = {
        "stage": trainer.deepspeed_stage,
        "contiguous_gradients": True,
        # Stage 1 reduces after the last micro-batch, and DeepSpeed refuses to overlap that.
        "overlap_comm": gpu and trainer.deepspeed_stage > 1,
    }
    if trainer.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": gpu}
    return {
        "train_micro_batch_size_per_gpu": trainer.micro_batch,
        # Pretraining decides when an update is complete, not DeepSpeed's count of calls.
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optim.gradient_clip or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": trainer.precision == "bf16-mixed", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


def bucket_sizes(parameters: int) -> dict[str, int]:
    """Sizes of DeepSpeed's buckets, in elements, for a number of trained parameters.

    By default it allocates buckets of 5e8 elements, however small the model is.
    """
    size = min(parameters, _LARGEST_BUCKET)
    size += size % 2  # DeepSpeed demands an even size
    return {"reduce_bucket_size": size, "allgather_bucket_size": size}
