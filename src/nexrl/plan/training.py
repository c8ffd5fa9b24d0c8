"""Memory of one rank of the trainer, in bytes, by what it is for.

The figures follow nexrl_trainer: `optimizer.py` (float32 masters, gradients and moments), `ranks.py` (FSDP2),
`token_scores.py` (logits), `build.py` (each rank builds the whole model before it is sharded). `test_plan.py` compares
them with the bytes that a real step allocates.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from nexrl.errors import naming
from nexrl.plan.model_size import ModelSize, size_of
from nexrl.spec import ExperimentSpec
from nexrl.spec.critic import Ppo
from nexrl.spec.model import PathModel

LOGITS_CHUNK_BYTES = 128 * 2**20
LOGITS_BLOCK_BYTES = 4 * 2**20
"""CHUNK_BYTES and BLOCK_BYTES of nexrl_trainer.token_scores; a test compares them."""
BLOCK_TEMPORARIES = 5
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Training:
    """What the memory of a rank depends on, besides the model. `micro_tokens`: tokens of the largest micro-batch."""

    item_bytes: int
    ranks: int
    micro_tokens: int
    checkpoints_activations: bool = False
    has_reference: bool = False
    keeps_two_snapshots: bool = False
    adapter_rank: int = 0
    """Rank of the LoRA adapters that are trained in float32 instead of the weights; 0 = the weights are trained."""
    has_muon: bool = False
    teacher_parameters: int = 0
    has_moving_reference: bool = False
    has_critic: bool = False

    @classmethod
    def of(cls, spec: ExperimentSpec) -> "Training":
        """Return those of an experiment. A sequence that is longer than the limit is computed alone.

        Raises what `size_of` raises, for the teacher.
        """
        trainer, teacher = spec.trainer, spec.algorithm.teacher
        ranks = trainer.replicas * trainer.processes_per_replica
        return cls(
            ITEM_BYTES[spec.model.dtype],
            ranks,
            max(trainer.max_tokens_per_micro_batch, spec.max_sequence_tokens),
            trainer.activation_checkpointing == "full",
            # With adapters, the reference model is the trainer's own, without them.
            has_reference=spec.model.lora is None
            and (spec.algorithm.needs_initial_model or spec.algorithm.kl_reward_coefficient > 0),
            # Otherwise the memory of the previous version is used again.
            keeps_two_snapshots=spec.weight_sync.path is not None,
            adapter_rank=spec.model.lora.rank if spec.model.lora else 0,
            has_muon=spec.algorithm.optimizer == "muon",
            has_moving_reference=spec.algorithm.reference is not None,
            teacher_parameters=_parameters(teacher.path) if teacher else 0,
            has_critic=isinstance(spec.algorithm, Ppo),
        )


@dataclass(frozen=True)
class RankMemory:
    """Bytes that the rank with the most, rank 0, holds on its device at the peak of a step."""

    weights: int
    masters: int
    gradients: int
    optimizer: int
    moving_reference: int
    critic: int
    """Its weights, masters, gradients and moments. Its activations are those of the policy: one after the other."""
    reference: int
    teacher: int
    gathered: int
    activations: int
    logits: int
    whole_model: int
    """At start, before the other figures exist: the model before it is sharded, in float32 for the check of packing."""

    @property
    def state(self) -> int:
        """Bytes that every step needs, whatever its batch."""
        return self.weights + self.masters + self.gradients + self.optimizer + self.moving_reference + self.critic

    @property
    def frozen(self) -> int:
        """Bytes of the models that are not trained. They are not sharded: rank 0 has them."""
        return self.reference + self.teacher

    @property
    def step(self) -> int:
        """Bytes at the peak of a step."""
        return self.state + self.frozen + self.gathered + self.activations + self.logits

    @property
    def total(self) -> int:
        """Bytes at the peak, of a step or at start."""
        return max(self.step, self.whole_model)


def rank_memory(size: ModelSize, training: Training) -> RankMemory:
    """Return the memory of rank 0."""
    shard = -(-size.parameters // training.ranks)
    item = training.item_bytes
    trained = -(-_trained(size, training).parameters // training.ranks)
    return RankMemory(
        weights=shard * item + (trained * 4 if training.adapter_rank else 0),
        masters=0 if item == 4 or training.adapter_rank else shard * 4,
        gradients=trained * 4,
        optimizer=_moment_bytes(size, training, training.ranks, _trained(size, training)),
        # Its own weights, and those of the policy while it takes their place.
        moving_reference=shard * (4 + item) if training.has_moving_reference else 0,
        critic=_critic_bytes(size, training) if training.has_critic else 0,
        reference=size.parameters * item if training.has_reference else 0,
        teacher=training.teacher_parameters * item,
        gathered=_gathered_bytes(size, item) if training.ranks > 1 else 0,
        activations=activation_bytes(size, training),
        logits=_logits_bytes(size, training),
        # A critic is built when the policy has its shard.
        whole_model=size.parameters * 4 + (shard * (4 if item == 4 else item + 4) if training.has_critic else 0),
    )


def critic_state_bytes(size: ModelSize, training: Training, ranks: int) -> int:
    """Return the bytes of a rank's weights, masters and moments of the critic, all of which is trained."""
    trained, masters = _critic(size), 0 if training.item_bytes == 4 else 4
    weights = -(-trained.parameters // ranks) * (training.item_bytes + masters)
    return weights + _moment_bytes(size, training, ranks, trained)


def _critic_bytes(size: ModelSize, training: Training) -> int:
    gradients = -(-_critic(size).parameters // training.ranks) * 4
    return critic_state_bytes(size, training, training.ranks) + gradients


def activation_bytes(size: ModelSize, training: Training) -> int:
    """Return the bytes that autograd keeps for the backward pass of one micro-batch, and one layer's temporaries.

    The tensors that each operation of a Llama layer of transformers keeps are counted, as in Korthikanti et al.,
    "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), section 4.1; there is neither
    dropout nor a [T, T] matrix of attention, because attention is fused. With item bytes b, per token and layer:

    - two norms: input and normalised input in float32 or b, output in b. 12 H each in float32, 8 H in 16 bits;
    - attention: query, key and value (repeated for each query head), and output, 4 A b, A = heads x head size;
    - feed-forward: gate, its SiLU, up, and their product, 4 F b.

    With activation checkpointing, each layer keeps only its input, H b, and one layer at a time is computed again.
    """
    item = training.item_bytes
    norms = 2 * (12 if item == 4 else 8) * size.hidden
    attention = 4 * size.heads * size.head_size * item
    layer = norms + attention + 4 * size.feed_forward * item
    kept = size.hidden * item if training.checkpoints_activations else layer
    temporaries = layer if training.checkpoints_activations else 2 * size.feed_forward * item
    return training.micro_tokens * (size.layers * kept + temporaries)


def snapshot_bytes(size: ModelSize, training: Training) -> int:
    """Return the host memory of the packed weights that rank 0 publishes, the previous version included."""
    trained = _trained(size, training)
    item = 4 if training.adapter_rank else training.item_bytes
    return trained.parameters * item * (2 if training.keeps_two_snapshots else 1)


def checkpoint_bytes(size: ModelSize, training: Training) -> int:
    """Return the size of one checkpoint: trained weights, masters of 16-bit weights, moments; and those of a critic."""
    trained = _trained(size, training)
    own = 4 if training.adapter_rank or training.item_bytes == 4 else training.item_bytes + 4
    reference = trained.parameters * 4 if training.has_moving_reference else 0
    critic = critic_state_bytes(size, training, ranks=1) if training.has_critic else 0
    return trained.parameters * own + _moment_bytes(size, training, 1, trained) + reference + critic


@cache  # `nexrl plan` asks once for each remedy, and a GGUF file takes seconds
def _parameters(teacher: str) -> int:
    with naming("algorithm.teacher"):
        return size_of(PathModel(path=teacher)).parameters


def _moment_bytes(size: ModelSize, training: Training, ranks: int, trained: "_Trained") -> int:
    """Return the bytes of a rank's moments: two of AdamW, and the number of updates of each tensor; one of Muon.

    The matrices of Muon are the seven of a dense Llama layer, that is all of it but its two norms.
    """
    layers_of_muon = size.layers if training.has_muon else 0
    moments = 2 * trained.parameters - layers_of_muon * (size.layer - 2 * size.hidden)
    return -(-moments // ranks) * 4 + 4 * (trained.tensors - 7 * layers_of_muon)


class _Trained(NamedTuple):
    parameters: int
    tensors: int


def _trained(size: ModelSize, training: Training) -> _Trained:
    """Return what is trained. Of adapters at most: those of all linear layers of a dense Llama layer."""
    if not training.adapter_rank:
        return _Trained(size.parameters, size.tensors)
    width, kv_width = size.heads * size.head_size, size.kv_heads * size.head_size
    attention = 2 * (size.hidden + width) + 2 * (size.hidden + kv_width)
    feed_forward = 3 * (size.hidden + size.feed_forward)
    return _Trained(training.adapter_rank * size.layers * (attention + feed_forward), 14 * size.layers)


def _critic(size: ModelSize) -> _Trained:
    """Return what is trained of the critic: the model with a head of one output, of its own."""
    head = 0 if size.is_tied else size.vocabulary * size.hidden
    return _Trained(size.parameters - head + size.hidden, size.tensors + (1 if size.is_tied else 0))


def _logits_bytes(size: ModelSize, training: Training) -> int:
    """Return the bytes of one chunk of logits, its blocks, and the head in float32 (`token_scores`)."""
    logits = training.micro_tokens * size.vocabulary * 4
    block = BLOCK_TEMPORARIES * min(logits, LOGITS_BLOCK_BYTES)
    if logits <= LOGITS_BLOCK_BYTES:
        return block
    head = size.vocabulary * size.hidden * 4
    hidden = training.micro_tokens * size.hidden * 4
    return min(logits, LOGITS_CHUNK_BYTES) + block + hidden + head * (1 if training.item_bytes == 4 else 2)


def _gathered_bytes(size: ModelSize, item_bytes: int) -> int:
    """Return the bytes that FSDP2 gathers: embedding and head, two layers, and the gradient of the larger of these."""
    largest = max(size.outside_layers, size.layer)
    return (size.outside_layers + 2 * size.layer + largest) * item_bytes + largest * 4
