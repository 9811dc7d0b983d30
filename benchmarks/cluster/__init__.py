"""Cost of a cluster: rounds on nodes of one machine, by part, and a model that predicts other clusters."""
