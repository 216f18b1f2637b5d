"""Pure functions of tensors: no parameters, no globals."""
