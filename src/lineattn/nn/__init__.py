"""Modules with parameters: one method, one file."""
