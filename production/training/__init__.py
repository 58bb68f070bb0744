"""The training job: SFT on packed rows with megatron-core, from one CPU to many nodes; Megatron-Core does the distributed work."""
