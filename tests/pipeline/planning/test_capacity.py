"""Models that this machine cannot hold, refused before they are built."""

from typing import Any

import psutil
import pytest
import torch

from longhaul.configs import ConfigError, RunConfig, load_run_config
from longhaul.modules.meta_device import build_on_meta
from longhaul.pipeline.planning.capacity import check_capacity, num_parameters


def config(*overrides: str) -> RunConfig:
    return load_run_config("run/demo.yaml", overrides)


@pytest.mark.parametrize("kind", ["softmax", "conformal_sympow"])
def test_parameters_are_those_of_the_model(kind: str) -> None:
    model = config(f"model.attention={{kind: {kind}}}", "model.layers=7").model
    assert num_parameters(model) == build_on_meta(model).num_parameters()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's memory counts, not that of the host")
def test_what_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = num_parameters(config().model)

    def has(total: int) -> None:
        memory: Any = type("Memory", (), {"total": total})
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    has(16 * parameters)
    check_capacity(config())
    sharded = ("trainer.devices=2", "trainer.strategy=fsdp", "trainer.micro_batch=8")
    check_capacity(config(*sharded))
    for two_copies in ((*sharded[:1], "trainer.strategy=ddp"), (*sharded, "trainer.replicas=2")):
        with pytest.raises(ConfigError, match="gradients and moments take"):
            check_capacity(config(*two_copies))
    has(16 * parameters - 1)
    with pytest.raises(ConfigError, match=f"found {parameters:,} parameters, whose weights"):
        check_capacity(config())
