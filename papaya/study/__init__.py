"""Research on the simulator: record and replay, workloads, sweeps, the paper's experiments."""
