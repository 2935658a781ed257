"""`python -m fitkit doctor`: what a bug report needs, in one screen."""

import pytest
import torch

from fitkit.distributed import devices
from fitkit.extras import doctor
from fitkit.extras.free_devices import GPU

LAUNCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost",
          "MASTER_PORT": "29500"}  # fmt: skip


@pytest.fixture
def report(monkeypatch):
    for name in (*LAUNCH, "TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)

    def with_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return doctor.report("1.2.3")

    return with_variables


def lines_of(text):
    """The report's lines by their names, joined where they were wrapped."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition("  ")
        if name:
            current, found[name] = name, value.strip()
        else:
            found[current] += " " + line.strip()
    return found


def test_it_fits_on_one_screen_and_names_what_a_report_needs(report):
    text = report()
    assert len(text.splitlines()) <= 33  # three of them where the machine is loaded
    assert max(map(len, text.splitlines())) <= 100
    lines = lines_of(text)
    assert lines["fitkit"] == "1.2.3" and lines["torch"] == torch.__version__
    assert "GiB" in lines["memory"] and "gloo" in lines["backends"]
    assert lines["launcher"] == "none"


ASKED = [
    "torch>=2.10",
    "numpy>=1.26",
    "h5py>=3.11",
    'keras>=3.15; python_version < "3.0" and extra == "keras"',
    'ray[train]>=2.40; extra == "ray"',
    'onnx>=1.17; extra == "onnx"',
    'pytest>=8; extra == "test"',
]
INSTALLED = {"numpy": "1.9.5", "h5py": "3.12.0", "keras": "2.0", "ray": "2.9.0", "pytest": "7.0"}


def test_what_is_too_old_has_a_line_each_that_says_what_to_run(report, monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda name: ASKED)
    monkeypatch.setattr(doctor, "metadata", lambda name: {"Requires-Python": ">=3.99"})
    monkeypatch.setattr(doctor, "_version", lambda name: INSTALLED.get(name, ""))
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    lines = lines_of(report())
    old = {name: value for name, value in lines.items() if name.startswith(("update", "too old"))}
    assert old.keys() == {"update Python", "update torch", "update numpy", "update ray"}
    assert old["update torch"].startswith("2.9.1+cu128 is installed")
    assert old["update ray"].endswith("pip install 'ray>=2.40'")


def test_a_release_candidate_and_a_local_build_are_no_older(report, monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda name: ASKED[:1])
    monkeypatch.setattr(doctor, "metadata", lambda name: {"Requires-Python": ">=3.10"})
    monkeypatch.setattr(torch, "__version__", "2.11.0.dev20260101+cpu")
    assert lines_of(report())["too old"] == "nothing"


def test_the_launchers_ranks_and_what_auto_makes_of_them(report):
    lines = lines_of(report(**LAUNCH))
    assert lines["launcher"] == "torchrun, rank 1 of 4, node 0 of 1"
    assert "WORLD_SIZE=4" in lines["environment"]
    if not torch.cuda.is_available():
        assert lines["devices='auto'"] == "cpu, cpu, cpu, cpu"
        assert lines["strategy='auto'"] == "'ddp', 4 ranks in all"


def test_an_environment_that_compile_would_refuse_is_told_not_raised(report):
    lines = lines_of(report(RANK="1", WORLD_SIZE="4"))
    assert "not LOCAL_RANK and MASTER_ADDR" in lines["launcher"]
    assert lines["devices='auto'"].startswith("refused: RANK='1'")


def test_secrets_of_the_environment_stay_out(report):
    assert "hunter2" not in report(WANDB_API_KEY="hunter2", MY_RANK="hunter2")


def test_the_ranks_secret_is_named_and_not_shown(report):
    text = report(FITKIT_SECRET="hunter2")
    assert "FITKIT_SECRET=(set)" in lines_of(text)["environment"] and "hunter2" not in text


def test_gpus_have_a_line_each_and_a_broken_one_its_reason(report, monkeypatch):
    gpus = [GPU(0, None, 30 * 2**30, 0, 80 * 2**30, 0.5), GPU(1, "no answer within 90 s")]
    monkeypatch.setattr(doctor, "probe_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    lines = lines_of(report())
    assert lines["cuda:0"] == "H100, 30.0 of 80.0 GiB free, 50% busy"
    assert lines["cuda:1"] == "can't be used: no answer within 90 s"
    assert lines["devices='auto'"] == "cuda:0, cuda:1"
    assert lines["strategy='auto'"] == "'ddp_spawn', 2 ranks in all"


@pytest.mark.parametrize(
    ("load", "policy", "text"),
    [
        (1.0, None, None),
        (8.2, None, "8 programs or threads want this machine's 2 cores, and torch's threads hold"),
        (8.2, "passive", "8 programs or threads want this machine's 2 cores."),
    ],
)
def test_a_busy_machine_has_a_line_that_says_what_helps(report, monkeypatch, load, policy, text):
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    lines = lines_of(report(**({} if policy is None else {"OMP_WAIT_POLICY": policy})))
    assert lines.get("load", "").startswith(text or "") and ("load" in lines) is (text is not None)
    assert ("OMP_NUM_THREADS=1" in lines.get("load", "")) is (text is not None and policy is None)
