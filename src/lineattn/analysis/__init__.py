"""What is read off a network."""
