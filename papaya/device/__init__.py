"""All of a Linux device: examples, history, eligibility, sandbox, training, visits, trust."""
