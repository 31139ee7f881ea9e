"""The shapes of each form of a call are checked, although most calls are not."""

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels import power_attention


def first_column(x: Float[Tensor, "B T"], keep: bool = False) -> Float[Tensor, " B"]:
    return x[:, :1] if keep else x[:, 0]


checked = jaxtyping.jaxtyped(typechecker=beartype)(first_column)


@pytest.mark.parametrize(
    ("x", "keep"),
    [
        pytest.param(torch.ones(2), False, id="another number of dimensions"),
        pytest.param(torch.ones(2, 3, dtype=torch.int64), False, id="another dtype"),
        pytest.param(torch.ones(2, 3).numpy(), False, id="another type"),
        pytest.param(torch.ones(2, 3), True, id="a flag that changes what is returned"),
    ],
)
def test_another_form_than_the_known_one_is_checked(x: Tensor, keep: bool) -> None:
    assert checked(torch.ones(2, 3), False).shape == (2,)
    for _ in range(2):
        with pytest.raises(jaxtyping.TypeCheckError):
            checked(x, keep)


def test_the_op_is_checked() -> None:
    q, k = torch.ones(1, 4, 2, 3), torch.ones(1, 4, 1, 3)
    power_attention(q, k, k, degree=2)
    with pytest.raises(jaxtyping.TypeCheckError):
        power_attention(q, k, torch.ones(1, 5, 1, 3), degree=2)
