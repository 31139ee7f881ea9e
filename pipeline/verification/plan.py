"""All checks in their order: what matters most, or may stop everything else, comes first."""

from longhaul.pipeline.verification import kernels, models, timings, trainer
from longhaul.pipeline.verification.check import Check
from longhaul.pipeline.verification.machine import Machine


def all_checks(machine: Machine) -> list[Check]:
    """Every check, including those that this machine cannot run.

    The headline kernel: its results, its time, and one update of a model with it. Then the kernels
    in bfloat16 and their times, since a borrowed GPU may be gone before the rest has run. Other
    projects' kernels are last: their tuning takes minutes.
    """
    device = machine.device
    steps = timings.step_timings()
    return [
        *kernels.headline_checks(device),
        *timings.headline_timings(),
        *trainer.first_checks(),
        *steps[:1],
        *kernels.training_dtype_checks(device),
        *timings.op_timings(),
        *steps[1:],
        *kernels.remaining_checks(device),
        *models.decoding_checks(),
        *trainer.remaining_checks(machine),
        *kernels.candidate_checks(device),
        *kernels.peer_checks(device),
        *timings.peer_timings(),
    ]
