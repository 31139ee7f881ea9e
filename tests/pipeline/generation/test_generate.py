"""Batches, sampling, stop strings and sessions, against plain loops and definitions."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from everyday_kinds import every_kind
from safetensors import safe_open
from torch import Tensor
from torch.utils import _pytree as pytree

from longhaul.datamodules.decoding import BytesDecoder, StoppingDecoder
from longhaul.datamodules.tokenizer import BytesTokenizer
from longhaul.modules.attention import attention_config, registered_variants
from longhaul.modules.language_model import LanguageModel
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.cli import main
from longhaul.pipeline.generation import decoding
from longhaul.pipeline.generation.decoding import Sampling, Session, decode
from longhaul.pipeline.generation.run import check_state_dtype
from longhaul.pipeline.generation.session_files import load_session, origin, save_session
from longhaul.pipeline.runs.trained_model import load_trained_model

Run = Any  # conftest.RunFolder: modules of this folder cannot import each other
Generate = Callable[..., str]
KINDS = registered_variants()
VOCABULARY = 60  # of 64 rows


def model_of(kind: str) -> LanguageModel:
    """A model whose next token depends on all before it."""
    torch.manual_seed(0)
    config = LanguageModelConfig(
        attention=attention_config(kind)(), layers=2, width=32, heads=2, vocabulary=64
    )
    model = LanguageModel(config).double().eval()
    for name, parameter in model.named_parameters():
        # A new model repeats its last token, whatever came before.
        if "attention." in name and parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def prompt_of(T: int) -> list[int]:
    generator = torch.Generator().manual_seed(T)
    return torch.randint(VOCABULARY, (T,), generator=generator).tolist()


def continuations(
    model: LanguageModel,
    sessions: list[Session],
    num_tokens: int,
    *,
    ends: Callable[[int, list[int]], bool] = lambda index, found: False,
    **sampling: Any,
) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in sessions]
    chosen = Sampling(vocabulary=VOCABULARY, **sampling)
    for index, token in decode(model, sessions, num_tokens=num_tokens, sampling=chosen):
        found[index].append(token)
        sessions[index].is_done = ends(index, found[index])
    return found


def likeliest(model: LanguageModel, tokens: list[int], count: int) -> list[int]:
    """By full passes over everything so far."""
    tokens = list(tokens)
    for _ in range(count):
        hidden, _ = model.activations(torch.tensor([tokens]))
        tokens.append(int((hidden[0, -1] @ model.embedding.weight.T)[:VOCABULARY].argmax()))
    return tokens[-count:]


@every_kind
def test_a_batch_read_in_pieces_gives_what_full_passes_give(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "tokens_at_once", lambda *_: 16)
    model, prompts = model_of(kind), [prompt_of(T) for T in (40, 3, 17, 40)]
    prompts[3] = prompts[3][::-1]
    found = continuations(model, [Session(prompt) for prompt in prompts], 5)
    assert found == [likeliest(model, prompt, 5) for prompt in prompts]
    assert len(set(map(tuple, found))) == 4


@pytest.mark.parametrize("kind", ["softmax", "conformal_sympow", "cartan"])
def test_a_prompt_draws_the_same_tokens_alone_and_in_a_batch_whose_others_end(kind: str) -> None:
    model, prompts = model_of(kind), [prompt_of(T) for T in (9, 5, 9, 12, 5)]

    def ends(index: int, found: list[int]) -> bool:
        return len(found) == 3 + 2 * index

    def draw(chosen: list[int]) -> list[list[int]]:
        sessions = [
            Session(prompts[index], generator=torch.Generator().manual_seed(7)) for index in chosen
        ]
        return continuations(
            model,
            sessions,
            9,
            ends=lambda row, found: ends(chosen[row], found),
            temperature=3.0,
            top_k=20,
            top_p=0.9,
        )

    found = draw([0, 1, 2, 3, 4])
    assert list(map(len, found)) == [3, 5, 7, 9, 9]
    assert found == [draw([index])[0] for index in range(5)]


def test_states_of_one_shape_share_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    step = LanguageModel.step

    def count(self: LanguageModel, token: Tensor, state: Any, *, inplace: bool) -> Any:
        rows.append(len(token))
        return step(self, token, state, inplace=inplace)

    monkeypatch.setattr(LanguageModel, "step", count)
    lengths = (4, 7, 4)
    for kind, wanted in (("retention", [3, 3]), ("softmax", [2, 2, 1, 1])):
        rows.clear()
        continuations(model_of(kind), [Session(prompt_of(T)) for T in lengths], 3)
        assert rows == wanted, kind


def nucleus(probabilities: list[float], p: float) -> list[float]:
    """The smallest set of tokens, likeliest first, that has p: by trying all sizes."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    for size in range(1, len(order) + 1):
        kept = order[:size]
        total = sum(probabilities[token] for token in kept)
        if total >= p:
            break
    return [probabilities[t] / total if t in kept else 0.0 for t in range(len(order))]


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 1.0])
def test_top_p_leaves_the_smallest_set_that_has_p(
    top_k: int | None, temperature: float, p: float
) -> None:
    logits = torch.randn(50, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(vocabulary=12, temperature=temperature, top_k=top_k, top_p=p)
    found = sampling.probabilities(logits)
    for row, one in zip(logits[:, :12].tolist(), found, strict=True):
        allowed = sorted(row)[-(top_k or 12) :]
        weights = [
            torch.tensor(x / temperature).double().exp().item() if x in allowed else 0.0
            for x in row
        ]
        wanted = nucleus([weight / sum(weights) for weight in weights], p)
        torch.testing.assert_close(
            one, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=0
        )


def test_draws_follow_the_probabilities_and_small_temperatures_are_finite() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]]).expand(400, -1)
    generators = [torch.Generator().manual_seed(seed) for seed in range(400)]
    sampling = Sampling(vocabulary=4, temperature=5.0, top_k=2)
    drawn = sampling.choose(logits, generators)
    assert set(drawn.tolist()) == {1, 2}
    share = sampling.probabilities(logits)[0, 1].item()
    assert (drawn == 1).double().mean().item() == pytest.approx(share, abs=0.1)
    cold = Sampling(vocabulary=4, temperature=1e-45).probabilities(logits[:1])
    assert cold.tolist() == [[0, 1, 0, 0]]
    assert Sampling(vocabulary=1).choose(logits[:1], [None]).tolist() == [0]


