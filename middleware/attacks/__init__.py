"""Clients that attack: who, what that needs and breaks, and the run under attack; ``kinds/`` has a file a family.

May import: middleware, middleware.attacks.kinds, simulator, simulator.arithmetic, simulator.driver.
"""
