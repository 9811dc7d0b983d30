"""Messages made smaller on their way, up and down: what follows what, needs and breaks; ``codecs/`` has a file a family.

May import: middleware, middleware.compression.codecs, simulator, simulator.arithmetic, simulator.block.
"""
