import pytest

from longhaul.kernels.power import op
from longhaul.modules.attention import power


@pytest.fixture
def chunks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of 16 tokens, which the cost model would not choose for sizes this small.

    formulas/ compares the same variants with their formulas in the form for short sequences.
    """
    for module in (op, power):
        monkeypatch.setattr(
            module,
            "choose_form",
            lambda T, K, V, degree, *_: "chunked" if degree <= 4 else "attention",
        )
        monkeypatch.setattr(module, "choose_chunk_size", lambda *_: 16)
