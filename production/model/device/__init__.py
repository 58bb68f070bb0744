"""Choose modules and kernels for the device, CPU or CUDA, and let megatron-core run on CPU ranks."""
