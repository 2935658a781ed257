"""Bagua's algorithms over threads that stand for ranks, against NumPy."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fitkit
from fitkit.errors import ConfigurationError
from fitkit.extras.bagua import ALGORITHMS, QAdamOptimizer
from fitkit.extras.bagua.algorithms import (
    Asynchronous,
    Decentralized,
    LowPrecisionDecentralized,
    PostLocalSGD,
    shifted_peer,
)
from fitkit.extras.bagua.compression import (
    BLOCK,
    ByteGrad,
    Feedback,
    compressed_mean,
    decode,
    encode,
    merge_feedback,
)
from fitkit.extras.bagua.qadam import QAdam
from fitkit.extras.bagua.strategy import average_states
from fitkit.strategies import BaguaStrategy, DDPStrategy
from fitkit.tensors import FlatTensors

pytestmark = pytest.mark.timeout(60)

LENGTH = 37
RATE = 0.1


class Table:
    """Where threads lay down what they send."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.entries = [None] * size
        self.rounds = {}
        self.bytes = [0] * size

    def show(self, rank, entry):
        self.entries[rank] = entry
        self.barrier.wait()
        shown = list(self.entries)
        self.barrier.wait()
        return shown


class ThreadPeers:
    """Ranks that are threads of one process; counts the bytes that ranks send."""

    def __init__(self, rank, table):
        self.rank, self.size, self.table = rank, table.size, table
        self.begun = 0

    def _sends(self, tensor, copies):
        self.table.bytes[self.rank] += tensor.numel() * tensor.element_size() * copies

    def mean(self, vector):
        # As a ring does it: each rank sends 2 (n - 1) parts of 1/n.
        self._sends(vector, 2 * (self.size - 1) / self.size)
        shown = self.table.show(self.rank, vector.clone())
        vector.copy_(torch.stack(shown).mean(0))

    def swap(self, tensor, others):
        self._sends(tensor, len(others))
        shown = self.table.show(self.rank, (tensor.clone(), others))
        assert all(self.rank in shown[other][1] for other in others)
        return [shown[other][0] for other in others]

    def deal(self, rows):
        self._sends(rows[0], self.size - 1)
        shown = self.table.show(self.rank, rows.clone())
        return torch.stack([other[self.rank] for other in shown])

    def join(self, row):
        self._sends(row, self.size - 1)
        return torch.stack(self.table.show(self.rank, row.clone()))

    def gather(self, value):
        return self.table.show(self.rank, value)

    def begin_sum(self, vector):
        self.begun += 1
        found = self.table.rounds.setdefault(self.begun, {})
        found[self.rank] = vector
        if len(found) == self.size:
            total = torch.stack(list(found.values())).sum(0)
            for other in found.values():
                other.copy_(total)
            found["done"] = True
        done = lambda: "done" in self.table.rounds[self.begun]  # noqa: E731

        def wait():
            while not done():
                threading.Event().wait(0.001)

        return SimpleNamespace(is_completed=done, wait=wait)

    def apart(self):
        return ThreadPeers(self.rank, self.table)

    def leave(self):
        pass


def on_ranks(size, function):
    """What each rank's `function(peers)` gives, and the bytes that each has sent."""
    table = Table(size)

    def run(rank):
        try:
            return function(ThreadPeers(rank, table))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size))), table.bytes


def targets(size, length=LENGTH):
    return np.random.default_rng(0).normal(size=(size, length)).astype(np.float32)


def learn(make, size, steps, optimizer=None, shift=0.0):
    """Each rank's weights after every step towards its own target; and the bytes sent."""
    goals = targets(size) + np.float32(shift)

    def run(peers):
        weight = torch.nn.Parameter(torch.zeros(LENGTH))
        own = (optimizer or (lambda p: torch.optim.SGD(p, lr=RATE)))([weight])
        exchange = make()
        exchange.check_optimizers([own])
        exchange.begin(peers, [weight], [own], 0)
        goal, seen = torch.from_numpy(goals[peers.rank]), []
        for _ in range(steps):
            weight.grad = weight.detach() - goal
            if exchange.averages_gradients and not exchange.mean_gradients([weight]):
                peers.mean(weight.grad)
            own.step()
            exchange.after_update()
            seen.append(weight.detach().numpy().copy())
        exchange.flush()
        exchange.end()
        return np.array(seen)

    weights, sent = on_ranks(size, run)
    return np.array(weights), goals, sent


