"""Run the training job: SFT on packed rows, from one CPU to many nodes. megatron-core does the distributed work."""
