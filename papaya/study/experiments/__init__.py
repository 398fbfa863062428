"""The paper's evaluation, one file for each figure or table; `papaya reproduce` runs them."""
