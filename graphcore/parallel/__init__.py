"""Several processes, on one machine or many, that run one model: ranks of a torch.distributed process group."""
