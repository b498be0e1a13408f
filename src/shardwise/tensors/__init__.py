"""Tensors as the planner sees them: boxes, tiles, placements, and a live model's own tensors."""
