"""Several devices in a notebook."""

import os
import sys
import time

import pytest

from tests.limits import patience

nbclient = pytest.importorskip("nbclient", reason="nbclient isn't installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat isn't installed")
pytest.importorskip("ipykernel", reason="ipykernel isn't installed")

pytestmark = pytest.mark.timeout(120)

CELLS = [
    """
import torch, fitkit
x, y = torch.randn(64, 6), torch.randint(3, (64,))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act = torch.nn.Linear(6, 3), lambda x: x.tanh()
    def forward(self, x):
        return self.layer(self.act(x))
""",
    """
model = fitkit.Model(Net())
model.compile("sgd", "cross_entropy", accelerator="cpu", devices=2, strategy="ddp")
before = model.net.layer.weight.detach().clone()
model.fit(x, y, verbose=0)
""",
    """
class Net(Net):  # defined anew
    def forward(self, x):
        return 0 * super().forward(x)
trained, model.net = model.net, Net()
same = torch.equal(before, trained.layer.weight)
print(model.world_size, model.predict(x, verbose=0).sum(), same)
""",
    """
import os, subprocess
children = ["ps", "-o", "pid=", "--ppid", str(os.getpid())]
print(os.getpid(), subprocess.run(children, capture_output=True, text=True).stdout)
""",
]


def test_ddp_trains_in_a_notebook_with_worker_processes_that_go_with_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=int(patience(90)), kernel_name="python3").execute()
    cells = [[output.get("text", "") for output in cell.outputs] for cell in notebook.cells]
    pids = [int(pid) for pid in "".join(cells.pop()).split()]
    said = [text for texts in cells for text in texts]
    assert sum("this is a notebook. It uses worker processes" in text for text in said) == 1
    assert said[-1] == "2 0.0 False\n"
    assert len(pids) >= 2  # the kernel and a worker (ps itself has gone)
    deadline = time.monotonic() + patience(10)
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
