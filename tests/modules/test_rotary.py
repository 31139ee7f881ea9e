"""Phases stay right over a million tokens; rotations are rotations."""

import math

import pytest
import torch

from longhaul.modules.rotary import accumulate, frequencies, frequencies_from_base, phases, rotate

CPU = torch.device("cpu")
MILLION = 1_048_576


def circular_distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (found - wanted).abs() % 1.0
    return float(torch.minimum(difference, 1 - difference).max())


def phase_in_turns(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.atan2(sin.double(), cos.double()) / (2 * torch.pi)


def test_phase_is_within_1e_4_turns_after_a_million_tokens() -> None:
    torch.manual_seed(0)
    rates = 1 + torch.randn(1, MILLION).tanh()
    turns_per_token = frequencies(8, 65_536, CPU)
    cos, sin = phases(accumulate(rates), turns_per_token, torch.float32)
    # The oracle adds with integers: rates in units of 2^-40 are exact, so are their sums.
    exact = (rates[0].double() * 2.0**40).round().to(torch.int64).cumsum(0)
    wanted = exact.double()[:, None] / 2.0**40 * turns_per_token
    error = circular_distance(phase_in_turns(cos, sin)[0, :, 0], wanted)
    assert error < 1e-4
    # The same sum in float32 fails this test: that the bound means something is checked too.
    naive = rates[0].cumsum(0).double()[:, None] * turns_per_token
    assert circular_distance(naive, wanted) > 1e-4


def test_phase_continues_exactly_over_a_split() -> None:
    rates = 1 + torch.randn(2, 1000).tanh()
    whole = accumulate(rates)
    first = accumulate(rates[:, :333])
    second = accumulate(rates[:, 333:], start=first[:, -1])
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=1e-9)


def test_packed_documents_each_begin_anew() -> None:
    rates = 1 + torch.randn(1, 100).tanh()
    packed = accumulate(rates, cu_seqlens=torch.tensor([0, 1, 40, 100]))
    parts = [accumulate(part) for part in rates.split([1, 39, 60], dim=1)]
    torch.testing.assert_close(packed, torch.cat(parts, 1), rtol=0, atol=1e-10)


def test_frequencies_are_the_formulas() -> None:
    found = (frequencies(8, 65_536, CPU) * 2 * math.pi).tolist()
    assert found == pytest.approx([2 * math.pi / 65_536 ** (2 * (j - 1) / 8) for j in range(1, 5)])
    found = (frequencies_from_base(8, 10_000.0, CPU) * 2 * math.pi).tolist()
    assert found == pytest.approx([10_000 ** (-2 * (j - 1) / 8) for j in range(1, 5)])


def test_rotation_keeps_norms_and_depends_on_differences_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 50, 1, 8)
    cos, sin = phases(accumulate(torch.ones(1, 50)), frequencies_from_base(8, 100.0, CPU), q.dtype)
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    scores = torch.einsum("bthk,bihk->ti", turned_q, turned_k)
    torch.testing.assert_close(scores[10:, 10:], scores[:-10, :-10])
    assert (scores[:-1, :-1] - scores[:-1, 1:]).abs().max() > 1e-3
