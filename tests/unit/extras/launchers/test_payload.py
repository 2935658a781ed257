"""What workers get of a call."""

import torch

from fitkit.extras.launchers.payload import Payload, load


def test_weights_have_the_same_memory_in_a_worker():
    # DDP compares strides; QR gives a matrix by columns, as in orthogonal starts.
    columns = torch.nn.Parameter(torch.linalg.qr(torch.ones(3, 3))[0])
    part = torch.nn.Parameter(torch.ones(4, 6)[:, :2])
    payload = Payload([columns, part], shape_only=[columns, part])
    found, _ = load(payload.data, payload.files)
    assert [(one.shape, one.stride()) for one in found] == [((3, 3), (1, 3)), ((4, 2), (6, 1))]
    assert all(type(one) is torch.nn.Parameter for one in found)
