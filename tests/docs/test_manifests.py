"""The Kubernetes manifests in docs/many-machines.md have fields that the operators know."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

PAGE = Path(__file__).parents[2] / "docs" / "many-machines.md"
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Of kubeflow/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go.
TRAINER = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
# Of kubeflow/training-operator, pkg/apis/kubeflow.org/v1.
REPLICAS = {"replicas", "template", "restartPolicy"}


def manifests():
    found = [yaml.safe_load(block) for block in BLOCK.findall(PAGE.read_text())]
    return {manifest["kind"]: manifest for manifest in found}


def test_the_trainjob_starts_torchrun_on_each_node():
    job = manifests()["TrainJob"]
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert job["spec"].keys() == {"runtimeRef", "trainer"}
    trainer = job["spec"]["trainer"]
    assert trainer.keys() <= TRAINER
    assert trainer["command"][0] == "torchrun"
    gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert gpus == trainer["numProcPerNode"]


def test_the_pytorchjob_has_a_master_and_workers_of_one_process():
    job = manifests()["PyTorchJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert [replicas[name]["replicas"] for name in ("Master", "Worker")] == [1, 3]
    for each in replicas.values():
        assert each.keys() == REPLICAS
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for that name
        assert container["command"][0] == "python"
