"""Compile ahead of time for devices that are not there, and report what the result costs."""
