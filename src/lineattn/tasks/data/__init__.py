"""Data: one file a data set, and what they share (reading, transforms, sampling)."""
