"""Muon: a step along the orthogonalised momentum of each matrix of a block, Adam for the rest.

Source: Jordan et al. (2024), "Muon: An optimizer for hidden layers in neural networks"; the scale
of a step is that of Liu et al. (2025), arXiv:2502.16982.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer

from longhaul.kernels.common.custom_ops import without_autocast

Rows = tuple[int, ...]
"""Rows of the matrices that one parameter holds, one below the other."""

MOMENTUM = 0.95
ITERATIONS = 5
# Chosen for a steep slope at 0, not for convergence: singular values end at about 0.7 to 1.2.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
# Added to the norm of a matrix, so that a zero gradient gives a zero step.
_FLOOR = 1e-7
# The root mean square of Adam's steps, in units of the learning rate, as measured by Liu et al.
_STEP_SIZE = 0.2
# Elements of the matrices that a rank works on at once. The iteration holds four times as many.
_MOST_AT_ONCE = 1 << 24


class Muon(AdamW):
    """Muon in groups of kind muon, Adam with decoupled decay in all others.

    With a gradient G and the state M of a matrix of R rows and C columns, at learning rate lr,

        M <- 0.95 M + 0.05 G,    U = 0.95 M + 0.05 G,
        W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(R, C)) orthogonalized(U).

    The scale gives steps the size of Adam's, so that one learning rate serves all groups. A group
    of kind muon has `rows`, the Rows of each of its parameters: matrices that are held in one are
    orthogonalised apart.

    A parameter whose rows are sharded over ranks has a momentum sharded alike. Each matrix is then
    brought together on one rank, which iterates for all of them.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Adam's own completes what old versions of torch saved, and wants a step in every state.
        Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["kind"] != "muon"]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["kind"] == "muon":
                self._step_along_momenta(group)
        return loss

    def _step_along_momenta(self, group: dict[str, Any]) -> None:
        pairs = zip(group["params"], group["rows"], strict=True)
        trained = [(parameter, rows) for parameter, rows in pairs if parameter.grad is not None]
        for batch in _batches(trained):
            parameters, rows = [one for one, _ in batch], [own for _, own in batch]
            directions = [self._direction(one) for one in parameters]
            if (ranks := _ranks(parameters[0])) is None:
                steps = _steps(directions, rows)
            else:
                shapes = [one.shape for one in parameters]
                steps = _sharded_steps(directions, shapes, rows, ranks)
            for parameter, step in zip(parameters, steps, strict=True):
                own = _own_rows(parameter)
                own.mul_(1 - group["lr"] * group["weight_decay"])
                own.add_(step, alpha=-group["lr"])

    def _direction(self, parameter: Tensor) -> Float[Tensor, "own_rows columns"]:
        """Add the gradient to the momentum; the direction of Nesterov's step, of this rank's rows.

        It has the precision of the iteration: 16 bits where the model's products have them, but
        never on CPUs, which are not faster then.
        """
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, momentum = _own_rows(parameter.grad), _own_rows(state["momentum"])
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = gradient.lerp(momentum, MOMENTUM)
        if direction.is_cuda and torch.is_autocast_enabled("cuda"):
            return direction.bfloat16()
        return direction.to(torch.promote_types(direction.dtype, torch.float32))


def orthogonalized(
    matrices: Float[Tensor, "count rows columns"],
) -> Float[Tensor, "count rows columns"]:
    """Close to U V^T for each matrix U S V^T, which has no more rows than columns.

    Newton-Schulz: X = M / ||M||, then five times X <- a X + (b Y + c Y Y) X with Y = X X^T.
    """
    a, b, c = COEFFICIENTS
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=wide)
    x: Tensor = matrices / (norm + _FLOOR).to(matrices.dtype)
    with without_autocast(x):
        for _ in range(ITERATIONS):
            y = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(y, y, y, beta=b, alpha=c), x, beta=a)
    return x


def orthogonalization_flops(groups: Iterable[Mapping[str, Any]]) -> int:
    """FLOPs of the iterations of one update, over all ranks that share them."""
    return sum(
        _flops(one.shape, rows)
        for group in groups
        if group["kind"] == "muon"
        for one, rows in zip(group["params"], group["rows"], strict=True)
    )


def _flops(shape: Sequence[int], rows: Rows) -> int:
    """Those of one parameter: 4 r^2 c + 2 r^3 an iteration for a matrix with r <= c."""
    sides = [sorted((own, shape[1])) for own in rows]
    return ITERATIONS * sum(4 * r * r * c + 2 * r**3 for r, c in sides)