class Pieces:
    """A decoder whose ids are places in a list of texts."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return "?"


def before_stop(text: str, stops: list[str]) -> str | None:
    """The text before the stop that is whole first, the longest of these; None without one."""
    for end in range(len(text) + 1):
        for begin in range(end):
            if text[begin:end] in stops:
                return text[:begin]
    return None


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("one\n\ntwo", ["\n\n"]),
        ("aaab", ["aab"]),
        ("ababac", ["abac", "x"]),
        ("xabc", ["abc", "b"]),
        ("xabc", ["abc", "bc"]),
        ("nothing", ["ngx"]),
        ("stop", ["stop"]),
        ("text", []),
    ],
)
def test_no_part_of_a_stop_is_ever_shown_however_tokens_cut_the_text(
    text: str, stops: list[str]
) -> None:
    for cuts in itertools.product([0, 1], repeat=len(text) - 1):
        pieces = [text[0]]
        for char, is_cut in zip(text[1:], cuts, strict=True):
            if is_cut:
                pieces.append(char)
            else:
                pieces[-1] += char
        decoder = StoppingDecoder(Pieces(pieces), stops)
        shown = ""
        wanted = before_stop(text, stops)
        for token in range(len(pieces)):
            shown += decoder.push(token)
            # What was shown stays, wherever the text goes from here.
            assert wanted is None or wanted.startswith(shown)
            if not decoder.has_stopped:
                # All is shown but what may be the beginning of a stop.
                given = "".join(pieces[: token + 1])
                begun = [n for stop in stops for n in range(len(stop)) if given.endswith(stop[:n])]
                assert shown == given[: len(given) - max(begun, default=0)]
        assert decoder.has_stopped == (wanted is not None)
        assert shown + decoder.flush() == (text + "?" if wanted is None else wanted)


@every_kind
def test_a_saved_session_goes_on_as_if_it_had_not_ended(kind: str, tmp_path: Path) -> None:
    model, prompt, added, file = model_of(kind), prompt_of(14), prompt_of(11), tmp_path / "s"
    other = Session(prompt_of(14)[::-1])
    first = Session(prompt)
    _, found = continuations(model, [other, first], 4)  # saved as a row of a batch
    save_session(file, first, "here")
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
    rest = continuations(model, [load_session(file, model, "here")], 4)
    assert [found + rest[0]] == continuations(model, [Session(prompt)], 8)
    again = load_session(file, model, "here")
    again.unread += added
    rest = continuations(model, [again], 4)
    assert rest == [likeliest(model, [*prompt, *found, *added], 4)]


@pytest.mark.parametrize("kind", ["conformal_sympow", "cartan"])
def test_states_in_bfloat16_go_on_from_a_file(kind: str, tmp_path: Path) -> None:
    model, prompt, file = model_of(kind).float(), prompt_of(14), tmp_path / "s"
    short, whole = Session(list(prompt)), Session(list(prompt))
    sampling = Sampling(vocabulary=VOCABULARY)

    def tokens_of(session: Session, count: int) -> list[int]:
        found = decode(
            model, [session], num_tokens=count, sampling=sampling, has_bfloat16_states=True
        )
        return [token for _, token in found]

    found = tokens_of(short, 4)
    leaves = pytree.tree_leaves(short.state)
    assert any(leaf.dtype == torch.bfloat16 for leaf in leaves)
    save_session(file, short, "here")
    found += tokens_of(load_session(file, model, "here"), 4)
    assert found == tokens_of(whole, 8)


def test_a_saved_state_is_of_constant_size_where_the_kind_is_of_linear_cost(tmp_path: Path) -> None:
    sizes = {}
    for kind in KINDS:
        model = model_of(kind)
        for T in (3, 30):
            session = Session(prompt_of(T))
            continuations(model, [session], 2)
            save_session(tmp_path / "s", session, "here")
            sizes[kind, T] = (tmp_path / "s").stat().st_size
    for kind in KINDS:
        grows = attention_config(kind).cost == "quadratic" or kind == "sliding_window"
        # Headers tell offsets in decimal digits.
        assert (sizes[kind, 30] > 1.5 * sizes[kind, 3]) == grows, (kind, sizes)
        assert grows or sizes[kind, 30] == sizes[kind, 3]


@pytest.fixture(scope="module")
def base(make_run: Callable[[int], Run]) -> Run:
    """A run of two checkpoints."""
    run = make_run(8)
    run.longhaul("train", "small.yaml")
    return run


@pytest.fixture
def generate(
    base: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Generate:
    """`longhaul generate ARGUMENTS` in the run's folder: what it prints, or how it refuses."""
    monkeypatch.chdir(base.path)

    def run(*arguments: str, status: int = 0) -> str:
        assert main(["generate", *arguments]) == status
        out, error = capsys.readouterr()
        if status == 0:
            return out
        assert len(error.splitlines()) == 1, error
        assert not out
        return error

    return run


