"""LSTM, GRU, RNN and attention as plain layers: what torch's own give, one client or many at once."""

import copy

import pytest
import torch
from torch import nn

from fedfleet.simulator.arithmetic import rng
from fedfleet.tasks.recurrent import Cell
from fedfleet.tasks.stateful import Dropout, Recurrent, buffers, called, prepared, trainable
from tests.tasks import own_nets


def drawn(shape, key=1):
    return rng.normal(rng.key(key), shape, torch.float64)


KINDS = [
    nn.LSTM(3, 4, batch_first=True), nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2, bias=False),
    nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True), nn.RNN(3, 4, nonlinearity="tanh"),
    nn.RNN(3, 4, num_layers=2, nonlinearity="relu"),
]  # fmt: skip


@pytest.mark.parametrize("layer", KINDS, ids=str)
def test_layers_are_torchs_with_and_without_a_first_state(layer):
    layer = copy.deepcopy(layer).double()
    x = drawn((5, 6, 3))
    both, batch = layer.num_layers * (1 + layer.bidirectional), 5 if layer.batch_first else 6
    h = drawn((both, batch, layer.proj_size or layer.hidden_size), 2)
    state = (h, drawn((both, batch, layer.hidden_size), 3)) if isinstance(layer, nn.LSTM) else h
    ours = prepared(nn.Sequential(copy.deepcopy(layer)))[0]
    assert isinstance(ours, Recurrent)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in layer.named_parameters()}
    for given in (None, state):
        torch.testing.assert_close(ours(x, given), layer(x, given), rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    found = torch.autograd.grad(ours(x)[0].square().sum(), list(ours.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "cell", [nn.LSTMCell(3, 4), nn.GRUCell(3, 4, bias=False), nn.RNNCell(3, 4, nonlinearity="relu")]
)
def test_cells_are_torchs(cell):
    cell = cell.double()
    ours, x = prepared(nn.Sequential(copy.deepcopy(cell)))[0], drawn((5, 3))
    assert isinstance(ours, Cell)
    first = cell(x)
    torch.testing.assert_close(ours(x), first, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours(x, first), cell(x, first), rtol=1e-12, atol=1e-12)


def test_dropout_is_between_layers_and_draws_from_the_key():
    net = prepared(nn.Sequential(nn.LSTM(3, 50, num_layers=2, dropout=0.5, batch_first=True))).double()
    one = prepared(nn.Sequential(nn.LSTM(3, 50, num_layers=1, batch_first=True))).double()
    x, weight = drawn((4, 5, 3)), torch.ones(4)
    p = trainable(net)
    draws = [called(net, p, {}, x, weight=weight, key=rng.key(k))[0][0] for k in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    torch.testing.assert_close(called(net, p, {}, x)[0][0], net[0](x)[0])
    first = {n: v for n, v in p.items() if n.endswith("l0")}
    called(one, first, {}, x, weight=weight, key=rng.key(1))  # one layer has nothing between


def test_sequences_of_other_kinds_are_refused():
    layer = prepared(nn.Sequential(nn.GRU(3, 4)))[0]
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 2, 3), torch.tensor([3, 2]))
    for x, says in ((torch.zeros(5, 3), r"not of shape \(5, 3\)"), (packed, "not a PackedSequence")):
        with pytest.raises(ValueError, match=f"GRU takes batches of sequences of one length, .* {says}"):
            layer(x)


def test_channels_are_dropped_whole():
    net = prepared(nn.Sequential(nn.Dropout2d(0.4)))
    x = torch.ones(300, 5, 2, 3)
    found = called(net, {}, {}, x, weight=torch.ones(300), key=rng.key(0))[0]
    each = found.flatten(2)
    assert bool((each == each[..., :1]).all())
    assert float((each[..., 0] > 0).float().mean()) == pytest.approx(0.6, abs=0.05)
    torch.testing.assert_close(each.unique(), torch.tensor([0.0, 1 / 0.6]))


def test_a_layer_that_is_there_twice_is_one():
    layer = nn.Dropout(0.5)
    net = prepared(nn.Sequential(layer, nn.Sequential(layer), nn.ReLU()))
    assert net[0] is net[1][0]
    assert isinstance(net[0], Dropout)


def test_eval_mode_is_that_of_the_call_and_leaves_the_net_as_it_was():
    class Telling(nn.Module):
        def forward(self, x):
            return x * (2 if self.training else 3)

    net = prepared(nn.Sequential(Telling(), nn.Sequential(Telling())).eval())
    x = torch.ones(2)
    assert called(net, {}, {}, x)[0].tolist() == [9, 9]
    assert net.training
    assert called(net, {}, {}, x, weight=torch.ones(2), key=rng.key(0))[0].tolist() == [4, 4]


def test_a_norm_that_alone_is_in_eval_mode_goes_by_what_it_has_counted():
    norm = nn.BatchNorm1d(2)
    norm(torch.tensor([[1.0, 5.0], [3.0, 9.0]]))
    norm.eval()
    net = prepared(nn.Sequential(nn.Sequential(norm), nn.BatchNorm1d(2)))
    assert set(buffers(net)) == {"1.running_mean", "1.running_var"}
    x = drawn((4, 2)).float()
    found = called(net[0], trainable(net[0]), {}, x, weight=torch.ones(4), key=rng.key(0))[0]
    torch.testing.assert_close(found, copy.deepcopy(norm)(x), rtol=1e-5, atol=1e-5)


def test_attention_runs_for_many_as_for_one_and_is_torchs():
    net = own_nets.Attention(3)
    wanted_net = copy.deepcopy(net).eval()
    ours = prepared(net)
    x, p = drawn((4, 2, 1, 8, 8)).float(), trainable(ours)
    each = [called(ours, p, {}, one)[0] for one in x]
    many = torch.func.vmap(lambda one: called(ours, p, {}, one)[0])(x)
    torch.testing.assert_close(many, torch.stack(each), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(each[0], wanted_net(x[0]), rtol=1e-5, atol=1e-6)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
