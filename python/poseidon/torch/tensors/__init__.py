"""PyTorch tensors: their memory, their versions, and what tells of their use."""
