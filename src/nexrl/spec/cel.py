"""The rules between fields as CEL, for the API server: those of the file's validators, and what may change when."""

from collections.abc import Iterator, Sequence

from nexrl.spec.advantages import DISTILLATION, GROUP_BASELINES, WITHOUT_ADVANTAGES
from nexrl.spec.choices import Node
from nexrl.spec.correction import correction_is_off
from nexrl.spec.demonstrations import cel_conditions
from nexrl.spec.inference import InferenceSpec
from nexrl.spec.marks import may_change
from nexrl.spec.section import LIVE, NEVER, NEXT_START, ROLLING
from nexrl.spec.structural import Rule
from nexrl.spec.variants import value_of, variants

_SCRATCH = "model.scratch"
RULES: Sequence[Rule] = (
    Rule(_SCRATCH, "heads", "self.hiddenSize % (2 * self.heads) == 0", "hiddenSize must be an even multiple of heads"),
    Rule(
        _SCRATCH,
        "alphabet",
        "self.alphabet.split('').all(c, self.alphabet.indexOf(c) == self.alphabet.lastIndexOf(c))",
        "each character once",
    ),
    Rule("rollout", "systemPrompt", "!has(self.systemPrompt) || self.chat", "requires rollout.chat: true"),
    Rule(
        "trajectoryPool",
        "groupSize",
        "self.batchSize % self.groupSize == 0",
        "batchSize must be a multiple of groupSize",
    ),
    *(
        Rule(
            "trainer",
            key,
            f"self.{key} == 1 || self.backend != 'mock'",
            "trainer.backend mock computes nothing that processes could share; use 1",
        )
        for key in ("replicas", "processesPerReplica")
    ),
    Rule(
        "validation",
        "samplesPerTask",
        "self.samplesPerTask == 1 || self.temperature > 0.0",
        "greedy samples are equal; use 1, or a temperature above 0",
    ),
    Rule(
        "algorithm",
        "finalLearningRateRatio",
        "self.finalLearningRateRatio < 1.0 || self.learningRateDecay == 'linear' && !has(self.decaySteps)",
        "the rate is constant, so learningRateDecay and decaySteps change nothing; use a lower ratio",
    ),
    Rule(
        "algorithm",
        "advantage",
        "!has(self.advantage) || self.advantage != 'max_rl'"
        " || !has(self.overlongPenalty) && self.klRewardCoefficient == 0.0",
        "max_rl divides by the mean reward, which a penalty can bring near 0",
    ),
    Rule(
        "algorithm",
        "reference",
        "!has(self.reference) || self.klCoefficient > 0.0 || self.loss == 'dpo'",
        "nothing compares with it; set klCoefficient above 0, or loss dpo",
    ),
    Rule(
        "algorithm",
        "processor",
        "!has(self.teacher) || self.processor != 'external'",
        "only the trainer asks the teacher; remove teacher",
    ),
    Rule(
        "algorithm",
        "teacher",
        f"has(self.teacher) || !has(self.advantage) || self.advantage != '{DISTILLATION}'",
        f"advantage {DISTILLATION} needs it",
    ),
    Rule(
        "algorithm",
        "teacher",
        f"!has(self.teacher) || !(self.loss in {list(WITHOUT_ADVANTAGES)})",
        "this loss does not use advantages; remove teacher",
    ),
    Rule(
        "algorithm",
        "loss",
        f"self.type != 'ppo' || !(self.loss in {list(WITHOUT_ADVANTAGES)})",
        "this loss does not use advantages, so the critic has no effect; use type grpo",
    ),
    Rule(
        "algorithm",
        "teacher",
        "self.type != 'ppo' || !has(self.teacher)",
        "type ppo takes its advantages from the critic; remove it",
    ),
    Rule(
        "algorithm",
        "zeroVarianceGroups",
        "self.type != 'ppo' || self.zeroVarianceGroups != 'refill'",
        "type ppo compares no samples, so equal rewards are no reason to refill a group; remove it",
    ),
    Rule(
        "algorithm",
        "miniBatches",
        "self.loss != 'dpo' || self.miniBatches == 1",
        "loss dpo needs both samples of a pair; use 1",
    ),
    Rule(
        "algorithm",
        "correction",
        f"self.loss != 'dpo' || {correction_is_off('self')}",
        "loss dpo has no ratio to correct; remove it",
    ),
    Rule(
        "algorithm",
        "klTarget",
        "!has(self.klTarget) || self.klCoefficient > 0.0",
        "needs klCoefficient, which it multiplies; set one above 0",
    ),
    Rule(
        "algorithm",
        "passK",
        "has(self.passK) == (has(self.advantage) && self.advantage == 'pass_at_k')",
        "advantage pass_at_k needs it, and no other has it",
    ),
    Rule(
        "algorithm",
        "discount",
        "!has(self.discount) || self.discount == 1.0 || self.type == 'ppo'"
        " || has(self.advantage) && self.advantage == 'return_to_go'",
        "only type ppo and advantage return_to_go have it",
    ),
    Rule(
        "algorithm",
        "correction",
        "self.loss != 'decoupled_ppo' || !has(self.correction.tokenBand)",
        "tokenBand and weightLimit of loss decoupled_ppo are two limits of the same ratio; remove tokenBand",
    ),
    Rule("algorithm.overlongPenalty", "fullTokens", "self.fullTokens > self.afterTokens", "must be above afterTokens"),
    Rule(
        "monitor.health",
        "timeoutSeconds",
        "self.timeoutSeconds > self.checkIntervalSeconds",
        "must be above checkIntervalSeconds",
    ),
    Rule(
        "redis",
        "url",
        "!has(self.url) || !self.url.matches('://[^/@]*:[^/@]*@|[?&]password=')",
        "contains a password, and many people read objects; the password comes from the chart's Secret",
    ),
    Rule("", "code", "self.code.all(name, name.matches('^[A-Za-z_][A-Za-z0-9_]{0,119}[.]py$'))", "names as `task.py`"),
    Rule(
        "",
        "rollout.maxNewTokens",
        "!has(self.model.scratch) || self.rollout.maxNewTokens < self.model.scratch.maxPositions",
        "must be below model.scratch.maxPositions",
    ),
    Rule(
        "",
        "algorithm.advantage",
        "self.trajectoryPool.groupSize > 1 && size(self.trajectoryPool.keyList) > 0 || self.algorithm.type != 'grpo'"
        " || self.algorithm.processor != 'builtin' || self.trainer.backend == 'mock'"
        " || self.algorithm.loss == 'cross_entropy' || self.rollout.type == 'demonstrations'"
        f" || (has(self.algorithm.advantage) && !(self.algorithm.advantage in {list(GROUP_BASELINES)}))",
        "compares the samples of a group, and trajectoryPool.groupSize is 1 or keyList is empty: all would be 0",
    ),
    Rule(
        "",
        "algorithm.optimizer",
        "self.algorithm.optimizer != 'muon' || !has(self.model.lora)",
        "muon needs the matrices of the model, and model.lora trains factors of their changes; use adamw",
    ),
    Rule(
        "",
        "algorithm.criticOnlySteps",
        "!has(self.algorithm.criticOnlySteps) || self.trainer.steps == 0"
        " || self.algorithm.criticOnlySteps < self.trainer.steps",
        "must be below trainer.steps, or the policy is never trained",
    ),
    Rule(
        "",
        "algorithm.reference",
        "!has(self.algorithm.reference) || !has(self.model.lora)",
        "with model.lora the reference model is the base, which does not move; remove it",
    ),
    Rule(
        "",
        "algorithm.passK",
        "!has(self.algorithm.passK) || self.trajectoryPool.groupSize == 1"
        " || self.algorithm.passK < self.trajectoryPool.groupSize",
        "must be below trajectoryPool.groupSize",
    ),
    Rule(
        "",
        "weightSync.transport",
        "self.weightSync.transport != 'nccl' || !has(self.model.lora)",
        "replicas merge adapters (model.lora) in host memory; use auto or gloo",
    ),
    Rule(
        "",
        "inference.maxTokensPerRow",
        "self.rollout.maxNewTokens < self.inference.maxTokensPerRow",
        "must be above rollout.maxNewTokens",
    ),
    Rule(
        "",
        "inference.maxTokensPerRow",
        "self.inference.maxTokensPerRow <= self.trainer.maxTokensPerMicroBatch",
        "must not exceed trainer.maxTokensPerMicroBatch",
    ),
)


