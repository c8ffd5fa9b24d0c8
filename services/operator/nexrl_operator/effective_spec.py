"""The spec that an experiment runs with: its own, or while that is invalid, the one that its pods read. Pure."""

from nexrl.components import BY_NAME
from nexrl.spec import SpecError, parse_experiment, yaml_core
from nexrl.spec.experiment import GENERATION_ANNOTATION
from nexrl.spec.marks import may_change
from nexrl.spec.section import LIVE
from nexrl_operator.children import Renderer
from nexrl_operator.objects import API_VERSION, EXPERIMENT_KIND, RUN_FOLDER, Object, Owner
from nexrl_operator.observed import Observed
from nexrl_operator.queueing import admitted_counts, queue_of
from nexrl_operator.revisions import CONFIGURATION_FILE
from nexrl_operator.settings import OperatorSettings

ALWAYS_HONOURED = tuple(path for path in may_change(LIVE) if "." not in path)
"""Fields that take effect even if the rest of the spec is invalid."""


def effective_renderer(observed: Observed, settings: OperatorSettings) -> tuple[Renderer, str]:
    """Return the renderer of the spec in effect, and what is wrong with the experiment's own spec; "" if it is valid.

    Raises SpecError if it is invalid and the experiment was never started.
    """
    asked = observed.resource["spec"]
    try:
        return _renderer(observed, asked, settings), ""
    except SpecError as error:
        if (configuration := _configuration(observed)) is None:
            raise
        started_with = yaml_core.load(configuration["data"][CONFIGURATION_FILE])["spec"]
        spec = {key: value for key, value in started_with.items() if key not in ALWAYS_HONOURED}
        honoured = {key: asked[key] for key in ALWAYS_HONOURED if key in asked}
        return _renderer(observed, spec | honoured, settings), error.message


def rendering_inputs(observed: Observed) -> tuple[object, ...]:
    """Return all that a valid spec's renderer is made from, besides the settings."""
    return observed.resource["spec"], _max_rollouts(observed), _generation(observed)


def _renderer(observed: Observed, spec: Object, settings: OperatorSettings) -> Renderer:
    metadata = observed.resource["metadata"]
    # Without annotations: that of `kubectl apply` is as long as the object.
    known = {name: metadata[name] for name in ("name", "namespace")}
    document = {"apiVersion": API_VERSION, "kind": EXPERIMENT_KIND, "metadata": known}
    experiment = parse_experiment(document | {"spec": spec}, RUN_FOLDER)
    owner = Owner(metadata["namespace"], metadata["name"], metadata["uid"])
    return Renderer(owner, experiment, settings, _max_rollouts(observed), _generation(observed))


def _max_rollouts(observed: Observed) -> int | None:
    admission = observed.admission if queue_of(observed.resource) else None
    return admitted_counts(admission).get("rollout", 0) if admission else None


def _generation(observed: Observed) -> int:
    """Return the generation that the pods were started with: to the controller, another one means a resumption."""
    known = int(observed.resource["metadata"].get("generation", 0))
    if not any(observed.workloads(name) for name in BY_NAME):
        return known
    annotations = (_configuration(observed) or {}).get("metadata", {}).get("annotations", {})
    told = str(annotations.get(GENERATION_ANNOTATION, ""))
    return int(told) if told.isdecimal() else known


def _configuration(observed: Observed) -> Object | None:
    return next((each for each in observed.children if each["kind"] == "ConfigMap"), None)
