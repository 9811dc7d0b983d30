"""What a curious server rebuilds of a client's examples from what it sends: overhear an exchange, compute it anew, match it.

May import: assembly, middleware.*, report, tasks, simulator.*.
"""
