from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from nexrl.errors import (
    NotFoundError,
)
from nexrl_inference.builtin.engine import Engine
from nexrl_inference.builtin.scheduler import Limits
from nexrl_inference.requests import GenerationRequest, GenerationResult

MakeEngine = Callable[..., Engine]
Run = Callable[..., dict[str, GenerationResult]]
Reference = Callable[..., Tensor]

EOS = 1


def seeds(first: int, n: int) -> tuple[int, ...]:
    """Neighbours: what they draw must have nothing in common all the same."""
    return tuple(range(first, first + n))


def seeded(seed: int, n: int, **fields: Any) -> GenerationRequest:
    return GenerationRequest(n=n, seeds=seeds(seed, n), **fields)


MIXED = [
    GenerationRequest("one", (5, 6, 7), max_new_tokens=12, n=3, seeds=seeds(1, 3)),
    GenerationRequest("hot", (9,), max_new_tokens=9, n=2, temperature=1.7, seeds=seeds(2, 2)),
    GenerationRequest("greedy", (2, 3, 4, 5, 6, 7, 8, 9), max_new_tokens=10, temperature=0.0),
    GenerationRequest("long", tuple(range(2, 22)), max_new_tokens=7, n=4, temperature=0.6, seeds=seeds(3, 4)),
]


def run_staggered(engine: Engine, requests: list[GenerationRequest], steps_between: int) -> dict[str, GenerationResult]:
    """Submit one request every few steps, so that prefills meet rows that are decoding."""
    results = []
    for request in requests:
        engine.submit(request)
        for _ in range(steps_between):
            results += engine.step()
    while not engine.is_idle:
        results += engine.step()
    return {result.request_id: result for result in results}


@pytest.mark.parametrize("steps_between", [0, 1, 3])
def test_logprobs_equal_a_full_forward(
    model_factory: Callable[[int], PreTrainedModel],
    make_engine: MakeEngine,
    reference_logprobs: Reference,
    steps_between: int,
) -> None:
    policy = model_factory(1)
    results = run_staggered(make_engine(policy, blank=model_factory(99)), MIXED, steps_between)
    for request in MIXED:
        assert len(results[request.request_id].completions) == request.n
        for completion in results[request.request_id].completions:
            expected = reference_logprobs(
                policy, request.prompt_ids, completion.token_ids, temperature=request.temperature or 1.0
            )
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_greedy_equals_hugging_face_generate(
    model_factory: Callable[[int], PreTrainedModel], make_engine: MakeEngine, run: Run
) -> None:
    policy = model_factory(1)
    prompts = [(5, 6, 7), (9,), tuple(range(2, 22))]
    engine = make_engine(policy, blank=model_factory(99))
    results = run(engine, [GenerationRequest(str(p), p, max_new_tokens=20, temperature=0.0) for p in prompts])
    for prompt in prompts:
        ids = torch.tensor([prompt])
        expected = policy.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert [*prompt, *results[str(prompt)].completions[0].token_ids] == expected[0].tolist()


def test_weights_swapped_mid_generation_continue_as_a_full_forward_of_the_new_weights(
    model: PreTrainedModel, other_model: PreTrainedModel, make_engine: MakeEngine, reference_logprobs: Reference
) -> None:
    # Chunks of the recomputation are smaller than the batch: 7 rows, at most 2 of the longest at a time.
    engine = make_engine(model, max_prefill_tokens=50)
    requests = [
        GenerationRequest("a", (5, 6, 7), max_new_tokens=12, n=4, seeds=seeds(7, 4)),
        GenerationRequest("b", tuple(range(2, 18)), max_new_tokens=12, n=3, seeds=seeds(8, 3)),
    ]
    for request in requests:
        engine.submit(request)
    results = [result for _ in range(4) for result in engine.step()]
    engine.load_weights(other_model.state_dict(), version=5)
    while not engine.is_idle:
        results += engine.step()

    completions = [(result.prompt_ids, completion) for result in results for completion in result.completions]
    assert any({0, 5} == set(completion.policy_versions) for _, completion in completions)
    for prompt_ids, completion in completions:
        assert list(completion.policy_versions) == sorted(completion.policy_versions)
        old = reference_logprobs(model, prompt_ids, completion.token_ids)
        new = reference_logprobs(other_model, prompt_ids, completion.token_ids)
        expected = torch.where(torch.tensor(completion.policy_versions) == 0, old, new)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_a_completion_of_two_versions_is_drawn_again_in_parts_by_each(
    model: PreTrainedModel, other_model: PreTrainedModel, make_engine: MakeEngine, run: Run
) -> None:
    whole = GenerationRequest("r", (5, 6, 7), max_new_tokens=20, temperature=2.0, seeds=(8,))
    engine = make_engine(model)
    engine.submit(whole)
    for _ in range(5):
        assert engine.step() == []
    engine.load_weights(other_model.state_dict(), version=5)
    (recorded,) = run(engine, [])["r"].completions
    drawn = recorded.policy_versions.count(0)
    assert set(recorded.policy_versions) == {0, 5}
    (first,) = run(make_engine(model), [replace(whole, max_new_tokens=drawn)])["r"].completions
    going_on = replace(
        whole,
        prompt_ids=(*whole.prompt_ids, *recorded.token_ids[:drawn]),
        drawn_tokens=drawn,
        max_new_tokens=20 - drawn,
    )
    (second,) = run(make_engine(other_model), [going_on])["r"].completions
    assert (*first.token_ids, *second.token_ids) == recorded.token_ids
    assert (*first.logprobs, *second.logprobs) == pytest.approx(recorded.logprobs, abs=1e-4)


