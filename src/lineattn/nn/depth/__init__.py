"""Attention over depth: a layer attends to all earlier layers. The contract is in `base`."""
