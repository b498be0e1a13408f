"""Tests on a device that is not the CPU, without hardware: ``simgpu`` (see simgpu.cpp), compiled when a test asks for it."""
