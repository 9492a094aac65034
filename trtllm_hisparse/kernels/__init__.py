"""The CUDA kernels from Python: `abi` mirrors the C header, `ops` are the torch operators over it."""
