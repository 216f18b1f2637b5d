"""Speed and memory, measured so that two figures of one run can be compared."""
