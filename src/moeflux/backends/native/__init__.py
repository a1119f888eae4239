"""The native CPU backend: numpy arrays above, C++ kernels below (native/ in the source tree)."""
