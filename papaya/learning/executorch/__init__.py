"""The ExecuTorch engine of devices: it trains a compiled program, without torch and without code.

`papaya/learning/torch/export.py` makes the programs, on the owner's machine.
"""
