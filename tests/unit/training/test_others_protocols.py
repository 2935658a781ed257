"""Objects of other libraries: used by their own protocol, or refused in a sentence."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import fitkit
from fitkit.errors import ConfigurationError
from fitkit.extras.data_on_ranks.sharding import has_own_part
from tests import nets

X, Y = nets.regression(12, 3)

# ---------------------------------------------------------------------- metrics


class Cumulative:
    """Collects values and gives their mean in the end, as MONAI's metrics do."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.values = []

    def __call__(self, prediction, target):
        values = (prediction - target).abs().flatten()
        self.values.append(values)
        return values

    def aggregate(self):
        return torch.cat(self.values).mean()


class Kept:
    """A user's function with settings; not a protocol."""

    def __init__(self):
        self.scale = 1.0

    def reset(self):
        self.scale = 1.0

    def __call__(self, prediction, target):
        return (prediction - target).abs().mean(1)


class Collecting(Cumulative):
    def aggregate(self):
        return Cumulative.aggregate(self)


@pytest.mark.parametrize("metric", [Cumulative(), Collecting()])
@pytest.mark.parametrize("argument", ["metrics", "weighted_metrics"])
def test_a_metric_that_collects_batches_itself_is_refused_by_compile(metric, argument):
    with pytest.raises(ConfigurationError, match="collects batches itself"):
        fitkit.Model(nets.linear(3, 1)).compile("sgd", "mse", **{argument: [metric]})
    assert metric.values == []


def test_a_callable_object_is_a_function():
    model = fitkit.Model(nets.linear(3, 1))
    model.compile("sgd", "mse", metrics=[Kept()])
    expected = (model.net(X) - Y).abs().mean().item()
    found = model.evaluate(X, Y, batch_size=5, return_dict=True, verbose=0)["kept"]
    assert found == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------- schedulers


class ByNumber:
    """Computes the rates from the number that it is given, as timm's schedulers do."""

    def __init__(self, optimizer, t_in_epochs=True):
        self.optimizer, self.t_in_epochs, self.given = optimizer, t_in_epochs, []

    def state_dict(self):
        return {"given": list(self.given)}

    def load_state_dict(self, state):
        self.given = list(state["given"])

    def step(self, epoch, metric=None):
        if self.t_in_epochs:
            self._set(epoch)

    def step_update(self, num_updates, metric=None):
        if not self.t_in_epochs:
            self._set(num_updates)

    def _set(self, number):
        self.given.append(number)
        for group in self.optimizer.param_groups:
            group["lr"] = 1 / (10 + number)


class Needy(ByNumber):
    def step(self, val_loss, state):
        raise AssertionError("never called")


def by_updates(optimizer):
    return ByNumber(optimizer, t_in_epochs=False)


@pytest.mark.parametrize(
    ("make", "numbers"), [(ByNumber, [1, 2]), (by_updates, [1, 2, 3, 4, 5, 6])]
)
@pytest.mark.parametrize("way", ["class or factory", "instance", "configure_optimizers"])
def test_a_scheduler_gets_the_number_that_its_step_takes(make, numbers, way, tmp_path):
    class Own(fitkit.Model):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [make(optimizer)]

    def made():
        net = nets.linear(3, 1)
        model = (Own if way == "configure_optimizers" else fitkit.Model)(net)
        if way == "configure_optimizers":
            model.compile(loss="mse")
        else:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            scheduler = make(optimizer) if way == "instance" else make
            model.compile(optimizer, "mse", lr_scheduler=scheduler)
        return model

    model = made()
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    (plan,) = model._fitkit.fit_state.schedulers
    assert plan.scheduler.given == numbers
    assert model.optimizer.param_groups[0]["lr"] == 1 / (10 + numbers[-1])
    model.save(tmp_path / "model.h5")
    other = made()
    other.fit(
        X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0, resume_from=tmp_path / "model.h5"
    )
    (plan,) = other._fitkit.fit_state.schedulers
    assert plan.scheduler.given == list(range(1, len(numbers) * 3 // 2 + 1))


@pytest.mark.parametrize("given", [Needy, lambda optimizer: Needy(optimizer)])
def test_a_scheduler_that_needs_something_else_is_refused_before_it_trains(given):
    net = nets.linear(3, 1)
    before = net.weight.clone()
    model = fitkit.Model(net)

    def train():
        model.compile("sgd", "mse", lr_scheduler=given)
        model.fit(X, Y, verbose=0)

    with pytest.raises(ConfigurationError, match=r"Needy has step\(val_loss, state\)"):
        train()
    assert torch.equal(net.weight, before)


# ---------------------------------------------------------------------- optimizers


class Curved(torch.optim.Optimizer):
    """Divides by the diagonal of the Hessian, of which it takes one product."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        signs = [torch.ones_like(p) for p in parameters]
        curvature = torch.autograd.grad(gradients, parameters, grad_outputs=signs)
        with torch.no_grad():
            for p, curve in zip(parameters, curvature, strict=True):
                p.sub_(self.defaults["lr"] * p.grad / (curve.abs() + 1))


class SaysSo(Curved):
    @property
    def is_second_order(self):
        return True


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("parts", [1, 3])
def test_an_optimizer_that_differentiates_gradients_gets_their_graph(parts):
    net = nets.linear(3, 1)
    optimizer = SaysSo(net.parameters())
    for x, y in zip(X.split(6), Y.split(6), strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward(create_graph=True)
        optimizer.step()
    model = fitkit.Model(nets.linear(3, 1))
    model.compile(SaysSo, "mse", accumulate_grad_batches=parts)
    model.fit(X, Y, batch_size=6 // parts, shuffle=False, verbose=0)
    torch.testing.assert_close(model.net.weight, net.weight)


def test_one_that_doesnt_say_so_is_told_what_to_write():
    model = fitkit.Model(nets.linear(3, 1))
    model.compile(Curved, "mse")
    with pytest.raises(ConfigurationError, match=r"Curved differentiates.*is_second_order = True"):
        model.fit(X, Y, verbose=0)


def test_other_errors_of_an_optimizer_stay_as_they_are():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of cheese")

    model = fitkit.Model(nets.linear(3, 1))
    model.compile(Broken, "mse")
    with pytest.raises(RuntimeError, match="^out of cheese$"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"devices": 2, "accelerator": "cpu"}])
def test_where_no_graph_leads_it_is_refused(options):
    model = fitkit.Model(nets.linear(3, 1))
    model.compile(SaysSo, "mse", **options)
    with pytest.raises(ConfigurationError, match="doesn't work with"):
        model.fit(X, Y, verbose=0)


# ---------------------------------------------------------------------- samplers


class ForARank(Sampler):
    """Divides the data itself, without being torch's own class (as timm's samplers)."""

    def __init__(self, rank, count, names=("rank", "num_replicas")):
        setattr(self, names[0], rank)
        setattr(self, names[1], count)
        self.indices = range(rank, 12, count)

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class Ranks:
    rank, world_size = 1, 2


@pytest.mark.parametrize("names", [("rank", "num_replicas"), ("process_index", "num_processes")])
def test_a_sampler_that_divides_the_data_is_taken_for_what_it_is(names):
    data = TensorDataset(X, Y)
    assert has_own_part(DataLoader(data, sampler=ForARank(1, 2, names)), Ranks)
    assert not has_own_part(DataLoader(data), Ranks)
    with pytest.raises(ConfigurationError, match="ForARank gives rank 1 of 2 the data of rank 0"):
        has_own_part(DataLoader(data, sampler=ForARank(0, 2, names)), Ranks)
