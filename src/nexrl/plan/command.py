"""`nexrl plan FILE`: prints what each role needs, and refuses what cannot fit."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from nexrl.errors import FailedPreconditionError, InvalidArgumentError
from nexrl.plan.memory_size import format_bytes, gpu_bytes, host_bytes, parse_bytes
from nexrl.plan.model_size import ModelSize, size_of
from nexrl.plan.roles import Available, Role, inference_role, problems, trainer_role
from nexrl.plan.training import Training, checkpoint_bytes
from nexrl.spec import Experiment, ExperimentSpec
from nexrl.spec.document import apply_overrides, read_yaml
from nexrl.spec.load import parse_experiment
from nexrl.spec.violations import spec_error


def plan(path: Path, overrides: Sequence[str], gpu_memory: str, memory: str, gpus: int | None = None) -> Iterator[str]:
    """Yield the lines of the plan. `gpu_memory` and `memory` are quantities as 80Gi; "" asks this machine.

    With `gpus`, one machine with so many runs all roles; without, each process has GPUs of its own.

    Raises SpecError for a wrong file, and after the last line FailedPreconditionError if something does not fit.
    """
    spec = read_experiment(path, overrides).spec
    size = size_of(spec.model)
    available = Available(
        parse_bytes("--gpu-memory", gpu_memory) if gpu_memory else gpu_bytes(),
        parse_bytes("--memory", memory) if memory else host_bytes(),
        gpus,
    )
    named = max((*spec.trainer.gpus, *spec.inference.gpus), default=0)
    if gpus is not None and named >= gpus:
        raise InvalidArgumentError(f"--gpus: {gpus}, but trainer.gpus or inference.gpus names GPU {named}")
    yield from plan_lines(size, spec, available)
    if found := problems(size, spec, available):
        raise FailedPreconditionError("\n".join(found))


def read_experiment(path: Path, overrides: Sequence[str]) -> Experiment:
    """Read an experiment that may run elsewhere: what this machine lacks is no error. Raises SpecError."""
    document = read_yaml(path)
    if violations := apply_overrides(overrides, document):
        raise spec_error(path, violations)
    return parse_experiment(document, path.resolve().parent)


def plan_lines(size: ModelSize, spec: ExperimentSpec, available: Available) -> Iterator[str]:
    """Yield the lines of the plan."""
    yield f"model: {size.parameters:,} parameters in {size.layers} layers, {spec.model.dtype}"
    for role in (trainer_role(size, spec, available), inference_role(size, spec, available)):
        yield from _role_lines(role)
    one = checkpoint_bytes(size, Training.of(spec))
    # An older checkpoint is removed after its successor is there.
    kept = spec.checkpoint.keep + 1
    yield f"disk: {format_bytes(one)} for each checkpoint, {format_bytes(kept * one)} for {kept} of them"


def _role_lines(role: Role) -> Iterator[str]:
    of_each = "rank 0" if role.name == "trainer" else "each replica"
    yield f"{role.name}: {of_each}"
    yield from (f"  {name:<34}{format_bytes(count):>14}" for name, count in role.parts.items() if count)
    if role.device_bytes is not None:
        yield f"  {'memory of each GPU':<34}{format_bytes(role.device_bytes):>14}"
    yield f"  {'memory of each host':<34}{format_bytes(role.host_bytes):>14}"
    gpus = f"{role.gpus} GPUs, " if role.gpus else ""
    yield f"  {role.replicas} x ({gpus}{role.cores} CPU cores, {format_bytes(role.host_bytes)} of host memory)"
