"""What the service says of a draw."""

from typing import Any, cast

from nexrl.v1 import inference_service_pb2 as pb
from nexrl.v1.trajectory_pb2 import Draw
from nexrl_inference.replica import Replica
from nexrl_inference.requests import Completion, GenerationRequest, GenerationResult
from nexrl_inference.service import InferenceServicer

ASKED: dict[str, Any] = {"temperature": 0.5, "top_p": 0.75, "top_k": 3, "stop": ["x"], "stop_token_ids": [9]}


class InParts:
    """A replica that draws in parts, as vLLM does when a weight sync aborts requests: no seed draws that again."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        completion = Completion((5,), (-1.0,), (0,), "stop", self._seed)
        return GenerationResult(request.request_id, request.prompt_ids, (completion,))


async def draw_of(seed: int | None, **fields: int) -> pb.GeneratedCompletion:
    servicer = InferenceServicer(cast(Replica, InParts(seed)))
    sent: dict[str, Any] = {"request_id": "r", "prompt_token_ids": [5, 6], "n": 1, "max_new_tokens": 4, "seeds": [7]}
    request = pb.GenerateRequest(**{**sent, **ASKED, **fields})
    (completion,) = (await servicer.Generate(request, cast(Any, None))).completions
    return completion


async def test_each_completion_names_the_parameters_that_it_was_drawn_with_and_its_seed_if_it_has_one() -> None:
    assert (await draw_of(7)).draw == Draw(seed=7, max_new_tokens=4, **ASKED)
    assert (await draw_of(None)).draw == Draw(max_new_tokens=4, **ASKED)


async def test_a_completion_that_goes_on_has_no_draw_of_its_own() -> None:
    assert not (await draw_of(7, drawn_tokens=1)).HasField("draw")
