"""torch's LSTM, GRU and RNN as plain layers: torch's own are one call each, which takes its weights from elsewhere than it is given
and cannot run for many clients at once. Names, shapes, order of gates and results are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[Tensor, tuple[Tensor, ...], Tensor, Tensor | None], tuple[Tensor, ...]]


def lstm_step(through: Tensor, state: tuple[Tensor, ...], u: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    """Return (h, c) after one step; gates: input, forget, cell, output."""
    h, c = state
    i, f, g, o = (through + F.linear(h, u, b)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(through: Tensor, state: tuple[Tensor, ...], u: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    """Return (h,) after one step; gates: reset, update, new."""
    (h,) = state
    ri, zi, ni = through.chunk(3, -1)
    rh, zh, nh = F.linear(h, u, b).chunk(3, -1)
    z, n = (zi + zh).sigmoid(), (ni + (ri + rh).sigmoid() * nh).tanh()
    return ((1 - z) * n + z * h,)


def tanh_step(through: Tensor, state: tuple[Tensor, ...], u: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    """Return (h,) after one step."""
    return ((through + F.linear(state[0], u, b)).tanh(),)


def relu_step(through: Tensor, state: tuple[Tensor, ...], u: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    """Return (h,) after one step."""
    return ((through + F.linear(state[0], u, b)).relu(),)


STEPS: dict[str, Step] = {"LSTM": lstm_step, "GRU": gru_step, "RNN_TANH": tanh_step, "RNN_RELU": relu_step}


class Layers(nn.RNNBase):
    """Layers of one kind, forwards and perhaps backwards, with the parameters of torch's under their names.

    Takes (B, T, in) if ``batch_first``, else (T, B, in), and a state to begin with; returns what torch's does.
    """

    def between(self, x: Tensor) -> Tensor:
        """Return what the next layer is given of the outputs of one."""
        return x

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs of the last layer, and the state that each layer and direction ends in."""
        if not isinstance(input, Tensor) or input.dim() != 3:
            kind = f"of shape {tuple(input.shape)}" if isinstance(input, Tensor) else f"a {type(input).__name__}"
            raise ValueError(
                f"{self.mode} takes batches of sequences of one length, a tensor (examples, steps, features), not {kind}"
            )
        x = input.transpose(0, 1) if self.batch_first else input
        given = None if hx is None else hx if isinstance(hx, tuple) else (hx,)
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            x = self.between(x) if layer else x
            both = []
            for reverse in (False, True)[: 1 + self.bidirectional]:
                state = None if given is None else tuple(s[len(ends)] for s in given)
                out, end = self._run(x.flip(0) if reverse else x, state, f"l{layer}{'_reverse' * reverse}")
                both.append(out.flip(0) if reverse else out)
                ends.append(end)
            x = both[0] if len(both) == 1 else torch.cat(both, -1)
        last = tuple(torch.stack(s) for s in zip(*ends, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, last if self.mode == "LSTM" else last[0]

    def _run(self, x: Tensor, state: tuple[Tensor, ...] | None, which: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        u = getattr(self, f"weight_hh_{which}")
        b_in, b_hidden = (getattr(self, f"bias_{k}_{which}") if self.bias else None for k in ("ih", "hh"))
        through, step = F.linear(x, getattr(self, f"weight_ih_{which}"), b_in), STEPS[self.mode]
        project = getattr(self, f"weight_hr_{which}") if self.proj_size else None
        if state is None:
            none = through.new_zeros(x.shape[1], self.hidden_size)
            h = none if project is None else through.new_zeros(x.shape[1], project.shape[0])
            state = (h, none) if self.mode == "LSTM" else (h,)
        outputs = []
        for each in through.unbind(0):
            state = step(each, state, u, b_hidden)
            if project is not None:
                state = (F.linear(state[0], project), *state[1:])
            outputs.append(state[0])
        return torch.stack(outputs), state


class Cell(nn.RNNCellBase):
    """One step of torch's LSTMCell, GRUCell or RNNCell, with its parameters."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the next state of the input (B, in)."""
        several = isinstance(self, nn.LSTMCell)
        mode = f"RNN_{self.nonlinearity.upper()}" if isinstance(self, nn.RNNCell) else "LSTM" if several else "GRU"
        through = F.linear(input, self.weight_ih, self.bias_ih)
        none = through.new_zeros(*input.shape[:-1], self.hidden_size)
        state = ((none, none) if several else (none,)) if hx is None else hx if several else (hx,)
        result = STEPS[mode](through, state, self.weight_hh, self.bias_hh)
        return result if several else result[0]
