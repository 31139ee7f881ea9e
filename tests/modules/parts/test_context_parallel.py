"""Context parallelism over gloo gives the outputs and gradients of a single process.

Each process runs this file as a script and saves its results of every case; the tests compare them.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from part_cases import CHUNKED, KINDS, LAYERS, NEIGHBOUR, OPTIONS, PACKINGS, POWER
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from longhaul.kernels import power_attention
from longhaul.kernels.power import op
from longhaul.modules.attention import (
    LayerShape,
    attention_config,
    build_attention,
)
from longhaul.modules.attention.parts.context_parallel import (
    PowerOptions,
    context_parallel_attention,
    state_before,
)
from longhaul.modules.documents import Documents, first_tokens
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.modules.rotary import PositionScaling
from longhaul.modules.sequence_part import SequencePart
from longhaul.pipeline.distributed.context_parallel import ContextParallel

WORLDS = (*(pytest.param(ranks, marks=pytest.mark.wide) for ranks in (2, 3)), 4)
TOKENS, WIDTH, HEADS, CHUNK = 108, 16, 2, 8  # a part is no multiple of the chunk
LIMIT_S = 300

Layers = dict[int, tuple[str, dict[str, Any]]]  # those that are not conformal_sympow
LINEAR: Layers = {1: ("zeros", {"second_order": True}), 2: ("cartan", {})}
HYBRID: Layers = {1: ("fox", {}), 2: ("sliding_window", {"window": 20})}
SOFTMAX: Layers = {1: ("softmax", {}), 2: ("coca", {})}
MODELS: dict[str, dict[str, Any]] = {
    "model": {},
    "model, again": {},
    "model, recomputed": {"recompute": True},
    "model, only initial states trained": {"initial_state": "learned"},
    "model, positions of a longer sequence": {
        "scaling": PositionScaling(name="dynamic_ntk", factor=2.0, context=32)
    },
    "hybrid": {"layers": HYBRID},
    "hybrid, recomputed": {"layers": HYBRID, "recompute": True},
    "hybrid, positions of a longer sequence": {
        "layers": SOFTMAX,
        "scaling": PositionScaling(name="dynamic_ntk", factor=2.0, context=32),
    },
}
Results = dict[str, Tensor]


def offsets_of(bounds: list[int] | None) -> Tensor | None:
    return None if bounds is None else torch.tensor(bounds, dtype=torch.int32)


def documents_of(x: Tensor, bounds: list[int] | None, part: SequencePart | None) -> Documents:
    """The documents of x, or of the part of them that is x."""
    offsets = offsets_of(bounds)
    is_first = None if offsets is None else first_tokens(offsets, x, TOKENS)
    return Documents(x, is_first, part)


def own(x: Tensor, part: SequencePart | None) -> Tensor:
    return x if part is None else x.chunk(part.count, dim=1)[part.index]


def layer(
    kind: str,
    options: dict[str, Any],
    bounds: list[int] | None,
    part: SequencePart | None,
    change: float = 0.0,
) -> Results:
    """The output, and gradients of its product with a random tensor; all parameters are large.

    `change` is added to the input in NEIGHBOUR.
    """
    torch.manual_seed(0)
    given = dict(options)
    key_heads = given.pop("key_heads", HEADS)
    shape = LayerShape(width=WIDTH, heads=HEADS, key_heads=key_heads, head_dim=WIDTH // HEADS)
    if kind in CHUNKED:
        given["chunk_size"] = CHUNK
    attention = attention_config(kind)(**given).build(shape).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
    shape = (2 if bounds is None else 1, TOKENS, WIDTH)
    x, probe = torch.randn(2, *shape, dtype=torch.float64).unbind(0)
    x[:, NEIGHBOUR] += change
    x, probe = own(x, part).clone().requires_grad_(), own(probe, part)
    attention.sequence_part = part
    documents = None if bounds is None else documents_of(x, bounds, part)
    y, _ = attention(x, documents=documents, keep_state=False)
    (y * probe).sum().backward()
    gradients = {f"d {name}": p.grad for name, p in attention.named_parameters()}
    return {"y": y.detach(), "dx": x.grad} | gradients


def resets(bounds: list[int] | None, part: SequencePart | None) -> Results:
    """The op with gates of 0 inside documents, one of them at the first token of a part."""
    torch.manual_seed(0)
    B = 2 if bounds is None else 1
    q, k, v, probe = torch.randn(4, B, TOKENS, HEADS, 4, dtype=torch.float64).unbind(0)
    log_g = logsigmoid(torch.randn(B, TOKENS, HEADS, dtype=torch.float64) + 2)
    log_g[:, [3, 54, 60]] = -torch.inf
    log_g[:, 81:, 0] = -torch.inf
    leaves = [own(x, part).clone().requires_grad_() for x in (q, k, v, log_g)]
    options = PowerOptions(degree=2, scale=None, normalize=True, chunk_size=CHUNK)
    if part is not None:
        log_g = documents_of(leaves[0], bounds, part).begin_anew(leaves[3])
        y = context_parallel_attention(part, *leaves[:3], log_g, None, options)
    else:
        y, _ = power_attention(*leaves, cu_seqlens=offsets_of(bounds), **options._asdict())
    (y * own(probe, part)).sum().backward()
    gradients = {f"d{name}": x.grad for name, x in zip("qkvg", leaves, strict=True)}
    return {"y": y.detach()} | gradients


def multiplied(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = A_t S_(t-1) + 1 with any matrices A_t, here x (B, T, K, K): each S, and the last."""
    states = [state]
    for transition in x.unbind(dim=1):
        states.append(transition @ states[-1] + 1)
    return torch.stack(states[1:], dim=1), states[-1]


