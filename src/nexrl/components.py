"""The components of an experiment: how many processes each has, what their environment holds, when they stop.

Two modules render this table: `nexrl.local.components` into processes of one machine, `nexrl_operator.pods` into pods.
"""

import re
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from nexrl.spec import ExperimentSpec


@dataclass(frozen=True)
class Component:
    """One role of `nexrl serve`."""

    name: str
    section: str
    """The section of the spec that describes it."""
    stop_wave: int
    """Components of one wave stop together, wave 0 first: a component stops before those it needs to end well."""
    has_replicas: bool = False
    """Whether its section sets the number of processes; otherwise there is one."""
    is_numbered: bool = False
    """Whether its processes are named as 'rollout-0' even if there is only one."""
    has_threads: bool = False
    """Whether its section sets the number of CPU threads; otherwise there is one."""
    uses_redis: bool = False
    """False for components that run user code or only compute: they get no access to Redis."""
    beside: str = ""
    """The component whose pods have a container of this one. "": it has pods of its own."""

    def replicas(self, spec: ExperimentSpec) -> int:
        """Number of processes."""
        return int(getattr(spec, self.section).replicas) if self.has_replicas else 1

    def threads(self, spec: ExperimentSpec) -> int:
        """Number of CPU threads of each process."""
        return int(getattr(spec, self.section).threads) if self.has_threads else 1


COMPONENTS = (
    Component("controller", "controller", stop_wave=3, uses_redis=True),
    Component("data-reader", "data", stop_wave=2, beside="trajectory-pool"),
    Component("trajectory-pool", "trajectory_pool", stop_wave=2, has_replicas=True, uses_redis=True),
    Component("weight-sync", "weight_sync", stop_wave=1, uses_redis=True),
    Component("trainer", "trainer", stop_wave=0, has_replicas=True, has_threads=True),
    Component("inference", "inference", stop_wave=1, has_replicas=True, is_numbered=True, has_threads=True),
    Component("rollout", "rollout", stop_wave=0, has_replicas=True, is_numbered=True),
)
"""In the order in which one machine starts them."""
BY_NAME = {component.name: component for component in COMPONENTS}
WITH_PODS = tuple(component for component in COMPONENTS if not component.beside)


_INSTANCE = re.compile(rf"(?:.*-)?({'|'.join(BY_NAME)})(?:-[a-z0-9]+)*")


def component_of(instance: str) -> str:
    """Return the component of a process by its name, as rollout-0 or x-trajectory-pool-5d9c7-x2k4f; "" for others."""
    found = _INSTANCE.fullmatch(instance)
    return found[1] if found else ""


def stop_waves() -> list[list[str]]:
    """Return the names of the components by wave, in the order in which the waves stop."""
    in_order = sorted(COMPONENTS, key=attrgetter("stop_wave"))
    return [[component.name for component in wave] for _, wave in groupby(in_order, attrgetter("stop_wave"))]


@dataclass(frozen=True)
class Wiring:
    """Where the processes of one experiment find its files, each other, and Redis; "" for what there is not."""

    experiment_file: Path
    run_folder: Path
    controller: str = ""
    data_reader: str = ""
    trajectory_pool: str = ""
    weight_sync: str = ""
    trainer_replicas: str = ""
    redis_url: str = ""
    redis_is_managed: bool = False

    def environment(self, component: Component, spec: ExperimentSpec) -> dict[str, str]:
        """Return the variables of a component's processes that do not depend on where they run."""
        variables = {
            "NEXRL_EXPERIMENT_FILE": str(self.experiment_file),
            "NEXRL_RUN_DIR": str(self.run_folder),
            "NEXRL_CONTROLLER": self.controller if component.name != "controller" else "",
            "NEXRL_TRAJECTORY_POOL": self.trajectory_pool,
            "NEXRL_WEIGHT_SYNC": self.weight_sync,
            "OMP_NUM_THREADS": str(component.threads(spec)),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        if component.name == "data-reader":
            variables["PYTHONHASHSEED"] = "0"  # a factory that lists a set has the same order after a restart
        if component.name == "trainer" and self.trainer_replicas:
            variables["NEXRL_TRAINER_REPLICAS"] = self.trainer_replicas
        if component.name == "trajectory-pool":
            variables["NEXRL_DATA_READER"] = self.data_reader
        if component.uses_redis:
            variables["NEXRL_REDIS_URL"] = self.redis_url
            if self.redis_is_managed:
                variables["NEXRL_REDIS_IS_MANAGED"] = "true"
        return variables