# ---------------------------------------------------------------------- bytes


def in_bytes(row):
    """A row (K,) rounded to 256 levels, block by block, in NumPy."""
    blocks = max(math.ceil(len(row) / BLOCK), 1)
    block = math.ceil(len(row) / blocks)
    found = []
    for begin in range(0, len(row), block):
        part = row[begin : begin + block]
        low, step = part.min(), (part.max() - part.min()) / 255
        found.append(low + np.rint((part - low) / step) * step if step else part)
    return np.concatenate(found)


@pytest.mark.parametrize("length", [1, 2, 37, BLOCK, BLOCK + 1, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_are_off_by_half_a_level_at_most(length, dtype):
    rows = torch.randn(3, length, dtype=dtype, generator=torch.Generator().manual_seed(length))
    wire = encode(rows)
    back = decode(wire, length, dtype)
    assert wire.dtype is torch.uint8 and back.dtype is dtype and back.shape == rows.shape
    assert wire.numel() <= rows.numel() + 3 * (8 + 1) * math.ceil(length / BLOCK)
    for row, found in zip(rows.numpy(), back.numpy(), strict=True):
        assert np.abs(found - row).max() <= (row.max() - row.min()) / 510 * 1.001 + 1e-6
        np.testing.assert_allclose(found, in_bytes(row), atol=1e-5 * np.abs(row).max())


def test_equal_numbers_travel_exactly():
    rows = torch.full((2, 9), 5.1)
    assert torch.equal(decode(encode(rows), 9, torch.float32), rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(bad):
    row = torch.randn(1, BLOCK * 2)
    row[0, 3] = bad
    found = decode(encode(row), BLOCK * 2, torch.float32)
    assert found[0, :BLOCK].isnan().all() and found[0, BLOCK:].isfinite().all()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 37, 5000])
def test_the_compressed_mean_is_near_the_mean_and_the_same_on_all_ranks(size, length):
    vectors = torch.randn(size, length)
    found, sent = on_ranks(size, lambda peers: compressed_mean(vectors[peers.rank], peers))
    assert all(torch.equal(one, found[0]) for one in found)
    bound = 2 * (vectors.max() - vectors.min()) / 510 * 1.001 + 1e-6
    assert (found[0] - vectors.mean(0)).abs().max() <= bound
    if length == 5000:
        exact = 4 * length * 2 * (size - 1) / size
        assert max(sent) <= exact / 4 * 1.01


def test_error_feedback_lets_no_error_add_up():
    # A number far below a level would be lost for ever; with feedback its sum comes through.
    vectors = torch.randn(2, 20) * 1e-4
    vectors[:, 0] = 1.0
    steps = 400

    def run(peers):
        feedback = Feedback.none(vectors[0], 2)
        mine, total = vectors[peers.rank], torch.zeros(20)
        for step in range(steps):
            total += compressed_mean(mine, peers, feedback)
            if step == 100:
                merge_feedback(feedback, peers)
        return total / steps

    found, _ = on_ranks(2, run)
    assert torch.equal(found[0], found[1])
    assert (found[0] - vectors.mean(0)).abs().max() < 3 / 255 / steps * 2
    (plain, _), _ = on_ranks(2, lambda peers: compressed_mean(vectors[peers.rank], peers))
    assert (plain - vectors.mean(0)).abs().max() > 5e-5


def test_merged_errors_are_the_same_on_all_ranks_and_lose_nothing():
    owns, chunks = torch.randn(3, 7), torch.randn(3, 3)

    def run(peers):
        feedback = Feedback(owns[peers.rank].clone(), chunks[peers.rank].clone())
        merge_feedback(feedback, peers)
        assert not feedback.chunk.any()
        return feedback.local

    found, _ = on_ranks(3, run)
    expected = owns.mean(0) + torch.cat([*chunks])[:7]
    assert all(torch.allclose(one, expected, atol=1e-6) for one in found)


def test_flat_tensors_share_no_memory_and_keep_dtypes():
    tensors = [torch.randn(2, 3).t(), torch.randn(2).bfloat16(), torch.randn(2).to(torch.cfloat)]
    flat = FlatTensors(tensors)
    vector = flat.read()
    assert vector.dtype is torch.float32 and vector.shape == (12,)
    doubled = [2 * tensor for tensor in tensors]
    flat.write(2 * vector)
    vector.zero_()
    assert all(torch.equal(a, b) for a, b in zip(tensors, doubled, strict=True))


# ---------------------------------------------------------------------- algorithms


@pytest.mark.parametrize("size", [2, 3])
def test_bytegrad_steps_by_the_mean_of_rounded_gradients(size):
    found, goals, _ = learn(ByteGrad, size, 4)
    weights = np.zeros(LENGTH, np.float32)
    chunk = math.ceil(LENGTH / size)
    for step in range(4):
        gradients = np.pad(weights - goals, ((0, 0), (0, chunk * size - LENGTH)), mode="edge")
        parts = []
        for part in np.split(gradients, size, axis=1):
            parts.append(in_bytes(np.mean([in_bytes(row) for row in part], 0)))
        weights = weights - RATE * np.concatenate(parts)[:LENGTH]
        np.testing.assert_allclose(found[:, step], np.tile(weights, (size, 1)), atol=1e-5)
    assert all(np.array_equal(one, found[0]) for one in found)


def test_bytegrad_counts_a_gradient_that_a_rank_lacks_as_zero():
    def run(peers):
        used, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
        exchange = ByteGrad()
        exchange.begin(peers, [used, unused], [], 0)
        used.grad = torch.full((3,), 4.0) if peers.rank == 0 else None
        assert exchange.mean_gradients([used, unused])
        return used.grad, unused.grad

    found, _ = on_ranks(2, run)
    for used, unused in found:
        assert torch.allclose(used, torch.full((3,), 2.0)) and unused is None


@pytest.mark.parametrize(("size", "interval"), [(2, 1), (3, 1), (3, 2)])
def test_decentralized_averages_all_weights(size, interval):
    found, goals, _ = learn(lambda: Decentralized(communication_interval=interval), size, 5)
    weights = np.zeros_like(goals)
    for step in range(5):
        weights = weights - RATE * (weights - goals)
        if (step + 1) % interval == 0:
            weights = np.tile(weights.mean(0), (size, 1))
        np.testing.assert_allclose(found[:, step], weights, atol=1e-6)


def test_shift_one_averages_pairs_that_change():
    meetings = {2: {(0, 1)}, 4: {(0, 2), (0, 3), (1, 2), (1, 3)}}
    for size, pairs in meetings.items():
        peers = [[shifted_peer(rank, size, step) for rank in range(size)] for step in range(size)]
        assert all(row[row[rank]] == rank for row in peers for rank in range(size))
        assert {(rank, row[rank]) for row in peers for rank in range(size // 2)} == pairs
    found, goals, sent = learn(lambda: Decentralized("shift_one"), 4, 5)
    weights = np.zeros_like(goals)
    for step in range(5):
        weights = weights - RATE * (weights - goals)
        weights = np.array(
            [(weights[r] + weights[shifted_peer(r, 4, step + 1)]) / 2 for r in range(4)]
        )
        np.testing.assert_allclose(found[:, step], weights, atol=1e-6)
    assert sent == [5 * 4 * LENGTH] * 4


@pytest.mark.parametrize("size", [2, 3, 4])
def test_low_precision_neighbours_keep_replicas_in_step(size):
    found, goals, sent = learn(LowPrecisionDecentralized, size, 30)
    mixing = np.zeros((size, size))
    for rank in range(size):
        near = {rank, (rank - 1) % size, (rank + 1) % size}
        mixing[rank, list(near)] = 1 / len(near)
    weights = np.zeros_like(goals)
    for step in range(30):
        gradients = weights - goals
        wanted = mixing @ weights - RATE * gradients
        weights = weights + np.array([in_bytes(row) for row in wanted - weights], np.float32)
        if step < 4:
            np.testing.assert_allclose(found[:, step], weights, atol=1e-4)
    # The mean goes where the mean of gradients leads, though differences were rounded.
    plain = goals.mean(0) * (1 - (1 - RATE) ** 30)
    np.testing.assert_allclose(found[:, -1].mean(0), plain, atol=0.02)
    assert max(sent) <= 30 * min(size - 1, 2) * (LENGTH + 8)


def test_post_local_sgd_averages_gradients_first_and_weights_later():
    found, goals, _ = learn(lambda: PostLocalSGD(warmup_steps=2, period=3), 2, 8)
    weights = np.zeros_like(goals)
    for step in range(8):
        gradients = weights - goals
        if step < 2:
            gradients = np.tile(gradients.mean(0), (2, 1))
        weights = weights - RATE * gradients
        if step in (4, 7):
            weights = np.tile(weights.mean(0), (2, 1))
        np.testing.assert_allclose(found[:, step], weights, atol=1e-6)


def test_async_adds_the_mean_s_difference_to_what_was_learned_meanwhile():
    goals, table = targets(2), Table(2)
    exchanges, weights, reference = [], [], np.zeros((2, LENGTH))
    for rank in range(2):
        weights.append(torch.nn.Parameter(torch.zeros(LENGTH)))
        exchanges.append(Asynchronous(sync_interval_ms=0))
        exchanges[rank].begin(ThreadPeers(rank, table), [weights[rank]], [], 0)

    def step(rank):
        with torch.no_grad():
            weights[rank] -= RATE * (weights[rank] - torch.from_numpy(goals[rank]))
        reference[rank] -= RATE * (reference[rank] - goals[rank])
        exchanges[rank].after_update()

    step(0)  # begins round 1 with this copy
    first = reference[0].copy()
    step(0)
    step(0)  # learns on, since rank 1 is late
    step(1)  # joins round 1, which is done by that
    mean = (first + reference[1]) / 2
    second = reference[1].copy()
    step(0)
    reference[0] += mean - first
    step(1)
    reference[1] += mean - second
    for rank in range(2):
        np.testing.assert_allclose(weights[rank].detach(), reference[rank], atol=1e-6)


def test_async_ends_its_rounds_although_one_rank_has_begun_a_round_more():
    def run(peers):
        weight = torch.nn.Parameter(torch.full((2,), float(peers.rank)))
        exchange = Asynchronous(sync_interval_ms=0)
        exchange.begin(peers, [weight], [], 0)
        for _ in range(1 + peers.rank):
            exchange.after_update()
        exchange.flush()
        return weight.detach()

    for found in zip(*(on_ranks(3, run)[0] for _ in range(3)), strict=True):
        assert all(one.isfinite().all() for one in found)


def test_async_s_warm_up_is_counted_over_all_of_the_training():
    exchange = Asynchronous(sync_interval_ms=0, warmup_steps=3)
    exchange.begin(ThreadPeers(0, Table(1)), [torch.nn.Parameter(torch.zeros(1))], [], 2)
    assert exchange.averages_gradients
    exchange.after_update()
    assert not exchange.averages_gradients


# ---------------------------------------------------------------------- QAdam


def adam(gradients, weights, warmup, betas=(0.9, 0.999), mean=lambda m: m):
    """The weights after every step, in float64; `gradients(weights)` are every rank's."""
    momentum = np.zeros_like(weights)
    variance = np.zeros_like(weights[0])
    for step in range(1, 1000):
        gradient = gradients(weights)
        if step <= warmup:
            gradient = np.tile(gradient.mean(0), (len(weights), 1))
            variance = betas[1] * variance + (1 - betas[1]) * gradient[0] ** 2
        momentum = betas[0] * momentum + (1 - betas[0]) * gradient
        if step > warmup:
            momentum = mean(momentum)
        root = np.sqrt(variance / (1 - betas[1] ** min(step, warmup))) + 1e-8
        weights = weights - 0.01 * momentum / (1 - betas[0] ** step) / root
        yield weights


def test_qadam_is_adam_until_its_variance_freezes():
    goal = targets(1)
    weight, other = (torch.nn.Parameter(torch.zeros(LENGTH)) for _ in range(2))
    own = QAdamOptimizer([weight], lr=0.01, warmup_steps=4, weight_decay=0.1)
    torchs = torch.optim.Adam([other], lr=0.01, weight_decay=0.1)
    for _ in range(4):
        for parameter, optimizer in ((weight, own), (other, torchs)):
            parameter.grad = parameter.detach() - torch.from_numpy(goal[0])
            optimizer.step()
        assert torch.allclose(weight, other, atol=1e-7)
    assert not own.is_warming_up
    frozen = own.state[weight]["exp_avg_sq"].clone()
    own.step()
    assert torch.equal(own.state[weight]["exp_avg_sq"], frozen)


@pytest.mark.parametrize("size", [2, 3])
def test_qadam_on_ranks_follows_adam_with_a_frozen_variance(size):
    make = lambda p: QAdamOptimizer(p, lr=0.01, warmup_steps=5)  # noqa: E731
    found, goals, _ = learn(QAdam, size, 40, optimizer=make, shift=4.0)
    assert all(np.array_equal(one, found[0]) for one in found)
    exact = adam(
        lambda w: w - goals,
        np.zeros_like(goals, dtype=float),
        5,
        mean=lambda m: np.tile(m.mean(0), (size, 1)),
    )
    for step, weights in zip(range(40), exact, strict=False):
        np.testing.assert_allclose(found[0, step], weights[0], atol=1e-6 if step < 5 else 2e-3)
    assert np.abs(found[0, -1] - weights[0]).mean() < 5e-4


def test_qadam_keeps_its_errors_where_a_checkpoint_finds_them():
    def run(peers):
        weight = torch.nn.Parameter(torch.zeros(LENGTH))
        own = QAdamOptimizer([weight], lr=0.01, warmup_steps=1)
        exchange = QAdam()
        exchange.begin(peers, [weight], [own], 0)
        for _ in range(3):
            weight.grad = weight.detach() - torch.from_numpy(targets(2)[peers.rank])
            own.step()
        exchange.flush()
        exchange.end()
        assert own.average is None
        return own.state[weight]["error"]

    (one, two), _ = on_ranks(2, run)
    assert one.any() and torch.equal(one, two)


def test_a_number_without_variance_does_not_fly_away():
    weight = torch.nn.Parameter(torch.zeros(3))
    own = QAdamOptimizer([weight], lr=0.01, warmup_steps=1)
    for gradient in ([1.0, 1.0, 0.0], [1.0, 1.0, 1.0]):
        weight.grad = torch.tensor(gradient)
        own.step()
    assert weight.abs().max() < 0.03


def test_a_gradient_that_grows_after_the_warm_up_moves_no_farther_than_adam_would():
    weight = torch.nn.Parameter(torch.zeros(2))
    own = QAdamOptimizer([weight], lr=0.01, warmup_steps=20)
    for step in range(40):
        before = weight.detach().clone()
        weight.grad = torch.tensor([1e-4 if step < 20 else 1.0, 1.0])
        own.step()
        way = (weight.detach() - before).abs()
        longest = 0.01 * 0.1 / math.sqrt(0.001) / (1 - 0.9 ** (step + 1))
        assert way.max() <= longest * 1.001
    assert way[0] == pytest.approx(longest) and way[1] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "options", [{"warmup_steps": 0}, {"lr": -1}, {"betas": 0.9}, {"betas": (0.9, 1.0)}]
)
def test_qadam_refuses_what_can_t_be(options):
    with pytest.raises(ConfigurationError):
        QAdamOptimizer([torch.nn.Parameter(torch.zeros(1))], **options)


def test_other_optimizers_are_refused_for_qadam():
    weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigurationError, match=r"SGD.*optimizer='qadam'"):
        QAdam().check_optimizers([torch.optim.SGD([weight], lr=0.1)])


# ---------------------------------------------------------------------- what surrounds them


def test_momentum_is_averaged_where_all_ranks_have_it():
    def run(peers):
        both, own = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([both, own], lr=0.1, momentum=0.9)
        both.grad = torch.full((2,), float(peers.rank))
        own.grad = torch.ones(2) if peers.rank else None
        optimizer.step()
        average_states([optimizer], peers)
        return optimizer.state[both]["momentum_buffer"]

    found, _ = on_ranks(3, run)
    assert all(torch.allclose(one, torch.ones(2)) for one in found)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_has_a_name_and_takes_ddp_s_options(algorithm):
    strategy = BaguaStrategy(algorithm=algorithm, timeout=5, bucket_cap_mb=1)
    assert strategy.algorithm.name == algorithm
    assert strategy.timeout.total_seconds() == 5 and strategy.options["bucket_cap_mb"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "bytegrat"}, "Did you mean 'bytegrad'"),
        ({"algorithm": 3}, "must be one of"),
        ({"algorithm": "async", "sync_interval": 3}, "Did you mean sync_interval_ms"),
        ({"algorithm": "async", "sync_interval_ms": -1}, "at least 0"),
        ({"algorithm": "bytegrad", "sync_interval_ms": 1}, "no option 'sync_interval_ms'"),
        ({"algorithm": "bytegrad", "comm_hook": print}, "no option 'comm_hook'"),
        ({"algorithm": "decentralized", "peer_selection_mode": "one"}, "shift_one"),
        ({"algorithm": "decentralized", "communication_interval": 0}, "at least 1"),
    ],
)
def test_what_can_t_be_is_refused_at_construction(options, message):
    with pytest.raises(ConfigurationError, match=message):
        BaguaStrategy(**options)


