"""The sums that must hold between the waiting times."""

import re
from importlib import resources

from longhaul.configs.schema import TrainerConfig
from longhaul.pipeline.system import waiting

TRAINER = TrainerConfig(max_tokens=1, micro_batch=1)


def test_a_stop_has_time_for_an_update_and_a_save_beside_all_waits() -> None:
    waits = waiting.CONNECT_S + waiting.UPLOAD_S + waiting.DISCONNECT_S
    assert waits + 20 <= TRAINER.stop_seconds
    # The signal of Slurm comes `stop_seconds` and SLURM_DELAY_S before the end, which has to hold.
    assert TRAINER.stop_seconds > waiting.REPEATED_SIGNAL_S


def test_slurm_waits_for_what_the_last_rank_still_does() -> None:
    script = resources.files("longhaul.slurm").joinpath("train.sbatch").read_text()
    (found,) = re.findall(r"srun --wait=(\d+)", script)
    assert int(found) == waiting.SLURM_WAIT_S
    assert waiting.END_RANKS_S + waiting.FAILURE_UPLOAD_S <= waiting.SLURM_WAIT_S
    assert waiting.ADVICE_S + waiting.DISCONNECT_S <= waiting.SLURM_WAIT_S


def test_a_rank_that_hangs_or_is_gone_is_named_before_anything_fails_without_its_name() -> None:
    told = 3 * waiting.HEARTBEAT_S
    assert told < waiting.FAIL_S, "a rank that fails by itself says so first"
    assert told + waiting.FLIGHT_RECORD_S < waiting.SILENT_S
    assert 60 < waiting.SILENT_S + 60 < waiting.DEAD_S, "a pause of a minute is forgiven"
    assert TRAINER.hang_seconds > waiting.DEAD_S
    assert 2 * waiting.SILENT_S + told + waiting.FLIGHT_RECORD_S < waiting.COLLECTIVE_S


def test_checks_outlast_what_they_call() -> None:
    assert waiting.GIT_S < waiting.GIT_CHECK_S
    assert waiting.ANSWER_S < waiting.CHECK_S
    assert waiting.GPU_CHECK_S < waiting.MEET_S
