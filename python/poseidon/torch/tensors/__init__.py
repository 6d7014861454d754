"""PyTorch tensors: their memory, differences between versions of PyTorch, and classes that notice their use."""