def test_a_prompt_is_prefilled_once_for_all_its_samples(model: PreTrainedModel, other_model: PreTrainedModel) -> None:
    engine = Engine(other_model, eos_token_ids=(EOS,), limits=Limits(max_tokens_per_row=64))
    engine.load_weights(model.state_dict(), version=0)
    shapes: list[torch.Size] = []
    other_model.get_input_embeddings().register_forward_hook(lambda _, inputs, output: shapes.append(inputs[0].shape))
    engine.submit(GenerationRequest("r", (5, 6, 7), max_new_tokens=2, n=8))
    engine.step()
    assert shapes[0] == (1, 3)


def test_samples_of_one_prompt_are_independent(model: PreTrainedModel, make_engine: MakeEngine, run: Run) -> None:
    """First tokens of many samples follow the model's distribution: sharing the prefill correlates nothing."""
    n = 4000
    engine = make_engine(model, max_rows=n)
    completions = run(engine, [GenerationRequest("r", (5, 6, 7), max_new_tokens=2, n=n, seeds=seeds(0, n))])[
        "r"
    ].completions
    with torch.no_grad():
        expected_V = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    first = torch.tensor([completion.token_ids[0] for completion in completions])
    observed_V = first.bincount(minlength=len(expected_V)) / n
    standard_error_V = (expected_V * (1 - expected_V) / n).sqrt()
    assert ((observed_V - expected_V).abs() < 5 * standard_error_V + 1e-6).all()
    # A sample says nothing about the next one: equal neighbours are as frequent as two independent draws.
    equal = sum(a == b for a, b in pairwise(first.tolist())) / (n - 1)
    chance = float(expected_V.square().sum())
    assert abs(equal - chance) < 5 * (chance * (1 - chance) / n) ** 0.5


def test_a_seed_reproduces_the_samples_whatever_shares_the_batch(
    model: PreTrainedModel, make_engine: MakeEngine, run: Run
) -> None:
    request = GenerationRequest("r", (5, 6, 7), max_new_tokens=12, n=4, seeds=seeds(11, 4))
    alone = run(make_engine(model), [request])["r"]
    crowded = run_staggered(make_engine(model), [*MIXED, request], steps_between=2)["r"]
    assert [c.token_ids for c in alone.completions] == [c.token_ids for c in crowded.completions]


def test_one_sample_is_drawn_again_alone_by_its_seed(
    model_factory: Callable[[int], PreTrainedModel], make_engine: MakeEngine, run: Run
) -> None:
    policy = model_factory(1)
    in_full_batch = run_staggered(make_engine(policy, blank=model_factory(99)), MIXED, steps_between=2)
    engine = make_engine(policy, blank=model_factory(99))
    for request in MIXED:
        for recorded in in_full_batch[request.request_id].completions:
            assert recorded.seed is not None
            # Alone, with room for more: neither n nor the number of tokens decides what is drawn.
            again = replace(request, n=1, seeds=(recorded.seed,), max_new_tokens=request.max_new_tokens + 5)
            (completion,) = run(engine, [again])[request.request_id].completions
            drawn = len(recorded.token_ids)
            assert completion.token_ids[:drawn] == recorded.token_ids
            assert completion.logprobs[:drawn] == pytest.approx(recorded.logprobs, abs=1e-4)


def test_a_completion_goes_on_from_its_middle_with_the_random_numbers_that_follow(
    model: PreTrainedModel, make_engine: MakeEngine, run: Run
) -> None:
    engine = make_engine(model)
    whole = GenerationRequest("r", (5, 6, 7), max_new_tokens=20, temperature=2.0, seeds=(3,))
    (completion,) = run(engine, [whole])["r"].completions
    for drawn in range(1, len(completion.token_ids)):
        rest = replace(whole, prompt_ids=(*whole.prompt_ids, *completion.token_ids[:drawn]), drawn_tokens=drawn)
        (going_on,) = run(engine, [replace(rest, max_new_tokens=20 - drawn)])["r"].completions
        assert going_on.token_ids == completion.token_ids[drawn:]


def test_different_seeds_draw_different_samples(model: PreTrainedModel, make_engine: MakeEngine, run: Run) -> None:
    n = 64
    request = GenerationRequest("r", (5, 6, 7), max_new_tokens=30, n=n, temperature=2.0, seeds=seeds(0, n))
    completions = run(make_engine(model, max_rows=n), [request])["r"].completions
    assert len({completion.token_ids for completion in completions if len(completion.token_ids) > 8}) > n / 2
    assert len({completion.seed for completion in completions}) == n


