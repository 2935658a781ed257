"""Conventions of one library: used for its objects, and never in the way of others'."""

import collections
import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fitkit
from fitkit.errors import ConfigurationError
from tests import nets

X, Y = nets.classification(12, 3)
Logits = collections.namedtuple("Logits", ["logits", "aux_logits"])


@dataclasses.dataclass
class Record:
    logits: torch.Tensor
    scale: torch.Tensor


class Attributes:
    def __init__(self, logits, scale):
        self.logits, self.scale = logits, scale


class Entries(collections.OrderedDict):
    """A dict with its entries as attributes, as diffusers' outputs are."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Giving(nn.Module):
    """Gives its logits, and twice those, in some container."""

    def __init__(self, make):
        super().__init__()
        self.lin, self.make = nets.linear(3, 3), make

    def forward(self, x):
        logits = self.lin(x)
        return self.make(logits, 2 * logits)


MAKES = {
    "named tuple": Logits,
    "record": Record,
    "object": Attributes,
    "attributes": lambda a, b: Entries(logits=a, aux=b),
    "tuple of one": lambda a, b: (a,),
    "list of one": lambda a, b: [a],
    "dict of one": lambda a, b: {"sample": a},
    "attribute of one": lambda a, b: Entries(sample=a),
    "with its loss": lambda a, b: {"loss": a.sum(), "logits": a},
    "tensor": lambda a, b: a,
}


def first(output):
    """The logits, wherever they are."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, (Logits, Record, Attributes)):
        return output.logits
    if isinstance(output, dict):
        return output.get("logits", output.get("sample"))
    return output[0]


class AsModule(nn.Module):
    def forward(self, output, target):
        return F.cross_entropy(first(output), target)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("as_module", [False, True])
def test_a_function_gets_what_the_net_returned(name, as_module):
    net, seen = Giving(MAKES[name]), []
    kind = type(net(X))

    def function(output, target):
        seen.append(type(output))
        return F.cross_entropy(first(output), target)

    model = fitkit.Model(net)
    model.compile("sgd", AsModule() if as_module else function)
    expected = F.cross_entropy(net.lin(X), Y).item()
    assert model.evaluate(X, Y, batch_size=5, verbose=0) == pytest.approx(expected, rel=1e-5)
    model.fit(X, Y, verbose=0)
    assert as_module or set(seen) == {kind}


@pytest.mark.parametrize("name", MAKES)
def test_by_name_the_part_is_right_or_each_output_counts(name):
    net = Giving(MAKES[name])
    expected = F.cross_entropy(net.lin(X), Y)
    if name in ("named tuple", "attributes"):
        expected = expected + F.cross_entropy(2 * net.lin(X), Y)
    model = fitkit.Model(net)
    model.compile("sgd", "cross_entropy")
    targets = [Y, Y] if name in ("named tuple", "attributes") else Y
    found = model.evaluate(X, targets, verbose=0, return_dict=True)["loss"]
    assert found == pytest.approx(expected.item(), rel=1e-5)


def test_a_function_that_takes_the_object_for_a_tensor_is_told_what_it_gets():
    model = fitkit.Model(Giving(MAKES["dict of one"]))
    model.compile("sgd", lambda p, t: F.cross_entropy(p, t))
    with pytest.raises(ConfigurationError, match=r"gets what the net returned, a dict"):
        model.fit(X, Y, verbose=0)


def tokens():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(17, (8, 10), generator=generator)
    labels = ids.clone()
    for row in range(8):
        labels[row, :row] = -100
    return {"input_ids": ids, "labels": labels}


def gpt():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=32, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def pairs_of(batch):
    return [{key: value[i : i + 2] for key, value in batch.items()} for i in range(0, 8, 2)]


def test_a_net_that_passes_the_number_of_items_on_is_asked_for_its_sum():
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    net, batch = peft.get_peft_model(gpt(), settings), tokens()
    model = fitkit.Model(net)
    model.compile("sgd")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Labels of -100")
        found = model.evaluate(pairs_of(batch), verbose=0)
    assert found == pytest.approx(net(**batch).loss.item(), rel=1e-5)


def test_a_function_gets_hugging_faces_output_and_a_name_its_logits():
    net, batch = gpt(), tokens()
    labels = batch.pop("labels") % 17
    wanted = F.cross_entropy(net(**batch).logits.movedim(-1, 1), labels).item()
    model = fitkit.Model(net)
    model.compile("sgd", lambda out, y: F.cross_entropy(out.logits.movedim(-1, 1), y))
    assert model.evaluate([(batch, labels)], verbose=0) == pytest.approx(wanted, rel=1e-5)


class Aligning(nn.Module):
    """Its labels are texts without places, as in speech: shorter than what it hears."""

    def __init__(self, reduction):
        super().__init__()
        self.lin, self.reduction = nets.linear(3, 5), reduction

    def forward(self, sound, labels=None):
        logits = self.lin(sound)
        lengths = (labels != -100).sum(1)
        loss = F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), labels.clamp(min=0),
            torch.full((len(sound),), sound.shape[1]), lengths, reduction=self.reduction,
        )  # fmt: skip
        return {"loss": loss, "logits": logits}


def spoken():
    labels = torch.arange(1, 5).repeat(8, 1)
    for row in range(8):
        labels[row, 1 + row % 4 :] = -100
    return {"sound": nets.normal(8, 12, 3), "labels": labels}


def test_a_loss_that_is_a_mean_over_samples_is_found_without_a_warning():
    net, batch = Aligning("mean"), spoken()
    model = fitkit.Model(net)
    model.compile("sgd", accumulate_grad_batches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.evaluate(pairs_of(batch), verbose=0)
        model.fit(pairs_of(batch), verbose=0)
    assert found == pytest.approx(Aligning("mean")(**batch)["loss"].item(), rel=1e-5)


def test_a_net_whose_own_loss_sums_is_refused_where_batches_are_parts():
    model = fitkit.Model(Aligning("sum"))
    model.compile("sgd", accumulate_grad_batches=2)
    with pytest.raises(ConfigurationError, match="net's own loss sums over the samples"):
        model.fit(pairs_of(spoken()), verbose=0)
