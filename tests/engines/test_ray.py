"""Ray Train with the real package: a cluster of two nodes on this machine."""

import os
import sys

import pytest
import torch

import fitkit

ray = pytest.importorskip("ray", reason="ray isn't installed here: make test-engines ARGS=ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchConfig, TorchTrainer  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def two_nodes():
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, runtime_env={"env_vars": variables}, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def compiled(batch_size=8):
    """The script's model, and its fit: nothing in them knows of Ray."""
    fitkit.set_seed(0)
    x, y = torch.randn(103, 6), torch.randint(3, (103,))
    model = fitkit.Model(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)))
    model.compile("adam", "cross_entropy", metrics=["accuracy"], accelerator="cpu")
    return model, lambda **options: model.fit(
        x, y, batch_size=batch_size, epochs=4, verbose=0, **options
    )


def run(train, tmp_path, failures=0, **config):
    trainer = TorchTrainer(
        train, train_loop_config={"folder": str(tmp_path), **config},
        scaling_config=ScalingConfig(
            num_workers=2, placement_strategy="STRICT_SPREAD", resources_per_worker={"CPU": 1}
        ),
        run_config=RunConfig(
            name="fitkit", storage_path=str(tmp_path / "ray"),
            failure_config=FailureConfig(max_failures=failures),
        ),
        torch_config=TorchConfig(backend="gloo"),
    )  # fmt: skip
    return trainer.fit()


def train(config):
    """What each worker runs."""
    model, fit = compiled()
    rank = model.global_rank
    report = fitkit.callbacks.RayTrainReport()
    marker = os.path.join(config["folder"], "failed")

    def end(epoch, logs):
        if config.get("fails") and epoch == 2 and rank == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(1)

    ends = fitkit.callbacks.LambdaCallback(on_epoch_begin=end)
    fit(callbacks=[ends, report], resume_from=report.last_checkpoint())
    assert torch.distributed.is_initialized()  # Ray's group is left as it was
    context = ray.train.get_context()
    assert (model.world_size, rank, model.local_rank) == (
        2, context.get_world_rank(), context.get_local_rank(),
    )  # fmt: skip
    weights = [p.tolist() for p in model.parameters()]
    node = ray.get_runtime_context().get_node_id()
    torch.save([weights, node], os.path.join(config["folder"], f"end{rank}.pt"))


def ends(tmp_path):
    found = [torch.load(tmp_path / f"end{rank}.pt") for rank in (0, 1)]
    (first, one), (second, other) = found
    assert first == second and one != other
    return first


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_in_a_torch_trainer_trains_as_one_process(tmp_path, fails):
    result = run(train, tmp_path, failures=int(fails), fails=fails)
    model, fit = compiled(batch_size=16)
    history = fit()
    found = ends(tmp_path)
    assert (tmp_path / "failed").exists() == fails
    for parameter, weights in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(parameter, torch.tensor(weights), atol=1e-5, rtol=1e-4)
    assert result.metrics["epoch"] == 4
    assert result.metrics["loss"] == pytest.approx(history.history["loss"][-1], rel=1e-4)
    with result.checkpoint.as_directory() as folder:
        model.load(os.path.join(folder, "model.h5"))
    for parameter, weights in zip(model.parameters(), found, strict=True):
        assert parameter.tolist() == weights
