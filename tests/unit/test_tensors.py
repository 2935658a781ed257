"""A tensor's bytes, whatever its strides."""

import numpy as np
import pytest
import torch

from fitkit.extras.launchers.payload import Payload, load
from fitkit.extras.launchers.process_group import pack, unpack
from fitkit.tensors import bytes_of

TENSORS = {
    "one entry, stride 0": torch.zeros(()).expand(1, 1) + 0,
    "expanded": torch.ones(()).expand(1, 1),
    "expanded rows": torch.arange(3.0).expand(2, 3),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 3),
    "every second": torch.arange(12).reshape(3, 4)[1:, ::2],
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "half": torch.ones(1, dtype=torch.bfloat16).expand(1),
    "large": torch.ones(1).expand(2**19).reshape(1, -1),
}


@pytest.mark.parametrize("name", TENSORS)
def test_they_are_numpys(name):
    tensor = TENSORS[name]
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.dtype is torch.bfloat16:
        plain = plain.reshape(-1).clone().view(torch.int16)
    assert bytes_of(tensor).numpy().tobytes() == np.asarray(plain).tobytes()


@pytest.mark.parametrize("name", TENSORS)
def test_ranks_exchange_them(name):
    tensor = TENSORS[name]
    for value in (tensor, {"x": [tensor, tensor]}):
        found = unpack(pack(value, b"key", "gather 1 of 0"), b"key", "gather 1 of 0", 0)
        payload = Payload(value, [])
        sent, _ = load(payload.data, payload.files[:])
        for other in (found, sent):
            first = other if isinstance(other, torch.Tensor) else other["x"][1]
            assert torch.equal(first, tensor) and first.dtype is tensor.dtype