def after_part(own: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    transition, added = own
    return (transition @ state[0] + added,)


def matrices(bounds: list[int] | None, part: SequencePart | None) -> Results:
    """An op whose state is multiplied by a matrix for each token, not by a number."""
    torch.manual_seed(0)
    whole = torch.randn(2 if bounds is None else 1, TOKENS, 3, 3, dtype=torch.float64) / 3
    probe = torch.randn(3, 3, dtype=torch.float64)
    x = own(whole, part).clone().requires_grad_()
    is_inside = torch.ones(*whole.shape[:2], 1, 1, dtype=x.dtype)
    is_inside[:, [] if bounds is None else bounds[:-1]] = 0  # a document begins with A = 0
    transitions = x * own(is_inside, part)
    start = state = x.new_zeros(x.shape[0], 3, 3)
    if part is not None:
        product = torch.eye(3, dtype=x.dtype).expand_as(start)
        for one in transitions.unbind(dim=1):
            product = one @ product
        left = multiplied(transitions, start)[1]
        (state,) = state_before(part, (product, left), (start,), after_part)
    y, _ = multiplied(transitions, state)
    (y * probe).sum().backward()
    return {"y": y.detach(), "dx": x.grad}


def build_model(initial_state: str = "zero", layers: Layers = LINEAR) -> LanguageModel:
    def config(kind: str, **options: Any) -> Any:
        if kind in POWER:
            options = {"chunk_size": CHUNK, "initial_state": initial_state, "rank": 3} | options
        return attention_config(kind)(**options)

    torch.manual_seed(0)
    model = LanguageModel(
        LanguageModelConfig(
            attention=config("conformal_sympow"),
            layer_attention={
                str(layer): config(kind, **options) for layer, (kind, options) in layers.items()
            },
            layers=3,
            width=WIDTH,
            heads=HEADS,
            vocabulary=24,
        )
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def language_model(
    part: SequencePart | None,
    *,
    tokens: int = TOKENS,
    recompute: bool = False,
    initial_state: str = "zero",
    layers: Layers = LINEAR,
    scaling: PositionScaling | None = None,
) -> Results:
    """Mean loss over the tokens of this part, and its gradients."""
    model = build_model(initial_state, layers)
    if initial_state == "learned":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("initial_state" in name)
    if recompute:
        for block in model.blocks:
            block.forward = recomputed(block.forward)
    if scaling is not None:
        model.set_positions(scaling)
    model.split_sequence(part)
    ids = torch.randint(24, (2, 2, tokens), generator=torch.Generator().manual_seed(0))
    loss = model.loss(own(ids[0], part), own(ids[1], part))
    loss.backward()
    grads = {f"d {name}": p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach()} | grads


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def bytes_sent(part: ContextParallel, run: Callable[[], Any]) -> Tensor:
    before = part.bytes_sent
    run()
    return torch.tensor(part.bytes_sent - before)


def every_case(part: ContextParallel) -> dict[str, Results]:
    results = {name: layer(*case, part) for name, case in LAYERS.items()}
    results |= {f"resets {name}": resets(bounds, part) for name, bounds in PACKINGS.items()}
    results |= {f"matrices {name}": matrices(bounds, part) for name, bounds in PACKINGS.items()}
    results |= {
        f"{kind} changed": layer(kind, OPTIONS[kind][0], PACKINGS["straddling"], part, change=1.0)
        for kind in KINDS
    }
    results |= {name: language_model(part, **options) for name, options in MODELS.items()}
    sent = {
        f"{times} T": bytes_sent(part, partial(language_model, part, tokens=times * TOKENS))
        for times in (1, 4)
    }
    window = partial(layer, "sliding_window", {"window": 4}, None, part)
    sent["window"] = bytes_sent(part, window)
    sent["states"] = bytes_sent(part, partial(layer, "retention", {}, None, part))
    return results | {"bytes": sent}


def use_chunks() -> None:
    op.choose_form = lambda *_: "chunked"  # type: ignore[assignment]


def one_rank(rank: int, world: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=LIMIT_S),
    )
    torch.save(every_case(ContextParallel(dist.group.WORLD)), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(world: int, folder: Path) -> None:
    """Fork the ranks after the imports, which take longer than all cases."""
    torch.set_num_threads(1)
    use_chunks()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=one_rank, args=(rank, world, folder)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


@pytest.fixture(scope="module", params=WORLDS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of every case, on every rank."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = subprocess.Popen(
        [sys.executable, "-P", __file__, str(request.param), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, error = ranks.communicate(timeout=LIMIT_S)
        assert ranks.returncode == 0, error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.fixture(autouse=True)
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the chunked form, which the cost model would not choose for sequences this short."""
    monkeypatch.setattr(op, "choose_form", lambda *_: "chunked")


def assert_same(found: Tensor, wanted: Tensor, name: str) -> None:
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=1e-10 * scale, msg=lambda text: f"{name}: {text}"
    )


def assert_ranks_equal(ranks: list[Results], wanted: Results, sequences: tuple[str, ...]) -> None:
    """Concatenate values along the sequence, and sum gradients of shared parameters over ranks."""
    for name, whole in wanted.items():
        if name in sequences:
            assert_same(torch.cat([rank[name] for rank in ranks], 1), whole, name)
        else:
            assert_same(sum(rank[name] for rank in ranks), whole, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_over_parts_equals_the_layer_over_the_sequence(found: list[Any], case: str) -> None:
    ranks = [rank[case] for rank in found]
    assert_ranks_equal(ranks, layer(*LAYERS[case], None), ("y", "dx"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_changes_no_bit_of_its_neighbours_in_any_part(
    found: list[Any], kind: str
) -> None:
    for name in ("y", "dx"):
        before, after = (
            torch.cat([rank[case][name] for rank in found], 1)
            for case in (f"{kind} {OPTIONS[kind][0] or ''} straddling", f"{kind} changed")
        )
        others = torch.ones(TOKENS, dtype=torch.bool)
        others[NEIGHBOUR] = False
        assert torch.equal(before[:, others], after[:, others]), name
        assert not torch.equal(before[:, ~others], after[:, ~others]), name


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_reset_in_any_part_forgets_everything_before_it(found: list[Any], packing: str) -> None:
    ranks = [rank[f"resets {packing}"] for rank in found]
    wanted = resets(PACKINGS[packing], None)
    assert_ranks_equal(ranks, wanted, tuple(wanted))


@pytest.mark.parametrize("packing", PACKINGS)
def test_states_of_any_op_are_composed_by_a_function_of_the_kind(
    found: list[Any], packing: str
) -> None:
    ranks = [rank[f"matrices {packing}"] for rank in found]
    wanted = matrices(PACKINGS[packing], None)
    assert_ranks_equal(ranks, wanted, tuple(wanted))


@pytest.mark.parametrize("case", MODELS)
def test_ranks_average_to_the_loss_and_gradients_of_one(found: list[Any], case: str) -> None:
    ranks = [{name: x / len(found) for name, x in rank[case].items()} for rank in found]
    options = {name: x for name, x in MODELS[case].items() if name != "recompute"}
    assert_ranks_equal(ranks, language_model(None, **options), ())


def test_a_second_run_gives_the_same_bits(found: list[Any]) -> None:
    for rank in found:
        for name, x in rank["model"].items():
            assert torch.equal(x, rank["model, again"][name]), name


def test_communication_does_not_grow_with_the_sequence(found: list[Any]) -> None:
    for rank in found:
        assert rank["bytes"]["1 T"] == rank["bytes"]["4 T"] > 0


def test_a_rank_sends_two_states_each_way_however_many_ranks_there_are(found: list[Any]) -> None:
    head_dim = WIDTH // HEADS
    rows = 2 * HEADS * head_dim  # of two sequences
    # What a part makes of a state, and the state, have values and a norm; there and back.
    numbers = rows * (4 * (head_dim + 1) + 1)  # and a log decay, without a gradient
    for rank in found:
        others = (len(found) - 1) / len(found)
        assert rank["bytes"]["states"] <= 1.1 * others * 8 * numbers


def test_a_window_is_sent_to_the_next_part_alone(found: list[Any]) -> None:
    first, *middle, last = (rank["bytes"]["window"] for rank in found)
    assert first > last > 0, "the first sends keys and values, the last their gradients"
    assert all(sent == first + last for sent in middle)


class FirstOfTwo:
    """A sequence part whose collective must not be called."""

    index, count = 0, 2

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        raise AssertionError

    def gather_before(self, reach: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        raise AssertionError

    def exchange(self, *_: Any) -> tuple[Tensor, ...]:
        raise AssertionError


def test_a_kind_that_does_not_compose_parts_is_refused_by_name() -> None:
    model = build_model(layers={1: ("power_delta", {})})
    with pytest.raises(ValueError, match=r"found power_delta, .* 36 x 36 .*; wanted a kind"):
        model.split_sequence(FirstOfTwo())
    assert all(block.attention.sequence_part is None for block in model.blocks)


@pytest.mark.parametrize("degree", [6, 8])
def test_degrees_whose_states_are_too_large_are_refused(degree: int) -> None:
    attention = build_attention("sympow", WIDTH, HEADS, degree=degree)
    with pytest.raises(ValueError, match=rf"degree: found {degree} .*, wanted|too large to build"):
        attention.check_context_parallel()


@pytest.mark.parametrize("kind", ["retention", "deltanet"])
def test_input_and_output_states_are_refused(kind: str) -> None:
    attention, x = build_attention(kind, WIDTH, HEADS), torch.randn(1, 4, WIDTH)
    _, state = attention(x)
    attention.sequence_part = FirstOfTwo()
    for call in (
        lambda: attention(x),
        lambda: attention(x, state, keep_state=False),
        lambda: attention.step(x[:, :1], state),
    ):
        with pytest.raises(ValueError, match="state: found one, or keep_state, under context par"):
            call()


def test_documents_are_described_for_the_whole_sequence() -> None:
    model, tokens = build_model(), torch.zeros(1, 4, dtype=torch.long)
    model.split_sequence(FirstOfTwo())
    with pytest.raises(ValueError, match=r"cu_seqlens: found \[0, 4\], wanted offsets from 0 to 8"):
        model.loss(tokens, tokens, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match=r"is_first: found \(1, 4\), wanted \(1, 8\)"):
        model.loss(tokens, tokens, is_first=tokens == 0)


def test_splitting_the_sequence_can_be_undone() -> None:
    model = build_model()
    model.split_sequence(FirstOfTwo())
    model.split_sequence(None)
    assert model.activations(torch.zeros(1, 4, dtype=torch.long))[0].shape == (1, 4, WIDTH)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
