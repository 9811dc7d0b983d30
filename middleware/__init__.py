"""What stands between an algorithm and the engine, a folder a feature; each says what it needs and breaks, and ``facts`` refuses.

May import: algorithms.options, simulator, simulator.arithmetic, simulator.block, simulator.driver.
"""
