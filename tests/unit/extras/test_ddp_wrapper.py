"""A compiled step leaves DDP's wrapper out only if one exchange of all gradients does the same."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fitkit.distributed.wrapped_model import WrappedModel
from fitkit.extras.ddp import DDPWrapper
from fitkit.strategies import DDPStrategy


@pytest.fixture(autouse=True)
def _group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class InAnotherModule(nn.Module):
    def __init__(self, router):
        super().__init__()
        self.router = router

    def forward(self, *args):
        return self.router(*args)


def of_another_group(router):
    return DistributedDataParallel(router, process_group=dist.new_group([0]))


def is_replaceable(configure, width=4):
    wrapper = DDPWrapper(WrappedModel(nn.Linear(width, width)), None, configure)
    try:
        return wrapper.is_replaceable
    finally:
        wrapper.drop()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_plain_ddp_with_one_bucket_is_left_out(options):
    assert is_replaceable(DDPStrategy(**options).configure_ddp)


@pytest.mark.parametrize(
    "configure",
    [
        DDPStrategy(find_unused_parameters=True).configure_ddp,
        DDPStrategy(static_graph=True).configure_ddp,
        DDPStrategy(comm_hook="bf16").configure_ddp,
        lambda router: DistributedDataParallel(router, broadcast_buffers=False),
        lambda router: DistributedDataParallel(InAnotherModule(router)),
        lambda router: InAnotherModule(router),
        of_another_group,
    ],
)
def test_what_an_option_or_an_override_asks_for_stays(configure):
    assert not is_replaceable(configure)


def test_gradients_of_several_buckets_are_sent_while_others_are_computed():
    large = 1 + int((2**20 / 4) ** 0.5)  # float32 numbers of more than a megabyte
    assert not is_replaceable(DDPStrategy(bucket_cap_mb=1).configure_ddp, large)
    assert is_replaceable(DDPStrategy(bucket_cap_mb=2).configure_ddp, large)


def test_a_carrier_is_averaged_only_where_the_wrapper_is_exact():
    carrier = nn.Parameter(torch.zeros(()))
    wrapped = WrappedModel(nn.Linear(4, 4))
    wrapper = DDPWrapper(wrapped, carrier, of_another_group)
    assert wrapped.count_parameter is None
    wrapper.drop()
