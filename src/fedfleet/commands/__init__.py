"""The command line: arguments in ``cli``, ``several`` and ``data``, and most commands' work in a file of its own.

May import: tuning, experiments, inversion, assembly, config, files, report, algorithms, tasks, middleware.*, datasets, simulator.*.
"""
