"""scripts/kubernetes by the published schemas: Kubernetes' own, the MPI Operator's and Trainer's; and the Dockerfile.

The schemas of pods and volumes come with the package kubernetes-validate. No package has those of jobs, so their tests
take files: ALLREDUCE_TEST_MPIJOB_CRD names manifests/base/kubeflow.org_mpijobs.yaml of kubeflow/mpi-operator, and
ALLREDUCE_TEST_TRAINER_CRDS the folder manifests/base/crds of kubeflow/trainer.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests import launch

VARIABLE = "ALLREDUCE_TEST_MPIJOB_CRD"
FOLDER_VARIABLE = "ALLREDUCE_TEST_TRAINER_CRDS"
KUBERNETES = "1.34"  # the version whose schemas the pods must follow


def fields(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


WHOLE = {"type": "integer", "minimum": 0}
REPLICA = fields("replicas", "template", replicas=WHOLE, restartPolicy={"enum": ["Never", "OnFailure"]}, template={})
# What the operator accepts of an MPIJob's own fields, for runs without its schema. It gives the missing ones a default.
MPIJOB = fields(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion={"const": "kubeflow.org/v2beta1"}, kind={"const": "MPIJob"}, metadata=fields("name", name={}),
    spec=fields(
        "mpiReplicaSpecs",
        slotsPerWorker=WHOLE, sshAuthMountPath={"type": "string"},
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]}, runLauncherAsWorker={"type": "boolean"},
        runPolicy=fields(
            cleanPodPolicy={"enum": ["None", "Running", "All"]}, backoffLimit=WHOLE, activeDeadlineSeconds=WHOLE,
            ttlSecondsAfterFinished=WHOLE, suspend={"type": "boolean"},
        ),
        mpiReplicaSpecs=fields("Launcher", Launcher=REPLICA, Worker=REPLICA),
    ),
)  # fmt: skip


def documents(name: str = "train.yaml") -> Any:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((launch.ROOT / "scripts" / "kubernetes" / name).read_text()))


def closed(schema: Any) -> Any:
    """Return a CustomResourceDefinition's schema that refuses other fields, as `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result


def test_pods_and_volumes_follow_the_published_schemas() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    claim, job = documents()
    kubernetes.validate(claim, KUBERNETES, strict=True)
    for name, replica in job["spec"]["mpiReplicaSpecs"].items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}, **replica["template"]}
        kubernetes.validate(pod, KUBERNETES, strict=True)
        pod["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(kubernetes.ValidationError, match="volumeMount"):
            kubernetes.validate(pod, KUBERNETES, strict=True)


def published(file: str = os.environ.get(VARIABLE, ""), api: str = "kubeflow.org/v2beta1", kind: str = "MPIJob") -> Any:
    """Return the schema of objects of a kind, closed, from the file of its CustomResourceDefinition."""
    definition = pytest.importorskip("yaml").safe_load(Path(file).read_text())
    group, _, number = api.partition("/")
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == number]
    assert version["served"]
    assert (definition["spec"]["group"], definition["spec"]["names"]["kind"]) == (group, kind)
    return closed(version["schema"]["openAPIV3Schema"])


def test_the_runtime_and_the_train_job_follow_the_published_schemas() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if FOLDER_VARIABLE not in os.environ:
        pytest.skip(f"{FOLDER_VARIABLE} is not set; docs/contribute/tests.md says what it names")
    for job in documents("trainjob.yaml")[1:]:
        api, kind = job["apiVersion"], job["kind"]
        file = Path(os.environ[FOLDER_VARIABLE]) / f"{api.partition('/')[0]}_{kind.lower()}s.yaml"
        schema = published(str(file), api, kind)
        jsonschema.validate(job, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**job, "spec": {**job["spec"], "slots": 3}}, schema)


def test_the_train_job_starts_what_the_mpi_job_starts() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    claim, runtime, job = documents("trainjob.yaml")
    former_claim, former = documents()
    assert claim == former_claim
    policy, spec = runtime["spec"]["mlPolicy"], former["spec"]
    workers, launcher = spec["mpiReplicaSpecs"]["Worker"], spec["mpiReplicaSpecs"]["Launcher"]
    assert (policy["numNodes"], policy["mpi"]["numProcPerNode"]) == (workers["replicas"], spec["slotsPerWorker"])
    assert policy["mpi"]["sshAuthMountPath"] == spec["sshAuthMountPath"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (started,) = launcher["template"]["spec"]["containers"]
    assert job["spec"]["trainer"] == {key: started[key] for key in ("command", "args", "env")}
    for part in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        template = part["template"]["spec"]["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": part["name"]}, **template}
        kubernetes.validate(pod, KUBERNETES, strict=True)
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    (worker,) = workers["template"]["spec"]["containers"]
    same = ("image", "command", "args", "resources", "volumeMounts", "securityContext")
    assert {key: node[key] for key in same} == {key: worker[key] for key in same}


@pytest.mark.parametrize("source", ["our table", "the published schema"])
def test_the_job_is_an_mpijob(source: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if source == "the published schema" and VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set; docs/contribute/tests.md says what it names")
    schema = MPIJOB if source == "our table" else published()
    job = documents()[1]
    jsonschema.validate(job, schema)
    for wrong in ({"slots": 3}, {"mpiImplementation": "OpenMPI 5"}, {"slotsPerWorker": "3"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**job, "spec": {**job["spec"], **wrong}}, schema)


def test_the_published_schema_has_all_fields_of_our_table() -> None:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set; docs/contribute/tests.md says what it names")
    ours, theirs = MPIJOB["properties"]["spec"]["properties"], published()["properties"]["spec"]["properties"]
    assert set(ours) <= set(theirs)
    assert set(ours["runPolicy"]["properties"]) <= set(theirs["runPolicy"]["properties"])
    assert set(REPLICA["properties"]) <= set(theirs["mpiReplicaSpecs"]["additionalProperties"]["properties"])


def test_the_numbers_of_the_job_fit() -> None:
    claim, job = documents()
    replicas = job["spec"]["mpiReplicaSpecs"]
    pod, (launcher,) = replicas["Worker"]["template"]["spec"], replicas["Launcher"]["template"]["spec"]["containers"]
    arguments = launcher["args"]
    assert int(arguments[arguments.index("-n") + 1]) == replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
    (worker,) = pod["containers"]
    assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (data,) = [volume for volume in pod["volumes"] if volume["name"] == "data"]
    assert claim["metadata"]["name"] == data["persistentVolumeClaim"]["claimName"]
    assert replicas["Launcher"]["restartPolicy"] == "OnFailure"  # of the operator's policies for a launcher
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
