"""`jit_compile`: the net is compiled for real, whatever it is made of, and keeps its names."""

import copy
import os
import pathlib

import pytest
import torch
from torch import nn

import fitkit
from fitkit.extras.jit.programs import Programs
from fitkit.extras.launchers.workers import end_workers
from tests.compiling import HAS_COMPILER

torch.manual_seed(0)
X, Y = torch.randn(32, 4), torch.randint(0, 3, (32,))


class OwnLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).relu() + 1


NETS = {
    "of torch's layers alone": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    "a single layer": lambda: nn.Linear(4, 3),
    "of one's own": OwnLayer,
}


class Counting:
    """A backend that notes the operations of each graph, and computes them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward


def trained(net, **arguments):
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", accelerator="cpu", **arguments)
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return history["loss"], model.predict(X, verbose=0).tolist()


@pytest.mark.parametrize("kind", NETS)
def test_a_net_is_compiled_whole_and_computes_the_same(kind):
    torch.manual_seed(1)
    net, backend = NETS[kind](), Counting()
    names = list(net.state_dict())
    torch.manual_seed(1)
    plain = trained(NETS[kind]())
    assert trained(net, jit_compile={"backend": backend}) == plain
    assert backend.graphs and len(set(backend.graphs)) == 1  # one graph, in each of the modes
    assert list(net.state_dict()) == names


def test_compile_takes_torchs_modes_its_own_cuda_graphs_among_them():
    backend, told = Counting(), []

    def noting(graph, inputs, mode=None):
        told.append(mode)
        return backend(graph, inputs)

    torch.manual_seed(1)
    plain = trained(nn.Linear(4, 3))
    torch.manual_seed(1)
    options = {"mode": "reduce-overhead", "backend": noting}
    assert trained(nn.Linear(4, 3), jit_compile=options) == plain
    assert set(told) == {"reduce-overhead"}
    fitkit.Model(nn.Linear(4, 3)).compile(jit_compile={"mode": "reduce-overhead"})
    with pytest.raises(fitkit.ConfigurationError, match="no argument 'cuda_graphs'"):
        fitkit.Model(nn.Linear(4, 3)).compile(cuda_graphs=True)


@pytest.mark.parametrize("metrics", [None, ["accuracy"], ["f1", "auroc"]])
def test_no_steps_graph_of_gradients_outlives_it(metrics):
    """It would hold memory that the next step could use: a CUDA graph's, where one is replayed."""

    class Look(fitkit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            bias = self.model.net.bias
            (node, _), *_ = bias.view_as(bias).grad_fn.next_functions  # where its gradient goes
            marks.append(node.metadata.get("batch"))
            node.metadata["batch"] = batch

    marks = []
    model = fitkit.Model(nn.Linear(4, 3))
    model.compile("adam", "cross_entropy", metrics=metrics, accelerator="cpu")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Look()])
    assert marks == [None] * 4


@pytest.mark.slow
@HAS_COMPILER
def test_torchs_own_compiler_gives_the_same_up_to_rounding():
    torch.manual_seed(1)
    plain = trained(NETS["of one's own"]())
    torch.manual_seed(1)
    compiled = trained(NETS["of one's own"](), jit_compile=True)
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_each_rank_compiles_its_own_copy(tmp_path):
    folder = str(tmp_path)

    def backend(graph, inputs):
        pathlib.Path(folder, str(os.getpid())).touch()
        return graph.forward

    try:
        trained(NETS["a single layer"](), jit_compile={"backend": backend}, devices=2,
                strategy="ddp_spawn")  # fmt: skip
    finally:
        end_workers()
    assert len(list(tmp_path.iterdir())) == 2


def test_many_nets_in_one_process_are_each_compiled():
    backends = []
    for _ in range(10):  # torch compiles one piece of code anew eight times at most
        backends.append(Counting())
        model = fitkit.Model(nn.Linear(4, 3))
        model.compile(accelerator="cpu", jit_compile={"backend": backends[-1]})
        model.predict(X, verbose=0)
    assert all(backend.graphs for backend in backends)


def test_another_nets_sizes_leave_a_nets_sizes_fixed():
    """Sizes that torch takes for variable would be inputs of the graph, and slow it down."""

    def backend(graph, inputs):
        sizes.extend(one for one in inputs if not isinstance(one, torch.Tensor))
        return graph.forward

    sizes, net = [], nn.Linear(4, 3)
    torch._dynamo.register_backend(backend, name="notes_sizes")
    for x in X.split([8, 24]):
        model = fitkit.Model(copy.deepcopy(net))
        model.compile(accelerator="cpu", jit_compile={"backend": backend})
        model.predict(x, verbose=0)
        programs = Programs({"backend": "notes_sizes"}, "the step")
        programs.run(lambda batches: net(batches[0]), [x], tuple(x.shape), "cpu")
    assert not sizes
