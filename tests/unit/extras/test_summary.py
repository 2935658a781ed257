"""The table of a net's layers: its numbers against hand arithmetic, the net left as it was."""

import io
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fitkit
from fitkit.errors import ArgumentTypeError, ConfigurationError
from fitkit.extras.summary import human_count, shape_text, summarize
from fitkit.tensors import human_bytes
from tests.reference import assert_same_weights, copied_state


def small_net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),  # 8·(1·9 + 1) = 80
        nn.BatchNorm2d(8),  # 16, and 8 + 8 + 1 in buffers
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 10),  # 2890
    )


def cells(summary):
    return {row.name: row for row in summary.rows}


# ------------------------------------------------------------------ numbers


def test_the_totals_are_what_one_counts_by_hand():
    net = small_net()
    net[0].requires_grad_(False)
    summary = summarize(net, torch.zeros(4, 1, 8, 8))
    assert [row.parameters for row in summary.rows] == [0, 80, 16, 0, 0, 2890]
    assert (summary.parameters, summary.trainable, summary.non_trainable) == (2986, 2906, 80)
    assert summary.parameter_bytes == {"float32": 4 * 2986}
    assert (summary.buffers, summary.buffer_bytes) == (17, 16 * 4 + 8)
    assert (summary.input, summary.input_bytes) == ("(4, 1, 8, 8)", 4 * 64 * 4)
    assert summary.activation_bytes == 4 * 4 * (4 * 8 * 6 * 6 + 10)
    assert [row.output for row in summary.rows] == [
        "(4, 10)", "(4, 8, 6, 6)", "(4, 8, 6, 6)", "(4, 8, 6, 6)", "(4, 288)", "(4, 10)",
    ]  # fmt: skip
    assert [row.trainable for row in summary.rows] == ["partly", "no", "yes", "", "", "yes"]


def test_memory_is_told_by_type():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, dtype=torch.float16))
    assert summarize(net).parameter_bytes == {"float32": 36, "float16": 8}


def test_the_rows_add_up_to_the_total_whatever_the_depth():
    net = nn.Sequential(
        small_net(), nn.Sequential(nn.Linear(10, 3), nn.Sequential(nn.Linear(3, 2)))
    )
    for depth in (1, 2, 3, 9, None):
        summary = summarize(net, depth=depth)
        assert sum(row.parameters for row in summary.rows) == summary.parameters == 3027
    rows = summarize(net, depth=1).rows
    assert [row.parameters for row in rows] == [0, 2986, 41]
    assert "depth=2 shows more" in str(summarize(net, depth=1))
    assert "shows more" not in str(summarize(net))


def test_a_long_net_is_folded_unless_asked_otherwise():
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU()) for _ in range(50)]
    net = nn.Sequential(*blocks)
    assert len(summarize(net).rows) == 51
    assert len(summarize(net, depth=2).rows) == 201


def test_what_is_shared_counts_once():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.again = self.first
            self.tied = nn.Linear(4, 4)
            self.tied.weight = self.first.weight

        def forward(self, x):
            return self.tied(self.again(self.first(x)))

    summary = summarize(Net(), torch.zeros(1, 4))
    rows = cells(summary)
    assert summary.parameters == 24
    assert rows["again"].reused and not rows["first"].reused
    assert rows["first"].calls == 2
    assert (rows["tied"].parameters, rows["tied"].shared) == (4, True)
    text = str(summary)
    assert "first (Linear) x2" in text and "(reused)" in text and "4 + shared" in text


def test_a_module_s_own_parameters_are_in_its_row():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 5))
            self.head = nn.Linear(5, 2)

    assert [row.parameters for row in summarize(Net()).rows] == [5, 12]


def test_attention_s_output_counts_though_a_child_holds_its_parameters():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.zeros(2, 5, 8)
    summary = summarize(attention, x, run=lambda net, x: net(x, x, x))
    assert summary.parameters == 8 * 24 + 24 + 8 * 8 + 8
    assert summary.rows[0].output == "(2, 5, 8), (2, 5, 5)"
    assert summary.activation_bytes == 4 * (80 + 50)


