"""Helpers of the tests: builders of small configurations, processes under test, case grids."""
