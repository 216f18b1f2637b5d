"""Tasks: what a network is trained for, one Lightning module each."""
