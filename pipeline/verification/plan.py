"""All checks in their order: what matters most, or may stop everything else, comes first."""

from longhaul.pipeline.verification import decoding, kernels, timings, trainer
from longhaul.pipeline.verification.check import Check
from longhaul.pipeline.verification.machine import Machine


def all_checks(machine: Machine) -> list[Check]:
    """Every check, also those that this machine has not what they need for.

    The headline kernel: its results, its time, and one update of a model with it. Then whatever
    the numbers of training rest on. Other projects' kernels are last: their tuning takes minutes.
    """
    device = machine.device
    steps = timings.step_timings()
    return [
        *kernels.headline_checks(device),
        *timings.headline_timings(),
        *trainer.first_checks(),
        *steps[:1],
        *kernels.training_dtype_checks(device),
        *kernels.candidate_checks(device),
        *decoding.decoding_checks(),
        *kernels.remaining_checks(device),
        *trainer.remaining_checks(machine),
        *timings.op_timings(),
        *steps[1:],
        *timings.peer_timings(),
    ]
