"""torch_tpu where no TPU is: it is found, asked, and refused."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import fitkit
from fitkit.extras.xla_adapters import TorchTPU, adapter_of
from tests.limits import patience

pytestmark = pytest.mark.timeout(200)
if importlib.util.find_spec("torch_tpu") is None:
    pytest.skip("torch_tpu isn't installed here: make test-engines", allow_module_level=True)
if TorchTPU().count() or torch.cuda.device_count():
    pytest.skip("this machine has other devices than a CPU", allow_module_level=True)


def test_a_machine_without_a_tpu_says_what_it_lacks():
    assert isinstance(adapter_of(None), TorchTPU)
    model = fitkit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    assert model._fitkit.compilation.strategy.device.type == "cpu"
    for words in ({"accelerator": "tpu"}, {"strategy": "xla"}, {"strategy": "tpu", "devices": 8}):
        with pytest.raises(fitkit.ConfigurationError, match="XLA devices: 0"):
            model.compile("sgd", "mse", **words)


def test_it_trains_on_the_cpu_where_torch_doesnt_load_the_package():
    code = """
        import torch, fitkit
        model = fitkit.Model(torch.nn.Linear(2, 1))
        model.compile("sgd", "mse")
        model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0)
    """
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        timeout=patience(90),
        env={**os.environ, **path},
    )
