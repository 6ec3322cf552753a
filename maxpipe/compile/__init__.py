"""Compile ahead of time for devices that are not there, and report what the result costs."""

FITS, DOES_NOT_FIT = 0, 3  # exit codes of maxpipe.compile
