"""Print a JobSet that trains on TPU slices of a GKE cluster, for `kubectl apply`.

    python scripts/launch/gke/jobset.py my-run --image IMAGE --accelerator tpu-v5p-slice \\
        --topology 4x4x4 --slices 2 --claim shared-disk -- \\
        configs/models/llama3-8b.yml output_dir=/shared/runs | kubectl apply -f -
    kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=my-run --max-log-requests 64
    kubectl delete jobset my-run

Without `| kubectl apply -f -` nothing is changed; applying the same JobSet twice changes nothing
either. Each pod has a supervisor (maxpipe supervise), which starts the training in all pods again
when a process is lost. All pods are started again after the loss of a node, and when the
supervisors have ended with exit codes 75, 124 and 134; never after 1, 2, 42 and 130. The cluster
needs the JobSet controller (https://jobset.sigs.k8s.io) and TPU node pools; `--claim` names a
persistent volume claim that all pods can write to, mounted at /shared. Tokens come from secrets of
the cluster, never from here. `--env LIBTPU_INIT_ARGS="..."` sets the compiler's flags that `python
-m maxpipe.compile` prints for a chip.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

FINAL_CODES = [1, 2, 42, 130]
SHARED = "/shared"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the manifest of a command line."""
    print(yaml.safe_dump(manifest(_parse(argv)), sort_keys=False), end="")
    return 0


def manifest(options: argparse.Namespace) -> dict[str, Any]:
    """Build the JobSet: one Job per slice, one pod per host."""
    hosts = math.prod(options.topology) // options.chips_per_host
    job = {
        "parallelism": hosts,
        "completions": hosts,
        # One lost pod ends its Job, so that the JobSet restarts all pods together.
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "train",
                        "operator": "In",
                        "values": FINAL_CODES,
                    },
                }
            ]
        },
        "template": {"spec": _pod(options)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": options.name,
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
            },
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": options.max_restarts,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [
                {"name": "slice", "replicas": options.slices, "template": {"spec": job}}
            ],
        },
    }


def _pod(options: argparse.Namespace) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "train",
        "image": options.image,
        "command": ["python", "-m", "maxpipe.supervise", "--", "python", "-m", "maxpipe.train"],
        "args": options.training,
        "env": [*_job_variables(), *({"name": n, "value": v} for n, v in options.env)],
        "ports": [{"containerPort": 8471}, {"containerPort": 8080}],
        "resources": {"limits": {"google.com/tpu": options.chips_per_host}},
        "volumeMounts": [{"name": "memory", "mountPath": "/dev/shm"}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_seconds,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": options.accelerator,
            "cloud.google.com/gke-tpu-topology": "x".join(map(str, options.topology)),
        },
        "containers": [container],
        # For replicas; a container has 64 MB of its own.
        "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
    }
    if options.claim:
        container["volumeMounts"].append({"name": "shared", "mountPath": SHARED})
        claim = {"claimName": options.claim}
        pod["volumes"].append({"name": "shared", "persistentVolumeClaim": claim})
    return pod


def _job_variables() -> list[dict[str, Any]]:
    """Return variables that name this JobSet, for the run's lease."""

    def variable(name: str, field: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}

    label = "metadata.labels['jobset.sigs.k8s.io/{}']"
    return [
        variable("JOBSET_NAMESPACE", "metadata.namespace"),
        variable("JOBSET_NAME", label.format("jobset-name")),
        {"name": "MAXPIPE_JOB", "value": "$(JOBSET_NAMESPACE)/$(JOBSET_NAME)"},
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="jobset.py",
        description="Prints a JobSet that trains on GKE.",
        usage="%(prog)s NAME [options] -- CONFIG.yml ...",
    )
    parser.add_argument("name", type=_name, help="of the JobSet")
    parser.add_argument("--image", required=True, help="built from the Dockerfile with EXTRA=tpu")
    parser.add_argument(
        "--accelerator", required=True, help="such as tpu-v5p-slice or tpu-v6e-slice"
    )
    parser.add_argument(
        "--topology", required=True, type=_topology, help="of a slice, such as 4x4x4"
    )
    parser.add_argument("--chips-per-host", type=_at_least(1), default=4)
    parser.add_argument("--slices", type=_at_least(1), default=1)
    parser.add_argument("--claim", default="", help=f"persistent volume claim, mounted at {SHARED}")
    parser.add_argument(
        "--grace-seconds", type=_at_least(0), default=300, help="from SIGTERM to SIGKILL"
    )
    parser.add_argument("--max-restarts", type=_at_least(0), default=20)
    parser.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="repeatable",
    )
    options = parser.parse_args(words[:end])
    options.training = words[end + 1 :]
    if not options.training:
        parser.error("what to train is missing: -- CONFIG.yml [key=value ...]")
    if math.prod(options.topology) % options.chips_per_host:
        parser.error(
            f"--chips-per-host {options.chips_per_host} does not divide the chips of --topology"
        )
    return options


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            "lower-case letters, digits and '-', at most 40, beginning with a letter"
        )
    return text


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number of at least {least}")
        return int(text)

    return number


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise argparse.ArgumentTypeError("a name and a value, such as HF_HOME=/shared/hf")
    return name, value


def _topology(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", text):
        raise argparse.ArgumentTypeError("sizes joined by x, such as 4x4x4")
    return [int(size) for size in text.split("x")]


if __name__ == "__main__":
    sys.exit(main())
