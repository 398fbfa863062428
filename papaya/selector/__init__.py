"""The Selector: the only component that devices talk to (paper, "System Components")."""
