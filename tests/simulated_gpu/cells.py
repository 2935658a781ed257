"""Recurrent cells: CUDA has kernels for them that the CPU lacks, so these compute them in steps."""

import torch


def register():
    """Give the device the cells, as torch's formulas for their gradients expect them."""
    kernels = torch.library.Library("aten", "IMPL", "CUDA")
    for function in (
        _thnn_fused_lstm_cell,
        _thnn_fused_lstm_cell_backward_impl,
        _thnn_fused_gru_cell,
        _thnn_fused_gru_cell_backward,
    ):
        kernels.impl(function.__name__, function)
    return kernels  # which has the functions for as long as it lives


def _plus(gates, bias):
    return gates if bias is None else gates + bias


def _thnn_fused_lstm_cell(inputs, hidden, cell, input_bias=None, hidden_bias=None):
    gates = _plus(inputs, input_bias) + _plus(hidden, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def _thnn_fused_lstm_cell_backward_impl(grad_hidden, grad_cell, cell, new, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    bent = new.tanh()
    grad_hidden = torch.zeros_like(new) if grad_hidden is None else grad_hidden
    grad_new = grad_hidden * o * (1 - bent * bent)
    if grad_cell is not None:
        grad_new = grad_new + grad_cell
    gates = torch.cat(
        [
            grad_new * g * i * (1 - i),
            grad_new * cell * f * (1 - f),
            grad_new * i * (1 - g * g),
            grad_hidden * bent * o * (1 - o),
        ],
        1,
    )
    return gates, grad_new * f, gates.sum(0) if has_bias else None


def _thnn_fused_gru_cell(inputs, hidden, before, input_bias=None, hidden_bias=None):
    i_r, i_z, i_n = _plus(inputs, input_bias).chunk(3, 1)
    h_r, h_z, h_n = _plus(hidden, hidden_bias).chunk(3, 1)
    r, z = (i_r + h_r).sigmoid(), (i_z + h_z).sigmoid()
    n = (i_n + r * h_n).tanh()
    return n + z * (before - n), torch.cat([r, z, n, before, h_n], 1)


def _thnn_fused_gru_cell_backward(grad, workspace, has_bias):
    r, z, n, before, h_n = workspace.chunk(5, 1)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_z = grad * (before - n) * z * (1 - z)
    grad_r = grad_n * h_n * r * (1 - r)
    inputs = torch.cat([grad_r, grad_z, grad_n], 1)
    hidden = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad * z, *biases
