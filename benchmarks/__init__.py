"""Speed, memory and scaling of the engine, and the same jobs in a bare loop, pfl-research and Flower."""
