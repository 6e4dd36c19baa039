"""scripts/kubernetes/train.yaml: fields, types and values of MPIJob v2beta1; its numbers and the Dockerfile fit."""

import re
from typing import Any

import pytest

from tests import launch

POLICIES = {"enum": ["Never", "OnFailure"]}  # that the operator accepts for the replicas
# Which fields and values an MPIJob may have, by the published CustomResourceDefinition of kubeflow/mpi-operator
# (manifests/base/kubeflow.org_mpijobs.yaml at caa3c47); of a pod only what the job uses.


def fields(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0}
LABELS = {"type": "object", "additionalProperties": TEXT}
CONTAINER = fields(
    "name", "image", name=TEXT, image=TEXT, command=array(TEXT), args=array(TEXT),
    securityContext=fields(runAsUser=WHOLE), env=array(fields("name", name=TEXT, value=TEXT)),
    resources=fields(limits=LABELS, requests=LABELS),
    volumeMounts=array(fields("name", "mountPath", name=TEXT, mountPath=TEXT)),
)  # fmt: skip
VOLUME = fields(
    "name", name=TEXT, emptyDir=fields(medium=TEXT, sizeLimit=TEXT),
    persistentVolumeClaim=fields("claimName", claimName=TEXT),
)  # fmt: skip
POD = fields(
    "containers", containers=array(CONTAINER), volumes=array(VOLUME), terminationGracePeriodSeconds=WHOLE,
    securityContext=fields(fsGroup=WHOLE),
)  # fmt: skip
REPLICA = fields(
    replicas=WHOLE, restartPolicy=POLICIES,
    template=fields("spec", metadata=fields(annotations=LABELS, labels=LABELS), spec=POD),
)  # fmt: skip
MPIJOB = fields(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion={"const": "kubeflow.org/v2beta1"}, kind={"const": "MPIJob"}, metadata=fields("name", name=TEXT),
    spec=fields(
        "mpiReplicaSpecs",
        slotsPerWorker=WHOLE, sshAuthMountPath=TEXT, mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]}, runLauncherAsWorker={"type": "boolean"},
        runPolicy=fields(
            cleanPodPolicy={"enum": ["None", "Running", "All"]}, backoffLimit=WHOLE, activeDeadlineSeconds=WHOLE,
            ttlSecondsAfterFinished=WHOLE, suspend={"type": "boolean"},
        ),
        mpiReplicaSpecs=fields("Launcher", Launcher=REPLICA, Worker=REPLICA),
    ),
)  # fmt: skip


def test_the_job_is_an_mpijob() -> None:
    yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
    claim, job = yaml.safe_load_all((launch.ROOT / "scripts" / "kubernetes" / "train.yaml").read_text())
    jsonschema.validate(job, MPIJOB)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "spec": {**job["spec"], "slots": 3}}, MPIJOB)
    replicas = job["spec"]["mpiReplicaSpecs"]
    pod, (launcher,) = replicas["Worker"]["template"]["spec"], replicas["Launcher"]["template"]["spec"]["containers"]
    arguments = launcher["args"]
    assert int(arguments[arguments.index("-n") + 1]) == replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    (worker,) = pod["containers"]
    assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (data,) = [volume for volume in pod["volumes"] if volume["name"] == "data"]
    assert (claim["kind"], claim["metadata"]["name"]) == (
        "PersistentVolumeClaim",
        data["persistentVolumeClaim"]["claimName"],
    )
    assert replicas["Launcher"]["restartPolicy"] == "OnFailure"
    options = pytest.importorskip("trainers.cli.options").parse(arguments[arguments.index("trainers") + 1 :], False)
    assert (options.standby, options.resume, options.checkpoint) == (1, True, "/data" + "/run")
    folder = re.escape(job["spec"]["sshAuthMountPath"])
    assert re.search(rf"HostKey {folder}/id_rsa", (launch.ROOT / "Dockerfile").read_text())


def test_the_image_has_what_the_package_needs_and_is_not_roots() -> None:
    lines = (launch.ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith((" ", "#"))]
    (base,) = [rest for name, rest in instructions if name == "FROM"]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", base)  # of the default registry, which no file names
    assert [rest for name, rest in instructions if name == "USER"] == ["mpiuser"]
    copied = {source for name, rest in instructions if name == "COPY" for source in rest.split()[1:-1]}
    assert {"pyproject.toml", "setup.py", "allreduce", "trainers", "benchmarks"} <= copied
    assert all((launch.ROOT / source).exists() for source in copied)
    project = (launch.ROOT / "pyproject.toml").read_text()
    modules = re.findall(r'"(\w+)"', project.partition("py-modules = ")[2].partition("]")[0])
    assert {f"{module}.py" for module in modules} <= copied
    extras = next(rest for name, rest in instructions if name == "ARG").partition("=")[2].split(",")
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras)
