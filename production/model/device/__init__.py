"""The one place that knows about CPU and CUDA: the shim that lets megatron-core run on CPU ranks, thd attention, norms, layer specs."""
