"""Checks of another project's kernels: that they do not run is not that they are wrong."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from longhaul.kernels.delta import op
from longhaul.pipeline.verification.check import Place
from longhaul.pipeline.verification.kernels import check_case, peer_checks

PLACE = Place("cpu", Path())


def test_a_peer_that_is_wrong_has_faults_and_one_that_does_not_run_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (one,) = (one for one in peer_checks("cuda") if one.name.endswith("carried on, gates scalar"))
    assert not one.is_ours
    case = one.argument.shrunk(40, 16)
    with pytest.raises(RuntimeError, match="chunked: ValueError: backend: 'fla' cannot run"):
        check_case(case, PLACE)
    error = 1.0

    # In place of the package: our own, off by a factor.
    def in_place_of_fla(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **how: Any) -> Any:
        beta, log_g, state = rest
        out, after = op.delta_rule(
            *(q, k, v, beta, log_g), initial_state=state, backend="torch", **how
        )
        return error * out, after

    monkeypatch.setattr(op, "delta_rule_fla", in_place_of_fla)
    assert check_case(case, PLACE)["faults"] == []
    error = 1.1
    faults = check_case(case, PLACE)["faults"]
    assert any(fault.startswith("chunked: out: ") for fault in faults), faults
