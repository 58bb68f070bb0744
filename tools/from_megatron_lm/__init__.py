"""Write a job of packproof from the arguments of a Megatron-LM run."""