def test_compile_refuses_ranks_and_precisions_that_an_algorithm_can_t_use():
    model = fitkit.Model(torch.nn.Linear(2, 1))
    odd = BaguaStrategy("decentralized", peer_selection_mode="shift_one")
    with pytest.raises(ConfigurationError, match="there are 3"):
        model.compile(strategy=odd, accelerator="cpu", devices=3)
    with pytest.raises(ConfigurationError, match="bf16-mixed"):
        model.compile(
            strategy=BaguaStrategy("qadam"), accelerator="cpu", devices=2, precision="16-mixed"
        )


@pytest.mark.parametrize(
    ("hook", "state", "message"),
    [
        ("fp17", None, "Known: .*'fp16'"),
        ("post_local_sgd", None, "BaguaStrategy"),
        (3, None, "must be a function"),
        ("fp16", {"rank": 2}, "takes: none"),
        ("powersgd", {"rank": 2}, "matrix_approximation_rank"),
        ("powersgd", 2, "must be a dict"),
    ],
)
def test_comm_hooks_that_can_t_be_are_refused(hook, state, message):
    with pytest.raises(ConfigurationError, match=message):
        DDPStrategy(comm_hook=hook, comm_hook_state=state)


def test_one_device_needs_no_exchange():
    torch.manual_seed(0)
    model = fitkit.Model(torch.nn.Linear(2, 1))
    x, y = torch.randn(16, 2), torch.randn(16, 1)
    for algorithm in ALGORITHMS:
        chosen = BaguaStrategy(algorithm)
        model.compile("qadam", "mse", accelerator="cpu", devices=1, strategy=chosen)
        model.fit(x, y, epochs=1, verbose=0)
