"""A configuration made ready to run in four stages, each made of the one before: data, federation, algorithm, prepared run.

May import: config, files, tracking, algorithms, tasks, middleware.*, datasets, simulator.*.
"""
