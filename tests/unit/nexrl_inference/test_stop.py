"""Stop strings: where completions end, with the built-in engine and with vLLM."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from nexrl.errors import InvalidArgumentError
from nexrl.models import build_config
from nexrl.spec import ExperimentSpec
from nexrl.stop_strings import ends_with_stop, text_before_stop
from nexrl.tokenizers import build_tokenizer
from nexrl_inference.backend import text_decoder
from nexrl_inference.builtin.engine import Engine
from nexrl_inference.builtin.scheduler import Limits
from nexrl_inference.requests import Completion, GenerationRequest, GenerationResult
from nexrl_inference.vllm.engine import VllmEngine
from tests.support.services import small_experiment

Run = Callable[..., dict[str, GenerationResult]]
EOS = 1


def letters(token_ids: Sequence[int]) -> str:
    """A letter for each token; none for a special one."""
    return "".join(chr(ord("a") + token) for token in token_ids if token > EOS)


def engine_with(model: PreTrainedModel, blank: PreTrainedModel) -> Engine:
    limits = Limits(max_tokens_per_row=64, max_rows=64)
    engine = Engine(blank, eos_token_ids=(EOS,), decode=letters, limits=limits)
    engine.load_weights(model.state_dict(), version=0)
    return engine


@given(text=st.text("abc", max_size=12), stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_token_by_token_the_first_stop_string_is_found_where_it_ends(text: str, stop: list[str]) -> None:
    token_ids = [ord(letter) - ord("a") for letter in text]
    decode = lambda ids: "".join("abc"[token] for token in ids)  # noqa: E731
    ends = (end for end in range(1, len(text) + 1) if ends_with_stop(token_ids[:end], stop, decode))
    found = next(ends, None)
    expected = min((text.find(end) + len(end) for end in stop if end in text), default=None)
    assert found == expected
    assert not any(end in text_before_stop(text, stop) for end in stop)


def test_text_before_a_stop_string_is_all_before_the_first() -> None:
    assert text_before_stop("a</x>b<y>", ("<y>", "</x>")) == "a"
    assert text_before_stop("ab", ("c",)) == text_before_stop("ab", ()) == "ab"


def test_a_completion_ends_with_the_token_that_completes_a_stop_string(
    model: PreTrainedModel, other_model: PreTrainedModel, run: Run
) -> None:
    stop = ("fe", "k", "mno")
    request = GenerationRequest("r", (5, 6), max_new_tokens=40, n=64, temperature=3.0, seeds=tuple(range(64)))
    engine = engine_with(model, other_model)
    free, stopped = (run(engine, [replace(request, stop=each)])["r"].completions for each in ((), stop))
    ended = 0
    for whole, part in zip(free, stopped, strict=True):
        text = letters(part.token_ids)
        assert part.token_ids == whole.token_ids[: len(part.token_ids)]
        assert part.logprobs == pytest.approx(whole.logprobs[: len(part.token_ids)], abs=1e-4)
        assert not any(end in letters(part.token_ids[:-1]) for end in stop)
        if text.endswith(stop):
            assert part.finish_reason == "stop"
            ended += part.token_ids[-1] != EOS
        else:
            assert part.token_ids == whole.token_ids
    assert ended > 20


def test_a_stop_string_that_began_before_the_prompts_end_ends_a_continued_completion(
    model: PreTrainedModel, other_model: PreTrainedModel, run: Run
) -> None:
    engine = engine_with(model, other_model)
    whole = GenerationRequest("r", (5, 6), max_new_tokens=40, temperature=3.0, seeds=(3,))
    tokens = run(engine, [whole])["r"].completions[0].token_ids
    stop = (letters(tokens[3:6]),)
    assert len(stop[0]) == 3
    rest = replace(whole, prompt_ids=(*whole.prompt_ids, *tokens[:5]), drawn_tokens=5, stop=stop)
    (continued,) = run(engine, [rest])["r"].completions
    assert continued.token_ids == tokens[5:6]


def test_an_engine_without_a_tokenizer_refuses_stop_strings(model: PreTrainedModel) -> None:
    engine = Engine(model, eos_token_ids=(EOS,), limits=Limits(max_tokens_per_row=64))
    engine.load_weights(model.state_dict(), version=0)
    with pytest.raises(InvalidArgumentError, match="stop: this engine has no tokenizer"):
        engine.submit(GenerationRequest("r", (5,), max_new_tokens=1, stop=("a",)))


@pytest.mark.parametrize("stop", [("",), ("a",) * 33])
def test_stop_strings_that_end_nothing_or_are_too_many_are_refused(stop: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="stop: at most 32 texts, none empty"):
        GenerationRequest("r", (5,), max_new_tokens=1, stop=stop)


class ScriptedVllm:
    """Answers each request with the next of `parts`, and keeps the requests. A part of None is aborted."""

    def __init__(self, *parts: tuple[list[int], str]) -> None:
        self.parts = list(parts)
        self.requests: list[dict[str, Any]] = []

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        tokens, finish_reason = self.parts.pop(0)
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -1.0} for _ in tokens]},
            "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
            "finish_reason": finish_reason,
        }
        return {"choices": [choice]}


VLLM = {"backend": "vllm", "maxTokensPerRow": 32}


async def generate(server: ScriptedVllm, spec: ExperimentSpec, request: GenerationRequest) -> Completion:
    tokenizer = build_tokenizer(spec.model)
    engine = VllmEngine(server, spec, [EOS], text_decoder(tokenizer))  # type: ignore[arg-type]
    engine._version, engine._is_whole = 0, True
    return (await engine.generate(request)).completions[0]


async def test_vllm_is_told_the_sampling_parameters_and_stop_strings() -> None:
    server, spec = ScriptedVllm(([5, 6], "stop")), small_experiment(inference=VLLM).spec
    request = GenerationRequest("r", (5,), 8, temperature=0.5, top_p=0.9, top_k=3, stop=("1",), seeds=(1,))
    await generate(server, spec, request)
    (sent,) = (each["sampling_params"] for each in server.requests)
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ("1",), "logprobs": 0, "max_tokens": 8}
    assert {name: sent[name] for name in wanted} == wanted


async def test_a_stop_string_in_two_parts_of_a_vllm_completion_ends_it() -> None:
    spec = small_experiment(inference=VLLM).spec
    assert build_config(spec.model).vocab_size > 8
    decode = text_decoder(build_tokenizer(spec.model))
    server = ScriptedVllm(([4, 5], "abort"), ([6, 7, 8], "length"))
    stop = (decode([5, 6]),)
    completion = await generate(server, spec, GenerationRequest("r", (5,), 8, stop=stop, seeds=(1,)))
    assert (completion.token_ids, completion.finish_reason) == ((4, 5, 6), "stop")
    assert len(completion.logprobs) == len(completion.policy_versions) == 3
