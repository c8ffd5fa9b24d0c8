"""The objects of an experiment: valid, restricted, owned, and the same for the same spec."""

from typing import Any

import kubernetes_validate
import pytest

from nexrl.components import WITH_PODS
from nexrl.errors import InvalidArgumentError
from nexrl.spec import Experiment, parse_experiment
from nexrl_operator.children import Renderer
from nexrl_operator.objects import RUN_FOLDER, Owner
from nexrl_operator.revisions import REVISION, configuration_revision, template_revision
from nexrl_operator.templates import lay_over
from tests.support.kubelet import experiment_object, operator_settings

Object = dict[str, Any]


def renderer(name: str = "x", settings: Object | None = None, **sections: Any) -> Renderer:
    experiment: Experiment = parse_experiment(experiment_object(name, "rl", **sections), RUN_FOLDER)
    return Renderer(Owner("rl", name, "3f0c-uid"), experiment, operator_settings(**(settings or {})))


def objects(made: Renderer) -> list[Object]:
    return [*made.foundation(), *made.workloads(1).values()]


def container(workload: Object) -> Object:
    found: Object = workload["spec"]["template"]["spec"]["containers"][0]
    return found


def variables(workload: Object) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container(workload)["env"]}


@pytest.mark.parametrize("tls", ["off", "operator"])
@pytest.mark.parametrize("backend", ["builtin", "vllm"])
def test_every_object_is_one_of_kubernetes(backend: str, tls: str) -> None:
    made = renderer(
        "a" * 40, {"tls": tls, "redis_secret": "redis/password"}, inference={"backend": backend, "maxTokensPerRow": 32}
    )
    for item in objects(made):
        kubernetes_validate.validate(item, "1.36", strict=True)
        assert len(item["metadata"]["name"]) <= 63
        assert item["metadata"]["ownerReferences"][0]["controller"]
        assert item["metadata"]["labels"]["nexrl.dev/experiment"] == "a" * 40


