"""In IPython a wrong call shows the user's lines and the sentence; all frames on request."""

import os
import re
import subprocess
import sys

import pytest

PROGRAM = '''
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell("""
import numpy as np, torch, fitkit

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x.long())

class Failing(torch.nn.Linear):
    def forward(self, x):
        raise KeyError("own")

def compiled(net):
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy", accelerator="cpu")
    return model

x = np.zeros((8, 4), "float32")
""")
for cell in (
    "compiled(torch.nn.Linear(4, 3)).fit(x, np.arange(8), verbose=0)",
    "compiled(Net()).fit(x, np.zeros(8, int), verbose=0)",
    "compiled(Failing(4, 3)).fit(x, np.zeros(8, int), verbose=0)",
    "%env FITKIT_TRACEBACK=full\\ncompiled(torch.nn.Linear(4, 3)).fit(x, np.arange(8), verbose=0)",
):
    print("=====")
    shell.run_cell(cell)
'''


def test_the_frames_of_fitkit_are_one_line_in_ipython():
    pytest.importorskip("IPython")
    environment = dict(os.environ)
    environment.pop("FITKIT_TRACEBACK", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True,
        timeout=100,
    )  # fmt: skip
    printed = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    labels, types, others, full = printed.split("=====\n")[1:]
    for text in (labels, types):
        assert text.count("FITKIT_TRACEBACK=full") == 1 and "fitkit/training" not in text
        assert "python -m fitkit explain FK0" in text.splitlines()[-1]
    assert len(labels.splitlines()) < 10 and "RuntimeError" not in labels
    assert "self.layer(x.long())" in types  # the user's own line, of what led to it
    assert "fitkit/training" in others and "FITKIT_TRACEBACK" not in others  # not an error of ours
    assert "fitkit/training" in full and "hidden" not in full