GREEDY = ("--temperature", "0")


def test_one_prompt_is_streamed_and_several_are_told_apart(generate: Generate) -> None:
    def text(*prompts: str, seed: str = "5") -> str:
        given = [part for prompt in prompts for part in ("--prompt", prompt)]
        return generate("small", *given, "--tokens", "30", "--seed", seed)

    # Each further prompt has the next seed, so that equal prompts have different samples.
    alone = [text("def "), text("é", seed="6"), text("def ", seed="7")]
    assert alone[0].startswith("def ")
    assert alone[0] != alone[2]
    together = text("def ", "é", "def ")
    wanted = [f"--- prompt {n} of 3 ---\n{one}" for n, one in enumerate(alone, 1)]
    assert together == "".join(wanted)


def test_each_continuation_is_decoded_after_its_prompt(
    base: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[int]] = []

    def decoder(self: BytesTokenizer, after: Sequence[int] = ()) -> BytesDecoder:
        seen.append(list(after))
        return BytesDecoder(self._bytes_of)

    monkeypatch.setattr(BytesTokenizer, "stream_decoder", decoder)
    monkeypatch.chdir(base.path)
    given = ["generate", "small", "--tokens", "2", *GREEDY]
    assert main([*given, "--prompt", "ab", "--save-state", "after.safetensors"]) == 0
    assert main([*given, "--prompt", "c", "--state", "after.safetensors"]) == 0
    last = capsys.readouterr().out.splitlines()[0].encode()[-1]
    assert seen == [[*b"ab"], [last, *b"c"]]


def test_generation_gives_the_likeliest_tokens_of_full_passes(base: Run) -> None:
    model = load_trained_model(base.path / "small").model
    tokens = [256, *b"def "]
    for _ in range(12):
        hidden, _ = model.activations(torch.tensor([tokens]))
        tokens.append(int((hidden[0, -1] @ model.embedding.weight.T)[:257].argmax()))
    result = base.longhaul("generate", "small", "--prompt", "def ", "--tokens", "12", *GREEDY)
    assert result.stdout == bytes(tokens[1:]).decode(errors="replace") + "\n"