def test_requests_without_a_seed_differ_and_the_engine_seed_reproduces_them(
    model: PreTrainedModel, make_engine: MakeEngine, run: Run
) -> None:
    requests = [GenerationRequest(name, (5, 6, 7), max_new_tokens=12, n=4) for name in "ab"]
    first, second = run(make_engine(model), requests), run(make_engine(model), requests)
    assert first == second
    assert first["a"].completions != first["b"].completions


def test_completions_end_at_eos_stop_token_budget_and_row_length(
    model: PreTrainedModel, make_engine: MakeEngine, run: Run
) -> None:
    engine = make_engine(model, max_tokens_per_row=16)
    results = run(
        engine,
        [
            GenerationRequest("any", (5, 6), max_new_tokens=100, n=64, temperature=2.0, seeds=seeds(0, 64)),
            GenerationRequest(
                "stop", (5, 6), max_new_tokens=100, n=16, stop_token_ids=tuple(range(2, 23)), seeds=seeds(0, 16)
            ),
            GenerationRequest("short", (5, 6), max_new_tokens=1, n=16, seeds=seeds(0, 16)),
        ],
    )
    for completion in results["any"].completions:
        assert EOS not in completion.token_ids[:-1]
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == EOS)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 14
    assert {c.finish_reason for c in results["any"].completions} == {"stop", "length"}
    assert {len(c.token_ids) for c in results["short"].completions} == {1}
    assert all(c.finish_reason == "stop" or c.token_ids == (0,) * 14 for c in results["stop"].completions)


requests_strategy = st.lists(
    st.builds(
        seeded,
        request_id=st.uuids().map(str),
        prompt_ids=st.lists(st.integers(0, 22), min_size=1, max_size=12).map(tuple),
        n=st.integers(1, 4),
        max_new_tokens=st.integers(1, 8),
        temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
        top_p=st.sampled_from([0.5, 1.0]),
        top_k=st.sampled_from([0, 3]),
        seed=st.integers(0, 99),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda request: request.request_id,
)


@settings(max_examples=20, deadline=None)
@given(requests=requests_strategy, arrivals=st.data())
def test_any_order_of_admission_and_cancellation_gives_each_request_what_it_gets_alone(
    make_llama: Callable[[int], PreTrainedModel],
    make_engine: MakeEngine,
    run: Run,
    requests: list[GenerationRequest],
    arrivals: st.DataObject,
) -> None:
    # Fewer rows than the requests need, so that some wait and rows are reused.
    engine = make_engine(make_llama(3), max_rows=6, max_tokens_per_row=16, max_prefill_tokens=20)
    alone = {request.request_id: run(engine, [request])[request.request_id] for request in requests}

    results: list[GenerationResult] = []
    cancelled = arrivals.draw(st.sets(st.sampled_from([request.request_id for request in requests])))
    for request in arrivals.draw(st.permutations(requests)):
        engine.submit(request)
        for _ in range(arrivals.draw(st.integers(0, 4))):
            results += engine.step()
    finished = {result.request_id for result in results}
    aborted = [engine.cancel(request_id) for request_id in sorted(cancelled - finished)]
    results += run(engine, []).values()

    assert sorted(result.request_id for result in results + aborted) == sorted(alone)
    for result in results:
        for got, expected in zip(result.completions, alone[result.request_id].completions, strict=True):
            assert (got.token_ids, got.finish_reason) == (expected.token_ids, expected.finish_reason)
            assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    for result in aborted:
        for got, expected in zip(result.completions, alone[result.request_id].completions, strict=True):
            assert got.token_ids == expected.token_ids[: len(got.token_ids)]
            assert got.finish_reason in ("abort", expected.finish_reason)


def test_cancelling_frees_the_rows_and_returns_what_there_is(model: PreTrainedModel, make_engine: MakeEngine) -> None:
    engine = make_engine(model, max_rows=2)
    engine.submit(GenerationRequest("running", (5,), max_new_tokens=50, n=2, temperature=2.0, seeds=seeds(0, 2)))
    engine.submit(GenerationRequest("waiting", (5,), max_new_tokens=50, n=2))
    engine.step()
    running, waiting = engine.cancel("running"), engine.cancel("waiting")
    assert [len(completion.token_ids) for completion in running.completions] == [2, 2]
    assert {c.finish_reason for c in running.completions + waiting.completions} == {"abort"}
    assert engine.is_idle
    with pytest.raises(NotFoundError):
        engine.cancel("running")


@pytest.mark.parametrize("absent", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_tensor_may_come_under_either_name(
    model: PreTrainedModel, make_engine: MakeEngine, run: Run, absent: str
) -> None:
    request = GenerationRequest("r", (5, 6, 7), max_new_tokens=12, n=4, seeds=seeds(11, 4))
    expected = run(make_engine(model), [request])
    engine = make_engine(None)
    engine.load_weights({name: tensor for name, tensor in model.state_dict().items() if name != absent}, version=0)
    assert run(engine, [request]) == expected
