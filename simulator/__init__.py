"""The engine: clients, rounds, executors, availability, clock, state, metrics. It knows no algorithm and no data set."""
