"""Weights: formats, reading, random ones of a shape, and conversion."""
