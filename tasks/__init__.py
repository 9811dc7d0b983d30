"""Models, objectives and evaluation: what is learnt, whatever the algorithm."""
