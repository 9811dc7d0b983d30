"""The command line, a file a command.

May import: experiments, config, report, algorithms, tasks, datasets, simulator.*.
"""
