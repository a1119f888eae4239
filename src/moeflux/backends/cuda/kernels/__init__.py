"""Triton kernels. Every sum of floats has an order that the text fixes, so tiles, warps and company never change bits."""
