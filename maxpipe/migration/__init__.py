"""Translate configurations of other trainers: MaxText's."""
