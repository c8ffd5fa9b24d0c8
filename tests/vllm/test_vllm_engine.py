"""The engine on a real vLLM: two by two workers, an untied model, one server for all tests of this file."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import pytest_asyncio
import torch

from nexrl.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from nexrl.spec import Experiment
from nexrl.tokenizers import build_tokenizer
from nexrl.truncation import truncated_logits
from nexrl_inference.backend import text_decoder
from nexrl_inference.requests import GenerationRequest, GenerationResult
from nexrl_inference.vllm.engine import VllmEngine
from nexrl_inference.vllm.server import VllmServer, start_vllm
from nexrl_inference.vllm.shared import LOADED, SharedBuffers
from tests.support.patience import eventually
from tests.support.vllm import POSITIONS, Reference, random_prompt, staged, untied_qwen, vllm_experiment, weights_of

GENERATED = "vllm:generation_tokens_total"
STEP_TOKENS = 512
"""Less than some of these tests keep in flight."""

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Deployed:
    """The engine and its server, the weights of each version, and the model that judges."""

    engine: VllmEngine
    server: VllmServer
    experiment: Experiment
    reference: Reference
    chance: random.Random

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        return weights_of(self.experiment.spec.model, version)

    async def load(self, version: int) -> None:
        await self.engine.load(staged(self.weights(version).items(), version))

    async def generate(self, **fields: object) -> GenerationResult:
        values = {"request_id": "r", "prompt_ids": tuple(random_prompt(self.chance)), "max_new_tokens": 24, **fields}
        return await self.engine.generate(GenerationRequest(**values))  # type: ignore[arg-type]

    def judge(self, result: GenerationResult, *versions: int) -> None:
        """Every log-probability is that of its version, and the versions are these."""
        known = {version: self.weights(version) for version in versions}
        for completion in result.completions:
            assert set(completion.policy_versions) <= set(versions)
            self.reference.require_equal(
                known, result.prompt_ids, completion.token_ids, completion.logprobs, completion.policy_versions
            )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployed]:
    model = untied_qwen(tmp_path_factory.mktemp("model"))
    few = ["--max-num-batched-tokens", str(STEP_TOKENS)]
    experiment = vllm_experiment(model, tensorParallel=2, dataParallel=2, vllmArgs=few)
    server = await start_vllm(experiment.spec)
    engine = VllmEngine(server, experiment.spec, [], text_decoder(build_tokenizer(experiment.spec.model)))
    try:
        with pytest.raises(FailedPreconditionError, match="no policy version"):
            await engine.generate(GenerationRequest("early", (5,), 4))
        await server.wait_until_it_answers()
        yield Deployed(engine, server, experiment, Reference(experiment.spec.model), random.Random(0))
    finally:
        await server.close()


@pytest.fixture(autouse=True)
def kept(deployed: Deployed) -> None:
    deployed.engine._in_flight = "keep"


async def test_log_probs_are_those_of_a_forward_pass_on_every_worker(deployed: Deployed) -> None:
    for version in (1, 2):
        await deployed.load(version)
        results = await asyncio.gather(*(deployed.generate(n=2) for _ in range(6)))  # on all workers
        for result in results:
            deployed.judge(result, version)


async def test_sampled_tokens_have_the_log_probs_of_the_distribution_they_were_drawn_from(deployed: Deployed) -> None:
    await deployed.load(3)
    result = await deployed.generate(temperature=0.5)
    (completion,) = result.completions
    cold = {name: tensor * (2.0 if name == "lm_head.weight" else 1.0) for name, tensor in deployed.weights(3).items()}
    wanted = deployed.reference.logprobs(cold, result.prompt_ids, completion.token_ids)
    assert (torch.tensor(completion.logprobs) - wanted).abs().max() < 1e-3


async def test_log_probs_of_truncated_sampling_are_those_that_the_trainer_computes(deployed: Deployed) -> None:
    await deployed.load(3)
    result = await deployed.generate(temperature=1.5, top_p=0.7, top_k=6, n=4)
    for completion in result.completions:
        tokens = torch.tensor(completion.token_ids)
        logits = deployed.reference.logits(deployed.weights(3), result.prompt_ids, completion.token_ids) / 1.5
        wanted = truncated_logits(logits, tokens, top_p=0.7, top_k=6).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert (torch.tensor(completion.logprobs) - wanted).abs().max() < 1e-3


async def test_a_completion_ends_with_the_token_that_completes_a_stop_string(deployed: Deployed) -> None:
    await deployed.load(4)
    decode = text_decoder(build_tokenizer(deployed.experiment.spec.model))
    found = None
    while found is None:  # weights are random: for some prompts, hardly any token is text
        prompt, seeds = tuple(random_prompt(deployed.chance)), tuple(range(16))
        many = (await deployed.generate(prompt_ids=prompt, n=len(seeds), seeds=seeds)).completions
        pairs = (
            (seed, free, pair) for seed, free in zip(seeds, many, strict=True) for pair in pairwise(free.token_ids[4:])
        )
        found = next(((seed, free, decode(pair)) for seed, free, pair in pairs if len(decode(pair)) == 2), None)
    seed, free, stop = found
    (stopped,) = (await deployed.generate(prompt_ids=prompt, seeds=(seed,), stop=(stop,))).completions
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert stopped.finish_reason == "stop"
    assert decode(stopped.token_ids).endswith(stop)
    assert decode(stopped.token_ids).count(stop) == 1


async def test_a_seed_draws_the_same_tokens_again(deployed: Deployed) -> None:
    await deployed.load(4)
    prompt = tuple(random_prompt(deployed.chance))
    first = await deployed.generate(prompt_ids=prompt, n=3, seeds=(7, 8, 9))
    again = await deployed.generate(prompt_ids=prompt, n=2, seeds=(9, 7))
    tokens = [completion.token_ids for completion in first.completions]
    assert [completion.token_ids for completion in again.completions] == [tokens[2], tokens[0]]
    assert [completion.seed for completion in first.completions] == [7, 8, 9]


async def test_a_completion_ends_at_its_limit_and_at_the_rows_end(deployed: Deployed) -> None:
    await deployed.load(5)
    result = await deployed.generate(max_new_tokens=3, n=8)
    ends = {(len(c.token_ids), c.finish_reason) for c in result.completions}
    assert (3, "length") in ends
    assert {reason for tokens, reason in ends if tokens < 3} <= {"stop"}  # it drew the model's own end
    long = tuple(random_prompt(deployed.chance, POSITIONS - 2))
    result = await deployed.generate(prompt_ids=long, max_new_tokens=50)
    assert (len(result.completions[0].token_ids), result.completions[0].finish_reason) in {
        (2, "length"),
        (1, "stop"),
        (2, "stop"),
    }
    with pytest.raises(InvalidArgumentError, match="must fit"):
        await deployed.generate(prompt_ids=(*long, 5, 5))


@pytest.mark.guide("L14")
@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
async def test_requests_in_flight_meet_new_weights_as_the_experiment_says(deployed: Deployed, in_flight: str) -> None:
    deployed.engine._in_flight = in_flight
    wanted, spans = {6} if in_flight == "wait" else {6, 7}, list[set[int]]()
    while wanted not in spans:  # a request that ends before the load, or starts after it, does not count
        await deployed.load(6)
        requests = [asyncio.create_task(deployed.generate(max_new_tokens=240, n=2)) for _ in range(4)]
        while not await running(deployed) and not any(request.done() for request in requests):
            pass
        await asyncio.sleep(deployed.chance.uniform(0.0, 0.2))
        await deployed.load(7)
        results = await asyncio.gather(*requests)
        for result in results:
            deployed.judge(result, 6, 7)
        completions = [completion for result in results for completion in result.completions]
        spans = [set(completion.policy_versions) for completion in completions]
        spanning = [completion for completion in completions if set(completion.policy_versions) == {6, 7}]
        # One that was cut off is continued on random numbers of its own.
        assert all((completion.seed is None) == (in_flight == "abort") for completion in spanning)
        assert in_flight != "wait" or not spanning
    deployed.judge(await deployed.generate(), 7)


async def test_prompts_of_more_tokens_than_a_step_takes_are_sampled_with_seeds(deployed: Deployed) -> None:
    await deployed.load(17)
    prompts = [tuple(random_prompt(deployed.chance, POSITIONS - 40)) for _ in range(32)]
    for result in await asyncio.gather(*(deployed.generate(prompt_ids=prompt, seeds=(1,)) for prompt in prompts)):
        deployed.judge(result, 17)


async def test_weights_that_are_not_what_was_sent_are_never_served(deployed: Deployed) -> None:
    flipped = staged(deployed.weights(9).items(), 9)
    flipped.buffers[1][100] ^= 1
    was_cut_off = False
    while not was_cut_off:  # a request that ends before the load does not count
        await deployed.load(8)
        in_flight = asyncio.create_task(deployed.generate(max_new_tokens=240, n=16))
        with pytest.raises(UnavailableError, match="other bytes"):
            await deployed.engine.load(flipped)
        (ended,) = await asyncio.gather(in_flight, return_exceptions=True)
        was_cut_off = isinstance(ended, UnavailableError) and "incomplete" in str(ended)
    with pytest.raises(UnavailableError, match="incomplete"):
        await deployed.generate()
    await deployed.load(10)
    deployed.judge(await deployed.generate(n=4), 10)


async def test_every_worker_says_what_became_of_its_load(deployed: Deployed) -> None:
    weights = staged(deployed.weights(15).items(), 15)
    await deployed.engine.load(weights)
    assert isinstance(weights.buffers, SharedBuffers)
    assert weights.buffers.verdicts(5) == [*[LOADED] * 4, ""]


async def test_what_is_received_over_a_loaded_version_does_not_touch_what_is_served(deployed: Deployed) -> None:
    weights = staged(deployed.weights(16).items(), 16)
    await deployed.engine.load(weights)
    again = deployed.engine.allocate(weights.manifest)
    assert again is weights.buffers
    for buffer in again:
        buffer.fill_(0xFF)
    deployed.judge(await deployed.generate(n=4), 16)


@pytest.mark.parametrize("rank", [0, 3])
async def test_a_version_that_any_worker_has_not_loaded_is_never_served(deployed: Deployed, rank: int) -> None:
    weights = staged(deployed.weights(20).items(), 20)
    buffers = weights.buffers
    assert isinstance(buffers, SharedBuffers)
    buffers.verdicts = lambda workers: [LOADED if other != rank else "" for other in range(workers)]  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="a worker has reported nothing"):
        await deployed.engine.load(weights)
    with pytest.raises(UnavailableError, match="incomplete"):
        await deployed.generate()
    await deployed.load(21)
    deployed.judge(await deployed.generate(n=4), 21)


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.norm.weight"])
async def test_a_version_without_one_of_its_tensors_is_never_served(deployed: Deployed, missing: str) -> None:
    await deployed.load(11)
    with pytest.raises(UnavailableError, match="nothing was sent for"):
        await deployed.engine.load(staged(((n, t) for n, t in deployed.weights(12).items() if n != missing), 12))
    with pytest.raises(UnavailableError, match="incomplete"):
        await deployed.generate()
    await deployed.load(13)
    deployed.judge(await deployed.generate(n=4), 13)


async def test_a_cancelled_request_ends_in_vllm(deployed: Deployed) -> None:
    """With fewer tokens than the same request has when nobody cancels it."""
    await deployed.load(14)
    before = await counted(deployed, GENERATED)
    asked = {"prompt_ids": tuple(random_prompt(deployed.chance)), "max_new_tokens": 240, "n": 16, "seeds": range(16)}
    whole = sum(len(completion.token_ids) for completion in (await deployed.generate(**asked)).completions)
    assert await counted(deployed, GENERATED) == before + whole
    request = asyncio.create_task(deployed.generate(**asked))
    while not await running(deployed):
        pass
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await until_idle(deployed)
    assert await counted(deployed, GENERATED) < before + 2 * whole
    assert deployed.engine.active_rows == 0


async def until_idle(deployed: Deployed) -> None:
    """Wait until vLLM works on nothing: only it knows."""

    async def is_idle() -> bool:
        return not await running(deployed)

    await eventually(is_idle)


async def running(deployed: Deployed) -> float:
    """Requests that vLLM works on."""
    return await counted(deployed, "vllm:num_requests_running")


async def counted(deployed: Deployed, metric: str) -> float:
    """What vLLM counts, over its engines."""
    async with deployed.server.open("GET", "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric))
