"""The command line, a file a command; those of a few lines are in ``cli``.

May import: tuning, experiments, inversion, assembly, config, files, report, algorithms, tasks, middleware.*, datasets, simulator.*.
"""
