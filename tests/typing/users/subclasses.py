# pyright: strict
"""A model class of one's own keeps its type."""

import torch
from typing_extensions import assert_type

import fitkit


class Autoencoder(fitkit.Model):
    def __init__(self, width: int, *, code: int = 2) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(width, code)
        self.decoder = torch.nn.Linear(code, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))

    def code_of(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


own = Autoencoder(8, code=3)
assert_type(own, Autoencoder)
own.compile("adamw", "mse", learning_rate=1e-3)
history = own.fit(torch.rand(64, 8), torch.rand(64, 8), epochs=2)
codes = own.code_of(torch.rand(4, 8)).detach().numpy()
plain = fitkit.Model(torch.nn.Linear(8, 2))
assert_type(plain, fitkit.Model)
