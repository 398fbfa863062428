"""The driver of real systems: the machines over sockets, threads and disks."""
