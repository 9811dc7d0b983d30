"""What is learnt: models, objectives, metrics, a file a task; ``registry`` names them.

May import: simulator, simulator.arithmetic.
"""
