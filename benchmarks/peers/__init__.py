"""The same jobs in other simulators, each in an environment of its own."""
