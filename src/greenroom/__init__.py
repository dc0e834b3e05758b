"""Greenroom: CPU offloading for diffusion models."""
