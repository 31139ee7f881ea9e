"""Every kind of attention, for what does not depend on formulas; tests/modules has those of all.

`make test` runs one kind of each family, and `make test-all` the others.
"""

import pytest
from everyday import everyday

from longhaul.modules.attention import registered_variants

EVERYDAY_KINDS = ("conformal_sympow", "gated_deltanet", "softmax", "zeros")

every_kind = pytest.mark.parametrize("kind", everyday(registered_variants(), EVERYDAY_KINDS))
