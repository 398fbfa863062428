"""The Aggregator: drives clients, turns updates into versions (paper, "System Components")."""
