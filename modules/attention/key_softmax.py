"""A softmax over key logits, which is a forget gate."""

from typing import NamedTuple

from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn.functional import logsigmoid

from longhaul.modules.documents import Documents


class KeySoftmax(NamedTuple):
    """softmax_i(s_1 .. s_t) = exp(G_t - G_i) alpha_i for every t, in linear time."""

    log_g: Float[Tensor, "B T H"]
    alpha: Float[Tensor, "B T H"]
    log_mass: Float64[Tensor, "B T H"]


def key_softmax(
    logit: Float[Tensor, "B T H"], documents: Documents, log_mass: Float64[Tensor, "N H"]
) -> KeySoftmax:
    """Gates and factors of the values, with L_t = logsumexp_(j <= t) s_j and L_0 = log_mass:

        gamma_t = exp(L_(t-1) - L_t) = sigma(L_(t-1) - s_t)
        alpha_t = exp(s_t - L_t) = 1 - gamma_t

    Nothing looks at later tokens: the maximum that steadies L_t is over tokens up to t. The
    difference L_(t-1) - L_t itself would have lost its digits where the past is heavy.
    """
    total, before = documents.logcumsumexp(logit.double(), log_mass)
    excess = (logit - before).to(logit.dtype)
    return KeySoftmax(logsigmoid(-excess), excess.sigmoid(), total)
