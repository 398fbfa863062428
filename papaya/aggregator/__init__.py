"""The Aggregator: drives clients and turns their updates into versions (paper, "System Components")."""