def backend_rules() -> Iterator[Rule]:
    """Which values of weightSync.inFlight and weightSync.transport each inference backend supports."""
    for backend in variants(InferenceSpec)["backend"]:
        name, supported = value_of(backend, "backend"), list(backend.IN_FLIGHT)  # type: ignore[attr-defined]
        rule = f"self.inference.backend != '{name}' || self.weightSync.inFlight in {supported}"
        yield Rule("", "inference.backend", rule, f"{name} supports weightSync.inFlight {', '.join(supported)} only")
        if not backend.RECEIVES_ON_GPU:  # type: ignore[attr-defined]
            rule = f"self.inference.backend != '{name}' || self.weightSync.transport != 'nccl'"
            yield Rule("", "inference.backend", rule, f"{name} supports weightSync.transport auto and gloo only")


def demonstration_rules() -> Iterator[Rule]:
    """What rollout.type demonstrations requires."""
    for field, condition, message in cel_conditions():
        yield Rule("", field, f"self.rollout.type != 'demonstrations' || {condition}", message)


def change_rules(spec: Node) -> Iterator[Rule]:
    """What of an experiment may change, and when."""
    for path in may_change(NEVER):
        yield Rule("", path, _unchanged(path, spec), f"spec.{path} never changes; create a new Experiment")
    for path in _only_while_suspended(spec):
        rule = f"self.suspend || oldSelf.suspend || {_unchanged(path, spec)}"
        yield Rule("", path, rule, f"set spec.suspend to true to change spec.{path}")


def _only_while_suspended(spec: Node) -> Iterator[str]:
    """The largest parts of the spec that contain nothing that may change at other times, or never."""
    marked = may_change(NEVER, LIVE, ROLLING, NEXT_START)
    for key, child in spec["properties"].items():
        if key in marked:
            continue
        if not any(path.startswith(f"{key}.") for path in marked):
            yield key
            continue
        yield from (f"{key}.{inner}" for inner in child["properties"] if f"{key}.{inner}" not in marked)


def _unchanged(path: str, spec: Node) -> str:
    section, _, key = path.rpartition(".")
    node = spec
    for part in path.split("."):
        node = node["properties"][part]
    new, old = (f"{self}.{section}" if section else self for self in ("self", "oldSelf"))
    is_always_there = "default" in node or key in (spec if not section else spec["properties"][section]).get(
        "required", []
    )
    if is_always_there:
        return f"{new}.{key} == {old}.{key}"
    # The rule is at the parent, since one at the field itself would not run if the field is added or removed.
    return f"has({new}.{key}) == has({old}.{key}) && (!has({new}.{key}) || {new}.{key} == {old}.{key})"
