"""`python -m fitkit verify script.py`."""

import os
import subprocess
import sys

import fitkit
from fitkit.__main__ import main

SCRIPT = """
import sys
import torch
import fitkit
from helper import loss

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x)

def main():
    torch.manual_seed(0)
    model = fitkit.Model(Net())
    model.compile("adam", loss, devices=2, strategy="ddp")
    x = torch.randn(64, 4)
    print("rows", len(x), sys.argv[1:])
    try:
        model.fit(x, x[:, :3].argmax(1), batch_size=16, epochs=100)
    except Exception:
        print("caught")
    finally:
        print("cleaned up")
    print("trained")

if __name__ == "__main__":
    main()
"""
MEAN = "from torch.nn.functional import cross_entropy as loss\n"
SUM = "def loss(p, t):\n    import torch\n    return torch.nn.functional.cross_entropy(p, t, reduction='sum')\n"  # noqa: E501


def scripted(folder, helper):
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(helper)
    return str(folder / "train.py")


def test_a_script_is_run_up_to_its_fit_which_is_verified_instead(tmp_path):
    path = scripted(tmp_path, MEAN)
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(fitkit.__file__))}
    ended = subprocess.run(
        [sys.executable, "-m", "fitkit", "verify", "--updates", "2", path, "--fast"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "rows 64 ['--fast']"
    assert lines[1].startswith("2 updates of 16 samples")
    assert "on 2 processes                 to 1" in ended.stdout
    assert lines[-1] == "cleaned up"
    assert "caught" not in lines and "trained" not in lines


def test_what_differs_is_status_1_and_everything_is_put_back(tmp_path, capsys):
    path, fit = scripted(tmp_path, SUM), fitkit.Model.fit
    before = sys.argv, list(sys.path)
    sys.modules.pop("helper", None)
    assert main(["verify", "--devices", "1", path]) == 1
    assert "sums over the samples of a batch" in capsys.readouterr().out
    assert fitkit.Model.fit is fit
    assert (sys.argv, sys.path) == before


def test_a_script_that_cannot_be_verified_is_status_2(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "none.py")]) == 2
    assert "There is no file" in capsys.readouterr().err
    (tmp_path / "idle.py").write_text("x = 1\n")
    assert main(["verify", str(tmp_path / "idle.py")]) == 2
    assert "without a call of fit" in capsys.readouterr().err
    (tmp_path / "ended.py").write_text("import sys\nsys.exit(0)\n")  # 0 would mean: all is equal
    assert main(["verify", str(tmp_path / "ended.py")]) == 2
    assert "without a call of fit" in capsys.readouterr().err
    (tmp_path / "failed.py").write_text("raise KeyError('its own')\n")
    assert main(["verify", str(tmp_path / "failed.py")]) == 2
    assert "KeyError: 'its own'" in capsys.readouterr().err
