"""A softmax over key logits, computed in linear time as a forget gate."""

from typing import NamedTuple

from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn.functional import logsigmoid

from longhaul.modules.documents import Documents


class KeySoftmax(NamedTuple):
    """softmax_i(s_1 .. s_t) = exp(G_t - G_i) alpha_i for every t, G the running sum of log_g.

    log_mass is log(exp(s_1) + ... + exp(s_t)), with everything before the first token included.
    """

    log_g: Float[Tensor, "B T H"]
    alpha: Float[Tensor, "B T H"]
    log_mass: Float64[Tensor, "B T H"]


def key_softmax(
    logit: Float[Tensor, "B T H"], documents: Documents, log_mass: Float64[Tensor, "N H"]
) -> KeySoftmax:
    """Gates and factors of the values. With L_t = logsumexp_(j <= t) s_j and L_0 = log_mass:

        gamma_t = exp(L_(t-1) - L_t) = sigma(L_(t-1) - s_t)
        alpha_t = exp(s_t - L_t) = 1 - gamma_t

    This is causal: the maximum that stabilises L_t is taken over tokens up to t. The gate is not
    computed as the difference L_(t-1) - L_t, which would lose its digits where the past has much
    more mass than token t.
    """
    total, before = documents.logcumsumexp(logit.double(), log_mass)
    excess = (logit - before).to(logit.dtype)
    return KeySoftmax(logsigmoid(-excess), excess.sigmoid(), total)
