"""Methods of the token axis: a token attends to all earlier ones. The contract is in `base`."""
