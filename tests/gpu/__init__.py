"""Checks on a real GPU, or on the simulated device as a stand-in: plain functions that pytest and ``make gpu-check`` call."""
