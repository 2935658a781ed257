"""What pages give to clusters: options of torchrun and sbatch, fields of Kubernetes' operators."""

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

yaml = pytest.importorskip("yaml")

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "many-machines.md"
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_TORCHRUN = sorted(
    page.relative_to(DOCS).as_posix()
    for page in DOCS.rglob("*.md")
    if "torchrun -" in page.read_text()
)
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Of sbatch's manual.
SBATCH = {
    "cpus-per-task", "gpus-per-node", "nodes", "ntasks-per-node", "open-mode", "requeue", "signal",
    "time",
}  # fmt: skip
# Of kubeflow/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go.
TRAINER = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
# Of kubeflow/training-operator, pkg/apis/kubeflow.org/v1.
REPLICAS = {"replicas", "template", "restartPolicy"}


def lines(page):
    """The commands and comments of a page's shell blocks, each on one line."""
    return "".join(SHELL.findall(page.read_text())).replace("\\\n", "").splitlines()


@pytest.mark.parametrize("name", WITH_TORCHRUN)
def test_torchrun_takes_the_options_of_a_page(name):
    for line in lines(DOCS / name):
        _, found, arguments = line.partition("torchrun ")
        if found and not line.startswith("#"):
            # A launcher's variables stand for numbers and addresses.
            given = shlex.split(re.sub(r"\$\(.*?\)|\$\w+", "1", arguments))
            parsed = get_args_parser().parse_args(given)
            assert parsed.training_script.endswith(".py")


@pytest.mark.parametrize("name", ["many-machines.md", "tasks/slurm.md"])
def test_a_batch_script_asks_for_a_signal_to_all_ranks(name):
    script = [line for line in lines(DOCS / name) if line.startswith("#SBATCH ")]
    options = dict(word.partition("=")[::2] for line in script for word in line.split()[1:])
    assert {option.removeprefix("--") for option in options} <= SBATCH
    # With B: before it the shell alone would get it, and not the ranks.
    assert re.fullmatch(r"SIGUSR1@\d+", options["--signal"])
    (start,) = [line for line in lines(DOCS / name) if line.startswith("srun ")]
    assert re.fullmatch(r"srun (--[\w=-]+ )*python train\.py", start)


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
