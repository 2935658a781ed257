"""Torch asks once a machine whether the CPU runs its vector code, not in each process."""

import pytest

from fitkit.extras.jit import probe

cpu_vec_isa = pytest.importorskip("torch._inductor.cpu_vec_isa")


@pytest.mark.skipif(not probe._machine(), reason="this system doesn't say what the CPU can do")
def test_an_answer_is_kept_for_the_machine_that_gave_it(tmp_path, monkeypatch):
    asked, loads = [], True

    def ask(self, path):
        asked.append(path)
        return loads

    monkeypatch.setattr(cpu_vec_isa.VecISA, probe.ASKS, ask)

    def answers(name):
        with probe.remembered():
            return cpu_vec_isa.VecAVX2()._probe_load(str(tmp_path / name))

    assert answers("a.so") and answers("a.so") and len(asked) == 1
    assert answers("b.so") and len(asked) == 2
    monkeypatch.setattr(probe, "_machine", lambda: "another")
    assert answers("a.so") and len(asked) == 3
    loads = False  # a "no" may be the load of the machine
    assert not answers("c.so") and not answers("c.so") and len(asked) == 5
    monkeypatch.setattr(probe, "_machine", lambda: "")
    loads = True
    assert answers("d.so") and answers("d.so") and len(asked) == 7
    assert cpu_vec_isa.VecISA._probe_load is ask