def _steps(
    directions: Sequence[Float[Tensor, "_ _"]], rows: Sequence[Rows]
) -> list[Float[Tensor, "_ _"]]:
    """Steps of whole parameters at a learning rate of 1. Matrices of one shape share a call."""
    pairs = zip(directions, rows, strict=True)
    matrices = [matrix for one, own in pairs for matrix in one.split(own)]
    # Lying, so that X X^T is the smaller product, and a matrix and its transpose are of one shape.
    lying = [one.mT if one.shape[0] > one.shape[1] else one for one in matrices]
    steps = list(matrices)
    for shape in dict.fromkeys(one.shape for one in lying):
        numbers = [number for number, one in enumerate(lying) if one.shape == shape]
        found = orthogonalized(torch.stack([lying[number] for number in numbers]))
        found *= _STEP_SIZE * math.sqrt(shape[1])
        for number, one in zip(numbers, found, strict=True):
            steps[number] = one if matrices[number].shape == shape else one.mT
    remaining = iter(steps)
    return [torch.cat([next(remaining) for _ in own]) for own in rows]


def _sharded_steps(
    directions: Sequence[Float[Tensor, "_ _"]],
    shapes: Sequence[torch.Size],
    rows: Sequence[Rows],
    ranks: dist.ProcessGroup,
) -> list[Float[Tensor, "_ _"]]:
    """As `_steps`, of this rank's rows; every parameter is brought together on one rank."""
    count, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    owned = _shares([_flops(shape, own) for shape, own in zip(shapes, rows, strict=True)], count)
    own, order = owned[rank], [number for share in owned for number in share]
    shards = [_shard_rows(shapes[number][0], count) for number in own]

    # First by owner, then by parameter.
    sent = torch.cat([directions[number].flatten() for number in order])
    sent_sizes = [sum(directions[number].numel() for number in share) for share in owned]
    # First by rank, then by parameter.
    sizes = [
        [split[other] * shapes[number][1] for number, split in zip(own, shards, strict=True)]
        for other in range(count)
    ]
    received = sent.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(received, sent, list(map(sum, sizes)), sent_sizes, group=ranks)
    parts = received.split([size for of_rank in sizes for size in of_rank])
    whole = [
        torch.cat(parts[place :: len(own)]).view(shapes[number]) for place, number in enumerate(own)
    ]
    steps = _steps(whole, [rows[number] for number in own])

    split_steps = [step.split(split) for step, split in zip(steps, shards, strict=True)]
    returned = [split[other].flatten() for other in range(count) for split in split_steps]
    received = torch.cat(returned) if returned else sent.new_empty(0)
    dist.all_to_all_single(sent, received, sent_sizes, list(map(sum, sizes)), group=ranks)
    found = sent.split([directions[number].numel() for number in order])
    by_number = dict(zip(order, found, strict=True))
    return [by_number[number].view_as(one) for number, one in enumerate(directions)]


def _batches(
    trained: Sequence[tuple[Tensor, Rows]],
) -> Iterator[list[tuple[Tensor, Rows]]]:
    """Consecutive parameters, of which each rank has not too many elements to work on."""
    batch: list[tuple[Tensor, Rows]] = []
    size = 0
    for one in trained:
        ranks = _ranks(one[0])
        most = _MOST_AT_ONCE * (1 if ranks is None else dist.get_world_size(ranks))
        if batch and size + one[0].numel() > most:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one[0].numel()
    if batch:
        yield batch


def _shares(costs: Sequence[int], count: int) -> list[list[int]]:
    """Numbers of the costs, dealt to so many ranks: the largest first, to who has least."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(costs)), key=lambda one: -costs[one]):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += costs[number]
    return shares


def _shard_rows(rows: int, count: int) -> list[int]:
    """Rows that each rank has of a sharded matrix: as in torch.chunk, the last may have none."""
    most = -(-rows // count)
    return [max(0, min(most, rows - rank * most)) for rank in range(count)]


def _ranks(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks over which the rows of a parameter are sharded; None if this one has all."""
    if not isinstance(parameter, DTensor):
        return None
    (dimension,) = (n for n, one in enumerate(parameter.placements) if isinstance(one, Shard))
    assert parameter.placements[dimension].is_shard(0)
    mesh = parameter.device_mesh
    return mesh.get_group(dimension) if mesh.size(dimension) > 1 else None


def _own_rows(tensor: Tensor) -> Float[Tensor, "own_rows columns"]:
    """This rank's rows of a matrix, which share its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
