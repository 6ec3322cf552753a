"""Declare what holds across keys, and derive values that are left open."""
