"""Data of researchers: readers, partitions into clients, and the devices that hold them."""
