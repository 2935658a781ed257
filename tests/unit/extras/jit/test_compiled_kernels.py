"""The kernels of a graph are compiled in one C++ file: the same bits as in a file for each."""

import copy

import pytest
import torch
from torch import nn

import fitkit
from fitkit.extras.jit import kernels
from fitkit.extras.jit.programs import traces_gradients
from tests.compiling import HAS_COMPILER

pytestmark = [
    HAS_COMPILER,
    pytest.mark.skipif(not traces_gradients(), reason="this torch compiles no gradients"),
]

torch.manual_seed(0)
X, Y = torch.randn(48, 8), torch.randint(3, (48,))
NET = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def trained():
    model = fitkit.Model(copy.deepcopy(NET))
    model.compile("sgd", "cross_entropy", accelerator="cpu", devices=1, jit_compile=True)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert model._fitkit.compiler.of_updates.stopped is None
    return list(model.net.state_dict().values())


@pytest.fixture
def files(monkeypatch):
    """How many kernels each file had."""
    found, write = [], kernels.one_file

    def noted(of_file):
        found.append(len(of_file))
        return write(of_file)

    monkeypatch.setattr(kernels, "one_file", noted)
    return found


def test_all_kernels_in_one_file_give_the_bits_of_a_file_for_each(files, monkeypatch):
    together = trained()
    assert len(files) == 1 and files[0] > 1
    monkeypatch.setattr(kernels, "_fits", lambda text: False)
    alone = trained()
    assert len(files) == 1
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["METHOD", "METHODS", "WRAPPER"])
def test_where_torch_writes_its_files_otherwise_it_compiles_them_in_its_own_way(
    files, monkeypatch, name
):
    monkeypatch.setattr(kernels, name, "what no torch writes")
    trained()  # torch has compiled these kernels in the test above
    assert len(files) == 1


def test_only_kernels_that_can_stand_beside_others_are_joined():
    kernel = '#include <a.h>\nextern "C"  void  kernel(float* out)\n{\n    #pragma omp\n}\n'
    assert kernels._fits(kernel)
    assert not kernels._fits(kernel + kernel)
    assert not kernels._fits("#define LANES 8\n" + kernel)
