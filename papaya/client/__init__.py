"""The client runtime: one device's side of the protocol (paper, "Client Runtime")."""
