"""The products of a block, in pieces."""

import torch
import torch.nn.functional as F

from benchmarks import pieces


def test_products_are_those_of_clients_that_train_alone(monkeypatch, capsys):
    monkeypatch.setattr(pieces, "EXAMPLES", 200)
    block, total = pieces.Block(7), torch.zeros(pieces.CLASSES, pieces.INPUTS)
    for rows, labels, weight in zip(block.rows, block.labels, block.weight, strict=True):
        model, moved = block.model, torch.zeros_like(block.model)
        for step in (slice(pieces.ROWS), slice(pieces.ROWS, None)):
            leaf = model.clone().requires_grad_()
            loss = F.cross_entropy(block.data[rows[step]] @ leaf.mT, labels[step].argmax(-1), reduction="sum")
            (gradient,) = torch.autograd.grad(loss, leaf)
            model, moved = model - pieces.RATE * gradient, moved + gradient
        total += weight * moved
    for at_once in (7, 3, 1):
        torch.testing.assert_close(block.update(at_once), total, rtol=1e-4, atol=1e-4)
    pieces.main(["--clients", "7", "--turns", "3"])
    assert "5 at a time" in capsys.readouterr().out