def test_multiply_adds_are_what_one_counts_by_hand():
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, groups=2),  # 4·8·25 outputs of 1·9
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Sequential(nn.Linear(200, 10), nn.ReLU()),  # 4·10 outputs of 200
    )
    summary = summarize(net, torch.zeros(4, 2, 5, 5))
    assert [row.multiply_adds for row in summary.rows] == [0, 7200, 0, 0, 0, 8000, 0]
    assert summary.multiply_adds == 15200
    folded = summarize(net, torch.zeros(4, 2, 5, 5), depth=1)
    assert [row.multiply_adds for row in folded.rows] == [0, 7200, 0, 0, 8000]
    assert summarize(net).multiply_adds is None
    assert "Mult-adds" in str(summary) and "Mult-adds" not in str(summarize(net))


@pytest.mark.parametrize("weights", [True, False])
def test_attention_s_multiply_adds_are_those_of_its_matrices(weights):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=weights)[0]

    summary = summarize(Net(), torch.zeros(3, 5, 8))
    projections = 3 * 5 * 8 * (24 + 8)
    scores_and_values = 2 * 3 * 5 * 5 * 8  # Both heads together are 8 wide.
    assert summary.multiply_adds == projections + scores_and_values


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_multiply_adds_are_counted_in_both_directions(kind, gates):
    net = kind(8, 16, num_layers=2, bidirectional=True, batch_first=True)
    first, second = gates * 16 * (8 + 16), gates * 16 * (32 + 16)
    summary = summarize(net, torch.zeros(3, 5, 8))
    assert summary.multiply_adds == 2 * 3 * 5 * (first + second)


def test_a_module_that_runs_twice_multiplies_twice_in_one_row():
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.Tanh(), shared)
    rows = summarize(net, torch.zeros(2, 4)).rows
    assert [(row.multiply_adds, row.reused) for row in rows] == [
        (0, False), (2 * 32, False), (0, False), (0, True),
    ]  # fmt: skip


def test_a_net_that_torch_cannot_count_has_its_other_numbers():
    class Refuses(nn.Module):
        def forward(self, x):
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise NotImplementedError("no rule for this operation")
            return x

    summary = summarize(nn.Sequential(nn.Linear(4, 3), Refuses()), torch.zeros(2, 4))
    assert summary.multiply_adds is None
    assert [row.output for row in summary.rows] == ["(2, 3)"] * 3


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (9994, "9.99 k"), (9996, "10.0 k"),
     (123456, "123 k"), (999_600, "1.00 M"), (4.06e9, "4.06 G"), (5e15, "5000 T")],
)  # fmt: skip
def test_counts_have_few_digits(number, text):
    assert human_count(number) == text


def test_a_net_without_parameters_or_layers_is_fine():
    summary = summarize(nn.ReLU(), torch.zeros(2, 3))
    assert (summary.parameters, summary.activation_bytes) == (0, 24)
    assert "ReLU" in str(summary)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 * 97.5, "97.5 MiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_memory_has_units_that_people_read(size, text):
    assert human_bytes(size) == text


# ------------------------------------------------------------------ inputs and outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_input_shape_makes_a_batch_of_one_in_the_net_s_type(dtype):
    summary = summarize(nn.Linear(4, 2, dtype=dtype), input_shape=[4])
    assert summary.input == "(1, 4)"
    assert summary.input_bytes == 4 * dtype.itemsize


def test_several_inputs_have_several_shapes():
    seen = {}
    net = nn.Bilinear(3, 4, 2)

    def run(net, inputs):
        seen.update(inputs)
        return net(inputs["a"], inputs["b"])

    summary = summarize(net, input_shape={"a": (3,), "b": (4,)}, run=run)
    assert summary.input == "a (1, 3), b (1, 4)"
    assert summarize(net, input_shape=((3,), (4,)), run=lambda net, x: net(*x)).rows[0].output == (
        "(1, 2)"
    )


