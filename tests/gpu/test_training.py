"""Training on a GPU: the result of a CPU up to rounding, repeatable, and with the memory of one chunk of logits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from nexrl.models import iter_weights
from nexrl.tokenizers import build_tokenizer
from nexrl.weights import nccl_communicator
from nexrl_trainer import token_scores
from nexrl_trainer.build import build_learner, prepare_torch, reference_logprobs
from nexrl_trainer.checkpoint import CheckpointMetadata, load_checkpoint
from nexrl_trainer.head import Head
from nexrl_trainer.losses import LOSSES
from nexrl_trainer.ranks import Ranks
from nexrl_trainer.step import Learner
from tests.support.checkpoints import save_checkpoint
from tests.support.gpu import SHARED_GPU_NCCL, needs_gpu, peak_gpu_bytes
from tests.support.rank_process import RankCase, train
from tests.support.rank_processes import RankProcesses, Tolerance, assert_as_on_one_rank, assert_close
from tests.support.services import small_experiment

pytestmark = [*needs_gpu]

DEVICE = "cuda"
STEPS = [9, 3, 0, 12]
# Not measured yet. Kernels of a GPU add up in another order, as other ranks do: ten times what is allowed between them.
ON_A_GPU = Tolerance(metric=2e-4, logprob=5e-5, weight=2e-5)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Training as with trainer.deterministic."""
    prepare_torch(small_experiment(trainer={"steps": 1, "deterministic": True}).spec)
    yield
    torch.use_deterministic_algorithms(mode=False)


def gpu() -> Ranks:
    """One rank, which computes on the GPU."""
    return Ranks(device=torch.device(DEVICE))


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in iter_weights(learner.model)}


def assert_equal(first: Learner, second: Learner) -> None:
    others = weights_of(second)
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights_of(first).items())


@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_gpu_learns_what_a_cpu_learns(loss: str, is_lora: bool) -> None:
    case = RankCase(STEPS, {"loss": loss, "entropy_coefficient": 0.05, "kl_coefficient": 0.1}, is_lora=is_lora)
    assert_close(train(case), train(case, gpu()), ON_A_GPU)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_training_repeats_bit_for_bit() -> None:
    case = RankCase([48, 48], {"loss": "ppo_clip", "entropy_coefficient": 0.05})
    first, second = case.learner(gpu()), case.learner(gpu())
    for batch in case.batches():
        assert first.train(batch) == second.train(batch)
    assert_equal(first, second)


@pytest.mark.usefixtures("deterministic")
def test_a_resumed_run_continues_with_the_random_state_of_the_gpu(tmp_path: Path) -> None:
    case = RankCase([9, 3, 12], {"loss": "ppo_clip"}, data_type="bfloat16")
    whole, resumed = case.learner(gpu()), case.learner(gpu())
    first, *later = case.batches()
    whole.train(first)
    path = save_checkpoint(tmp_path, whole, build_tokenizer(case.source), CheckpointMetadata(step=1))
    drawn = torch.rand(4, device=DEVICE)

    resumed.train(later[-1])  # whatever it held before must be gone
    load_checkpoint(path, resumed)
    assert torch.equal(torch.rand(4, device=DEVICE), drawn)
    for batch in later:
        assert whole.train(batch) == resumed.train(batch)
    assert_equal(whole, resumed)


def test_policy_optimizer_and_reference_model_are_on_the_gpu() -> None:
    scratch = {"alphabet": "0123456789=", "hiddenSize": 16, "layers": 1, "heads": 2, "maxPositions": 32}
    trainer, algorithm = {"steps": 4, "device": DEVICE}, {"klCoefficient": 0.1}
    spec = small_experiment(model={"scratch": scratch}, trainer=trainer, algorithm=algorithm).spec
    learner, batch = build_learner(spec), RankCase([4], {}).batches()[0]
    learner.train(batch)
    tensors = [*weights_of(learner).values(), *learner.optimizer.tensors().values()]
    assert {tensor.device.type for tensor in tensors} == {DEVICE}
    reference = reference_logprobs(spec, shares_prompts=learner.forward_pass.shares_prompts)
    weights = sum(tensor.nbytes for _, tensor in iter_weights(learner.model))
    assert peak_gpu_bytes(lambda: reference(batch)) >= weights


def test_memory_of_the_logits_is_that_of_one_chunk() -> None:
    tokens, vocabulary_size = 8192, 49_152  # 1.5 GiB of logits
    layer, token_ids_P = nn.Linear(64, vocabulary_size, bias=False, device=DEVICE), torch.arange(tokens, device=DEVICE)
    hidden_PH = torch.randn(tokens, 64, device=DEVICE, requires_grad=True)

    def score() -> None:
        head = Head(layer, hidden_PH, lambda logits_RV: logits_RV)
        scores = token_scores.token_scores(head, token_ids_P, lambda logits_RV, _: logits_RV.log_softmax(-1))
        (scores.logprobs_P.sum() - 0.1 * scores.entropy_P.sum()).backward()

    score()  # allocates the workspace of cuBLAS, which stays
    layer.weight.grad = hidden_PH.grad = None
    gradient_bytes = 4 * (layer.weight.numel() + hidden_PH.numel())
    assert peak_gpu_bytes(score) <= gradient_bytes + 1.2 * token_scores.CHUNK_BYTES


def can_hold_two_ranks() -> bool:
    # Earlier versions of NCCL refuse two ranks on one GPU. torch.cuda.nccl.version() is what PyTorch was compiled with.
    if not torch.cuda.is_available():
        return False
    return torch.cuda.device_count() > 1 or nccl_communicator.version() >= SHARED_GPU_NCCL


@pytest.mark.skipif(not can_hold_two_ranks(), reason="two ranks need two GPUs, or NCCL 2.30 or later")
def test_two_ranks_on_gpus_learn_what_one_rank_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    case = RankCase(STEPS, {"loss": "ppo_clip", "entropy_coefficient": 0.05, "kl_coefficient": 0.1})
    ranks = RankProcesses(tmp_path, 2, DEVICE)
    try:
        (by_rank,) = ranks.train(2, [case])
    finally:
        ranks.end()
    assert_as_on_one_rank(train(case, gpu()), by_rank, ON_A_GPU)
