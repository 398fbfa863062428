"""What simulated devices learn: a model, the data of every device, and the kernel that trains."""