def test_numpy_arrays_and_integers_are_inputs_too():
    assert summarize(nn.Linear(3, 2), np.zeros((5, 3))).rows[0].output == "(5, 2)"
    assert summarize(nn.Embedding(9, 2), np.zeros((5, 3), dtype=np.int64)).rows[0].output == (
        "(5, 3, 2)"
    )


def test_the_input_goes_to_the_net_s_device():
    assert summarize(nn.Linear(3, 2, device="meta"), np.zeros((5, 3))).rows[0].output == "(5, 2)"


def test_nested_outputs_are_told_by_name():
    class Answer:
        def __init__(self):
            self.logits = torch.zeros(2, 5)

    state = (torch.zeros(2), torch.zeros(3))
    assert shape_text({"logits": torch.zeros(2, 5), "states": state}) == (
        "logits (2, 5), states (2,), states (3,)"
    )
    assert shape_text([torch.zeros(i) for i in range(5)]) == "(0,), (1,), (2,), +2 more"
    assert shape_text(Answer()) == "logits (2, 5)"
    assert shape_text("text") == "str"
    assert shape_text((torch.zeros(2), None)) == "(2,)"
    assert shape_text(None) == ""


def test_lazy_modules_are_not_yet_known_and_stay_so():
    net = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 2))
    summary = summarize(net)
    assert (summary.parameters, summary.unknown) == (12, 4)
    assert [row.parameters for row in summary.rows] == [0, None, None, 12]
    assert summarize(net, depth=1).rows[1].parameters is None
    assert summarize(nn.Sequential(net), depth=1).rows[1].parameters is None
    assert "not yet known" in str(summary)
    tried = summarize(net, torch.zeros(2, 3))
    assert (tried.parameters, tried.unknown) == (20 + 10 + 12, 0)
    assert summarize(net).unknown == 4


# ------------------------------------------------------------------ the net is left as it was


