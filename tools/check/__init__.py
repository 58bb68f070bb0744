"""Say whether a job's own file, tokenizer and configuration feed the model what Megatron-LM would, before nodes are booked."""