def test_pods_are_as_restricted_as_can_be() -> None:
    for item in renderer().workloads(1).values():
        pod = item["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod["automountServiceAccountToken"]
        assert container(item)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("hostPath" in volume for volume in pod["volumes"])


@pytest.mark.parametrize(("backend", "image"), [("builtin", "image_inference"), ("vllm", "image_vllm")])
def test_the_pods_of_the_engines_run_the_image_of_their_backend(backend: str, image: str) -> None:
    made = renderer(inference={"backend": backend, "maxTokensPerRow": 32})
    assert container(made.workloads(1)["inference"])["image"] == getattr(made.settings, image)


def test_rendering_twice_gives_no_difference() -> None:
    assert objects(renderer()) == objects(renderer())


def test_another_version_of_the_operator_makes_no_other_revision() -> None:
    before, after = renderer(), renderer(settings={"image_trainer": "test/trainer:2"})
    assert container(before.workloads(1)["trainer"])["image"] != container(after.workloads(1)["trainer"])["image"]
    assert template_revision(before.experiment, "trainer") == template_revision(after.experiment, "trainer")
    assert configuration_revision(before.experiment) == configuration_revision(after.experiment)


def test_what_may_change_while_it_runs_makes_no_other_configuration() -> None:
    template = {"metadata": {"labels": {"a": "b"}}}
    changed = renderer(rollout={"maxNewTokens": 8, "replicas": 5, "template": template}, ttlSecondsAfterFinished=5)
    assert configuration_revision(changed.experiment) == configuration_revision(renderer().experiment)
    assert template_revision(changed.experiment, "rollout") != template_revision(renderer().experiment, "rollout")
    other = renderer(trainer={"steps": 5})
    assert configuration_revision(other.experiment) != configuration_revision(renderer().experiment)


def test_pods_read_the_experiment_and_the_modules_of_its_user() -> None:
    data = {"type": "python", "factory": "task:tasks"}
    made = renderer(data=data, code={"task.py": "x = 1\n"}, checkpoint={"path": "kept"})
    files = made.config_map()["data"]
    assert files["task.py"] == "x = 1\n"
    assert "task.py" not in files["experiment.yaml"]
    assert "nexrl.dev/folder: /etc/nexrl/experiment" in files["experiment.yaml"]
    assert "nexrl.dev/ledger: rl.x.3f0c-uid"[:30] in files["experiment.yaml"]
    assert "path: /var/lib/nexrl/run/kept" in files["experiment.yaml"]


def test_pods_find_each_other_by_their_services() -> None:
    made = renderer()
    services = {item["metadata"]["name"]: item["spec"] for item in made.foundation() if item["kind"] == "Service"}
    known = variables(made.workloads(1)["rollout"])
    assert known["NEXRL_WEIGHT_SYNC"] == "dns:///x-weight-sync.rl.svc:50051"
    pod = made.workloads(1)["weight-sync"]["spec"]["template"]["metadata"]["labels"]
    assert services["x-weight-sync"]["selector"].items() <= pod.items()
    assert known["NEXRL_INSTANCE"] == "rollout-$(NEXRL_POD_INDEX)"
    assert known["NEXRL_ADVERTISE"] == "$(NEXRL_POD_IP)"


def test_a_password_is_referred_to_and_never_written_down() -> None:
    made = renderer(settings={"redis_secret": "redis/password"}).workloads(1)["controller"]
    [password] = [each for each in container(made)["env"] if each["name"] == "NEXRL_REDIS_PASSWORD"]
    assert password["valueFrom"] == {"secretKeyRef": {"name": "x-redis", "key": "password"}}


def test_who_runs_code_of_the_user_knows_no_redis() -> None:
    made = renderer(settings={"redis_secret": "redis/password"}).workloads(1).items()
    told = {name: {each["name"] for each in container(item)["env"]} for name, item in made}
    redis = {"NEXRL_REDIS_URL", "NEXRL_REDIS_PASSWORD"}
    assert {name for name in told if redis <= told[name]} == {"controller", "trajectory-pool", "weight-sync"}
    assert {name for name in told if not redis & told[name]} == {"rollout", "trainer", "inference"}


def test_the_data_reader_shares_neither_credentials_nor_user_nor_files_with_the_pool_beside_it() -> None:
    settings = {"redis_secret": "redis/password", "tls": "operator", "token_reviews": True}
    pod = renderer(settings=settings).workloads(1)["trajectory-pool"]["spec"]["template"]["spec"]
    pool, reader = pod["containers"]
    assert (pool["name"], reader["name"], reader["args"]) == ("nexrl", "data-reader", ["data-reader"])
    assert pod["securityContext"]["runAsUser"] != reader["securityContext"]["runAsUser"]  # /proc shows only one's own
    assert "runAsUser" not in pool["securityContext"]
    told = {each["name"]: each.get("value") for each in reader["env"]}
    assert told["NEXRL_LISTEN"] == next(each["value"] for each in pool["env"] if each["name"] == "NEXRL_DATA_READER")
    assert told["NEXRL_LISTEN"].startswith("127.0.0.1:")
    assert not [name for name in told if name.startswith(("NEXRL_REDIS", "NEXRL_TOKEN"))]
    assert not {"ports", "livenessProbe", "readinessProbe", "startupProbe"} & set(reader)
    mounts = [{mount["name"]: mount for mount in each["volumeMounts"]} for each in (pool, reader)]
    assert all(mounts[1][name].get("readOnly") for name in set(mounts[0]) & set(mounts[1]))
    token = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert token in {mount["mountPath"] for mount in reader["volumeMounts"]}  # so Kubernetes mounts no token there
    assert reader["securityContext"] | pool["securityContext"] == reader["securityContext"]
    assert reader["resources"]["limits"] == {"memory": "8Gi"}


def test_a_template_of_the_pool_gives_the_data_reader_what_its_data_needs() -> None:
    added = [
        {"name": "data-reader", "image": "mine:1", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
    ]
    template = {"spec": {"containers": added, "volumes": [{"name": "data", "emptyDir": {}}]}}
    made = renderer(trajectoryPool={"batchSize": 4, "groupSize": 2, "replicas": 2, "template": template}).workloads(1)
    _, reader = made["trajectory-pool"]["spec"]["template"]["spec"]["containers"]
    assert (reader["image"], reader["args"]) == ("mine:1", ["data-reader"])
    assert {"/data", "/tmp"} < {mount["mountPath"] for mount in reader["volumeMounts"]}
    assert {each["name"]: each.get("value") for each in reader["env"]}["NEXRL_INSTANCE"] == "$(NEXRL_POD)-data-reader"


def test_an_event_loop_that_hangs_is_noticed_where_nothing_is_computed() -> None:
    probes = {name: container(item)["livenessProbe"] for name, item in renderer().workloads(1).items()}
    asked = {name for name, probe in probes.items() if probe.get("grpc", {}).get("service") == "alive"}
    assert asked == {"controller", "trajectory-pool", "weight-sync"}


def test_nobody_but_the_trainer_is_bound_to_the_node_of_the_volume() -> None:
    for mode, expected in (("ReadWriteOnce", {"trainer"}), ("ReadWriteMany", {each.name for each in WITH_PODS})):
        made = renderer(storage={"accessMode": mode}).workloads(1).items()
        volumes = {name: item["spec"]["template"]["spec"]["volumes"] for name, item in made}
        assert {name for name, found in volumes.items() if any("persistentVolumeClaim" in v for v in found)} == expected


def test_a_log_is_kept_on_the_volume_where_a_pod_mounts_it_and_only_trainer_and_controller_reach_the_checkpoints() -> (
    None
):
    for mode, keeping in (("ReadWriteOnce", {"trainer"}), ("ReadWriteMany", {each.name for each in WITH_PODS})):
        made = renderer(storage={"accessMode": mode}).workloads(1)
        keeps = {"name": "NEXRL_KEEPS_LOG", "value": "true"}
        assert {name for name, item in made.items() if keeps in container(item)["env"]} == keeping
        keeps = {"name": "NEXRL_KEEPS_METRICS", "value": "true"}
        trainer_only = {"trainer"} if mode == "ReadWriteOnce" else set()  # else the controller writes the file
        assert {name for name, item in made.items() if keeps in container(item)["env"]} == trainer_only
    for name, item in made.items():
        pod = item["spec"]["template"]["spec"]
        claimed = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
        (mount,) = (each for each in container(item)["volumeMounts"] if each["name"] in claimed)
        is_whole = name in ("trainer", "controller")
        assert mount["mountPath"] == str(RUN_FOLDER if is_whole else RUN_FOLDER / "logs")
        assert mount.get("subPath") == (None if is_whole else "logs")


def test_only_the_trainer_gets_the_credentials_of_object_storage_and_may_reach_it() -> None:
    storage = {"uri": "s3://bucket/lab", "endpoint": "https://s3.lab:9000", "secretName": "s3"}
    made = renderer(storage=storage)
    found = {name: container(item).get("envFrom") for name, item in made.workloads(1).items()}
    assert found.pop("trainer") == [{"secretRef": {"name": "s3"}}]
    assert set(found.values()) == {None}
    (policy,) = (item for item in made.foundation() if item["metadata"]["name"] == "x-storage")
    assert policy["spec"]["egress"] == [{"ports": [{"port": 9000, "protocol": "TCP"}]}]
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    pods = {name: item["spec"]["template"]["metadata"]["labels"] for name, item in made.workloads(1).items()}
    assert {name for name, labels in pods.items() if selected <= labels.items()} == {"trainer"}
    for item in objects(made):
        kubernetes_validate.validate(item, "1.36", strict=True)


def test_a_shared_folder_as_object_storage_needs_no_network() -> None:
    names = {item["metadata"]["name"] for item in renderer(storage={"uri": "file:///shared/results"}).foundation()}
    assert "x-storage" not in names


@pytest.mark.guide("A4", "S2")
def test_a_template_adds_gpus_and_keeps_what_finds_the_pods() -> None:
    template = {
        "metadata": {"labels": {"team": "a", "nexrl.dev/experiment": "other"}},
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "containers": [{"name": "nexrl", "resources": {"limits": {"nvidia.com/gpu": 1}}}, {"name": "side"}],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        },
    }
    job = renderer(trainer={"steps": 4, "template": template}).workloads(1)["trainer"]
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["nexrl.dev/experiment"] == "x"
    assert container(job)["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert container(job)["args"] == ["trainer"]
    assert [each["name"] for each in pod["spec"]["containers"]] == ["nexrl", "side"]
    assert {"models", "run"} <= {volume["name"] for volume in pod["spec"]["volumes"]}
    assert job["metadata"]["annotations"][REVISION]


def test_memory_of_components_without_a_model_is_limited_unless_the_template_names_it() -> None:
    def resources(**given: Object) -> Object:
        template = {"spec": {"containers": [{"name": "nexrl", "resources": given}]}}
        made = renderer(rollout={"maxNewTokens": 8, "template": template}).workloads(1)["rollout"]
        found: Object = container(made)["resources"]
        return found

    assert resources()["limits"] == {"memory": "16Gi"}
    assert resources(limits={"nvidia.com/gpu": 1})["limits"] == {"memory": "16Gi", "nvidia.com/gpu": 1}
    assert resources(requests={"cpu": 4})["limits"] == {"memory": "16Gi"}
    assert resources(limits={"memory": "1Gi"})["limits"] == {"memory": "1Gi"}
    assert "limits" not in resources(requests={"memory": "32Gi"})  # below it, the API server would refuse the pod
    limited = {name for name, item in renderer().workloads(1).items() if "limits" in container(item)["resources"]}
    assert limited == {"controller", "trajectory-pool", "weight-sync", "rollout"}


def test_the_release_sets_resources_that_a_template_replaces() -> None:
    limits = {"memory": "64Gi", "ephemeral-storage": "100Gi"}
    settings = {"resources": {"trainer": {"limits": limits}, "rollout": {"requests": {"memory": "32Gi"}}}}
    made = renderer(settings=settings).workloads(1)
    requests = {"cpu": "200m", "memory": "1Gi", "ephemeral-storage": "512Mi"}
    assert container(made["trainer"])["resources"] == {"requests": requests, "limits": limits}
    assert "limits" not in container(made["rollout"])["resources"]  # the default limit is below the request
    template = {"spec": {"containers": [{"name": "nexrl", "resources": {"limits": {"memory": "99Gi"}}}]}}
    trainer = renderer(settings=settings, trainer={"steps": 4, "template": template}).workloads(1)["trainer"]
    assert container(trainer)["resources"]["limits"] == {**limits, "memory": "99Gi"}


def test_every_container_asks_for_disk_unless_a_queue_would_have_to_have_a_quota_for_it() -> None:
    for kueue in (False, True):
        for item in renderer(settings={"kueue": kueue}).workloads(1).values():
            for each in item["spec"]["template"]["spec"]["containers"]:
                assert {"cpu", "memory"} <= each["resources"]["requests"].keys()
                assert ("ephemeral-storage" in each["resources"]["requests"]) is not kueue


@pytest.mark.parametrize(
    "containers",
    [7, [7], [{}], [{"name": "nexrl", "resources": 7}], [{"name": "nexrl", "resources": {"requests": 7}}]],
)
def test_a_template_that_is_no_pod_is_rendered_for_the_api_server_to_refuse(containers: Any) -> None:
    made = renderer(rollout={"maxNewTokens": 8, "template": {"spec": {"containers": containers}}})
    assert made.workloads(1)["rollout"]["spec"]["template"]["spec"]["containers"]


def test_replicas_are_spread_over_nodes_as_the_template_says() -> None:
    made = {name: item["spec"]["template"]["spec"] for name, item in renderer().workloads(1).items()}
    spread = {
        name: spec["topologySpreadConstraints"] for name, spec in made.items() if "topologySpreadConstraints" in spec
    }
    assert spread.keys() == {"trajectory-pool", "inference", "rollout"}
    [constraint] = spread["rollout"]
    assert (constraint["topologyKey"], constraint["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "rollout"
    required = {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    template = {"spec": {"topologySpreadConstraints": [required], "priorityClassName": "training"}}
    changed = renderer(rollout={"maxNewTokens": 8, "template": template}).workloads(1)["rollout"]
    spec = changed["spec"]["template"]["spec"]
    assert spec["topologySpreadConstraints"] == [constraint | required]
    assert spec["priorityClassName"] == "training"


def test_replicas_that_do_the_same_work_are_evicted_one_at_a_time_unless_the_release_says_otherwise() -> None:
    made = renderer()
    budgets = [item for item in made.foundation() if item["kind"] == "PodDisruptionBudget"]
    assert {item["metadata"]["name"] for item in budgets} == {"x-trajectory-pool", "x-inference", "x-rollout"}
    workloads = made.workloads(1)
    for item in budgets:
        assert item["metadata"]["ownerReferences"] == [made.owner.reference()]
        spec, component = item["spec"], item["metadata"]["name"].removeprefix("x-")
        assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
        selected = spec["selector"]["matchLabels"]
        assert selected.items() <= workloads[component]["spec"]["template"]["metadata"]["labels"].items()
        assert not selected.items() <= dict(made.owner.selector(component)).items()  # the labels of users' own pods
    without = renderer(settings={"disruption_budgets": False}).foundation()
    assert not [item for item in without if item["kind"] == "PodDisruptionBudget"]


def test_volumes_on_the_disk_of_a_node_have_a_size_that_a_template_replaces() -> None:
    sizes = {"trainer": "64Gi", "inference": "64Gi", "rollout": "32Gi"}
    for name, item in renderer().workloads(1).items():
        volumes = [each for each in item["spec"]["template"]["spec"]["volumes"] if "emptyDir" in each]
        on_disk = {each["emptyDir"]["sizeLimit"] for each in volumes if "medium" not in each["emptyDir"]}
        of_the_data_reader = {"32Gi"} if name == "trajectory-pool" else set()
        assert on_disk == {sizes.get(name, "4Gi")} | of_the_data_reader
    template = {"spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "900Gi"}}]}}
    trainer = renderer(trainer={"steps": 4, "template": template}).workloads(1)["trainer"]
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "900Gi"}} in trainer["spec"]["template"]["spec"]["volumes"]


def test_volumes_in_memory_have_a_size_that_a_template_replaces() -> None:
    volume = {"name": "shared-memory", "emptyDir": {"sizeLimit": "64Gi"}}
    made = renderer(trainer={"steps": 4, "template": {"spec": {"volumes": [volume]}}}).workloads(1)
    for item in made.values():
        volumes = item["spec"]["template"]["spec"]["volumes"]
        in_memory = [each["emptyDir"] for each in volumes if each.get("emptyDir", {}).get("medium") == "Memory"]
        assert in_memory
        assert all("sizeLimit" in each for each in in_memory)
    [shared] = [
        each for each in made["trainer"]["spec"]["template"]["spec"]["volumes"] if each["name"] == "shared-memory"
    ]
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_lists_without_names_are_replaced() -> None:
    assert lay_over({"args": [1, 2], "kept": 1}, {"args": [3]}) == {"args": [3], "kept": 1}


def test_lists_whose_names_are_none_are_replaced() -> None:
    named, nonsense = [{"name": "nexrl"}], [{"name": ["a"]}]
    assert lay_over({"containers": named}, {"containers": nonsense}) == {"containers": nonsense}


@pytest.mark.parametrize("key", ["serviceAccountName", "serviceAccount", "automountServiceAccountToken"])
def test_a_template_takes_no_account(key: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"{key}: must not be set: all pods use the ServiceAccount of the release"
    ):
        renderer(trainer={"steps": 4, "template": {"spec": {key: "operator"}}})


def test_a_default_that_is_written_out_makes_no_other_configuration() -> None:
    spec = renderer().experiment.spec.model_dump(mode="json", by_alias=True)
    written = renderer(rollout=spec["rollout"], algorithm=spec["algorithm"], failurePolicy=spec["failurePolicy"])
    assert configuration_revision(written.experiment) == configuration_revision(renderer().experiment)
    more = renderer(trajectoryPool={"template": {"spec": {}}})
    assert configuration_revision(more.experiment) == configuration_revision(renderer().experiment)


@pytest.mark.guide("Q20")
def test_the_replicas_of_a_trainer_are_one_job_and_find_each_other_by_names_that_stay() -> None:
    made = renderer(trainer={"steps": 4, "replicas": 3, "processesPerReplica": 2})
    job, later = (made.workloads(attempt)["trainer"]["spec"] for attempt in (1, 2))
    assert job == later  # a later attempt does not look like a change by somebody else
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (3, 3, 0)
    pod = job["template"]["spec"]
    [service] = [each for each in made.foundation() if each["metadata"]["name"] == "x-trainer"]
    assert (pod["subdomain"], service["spec"]["clusterIP"]) == (service["metadata"]["name"], "None")
    variables = pod["containers"][0]["env"]
    fields = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in variables if "valueFrom" in each}
    assert fields["NEXRL_REPLICA"] == "metadata.labels['batch.kubernetes.io/job-completion-index']"
    assert fields["NEXRL_JOB"] == "metadata.labels['batch.kubernetes.io/job-name']"
    values = {each["name"]: each.get("value") for each in variables}
    others = [f"$(NEXRL_JOB)-{replica}.x-trainer.rl.svc:50051" for replica in (1, 2)]
    assert (values["NEXRL_INSTANCE"], values["NEXRL_TRAINER_REPLICAS"]) == (
        "trainer-$(NEXRL_REPLICA)",
        ",".join(others),
    )
    names = list(values)
    assert names.index("NEXRL_JOB") < names.index("NEXRL_TRAINER_REPLICAS")  # Kubernetes expands earlier ones only


def test_the_replicas_of_a_trainer_share_a_node_if_the_volume_is_on_one_only() -> None:
    trainer = {"steps": 4, "replicas": 2}
    for mode, is_bound in (("ReadWriteOnce", True), ("ReadWriteMany", False)):
        made = renderer(trainer=trainer, storage={"accessMode": mode}).workloads(1)["trainer"]
        assert ("affinity" in made["spec"]["template"]["spec"]) == is_bound
    assert "affinity" not in renderer().workloads(1)["trainer"]["spec"]["template"]["spec"]
