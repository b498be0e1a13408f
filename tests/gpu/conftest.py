"""The simulated device, which stands in for a GPU."""

from tests.device.conftest import simgpu

__all__ = ["simgpu"]
