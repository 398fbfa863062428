"""The learning arithmetic: parameters, the weight of an update, the server's optimizer."""
