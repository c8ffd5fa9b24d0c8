"""The schema of an Experiment's status, which the operator writes. What each field means: docs/reference/status.md."""

from typing import Any

_TIME = {"type": "string", "format": "date-time"}
_TEXT = {"type": "string", "maxLength": 1024}
_COUNT = {"type": "integer", "format": "int64"}

_CONDITION = {
    "type": "object",
    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
    "properties": {
        "type": {"type": "string", "maxLength": 64, "description": "Name of the condition."},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether it holds."},
        "reason": {"type": "string", "maxLength": 128, "description": "Why, in one word."},
        "message": {"type": "string", "maxLength": 32_768, "description": "Why, in a sentence, and what to do."},
        "lastTransitionTime": {**_TIME, "description": "When `status` changed last."},
        "observedGeneration": {**_COUNT, "description": "The metadata.generation that it is about."},
    },
}

_TOLERATION = {
    "type": "object",
    "properties": {
        "key": {**_TEXT, "description": "Key of the taint; absent: every key."},
        "operator": {**_TEXT, "description": "Exists, or Equal."},
        "value": {**_TEXT, "description": "Value of the taint."},
        "effect": {**_TEXT, "description": "Effect of the taint; absent: every effect."},
        "tolerationSeconds": {**_COUNT, "description": "How long NoExecute is tolerated; absent: always."},
    },
}

_PROGRESS = {
    "type": "object",
    "description": "How far the experiment is; updated at most every 10 seconds.",
    "properties": {
        "step": {**_COUNT, "description": "Optimizer steps made."},
        "totalSteps": {**_COUNT, "description": "Optimizer steps asked for."},
        "policyVersion": {**_COUNT, "description": "Committed policy version; -1 before the first."},
        "reward": {**_TEXT, "description": "Mean reward of the newest step."},
        "staleness": {**_TEXT, "description": "Mean staleness (steps) of the newest step's trajectories."},
        "metrics": {
            "type": "object",
            "description": "Newest value of each metric, by name.",
            "maxProperties": 64,
            "additionalProperties": _TEXT,
        },
        "lastUpdateTime": {**_TIME, "description": "When this was read from the controller."},
    },
}

_AUDIT = {
    "type": "object",
    "description": "The ledger, recounted from its records at the end of training, or on request.",
    "properties": {
        "request": {**_TEXT, "description": "Which request this answers: the annotation nexrl.dev/audit, or final."},
        "problem": {**_TEXT, "description": "Why it could not be counted."},
        "granted": {**_COUNT, "description": "Samples handed out."},
        "trained": {**_COUNT, "description": "Samples trained, each once."},
        "dropped": {**_COUNT, "description": "Samples dropped, for reasons that are counted."},
        "inFlight": {**_COUNT, "description": "Samples in flight."},
        "findings": {**_COUNT, "description": "Records that break the balance; 0 if every sample is accounted for."},
    },
}

STATUS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "What the operator has observed. Programs read the conditions; the phase is a summary for people.",
    "properties": {
        "observedGeneration": {**_COUNT, "description": "The metadata.generation that this status is about."},
        "phase": {
            "type": "string",
            "maxLength": 32,
            "description": "Pending, Queued, Starting, Running, Suspending, Suspended, Restarting, Stopping, Succeeded "
            "or Failed; follows from the conditions.",
        },
        "conditions": {
            "type": "array",
            "maxItems": 16,
            "description": "Accepted, ServicesReady, InferenceReady, TrainerReady, RolloutReady, Ready, Suspended, "
            "Stalled, SamplesFailing, Admitted, RolloutScaleLimited, SpecChangePending, Complete, Failed.",
            "items": _CONDITION,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
        "startTime": {**_TIME, "description": "When it started, or last resumed."},
        "trainingTime": {**_TIME, "description": "When it was first Running since then."},
        "completionTime": {**_TIME, "description": "When it became Complete or Failed."},
        "restarts": {**_COUNT, "description": "Restarts of components so far."},
        "trainerAttempt": {**_COUNT, "description": "Number of the newest trainer Job."},
        "disruptedAttempt": {
            **_COUNT,
            "description": "Number of the last attempt whose pod was evicted or deleted; 0: none.",
        },
        "setbacks": {
            "type": "object",
            "description": "What has ended since a step, without a failure of the trainer. Absent while suspended.",
            "properties": {
                "step": {**_COUNT, "description": "The newest step at the last of these ends."},
                "controllerEnds": {**_COUNT, "description": "Ends of the controller that count for maxRestarts."},
                "disruptions": {**_COUNT, "description": "Trainer Jobs whose pods were evicted or deleted."},
                "controllerPod": {**_TEXT, "description": "UID of the controller's pod."},
                "controllerRestarts": {**_COUNT, "description": "Restarts in that pod, all of them."},
            },
        },
        "rollout": {
            "type": "object",
            "description": "The rollout pods, as `kubectl scale` and autoscalers read them.",
            "properties": {
                "replicas": {**_COUNT, "description": "Pods that exist."},
                "readyReplicas": {**_COUNT, "description": "Pods that are ready."},
                "selector": {**_TEXT, "description": "Label selector of the pods."},
            },
        },
        "trainer": {
            "type": "object",
            "description": "The replicas of the trainer.",
            "properties": {
                "replicas": {**_COUNT, "description": "Pods that train together."},
                "readyReplicas": {**_COUNT, "description": "Pods that are ready."},
            },
        },
        "results": {
            "type": "object",
            "description": "How `nexrl get results` and `nexrl logs` read the volume.",
            "properties": {
                "claim": {**_TEXT, "description": "PersistentVolumeClaim of the volume."},
                "image": {**_TEXT, "description": "Image of the pod that reads it."},
                "serviceAccountName": {**_TEXT, "description": "ServiceAccount of that pod; absent: default."},
                "nodeSelector": {
                    "type": "object",
                    "description": "Labels of the trainer's nodes, which that pod prefers.",
                    "maxProperties": 64,
                    "additionalProperties": _TEXT,
                },
                "tolerations": {
                    "type": "array",
                    "description": "Tolerations of the trainer, so that the pod may run on its nodes.",
                    "maxItems": 64,
                    "items": _TOLERATION,
                },
            },
        },
        "components": {
            "type": "array",
            "maxItems": 16,
            "description": "Each kind of pod.",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "maxLength": 64, "description": "Component, as trajectory-pool."},
                    "ready": {**_COUNT, "description": "Pods that are ready."},
                    "desired": {**_COUNT, "description": "Pods that should exist."},
                    "revision": {
                        "type": "string",
                        "maxLength": 64,
                        "description": "Digest of the part of the spec that its pods were made from.",
                    },
                },
            },
        },
        "progress": _PROGRESS,
        "audit": _AUDIT,
    },
}
