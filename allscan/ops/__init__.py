"""Differentiable functions."""
