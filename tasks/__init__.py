"""What is learnt: models, objectives, metrics, a file a task, and what several share; ``registry`` names them.

May import: simulator, simulator.arithmetic.
"""
