"""Features between an algorithm and the engine, a folder each, with its needs and breaks; ``facts`` refuses by these.

May import: algorithms.options, simulator, simulator.arithmetic, simulator.block, simulator.driver.
"""
