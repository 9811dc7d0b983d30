"""What a cluster costs: rounds on nodes of one machine, by part; a model of their cost; what it says of clusters not here."""