class Nosy(nn.Module):
    """Counts in a buffer, replaces another one, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        self.last = x.mean().reshape(1)
        return x + torch.rand_like(x)


def hooks(net):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]


def test_modes_buffers_random_numbers_gradients_and_hooks_stay():
    net = nn.Sequential(small_net(), nn.Dropout(), Nosy())
    net[0][1].eval()
    before = copied_state(net)
    identities = [id(buffer) for buffer in net.buffers()]
    modes = [module.training for module in net.modules()]
    state = torch.get_rng_state()
    summarize(net, torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in net.modules()] == modes
    assert [id(buffer) for buffer in net.buffers()] == identities
    assert_same_weights(net, before)
    assert hooks(net) == [0] * len(hooks(net))
    assert torch.is_grad_enabled()


def test_a_net_that_fails_is_left_alone_and_the_error_has_torch_s_as_cause():
    net = small_net()
    with pytest.raises(ConfigurationError, match=r"\(4, 1, 5, 5\): RuntimeError") as caught:
        summarize(net, torch.zeros(4, 1, 5, 5))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert net.training and hooks(net) == [0] * 6


def test_a_net_may_catch_a_layer_s_error():
    class Patient(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrong, self.right = nn.Linear(9, 1), nn.Linear(3, 1)

        def forward(self, x):
            try:
                return self.wrong(x)
            except RuntimeError:
                return self.right(x)

    summary = summarize(Patient(), torch.zeros(2, 3))
    assert summary.activation_bytes == 8
    assert cells(summary)["wrong"].output == ""


def test_a_compiled_net_is_not_compiled_for_it():
    net = small_net()
    net.compile(backend=pytest.fail)
    assert summarize(net, input_shape=(1, 8, 8)).rows[0].output == "(1, 10)"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"net": "resnet"}, ArgumentTypeError, "torch.nn.Module"),
        ({"depth": 0}, ConfigurationError, "depth=0"),
        ({"depth": 1.5}, ArgumentTypeError, "depth=1.5"),
        ({"example": (1, 28, 28)}, ConfigurationError, r"input_shape=\(1, 28, 28\)"),
        ({"input_shape": (None, 3)}, ConfigurationError, "without the batch"),
        ({"input_shape": 3}, ConfigurationError, "shape of one sample"),
        ({"example": torch.zeros(1, 3), "input_shape": (3,)}, ConfigurationError, "not both"),
    ],
)
def test_what_can_t_be_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        summarize(**{"net": nn.Linear(3, 1), **arguments})


# ------------------------------------------------------------------ the table


class LongNames(nn.Module):
    def __init__(self):
        super().__init__()
        inner = nn.ModuleDict({"a_name_that_goes_on_and_on_" * 4: nn.Linear(12345, 1000)})
        self.a_layer_with_an_extraordinarily_long_name = nn.Sequential()
        self.a_layer_with_an_extraordinarily_long_name.add_module("x", inner)

    def forward(self, x):
        return {f"an_output_with_a_long_name_{i}": x for i in range(9)}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_plain_table_is_ascii_and_fits(width):
    summary = summarize(LongNames(), torch.zeros(2, 3))
    text = summary.text(width)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width
    assert "12,346,000" in text and "~" in text
    assert str(summary) == summary.text(80)


def test_the_table_reads_like_this():
    assert str(summarize(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), input_shape=(8, 8))) == (
        "Layer           Output shape   Parameters   Trainable   Mult-adds\n"
        "-----------------------------------------------------------------\n"
        "Sequential      (1, 10)                     yes\n"
        "  0 (Flatten)   (1, 64)                 0\n"
        "  1 (Linear)    (1, 10)               650   yes               640\n"
        "\n"
        "Parameters     650  2.5 KiB (float32)\n"
        "Trainable      650\n"
        "Non-trainable    0\n"
        "Buffers          0\n"
        "Input               256 B, (1, 8, 8)\n"
        "Activations         about 296 B, forward and kept for backward\n"
        "Mult-adds      640  forward, with this input"
    )


def test_names_with_brackets_are_no_markup():
    net = nn.ModuleDict({"[bold]x[/bold]": nn.Linear(1, 1)})
    assert "[bold]x[/bold]" in str(summarize(net))


def test_it_prints_to_a_file_a_function_and_a_terminal(capsys):
    summary = summarize(small_net(), input_shape=(1, 8, 8))
    summary.print()
    assert capsys.readouterr().out == str(summary) + "\n"
    told = []
    summary.print(print_fn=told.append)
    assert told == [str(summary)]

    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    for encoding in ("utf-8", "ascii"):
        terminal = Terminal(io.BytesIO(), encoding=encoding)
        summary.print(terminal)
        terminal.flush()
        assert b"2,986" in terminal.buffer.getvalue()


def test_a_stdout_of_another_encoding_gets_what_it_has(monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", file)
    net = nn.ModuleDict({"präzise": nn.Linear(1, 1)})
    summarize(net).print()
    file.flush()
    assert b"pr?zise" in file.buffer.getvalue()


def test_a_model_shows_its_rates_by_layer_and_its_teacher():
    model = fitkit.Model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    teacher = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3))  # 45 + 30 numbers
    shown = []
    model.compile("adamw", fitkit.losses.Distillation(teacher), layer_decay=0.5)
    model.summary(print_fn=shown.append)
    lines = {line.split()[0]: line.split() for line in shown[0].splitlines() if line.strip()}
    assert (lines["0"][-1], lines["2"][-1]) == ("0.5", "1")
    assert lines["Teacher"][:4] == ["Teacher", "75", "300", "B,"]
    model.compile(loss="cross_entropy", layer_decay=None)
    model.summary(print_fn=shown.append)
    assert "Rate" not in shown[1] and "Teacher" not in shown[1]


def test_a_net_may_write_into_the_example():
    x = -torch.ones(2, 3)
    model = fitkit.Model(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 1)))
    model.summary(x)
    assert (x == -1).all()


def test_an_index_that_an_embedding_lacks_is_named():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Flatten())
    with pytest.raises(ConfigurationError, match=r"Embedding\(5, 4\).*got 9.*FK012"):
        fitkit.Model(net).summary(np.array([[1, 9]]))