def test_output_ends_before_a_stop_and_so_do_the_steps(
    base: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("generate", "small", "--prompt", "def ", "--tokens", "40", "--seed", "3")
    whole = base.longhaul(*given).stdout[:-1]
    stop = whole[20:23]
    monkeypatch.chdir(base.path)
    step, steps = LanguageModel.step, []

    def count(*arguments: Any, inplace: bool) -> Any:
        steps.append(1)
        return step(*arguments, inplace=inplace)

    monkeypatch.setattr(LanguageModel, "step", count)
    assert main([*given, "--stop", "never to be seen", "--stop", stop]) == 0
    assert capsys.readouterr().out == "def " + whole[4 : whole.index(stop, 4)] + "\n"
    assert 0 < len(steps) < 39


def test_states_of_fixed_size_and_weights_can_be_in_bfloat16(base: Run) -> None:
    given = ("generate", "small", "--prompt", "def ", "--tokens", "12", *GREEDY)
    result = base.longhaul(*given, "--state-dtype", "bfloat16", "--dtype", "bfloat16")
    assert result.stdout.startswith("def ")
    assert result.returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_without_a_state_to_round_is_refused(kind: str) -> None:
    model = model_of(kind)
    if not model.blocks[0].attention.can_round_state or kind == "zeros":
        with pytest.raises(ValueError, match=rf"--state-dtype: found bfloat16 with kind {kind}"):
            check_state_dtype(model)
    else:
        check_state_dtype(model)


def test_a_session_is_continued_from_its_file(base: Run, generate: Generate) -> None:
    given = ("small", "--tokens", "10", *GREEDY)
    first = generate(*given, "--prompt", "def f(", "--save-state", "one")
    with safe_open(base.path / "one", "pt") as file:
        assert list(file.metadata()) == ["longhaul_session"]
        described = json.loads(file.metadata()["longhaul_session"])
    assert described["of"].startswith("small/step-000000008 (sha256 ")
    assert len(described["unread"]) == 1
    second = generate(*given, "--prompt", "(x):", "--state", "one", "--save-state", "one")
    # The printed text is the session's, as long as bytes are whole characters.
    assert second == generate(*given, "--prompt", first[:-1] + "(x):")[len(first) - 1 :]
    third = generate(*given, "--state", "one")
    whole = generate(*given, "--prompt", first[:-1] + second[:-1])
    assert third == whole[len(first + second) - 2 :]
    # From one state to several texts.
    both = generate(*given, "--state", "one", "--prompt", "", "--prompt", "a")
    assert both.startswith(f"--- prompt 1 of 2 ---\n{third}--- prompt 2 of 2 ---\na")


def test_what_does_not_belong_together_is_refused(base: Run, generate: Generate) -> None:
    refused = partial(generate, status=2)
    older = str(min((base.path / "small" / "checkpoints").iterdir()))
    arguments = ("--prompt", "a", "--tokens", "1", "--save-state", "older")
    generate(older, *arguments)
    said = refused("small", "--state", "older")
    assert re.match(
        r"longhaul: --state: found a state of small/step-000000004 \(sha256 \w{16}, positions "
        r"none\), wanted one of small/step-000000008 \(sha256 \w{16}, positions none\)",
        said,
    )
    scaled = ("--positions", "linear", "--factor", "2")
    said = refused(older, "--state", "older", *scaled)
    assert "positions none), wanted one of" in said
    assert "positions linear 2)" in said
    trained = load_trained_model(base.path / "small")
    model = dataclasses.replace(trained.config.model, heads=1)
    config = dataclasses.replace(trained.config, model=model)
    assert origin(dataclasses.replace(trained, config=config)) != origin(trained)
    content = (base.path / "older").read_bytes()
    for name, damaged, told in (
        ("short", content[:-9], "found short, wanted a saved state: "),
        (
            "flipped",
            content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
            "found flipped damaged",
        ),
        ("text", b"no tensors", "found text, wanted a saved state: "),
        (
            "other",
            (Path(older) / "model-00000-000.safetensors").read_bytes(),
            "found other, wanted a saved state: ",
        ),
    ):
        (base.path / name).write_bytes(damaged)
        assert refused("small", "--state", name).startswith(f"longhaul: --state: {told}")
    assert refused("small", "--state", "gone").startswith("longhaul: --state: found gone, wanted")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--prompt: found none, wanted one or more, or --state"),
        (["--prompt", "a", "--tokens", "0"], "--tokens: found 0, wanted 1 or more"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature: found -1.0, wanted 0 or more"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature: found nan, wanted 0 or more"),
        (["--prompt", "a", "--top-k", "0"], "--top-k: found 0, wanted 1 or more"),
        (
            ["--prompt", "a", "--top-p", "0"],
            "--top-p: found 0.0, wanted more than 0, and 1 at most",
        ),
        (["--prompt", "a", "--top-p", "nan"], "--top-p: found nan, wanted more than 0, and 1 at"),
        (["--prompt", "a", "--stop", ""], "--stop: found an empty text, wanted a character or"),
        (["--prompt", "a", "--prompt", "b", "--save-state", "s"], "--save-state: found 2 prompts"),
        (["--prompt", "a", "--seed", "-1"], "--seed: found -1, wanted 0 to 2"),
        (["--prompt", "a", "--save-state", "."], "--save-state: found the folder ., wanted a file"),
        (["--prompt", "a", "--save-state", "no/s"], "--save-state: found no folder no, wanted one"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Before any run is looked for.
    assert main(["generate", "nowhere", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"longhaul: {message}")
    assert len(said.splitlines()) == 1
