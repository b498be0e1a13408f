"""Models and pipelines of diffusers."""
