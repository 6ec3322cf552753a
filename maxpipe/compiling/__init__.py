"""Ahead-of-time compilation for devices that are not there, and what can be read off the result."""
